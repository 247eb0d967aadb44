//! Servers of FUSE file systems: how a dump refuses them, and the new mounts that restored ones go on with (`--fuse`).
//!
//! A connection ends with the last process that has it open, and its mount takes no other one. A restored server gets a
//! new mount with a connection of its own. What the kernel knew of files, by numbers and handles that the server has
//! given, is gone with the old one: it asks for each name again. A connection begins with an agreement on what both
//! can do (`FUSE_INIT`), which servers make once. So it is made here, in the name of the server.
//!
//! A new mount for a path of this host is in no namespace until the tasks wake, and goes with its descriptor if they do
//! not. One of a mount namespace of the tree is made where that is, by whoever makes namespaces: the ids and process
//! ids in the kernel's requests are those of the one who has made it.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Stat, StatxFlags, makedev, statx};
use rustix::io::{Errno, retry_on_intr};
use rustix::mount::{MoveMountFlags, UnmountFlags, move_mount, unmount};
use torpor_tracee::Tracee;
use torpor_tracee::syscall::{self, RemoteFd};

use super::collect::{MountNamespace, TreeMounts};
use super::fs::{attributes, flag_names, mount_flag_names, split_options};
use super::mountinfo::{FromOutside, Mount, mount_flags};
use super::superblock::{Parameter, fetch, make_from, make_from_in};
use crate::error::{Context, Error, Result};
use crate::external::External;
use crate::file::description::open_in;
use crate::file::found::Found;
use crate::options::{FuseAgreement, FuseMount, FuseParameters, FusePlace, InheritFd};

/// What a server has open, and its number.
pub(crate) const DEVICE: &str = "/dev/fuse";
const NUMBER: (u32, u32) = (10, 229);
/// The type of the file system.
const FUSE: &str = "fuse";
/// What the description of a new mount looks like.
const FORM: &str = "expected KEY:OPTIONS:PLACE, as in file[18:5a]:user_id=0,group_id=0:/mnt";
/// What the refusal of a dump calls the mount of a server in a mount namespace of its own.
const NAME: &str = "fuse";

/// `FUSE_INIT` of linux/fuse.h, and the versions of the protocol that the answer is of.
const INIT: u32 = 26;
const MAJOR: u32 = 7;
const MINOR: u32 = 31;
/// What every libfuse agrees to: `FUSE_ASYNC_READ`, and `FUSE_BIG_WRITES`.
const AGREED: u32 = 0x21;
/// The most bytes of a write: what older ones of libfuse have room for, and the least that the kernel takes.
const MAX_WRITE: u32 = 1 << 17;
const MIN_WRITE: u32 = 4096;
/// The kernel hands no request to less room (`FUSE_MIN_READ_BUFFER`), and the first one needs less.
const ROOM: usize = 8192;
/// `struct fuse_in_header` with the opcode and the number of a request, and what `struct fuse_init_in` has behind it.
const OPCODE: usize = 4;
const UNIQUE: usize = 8;
const ASKED_MAJOR: usize = 40;
const ASKED_READAHEAD: usize = 48;
const ASKED_FLAGS: usize = 52;
/// `struct fuse_out_header`, and the same with `struct fuse_init_out`.
const HEADER: usize = 16;
const ANSWER: u32 = 80;
/// How long the kernel may take to begin.
const PATIENCE: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };

/// A new mount for a restored server: `KEY:OPTIONS:PLACE` (`--fuse`).
///
/// KEY is that of its connection, as the dump was given it: `file[MNT_ID:INODE]`. OPTIONS are those of the old mount,
/// as `/proc/self/mountinfo` shows them. PLACE is where the new one goes: a path of this host, or `mnt[NAME]` for the
/// one that the dump has called so (`--external mnt[MOUNTPOINT]:NAME`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FuseServer {
    text: String,
    key: String,
    place: FusePlace,
    parameters: FuseParameters,
}

