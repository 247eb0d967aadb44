//! Memory: mappings and pages.

pub mod pages;
pub mod shmem;
pub mod vma;
