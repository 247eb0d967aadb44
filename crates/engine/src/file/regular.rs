use crate::{dump::Dump, error::Result, memory::vma::Vma, restore::Restore};
use std::os::fd::OwnedFd;
pub fn describe_mapped(_cx: &mut Dump<'_>, _task: usize, _vma: &Vma) -> Result<(u32, u32)> {
    Ok((0, 0))
}
pub fn describe_path(_cx: &mut Dump<'_>, _task: usize, _name: &str) -> Result<u32> {
    Ok(0)
}
pub fn describe_exe(_cx: &mut Dump<'_>, _task: usize) -> Result<u32> {
    Ok(0)
}
pub fn open_for_mapping(_cx: &mut Restore<'_>, _id: u32, _flags: Option<u32>) -> Result<OwnedFd> {
    Err(crate::Error::Unsupported(String::new()))
}