impl FromStr for FuseServer {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let (key, rest) = text.split_once("]:").ok_or(FORM)?;
        let key = format!("{key}]");
        if !matches!(key.parse(), Ok(External::File { .. })) {
            return Err(FORM.to_owned());
        }
        // A source (HOST:/PATH) may have a colon.
        let place = [":/", ":mnt["].iter().filter_map(|begin| rest.rfind(begin)).max();
        let (options, place) = rest.split_at(place.ok_or(FORM)?);
        let place = &place[1..];
        let named = place.strip_prefix("mnt[").map(|name| name.strip_suffix(']'));
        let place = match named {
            None => FusePlace::Path(place.into()),
            Some(Some(name)) if !name.is_empty() => FusePlace::Mount(name.to_owned()),
            Some(_) => return Err(FORM.to_owned()),
        };
        // The kernel's default, and that of mount(8), are not the same.
        let (flags, rest) = mount_flags(OsStr::new(&format!("relatime,{options}")));
        let mut parameters = FuseParameters {
            flags,
            options: Vec::new(),
            root_mode: None,
            agreement: FuseAgreement { flags: AGREED, max_write: MAX_WRITE },
        };
        if flags & libc::MS_RDONLY != 0 {
            parameters.options.push(("ro".to_owned(), None));
        }
        rest.iter().try_for_each(|option| parameters.add(option))?;
        // The kernel makes none without.
        for (name, value) in [("user_id", "0"), ("group_id", "0"), ("source", "fuse")] {
            if !parameters.options.iter().any(|(known, _)| known == name) {
                parameters.options.push((name.to_owned(), Some(value.to_owned())));
            }
        }
        Ok(FuseServer { text: text.to_owned(), key, place, parameters })
    }
}

impl FuseParameters {
    /// Adds an option that is none of every mount.
    fn add(&mut self, option: &str) -> std::result::Result<(), String> {
        let wrong = || format!("{option:?} is no option of a FUSE mount");
        let (name, value) = match option.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (option, None),
        };
        match (name, value) {
            // All that lists show of its flags: the kernel makes none with mandatory locks (`mand`).
            ("allow_other" | "default_permissions" | "sync" | "dirsync" | "lazytime", None) => {}
            ("user_id" | "group_id" | "max_read", Some(value)) => {
                value.parse::<u32>().map_err(|_| wrong())?;
            }
            ("subtype" | "source", Some(value)) if !value.is_empty() => {}
            ("rootmode", Some(value)) => {
                u32::from_str_radix(value, 8).map_err(|_| wrong())?;
                self.root_mode = Some(value.to_owned());
                return Ok(());
            }
            ("agreed", Some(value)) => {
                let digits = value.strip_prefix("0x").ok_or_else(wrong)?;
                self.agreement.flags |= u32::from_str_radix(digits, 16).map_err(|_| wrong())?;
                return Ok(());
            }
            ("max_write", Some(value)) => {
                let bytes = value.parse().ok().filter(|bytes| *bytes >= MIN_WRITE);
                self.agreement.max_write = bytes.ok_or_else(wrong)?;
                return Ok(());
            }
            _ => return Err(wrong()),
        }
        self.options.push((name.to_owned(), value.map(str::to_owned)));
        Ok(())
    }

    /// What the kernel makes the file system with, which the process that asks for it has the connection open for.
    fn with(&self, connection: u64, root_mode: &str) -> Vec<Parameter> {
        let own = [("fd", connection.to_string()), ("rootmode", root_mode.to_owned())];
        let own: [Parameter; 2] = own.map(|(name, value)| (name.into(), Some(value.into())));
        let options = self
            .options
            .iter()
            .map(|(name, value)| (OsString::from(name), value.as_deref().map(OsString::from)));
        own.into_iter().chain(options).collect()
    }

    /// Gives a new mount its flags, and agrees with the kernel in the name of the server.
    fn settle(
        &self,
        mount: &OwnedFd,
        connection: BorrowedFd<'_>,
        what: impl FnOnce() -> String,
    ) -> Result<()> {
        let flags = attributes(self.flags);
        torpor_sys::mount::set_attributes(mount.as_fd(), false, flags).context(what)?;
        agree(connection, self.agreement)
    }
}

impl FuseServer {
    /// Refuses a mount on another one, or below: whoever looks for such a place asks a server that sleeps still.
    ///
    /// # Errors
    /// Both options.
    pub fn check_places(all: &[FuseServer]) -> std::result::Result<(), String> {
        let lies_on = |one: &FuseServer, other: &FuseServer| match (&one.place, &other.place) {
            (FusePlace::Path(place), FusePlace::Path(other)) => place.starts_with(other),
            (place, other) => place == other,
        };
        let mut pairs = all.iter().enumerate().flat_map(|(at, one)| {
            let others = all.iter().enumerate().filter(move |(other, _)| *other != at);
            others.map(move |(_, other)| (one, other))
        });
        match pairs.find(|(one, other)| lies_on(one, other)) {
            Some((one, other)) => Err(format!(
                "--fuse {one}: its place is on the mount of --fuse {other}, whose server sleeps until both are there"
            )),
            None => Ok(()),
        }
    }

