//! Landlock: what a thread may open, for good.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::{Result, addr, check, syscall};

/// `LANDLOCK_ACCESS_FS_WRITE_FILE`, `LANDLOCK_ACCESS_FS_READ_FILE` and `LANDLOCK_ACCESS_FS_READ_DIR`, which all versions know.
const FILES: u64 = 1 << 1 | 1 << 2;
const HANDLED: u64 = FILES | 1 << 3;
/// `LANDLOCK_RULE_PATH_BENEATH`.
const PATH_BENEATH: u64 = 1;

/// `struct landlock_path_beneath_attr`.
#[repr(C, packed)]
struct PathBeneath {
    allowed: u64,
    parent: i32,
}

/// From now on the calling thread opens nothing to be read or written but this file, by whatever name; nor does it get new
/// privileges. The kernel asks before a driver has anything to do with what is opened. Returns whether the kernel has
/// Landlock, and has it switched on.
///
/// # Errors
/// `EBADFD` for a file that is on no mount; `E2BIG` if the thread has as many rules as there can be.
pub fn open_only(file: BorrowedFd<'_>) -> Result<bool> {
    let handled = HANDLED;
    let size = size_of_val(&handled) as u64;
    // SAFETY: the kernel reads so many bytes of a local variable.
    let made = unsafe {
        syscall(libc::SYS_landlock_create_ruleset, [addr(&raw const handled), size, 0, 0, 0, 0])
    };
    let rules = match made {
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENOSYS | libc::EOPNOTSUPP)) => {
            return Ok(false);
        }
        // SAFETY: the kernel has just returned the number, which nobody else has.
        made => unsafe { OwnedFd::from_raw_fd(i32::try_from(made?).unwrap_or(-1)) },
    };
    let number = u64::from(rules.as_raw_fd().cast_unsigned());
    let rule = PathBeneath { allowed: FILES, parent: file.as_raw_fd() };
    // SAFETY: the kernel reads the structure that this type of rule has; the other calls take numbers only.
    unsafe {
        let rule = addr(&raw const rule);
        syscall(libc::SYS_landlock_add_rule, [number, PATH_BENEATH, rule, 0, 0, 0])?;
        check(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))?;
        syscall(libc::SYS_landlock_restrict_self, [number, 0, 0, 0, 0, 0])?;
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn the_structure_is_the_kernels() {
        assert_eq!(size_of::<PathBeneath>(), 12);
        assert_eq!(std::mem::offset_of!(PathBeneath, parent), 8);
    }

    /// Whatever its name is by then.
    #[test]
    fn a_thread_opens_one_file_only() {
        let dir = std::env::temp_dir().join(format!("torpor-landlock-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        let [own, other, moved] = ["own", "other", "moved"].map(|name| dir.join(name));
        [&own, &other].iter().for_each(|path| fs::write(path, "").unwrap());
        let file = File::open(&own).unwrap();
        let limited = std::thread::spawn({
            let (other, moved) = (other.clone(), moved.clone());
            move || {
                if !open_only(file.as_fd()).unwrap() {
                    return None;
                }
                fs::rename(own, &moved).unwrap();
                let open = |path| File::options().read(true).write(true).open(path).is_ok();
                Some([open(&moved), open(&other)])
            }
        });
        let opened = limited.join().unwrap();
        assert!(opened.is_none_or(|opened| opened == [true, false]), "{opened:?}");
        File::open(&other).unwrap();
        fs::remove_dir_all(&dir).unwrap();
    }
}
