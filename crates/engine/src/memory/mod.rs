//! Memory: mappings and pages.

pub mod aio;
pub mod frames;
pub mod keeper;
pub mod pages;
pub mod relatives;
pub mod shmem;
pub mod track;
pub mod vma;