    /// Makes the mount that goes to a path of this host, and its agreement with the kernel in the name of the server. One
    /// that goes to a namespace of the tree is made there.
    ///
    /// # Errors
    /// If a mount whose server has ended is still at the place; if there is no FUSE; if the kernel does not take the
    /// options, or has not what was agreed on.
    pub fn connect(&self) -> Result<FuseMount> {
        let root_mode = match &self.place {
            FusePlace::Path(path) => Some(self.root_mode(path)?),
            FusePlace::Mount(_) => None,
        };
        let connection = rustix::fs::open(DEVICE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .context(|| format!("--fuse {self}: open {DEVICE}"))?;
        let mount = root_mode.map(|mode| self.make(connection.as_fd(), &mode)).transpose()?;
        let connection = InheritFd { fd: Arc::new(connection), key: self.key.clone() };
        Ok(FuseMount {
            connection,
            mount: mount.map(Arc::new),
            place: self.place.clone(),
            parameters: self.parameters.clone(),
            text: self.text.clone(),
        })
    }

    /// The type of the root, which the place has.
    fn root_mode(&self, path: &Path) -> Result<String> {
        // The kernel may still know what the server of an old mount has said.
        let look = statx(CWD, path, AtFlags::STATX_FORCE_SYNC, StatxFlags::TYPE);
        let path = path.display();
        let old = match look {
            Err(Errno::NOTCONN) => Some("the mount of a server that has ended"),
            // Whether its server has ended, too, only that user is told.
            Err(Errno::ACCESS) => Some("a mount that shows itself to nobody but its user"),
            _ => None,
        };
        if let Some(old) = old {
            return Err(Error::Usage(format!(
                "--fuse {self}: {old} is still at {path}; take it away first (umount --lazy {path})"
            )));
        }
        if let Some(mode) = &self.parameters.root_mode {
            return Ok(mode.clone());
        }
        let stat = look.context(|| format!("--fuse {self}: look at {path}"))?;
        Ok(format!("{:o}", u32::from(stat.stx_mode) & libc::S_IFMT))
    }

    fn make(&self, connection: BorrowedFd<'_>, root_mode: &str) -> Result<OwnedFd> {
        let what = || format!("make the mount of --fuse {self}");
        let number = u64::from(connection.as_raw_fd().cast_unsigned());
        let parameters = self.parameters.with(number, root_mode);
        let mount = make_from(FUSE, &parameters).context(what)?;
        self.parameters.settle(&mount, connection, what)?;
        tracing::debug!("--fuse {self}: there is a connection");
        Ok(mount)
    }
}

impl fmt::Display for FuseServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Answers the first request of a connection, in the name of its server.
fn agree(connection: BorrowedFd<'_>, agreement: FuseAgreement) -> Result<()> {
    let what = || format!("agree with the kernel on a connection of {DEVICE}");
    let mut waiting = [PollFd::from_borrowed_fd(connection, PollFlags::IN)];
    if retry_on_intr(|| poll(&mut waiting, Some(&PATIENCE))).context(what)? == 0 {
        return Err(Errno::TIMEDOUT).context(what);
    }
    let mut request = [0_u8; ROOM];
    let length = retry_on_intr(|| rustix::io::read(connection, &mut request)).context(what)?;
    let answer = answer(&request[..length], agreement)?;
    rustix::io::write(connection, &answer).context(what).map(drop)
}

/// What a server answers to the first request: what it has agreed to before.
fn answer(request: &[u8], agreement: FuseAgreement) -> Result<Vec<u8>> {
    let word = |at: usize| -> Option<u32> {
        Some(u32::from_ne_bytes(request.get(at..at + 4)?.try_into().ok()?))
    };
    let asked = [OPCODE, ASKED_MAJOR, ASKED_READAHEAD, ASKED_FLAGS].map(word);
    let [Some(INIT), Some(MAJOR), Some(readahead), Some(offered)] = asked else {
        let reason = format!(
            "{DEVICE}: a connection begins otherwise than by FUSE_INIT of protocol {MAJOR}"
        );
        return Err(Error::Protocol(reason));
    };
    let missing = agreement.flags & !offered;
    if missing != 0 {
        return Err(Error::Usage(format!(
            "--fuse: this kernel does not offer what the server has agreed to ({missing:#x} of FUSE_INIT)"
        )));
    }
    let mut answer = vec![0; ANSWER as usize];
    let mut put = |at: usize, bytes: &[u8]| answer[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &ANSWER.to_ne_bytes());
    put(8, &request[UNIQUE..UNIQUE + 8]);
    let words = [MAJOR, MINOR, readahead, agreement.flags];
    put(HEADER, words.map(u32::to_ne_bytes).as_flattened());
    // Behind two limits of requests in the background, for which the kernel has defaults: the most bytes of a write, and
    // that times are of nanoseconds.
    put(HEADER + 20, [agreement.max_write, 1].map(u32::to_ne_bytes).as_flattened());
    Ok(answer)
}

impl FuseMount {
    /// Has a husk make the mount, in whose namespaces it is then: the requests of the kernel have the ids that tasks have
    /// there. The server gets the connection of that one.
    ///
    /// # Errors
    /// If the husk is gone, or may not open the device; otherwise as [`FuseServer::connect`].
    pub(super) fn make_in(&self, husk: &mut Tracee) -> Result<OwnedFd> {
        let what = || format!("make the mount of --fuse {self}");
        let mut batch = husk.batch();
        let device = batch.cstr(DEVICE);
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let opened = batch.call(syscall::openat(RemoteFd::CWD, device, flags, Mode::empty()));
        let number = batch.run()?.expect(opened, || {
            format!("--fuse {self}: open {DEVICE} as the root of the user namespace that the mount is of")
        })?;
        let directory = || format!("{:o}", libc::S_IFDIR);
        let root_mode = self.parameters.root_mode.clone().unwrap_or_else(directory);
        let parameters = self.parameters.with(number, &root_mode);
        let (made, mount) = make_from_in(husk, FUSE, &parameters, what)?;
        let connection = fetch(husk.pid(), number).context(what)?;
        for number in [made, number] {
            husk.call("close", syscall::close(RemoteFd(number)))?;
        }
        self.parameters.settle(&mount, connection.as_fd(), what)?;
        torpor_sys::inherited::replace(self.connection.fd.as_fd(), connection.as_fd())
            .context(what)?;
        tracing::debug!("--fuse {self}: there is a connection");
        Ok(mount)
    }

