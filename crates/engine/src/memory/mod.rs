//! Memory: mappings and pages.

pub(crate) mod aio;
pub(crate) mod changes;
pub(crate) mod frames;
pub(crate) mod keeper;
pub(crate) mod names;
pub(crate) mod pages;
pub(crate) mod registered;
pub(crate) mod relatives;
pub(crate) mod scan;
pub(crate) mod track;
pub(crate) mod vma;
