//! Open files of the tasks that the caller hands over, and what the images call them.

use std::borrow::Cow;
use std::fmt;

use crate::given_file::GivenFile;
use crate::open_file::{FileKind, OpenFile};
use crate::path_file::{FoundBy, PathFile};
use crate::pipe::PipeEnd;
use crate::terminal::{Terminal, TerminalKind};
use crate::unix_end::UnixEnd;

/// What a caller may call an open file of the images.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileKey<'a> {
    /// This path, with or without its first slash.
    Path(&'a [u8]),
    /// `pipe:[1]`, as procfs has it, or `pipe[1]`.
    Pipe(u32),
    /// `socket:[1]` or `socket[1]`.
    Socket {
        /// Its inode number in the images.
        number: u32,
        /// It is none of the tasks': there is no other way to have it.
        outside: bool,
    },
    /// This text; there is no other way to have it.
    Outside(Cow<'a, str>),
}

impl GivenFile {
    /// The one that stands for a file of the images, if one does; `given` are the keys of those that are handed over.
    #[must_use]
    pub fn of(file: &OpenFile, terminals: &[Terminal], given: &[String]) -> Option<Self> {
        let name = FileKey::of(file, terminals)?;
        let key = given.iter().find(|key| name.is(key)).cloned();
        Some(GivenFile { file: file.id, key: key.or_else(|| name.needed())? })
    }
}

impl<'a> FileKey<'a> {
    /// That of a file of the images; `None` if nobody can hand it over.
    #[must_use]
    pub fn of(file: &'a OpenFile, terminals: &[Terminal]) -> Option<Self> {
        match &file.kind {
            FileKind::Path(path) => FileKey::of_path(path),
            FileKind::Tun(tun) => FileKey::of_path(&tun.path),
            FileKind::Pipe(pipe) => Some(FileKey::of_pipe(pipe)),
            FileKind::Unix(socket) => Some(FileKey::of_socket(socket)),
            FileKind::Terminal(of) => {
                FileKey::of_terminal(terminals.iter().find(|terminal| terminal.id == of.terminal)?)
            }
            _ => None,
        }
    }

    /// That of a file that is opened by a path.
    #[must_use]
    pub fn of_path(file: &'a PathFile) -> Option<Self> {
        let path = file.path.as_slice();
        match file.found {
            FoundBy::Path | FoundBy::Mount => Some(FileKey::Path(path)),
            FoundBy::Caller => Some(FileKey::Outside(String::from_utf8_lossy(path))),
            FoundBy::Queue(_) => None,
        }
    }

    /// That of a pipe.
    #[must_use]
    pub fn of_pipe(pipe: &PipeEnd) -> Self {
        FileKey::Pipe(pipe.pipe)
    }

    /// That of a Unix socket.
    #[must_use]
    pub fn of_socket(socket: &UnixEnd) -> Self {
        // Those for datagrams are found by their names.
        let outside = socket.outside.is_some() && !socket.kind.is_of_datagrams();
        FileKey::Socket { number: socket.link.inode, outside }
    }

    /// That of a terminal; `None` if it is no one's outside.
    #[must_use]
    pub fn of_terminal(terminal: &Terminal) -> Option<Self> {
        let Terminal { kind, rdev, devpts, .. } = terminal;
        let key = || FileKey::Outside(format!("tty[{rdev:x}:{:x}]", devpts.unwrap_or(0)).into());
        (*kind == TerminalKind::Given).then(key)
    }

    /// Whether `key` is a name of it.
    #[must_use]
    pub fn is(&self, key: &str) -> bool {
        let bare = |path: &'a [u8]| path.strip_prefix(b"/").unwrap_or(path);
        let numbered = |kind: &str, number: &u32| {
            let digits = key.strip_prefix(kind).map(|rest| rest.strip_prefix(':').unwrap_or(rest));
            let digits = digits.and_then(|rest| rest.strip_prefix('[')?.strip_suffix(']'));
            digits.is_some_and(|digits| digits == number.to_string())
        };
        match self {
            FileKey::Path(path) => bare(path) == key.strip_prefix('/').unwrap_or(key).as_bytes(),
            FileKey::Pipe(number) => numbered("pipe", number),
            FileKey::Socket { number, .. } => numbered("socket", number),
            FileKey::Outside(text) => text == key,
        }
    }

    /// The name that it has to be given by, if there is no other way to have it.
    #[must_use]
    pub fn needed(&self) -> Option<String> {
        let needed = matches!(self, FileKey::Socket { outside: true, .. } | FileKey::Outside(_));
        needed.then(|| self.to_string())
    }
}

impl fmt::Display for FileKey<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FileKey::Path(path) => f.write_str(&String::from_utf8_lossy(path)),
            FileKey::Pipe(number) => write!(f, "pipe[{number}]"),
            FileKey::Socket { number, .. } => write!(f, "socket[{number}]"),
            FileKey::Outside(text) => f.write_str(text),
        }
    }
}

#[cfg(test)]
mod tests {
    use torpor_images::proto::{
        FdTypes, FileEntry, PipeEntry, RegFileEntry, TtyFileEntry, TtyInfoEntry, TtyType,
        TunfileEntry, UnixSkEntry,
    };