    /// Mounts it, if it goes to a path of this host.
    fn attach(&self) -> Result<Option<PlacedMount<'_>>> {
        let (FusePlace::Path(path), Some(mount)) = (&self.place, &self.mount) else {
            return Ok(None);
        };
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        move_mount(&**mount, "", CWD, path, flags)
            .context(|| format!("--fuse {self}: mount at {}", path.display()))?;
        Ok(Some(PlacedMount { mount, of: self }))
    }
}

/// A new mount at its place.
#[derive(Debug)]
struct PlacedMount<'m> {
    mount: &'m OwnedFd,
    of: &'m FuseMount,
}

impl PlacedMount<'_> {
    /// Takes it away again.
    fn detach(&self) {
        let path = format!("/proc/self/fd/{}", self.mount.as_raw_fd());
        if let Err(error) = unmount(&path, UnmountFlags::DETACH) {
            tracing::warn!(%error, "--fuse {}: the new mount stays", self.of);
        }
    }
}

/// New mounts at their places, from where they are taken away again unless they are kept.
#[must_use]
#[derive(Debug)]
pub(crate) struct PlacedMounts<'m>(Vec<PlacedMount<'m>>);

impl PlacedMounts<'_> {
    /// The tasks run: they stay.
    pub(crate) fn keep(mut self) {
        self.0.clear();
    }
}

impl Drop for PlacedMounts<'_> {
    fn drop(&mut self) {
        self.0.iter().rev().for_each(PlacedMount::detach);
    }
}

/// Mounts those that go to paths of this host: all, or none.
///
/// # Errors
/// If one cannot be mounted there.
pub(crate) fn attach(all: &[FuseMount]) -> Result<PlacedMounts<'_>> {
    let mut placed = PlacedMounts(Vec::new());
    for new in all {
        placed.0.extend(new.attach()?);
    }
    Ok(placed)
}

