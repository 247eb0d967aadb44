//! Memory: mappings and pages.

pub mod aio;
pub mod changes;
pub mod frames;
pub mod keeper;
pub mod pages;
pub mod registered;
pub mod relatives;
pub mod scan;
pub mod track;
pub mod vma;