    use super::*;
    use crate::unix_name::EXTERNAL;

    /// The type of a Unix socket of datagrams.
    const DATAGRAMS: u32 = libc::SOCK_DGRAM.cast_unsigned();

    fn keys(entry: &FileEntry, terminals: &[Terminal], given: &[&str]) -> Option<String> {
        let given: Vec<String> = given.iter().map(|&key| key.to_owned()).collect();
        let found = GivenFile::of(&OpenFile::read(entry).unwrap(), terminals, &given)?;
        assert_eq!(found.file, 7);
        Some(found.key)
    }

    /// The key by which an entry is given, of these and others that are near.
    fn only_by(entry: &FileEntry, right: &[&str], wrong: &[&str]) {
        let needed = keys(entry, &[], &[]);
        for key in right {
            let among: Vec<&str> = wrong.iter().chain([key]).copied().collect();
            assert_eq!(keys(entry, &[], &among).as_deref(), Some(*key));
        }
        for key in wrong {
            assert_eq!(keys(entry, &[], &[key]), needed, "{key}");
        }
    }

    fn reg(path: &str) -> RegFileEntry {
        RegFileEntry { id: 7, name: path.as_bytes().to_vec(), ..RegFileEntry::default() }
    }

    fn entry(r#type: FdTypes, change: impl Fn(&mut FileEntry)) -> FileEntry {
        let mut entry = FileEntry { id: 7, r#type: r#type.into(), ..FileEntry::default() };
        change(&mut entry);
        entry
    }

    #[test]
    fn each_kind_has_its_names() {
        let path = entry(FdTypes::Reg, |entry| entry.reg = Some(reg("/dir/file")));
        only_by(&path, &["/dir/file", "dir/file"], &["file", "/dir", "//dir/file", ""]);
        assert_eq!(keys(&path, &[], &[]), None);
        let torpor_reg = Some(reg("/dev/net/tun"));
        let tun = TunfileEntry { id: 7, torpor_reg, ..TunfileEntry::default() };
        only_by(
            &entry(FdTypes::Tunf, |entry| entry.tunf = Some(tun.clone())),
            &["/dev/net/tun"],
            &["tun"],
        );
        let pipe = PipeEntry { id: 7, pipe_id: 12, ..PipeEntry::default() };
        let pipe = entry(FdTypes::Pipe, |entry| entry.pipe = Some(pipe));
        let wrong = ["pipe[1]", "pipe[012]", "pipe12", "pipe::[12]", "pipe:[12", "socket[12]"];
        only_by(&pipe, &["pipe:[12]", "pipe[12]"], &wrong);
        let socket = UnixSkEntry { id: 7, ino: 12, r#type: 1, state: 7, ..Default::default() };
        let of =
            |socket: &UnixSkEntry| entry(FdTypes::Unixsk, |entry| entry.usk = Some(socket.clone()));
        only_by(&of(&socket), &["socket:[12]", "socket[12]"], &["pipe[12]", "socket[1]"]);
        assert_eq!(keys(&of(&socket), &[], &[]), None);
        let outside = UnixSkEntry { uflags: EXTERNAL, ..socket };
        assert_eq!(keys(&of(&outside), &[], &[]).as_deref(), Some("socket[12]"));
        let datagrams = UnixSkEntry { r#type: DATAGRAMS, ..outside };
        assert_eq!(keys(&of(&datagrams), &[], &[]), None);
    }

    #[test]
    fn what_is_outside_has_to_be_given() {
        let outside = RegFileEntry { ext: Some(true), ..reg("file[1f:2a6]") };
        let outside = entry(FdTypes::Reg, |entry| entry.reg = Some(outside.clone()));
        only_by(&outside, &["file[1f:2a6]"], &["/file[1f:2a6]", "file[1f:2a7]"]);
        assert_eq!(keys(&outside, &[], &[]).as_deref(), Some("file[1f:2a6]"));
        let queue = RegFileEntry { torpor_mqueue: Some(3), ..reg("/queue") };
        assert_eq!(
            keys(&entry(FdTypes::Reg, |entry| entry.reg = Some(queue.clone())), &[], &["/queue"]),
            None
        );
    }

    #[test]
    fn terminals_are_given_only_from_outside() {
        let dir = tempfile::tempdir().unwrap();
        let images = torpor_images::ImageDir::open(dir.path()).unwrap();
        let info = |id, ty: TtyType| TtyInfoEntry {
            id,
            r#type: ty.into(),
            rdev: 0x8803,
            dev: Some(0xd),
            ..TtyInfoEntry::default()
        };
        let all = [info(1, TtyType::ExtTty), info(2, TtyType::Pty)];
        images.write_all(torpor_images::kind::TTY_INFO, 0, &all).unwrap();
        let terminals = Terminal::all(&images).unwrap();
        let of = |tty_info_id| {
            let tty = TtyFileEntry { id: 7, tty_info_id, ..TtyFileEntry::default() };
            keys(&entry(FdTypes::Tty, |entry| entry.tty = Some(tty)), &terminals, &["tty[8803:d]"])
        };
        let outside = Some("tty[8803:d]".to_owned());
        assert_eq!([of(1), of(2), of(3)], [outside, None, None]);
    }
}