/// The new mount that is given for one of the images, and the name of that.
pub(super) fn given<'g>(
    given: &'g [FuseMount],
    external: Option<&FromOutside>,
) -> Option<(&'g str, &'g FuseMount)> {
    let Some(FromOutside::Key(key)) = external else { return None };
    let mut named = given.iter().filter_map(|new| Some((new.stands_for()?, new)));
    named.find(|(name, _)| name == key)
}

/// Whether a file is a connection of a server.
pub(crate) fn is_connection(stat: &Stat) -> bool {
    let is_device = FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice;
    is_device && stat.st_rdev == makedev(NUMBER.0, NUMBER.1)
}

/// Why a server is refused, and what to do. Linux 6.18 tells what is served by a connection.
pub(crate) fn refusal(mounts: &TreeMounts, found: &Found) -> String {
    let key = format!("file[{:x}:{:x}]", found.info.mnt_id, found.stat.st_ino);
    let number = found.info.values("fuse_connection").next().and_then(|text| text.parse().ok());
    let (more, new) = number.and_then(|device| served(mounts, device)).unwrap_or_else(|| {
        (String::new(), "OPTIONS:PLACE, with the options that /proc/self/mountinfo has".to_owned())
    });
    format!(
        "a FUSE file system is served through it, and the kernel takes no other server for that mount; dump \
         with --external {key}{more}, and restore with a new mount: --fuse {key}:{new} (or with --inherit-fd \
         fd[N]:{key}, if somebody keeps the connection open), leave the server out of the tree, or unmount and \
         end it (docs/guide.md)"
    )
}

/// What a dump needs besides the key, and how a restore gets the mount of a device anew, if that is found.
fn served(mounts: &TreeMounts, device: u32) -> Option<(String, String)> {
    let is_it = |mount: &&Mount| mount.dev == device && mount.root == Path::new("/");
    let own = mounts.spaces.iter().filter(|space| !space.is_host).find_map(|space| {
        let mount = space.tree.mounts().iter().find(is_it)?;
        let options = options(mount)? + root_of(space, mount);
        let more = format!(" --external mnt[{}]:{NAME}", mount.mountpoint.display());
        Some((more, format!("{options}:mnt[{NAME}]")))
    });
    own.or_else(|| {
        let mount = mounts.host.mounts().iter().find(is_it)?;
        Some((String::new(), format!("{}:{}", options(mount)?, mount.mountpoint.display())))
    })
}

/// The options that make a mount again, as `--fuse` takes them.
fn options(mount: &Mount) -> Option<String> {
    let subtype = match mount.fs.split_once('.') {
        Some(("fuse", subtype)) => Some(format!("subtype={subtype}")),
        Some(_) => return None,
        None if mount.fs == "fuse" => None,
        None => return None,
    };
    let source = mount.source.to_str().filter(|source| !source.contains(',')).unwrap_or("fuse");
    let flags = mount_flag_names(mount.flags).chain(flag_names(mount.sb_flags));
    let noatime = (mount.flags & libc::MS_NOATIME != 0).then_some("noatime");
    let of_flags = flags.chain(noatime).map(str::to_owned);
    let own = split_options(&mount.options).filter_map(OsStr::to_str).map(str::to_owned);
    let mut all: Vec<String> = Vec::new();
    for option in own.chain(subtype).chain([format!("source={source}")]).chain(of_flags) {
        if !all.contains(&option) {
            all.push(option);
        }
    }
    Some(all.join(","))
}

