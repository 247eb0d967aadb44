//! The formats of programs that a user namespace has, and the programs that run them: binfmt_misc.
//! There is one list for each user namespace, that of the host included; the images have that of the
//! root task's own.

use std::os::fd::{AsFd, BorrowedFd};

use rustix::fs::{Dir, Mode, OFlags, openat};
use torpor_images::proto::BinfmtMiscEntry;
use torpor_images::{ImageDir, kind};
use torpor_policy::ProgramFormat;
use torpor_tracee::syscall::{self, RemoteFd};

use super::assembly::Assembly;
use super::base::Bases;
use super::mountinfo::Mount;
use super::origin::Forest;
use super::sharing::Base;
use super::superblock;
use crate::error::{Context, Error, Result};
use crate::namespace::Namespaces;
use crate::options::JoinNsKind;
use crate::restore::transport::Transport;

/// What such a file system has besides.
const OTHERS: [&str; 4] = [".", "..", "register", "status"];

/// Why the formats below a mount, in mount namespace `space` of the images, cannot be kept, if so.
///
/// # Errors
/// If the kernel does not say which those of the host are.
pub(super) fn obstacle(
    mount: &Mount,
    space: u32,
    spaces: &Namespaces,
) -> Result<Option<&'static str>> {
    let is_hosts = || -> Result<bool> {
        let own = superblock::make_here(&Mount { options: "".into(), ..mount.clone() })?;
        let stat = rustix::fs::fstat(own).context(|| "stat binfmt_misc".to_owned())?;
        Ok(stat.st_dev == u64::from(mount.dev))
    };
    Ok(if spaces.own_user().is_none() || is_hosts()? {
        Some("its formats are those of this host; unmount it, or leave it out with --skip-mnt")
    } else if spaces.users.iter().any(|user| user.owned.contains(&space)) {
        Some("its formats are those of a nested user namespace; unmount it")
    } else {
        None
    })
}

/// Writes the formats below the root of such a file system.
///
/// # Errors
/// One that is not text; all of them switched off at once.
pub(super) fn save(root: BorrowedFd<'_>, images: &ImageDir) -> Result<()> {
    let what = || "read the formats of binfmt_misc".to_owned();
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = openat(root, ".", flags, Mode::empty()).context(what)?;
    let mut all = Vec::new();
    for name in Dir::new(dir).context(what)? {
        let name = name.context(what)?.file_name().to_owned();
        let Ok(name) = name.to_str() else {
            return Err(Error::Unsupported(format!("the format {name:?} in binfmt_misc")));
        };
        if OTHERS.contains(&name) {
            continue;
        }
        let text = read(root, name)?;
        let format = parse(name, &text).filter(|format| ProgramFormat::read(format).is_ok());
        all.push(format.ok_or_else(|| {
            Error::Unsupported(format!("the format {name} in binfmt_misc: {text:?}"))
        })?);
    }
    if read(root, "status")?.trim() != "enabled" {
        let what = "binfmt_misc that is switched off (its file status); write 1 to it";
        return Err(Error::Unsupported(what.to_owned()));
    }
    // The kernel lists the newest one first, which is also the first that it tries.
    all.reverse();
    Ok(images.write_all(kind::BINFMT_MISC, 0, &all)?)
}

fn read(root: BorrowedFd<'_>, name: &str) -> Result<String> {
    let what = || format!("read {name} of binfmt_misc");
    let file = openat(root, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).context(what)?;
    std::io::read_to_string(std::fs::File::from(file)).context(what)
}

/// What the kernel says of a format.
fn parse(name: &str, text: &str) -> Option<BinfmtMiscEntry> {
    let mut lines = text.lines();
    let enabled = match lines.next()? {
        "enabled" => true,
        "disabled" => false,
        _ => return None,
    };
    let mut format = BinfmtMiscEntry { name: name.to_owned(), enabled, ..Default::default() };
    for line in lines {
        let (key, value) = line.split_once(' ').unwrap_or((line, ""));
        let text = Some(value.to_owned());
        match key {
            "interpreter" => format.interpreter = value.to_owned(),
            "flags:" => format.flags = text,
            "extension" => format.extension = Some(value.strip_prefix('.')?.to_owned()),
            "offset" => format.offset = Some(value.parse().ok()?),
            "magic" => format.magic = text,
            "mask" => format.mask = text,
            _ => return None,
        }
    }
    Some(format)
}

/// Registers the formats of the images in the new file system that has them, once all mounts are in
/// place: the kernel opens some of the programs then, for the root task and as that finds them.
///
/// # Errors
/// One that the kernel refuses, or that is none; if they would be those of a namespace that is joined.
pub(super) fn restore(cx: &mut Assembly<'_>, forest: &Forest, bases: &Bases) -> Result<()> {
    let Some(dev) = forest.registered() else { return Ok(()) };
    let Some(base) = bases.get(Base::FileSystem(dev)) else { return Ok(()) };
    let formats = &cx.spaces.filling.formats;
    let husk = cx.root.remote()?;
    let mut transport = Transport::open(husk, 1)?;
    let mut batch = husk.batch();
    transport.send(&mut batch, &[base.at.as_fd()])?;
    let received = batch.run()?.first_error();
    received.map_or(Ok(()), |(_, e)| Err(e)).context(|| "pass on binfmt_misc".to_owned())?;
    for format in formats {
        let off = (!format.enabled).then_some((format.name.as_str(), "0"));
        for (file, text) in [("register", format.command.as_str())].into_iter().chain(off) {
            let mut batch = husk.batch();
            let (path, at) = (batch.cstr(file), batch.bytes(text.as_bytes()));
            let flags = OFlags::WRONLY | OFlags::CLOEXEC;
            let open = batch.must(syscall::openat(RemoteFd(0), path, flags, Mode::empty()));
            let write = batch.must((libc::SYS_write, [0, at.0, text.len() as u64]));
            batch.forward(open, write, 0);
            let failed = batch.run()?.first_error();
            let what = || format!("register the format {} (binfmt_misc)", format.name);
            failed.map_or(Ok(()), |(_, e)| Err(e)).context(what)?;
        }
    }
    let mut batch = husk.batch();
    batch.call((libc::SYS_close_range, [0, u64::from(u32::MAX), 0]));
    batch.run()?;
    Ok(())
}

/// Whether a new file system of this type would be one of the tasks' own.
pub(super) fn are_own(cx: &Assembly<'_>) -> bool {
    let joined = cx.given.join_ns.iter().any(|join| join.kind == JoinNsKind::User);
    cx.spaces.own_user().is_some() && !joined
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn what_the_kernel_says_is_registered_again() {
        let text = "disabled\ninterpreter /bin/cat\nflags: OC\noffset 2\nmagic 7f58\nmask ff0f\n";
        let format = parse("some", text).unwrap();
        assert!(!format.enabled);
        let command = |format| ProgramFormat::read(&format).unwrap().command;
        let fields = ["", "some", "M", "2", "\\x7f\\x58", "\\xff\\x0f", "/bin/cat", "OC"];
        assert_eq!(command(format), fields.join("\x01"));
        let format =
            parse("e", "enabled\ninterpreter /bin/x y\nflags: \nextension .xyz\n").unwrap();
        assert_eq!(command(format), ["", "e", "E", "", "xyz", "", "/bin/x y", ""].join("\x01"));
    }

    #[test]
    fn what_the_kernel_does_not_say_is_no_format() {
        assert!(parse("e", "perhaps\n").is_none() && parse("e", "enabled\nmore x\n").is_none());
    }
}
