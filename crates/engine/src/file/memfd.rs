use crate::{dump::Dump, error::Result, memory::vma::Vma, restore::Restore};
use std::os::fd::OwnedFd;
use torpor_images::proto::VmaEntry;
pub fn describe_mapped(_cx: &mut Dump<'_>, _task: usize, _vma: &Vma) -> Result<u32> {
    Ok(0)
}
pub fn open_for_mapping(_cx: &mut Restore<'_>, _id: u32, _v: &VmaEntry) -> Result<OwnedFd> {
    Err(crate::Error::Unsupported(String::new()))
}