/// The option of a mount whose root is no directory. Its server has stopped; that type is known without asking it, and so
/// it is on the way to it, but for that of another server.
fn root_of(space: &MountNamespace, mount: &Mount) -> &'static str {
    let parents = space.tree.mounts().iter().filter(|parent| parent.id == mount.parent);
    if parents.map(|parent| &parent.fs).any(|fs| fs.starts_with("fuse")) {
        return "";
    }
    let path = mount.mountpoint.as_os_str().as_encoded_bytes();
    // No statx(2): the mount of an ordinary user tells its root's type nobody else.
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::DIRECTORY;
    match open_in(space.root.as_fd(), path, flags, Mode::empty()) {
        Err(Errno::NOTDIR) => ",rootmode=100000",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::super::collect::make_all_private;
    use super::super::mountinfo::parse;
    use super::*;

    /// Gives this thread mounts of its own.
    fn among_own_mounts() {
        torpor_sys::ns::unshare_namespaces(libc::CLONE_NEWNS).unwrap();
        make_all_private().unwrap();
    }

    #[test]
    fn descriptions_are_read() {
        let server: FuseServer =
            "file[18:5a]:rw,nosuid,user_id=7,allow_other,source=h:/x,agreed=0x400:/m:n"
                .parse()
                .unwrap();
        assert_eq!(server.key, "file[18:5a]");
        assert_eq!(server.place, FusePlace::Path("/m:n".into()));
        assert_eq!(server.parameters.flags, libc::MS_NOSUID | libc::MS_RELATIME);
        let value = |value: &str| Some(value.to_owned());
        let options = [
            ("user_id", value("7")),
            ("allow_other", None),
            ("source", value("h:/x")),
            ("group_id", value("0")),
        ];
        let options = options.map(|(name, value)| (name.to_owned(), value));
        assert_eq!(server.parameters.options, options);
        let agreement = FuseAgreement { flags: 0x421, max_write: MAX_WRITE };
        assert_eq!(server.parameters.agreement, agreement);
        let server: FuseServer =
            "file[1:2]:ro,rootmode=100000,max_write=8192:mnt[a]".parse().unwrap();
        assert_eq!(server.place, FusePlace::Mount("a".to_owned()));
        assert_eq!(server.parameters.root_mode.as_deref(), Some("100000"));
        assert!(server.parameters.options.contains(&("ro".to_owned(), None)));
        assert_eq!(server.parameters.agreement.max_write, 8192);
        assert_eq!(
            "file[1:2]::/m".parse::<FuseServer>().unwrap().place,
            FusePlace::Path("/m".into())
        );
    }

    #[test]
    fn other_descriptions_are_refused() {
        for (text, why) in [
            ("file[1:2]:/mnt", FORM),
            ("file[1:2]", FORM),
            ("pipe[1]::/mnt", FORM),
            ("file[1:2]:user_id=0:mnt", FORM),
            ("file[1:2]::mnt[]", FORM),
            ("file[1:2]::mnt[a", FORM),
            ("file[1:2]:fd=3:/mnt", "\"fd=3\" is no option of a FUSE mount"),
            ("file[1:2]:allow_other=1:/mnt", "\"allow_other=1\""),
            ("file[1:2]:user_id:/mnt", "\"user_id\""),
            ("file[1:2]:user_id=-1:/mnt", "\"user_id=-1\""),
            ("file[1:2]:agreed=21:/mnt", "\"agreed=21\""),
            ("file[1:2]:max_write=100:/mnt", "\"max_write=100\""),
            ("file[1:2]:rootmode=9:/mnt", "\"rootmode=9\""),
        ] {
            let error = text.parse::<FuseServer>().unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn what_is_shown_of_a_mount_makes_it_again() {
        let options_of = |line: &str| options(&parse(line.as_bytes()).unwrap()[0]);
        let shown = options_of(
            "1 0 0:50 / /m rw,nosuid,relatime - fuse.sshfs u@h:/x ro,lazytime,user_id=7,group_id=8,allow_other",
        )
        .unwrap();
        let expected =
            "user_id=7,group_id=8,allow_other,subtype=sshfs,source=u@h:/x,nosuid,ro,lazytime";
        assert_eq!(shown, expected);
        format!("file[1:2]:{shown}:/m").parse::<FuseServer>().unwrap();
        let plain =
            options_of("1 0 0:50 / /m rw,noatime - fuse a,b rw,user_id=0,group_id=0").unwrap();
        assert_eq!(plain, "user_id=0,group_id=0,source=fuse,noatime");
        assert_eq!(options_of("1 0 8:1 / /m rw - fuseblk /dev/sda1 rw,user_id=0"), None);
    }

    #[test]
    fn a_place_on_another_mount_is_refused() {
        let check = |places: [&str; 3]| {
            let all = places.map(|place| format!("file[1:2]::{place}").parse().unwrap());
            FuseServer::check_places(&all)
        };
        assert_eq!(check(["/m/a", "/m/ab", "mnt[a]"]), Ok(()));
        for (places, one, other) in [
            (["/m", "/n", "/m/a"], "/m/a", "/m"),
            (["/m/a", "mnt[a]", "/m/"], "/m/a", "/m/"),
            (["/n", "/m", "//m"], "/m", "//m"),
            (["mnt[a]", "/n", "mnt[a]"], "mnt[a]", "mnt[a]"),
        ] {
            let error = check(places).unwrap_err();
            let expected = format!(
                "--fuse file[1:2]::{one}: its place is on the mount of --fuse file[1:2]::{other}, "
            );
            assert!(error.starts_with(&expected), "{error}");
        }
    }

    #[test]
    fn the_first_request_is_answered_for_the_server() {
        let mut request = vec![0; 104];
        for (at, word) in
            [(0, 104), (OPCODE, INIT), (UNIQUE, 2), (40, MAJOR), (44, 45), (48, 1 << 17)]
        {
            request[at..at + 4].copy_from_slice(&u32::to_ne_bytes(word));
        }
        request[ASKED_FLAGS..ASKED_FLAGS + 4].copy_from_slice(&0x421_u32.to_ne_bytes());
        let agreement = |flags| FuseAgreement { flags, max_write: 4096 };
        let answer_of = |flags| answer(&request, agreement(flags));
        let answered = answer_of(0x21).unwrap();
        let word = |at: usize| u32::from_ne_bytes(answered[at..at + 4].try_into().unwrap());
        assert_eq!((answered.len(), word(0), word(4), word(8)), (80, 80, 0, 2));
        assert_eq!((word(16), word(20), word(24), word(28)), (7, 31, 1 << 17, 0x21));
        assert_eq!((word(36), word(40)), (4096, 1));
        let error = answer_of(0x100_0021).unwrap_err().to_string();
        assert!(error.contains("(0x1000000 of FUSE_INIT)"), "{error}");
        let error = answer(&request[..50], agreement(0x21)).unwrap_err().to_string();
        assert!(error.contains("begins otherwise"), "{error}");
    }

    #[test]
    fn what_was_placed_is_taken_away_if_another_one_has_no_place() {
        among_own_mounts();
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("first");
        std::fs::create_dir(&place).unwrap();
        let connect = |path: &Path, more: &str| {
            let text = format!("file[1:2]:{more}:{}", path.display());
            text.parse::<FuseServer>().unwrap().connect()
        };
        let Ok(first) = connect(&place, "") else {
            println!("left out: what_was_placed_is_taken_away (no FUSE file systems)");
            return;
        };
        let second = connect(&dir.path().join("none"), "rootmode=40000").unwrap();
        let error = attach(&[first, second]).unwrap_err().to_string();
        assert!(error.contains("mount at") && error.contains("/none"), "{error}");
        let shown = std::fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
        assert!(!shown.contains(place.to_str().unwrap()), "{shown}");
    }

    #[test]
    fn the_mount_of_a_server_that_has_ended_is_to_be_taken_away_first() {
        among_own_mounts();
        let dir = tempfile::tempdir().unwrap();
        let text = format!("file[1:2]::{}", dir.path().display());
        let server: FuseServer = text.parse().unwrap();
        let Ok(first) = server.connect() else {
            println!("left out: the_mount_of_a_server_that_has_ended (no FUSE file systems)");
            return;
        };
        first.attach().unwrap();
        let mount = first.mount.clone();
        drop(first);
        let fails = |options: &str, why: &str| {
            let text = format!("file[1:2]:{options}:{}", dir.path().display());
            let error = text.parse::<FuseServer>().unwrap().connect().unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
            assert!(error.contains("take it away first (umount --lazy /"), "{error}");
        };
        fails("", "the mount of a server that has ended");
        fails("rootmode=40000", "the mount of a server that has ended");
        unmount(dir.path(), UnmountFlags::DETACH).unwrap();
        drop(mount);
        let text = format!("file[1:2]:user_id=7,group_id=7,lazytime:{}", dir.path().display());
        let of_user = text.parse::<FuseServer>().unwrap().connect().unwrap();
        of_user.attach().unwrap();
        let mount = of_user.mount.clone();
        drop(of_user);
        fails("rootmode=40000", "a mount that shows itself to nobody but its user");
        unmount(dir.path(), UnmountFlags::DETACH).unwrap();
        drop(mount);
    }
}
