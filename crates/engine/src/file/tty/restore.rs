//! The restore half of terminals.
//!
//! A pair is made when the first of its descriptions is needed: the master at its old
//! number, then everything else through a slave of our own. Sessions get their
//! terminal while the descriptor tables of the husks are still empty: the leader has
//! to ask for it itself.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{FileType, Mode, OFlags};
use rustix::process::PidfdGetfdFlags;
use torpor_policy::{FileKey, PathFile, Terminal, TerminalFile, TerminalInput, TerminalKind};
use torpor_sys::tty;
use torpor_tracee::syscall::{self, RemoteFd};
use torpor_tracee::{Batch, Call, RemoteAddr, Tracee};

use super::{TtyNode, info, queue};
use crate::error::{Context, Error, Result};
use crate::file::description::{
    duplicate, open_flags, outside, reopen, same_inode, set_status_flags,
};
use crate::file::ext;
use crate::file::opener::Opener;
use crate::file::remap::parent;
use crate::namespace::pid;
use crate::proc;
use crate::restore::transport::Transport;

/// The image file that most contradictions are found in.
const INFO: &str = "tty-info.img";
/// Where a husk's end of the transport goes: above what is sent.
const TRANSPORT: i32 = 8;

/// The terminals of the images, and what has become of them.
#[derive(Debug, Default)]
pub(crate) struct TtyRestorer {
    infos: HashMap<u32, Terminal>,
    /// The pair that each end belongs to: devpts instance and number.
    keys: HashMap<u32, (u32, u32)>,
    data: HashMap<u32, Vec<u8>>,
    files: Vec<TerminalFile>,
    pairs: HashMap<(u32, u32), Pair>,
    /// The masters of terminals whose slaves only are in the tree, for the caller.
    pub orphan_masters: Vec<OwnedFd>,
}

/// A pair that has been made.
#[derive(Debug)]
struct Pair {
    master: OwnedFd,
    /// A slave for our own use until everything is open.
    slave: Option<OwnedFd>,
    /// Whether somebody of the tree has the master.
    has_master: bool,
}

impl TtyRestorer {
    /// Takes note of the terminals of the images, of what waits in them, and of their open ends.
    pub(crate) fn load(
        &mut self,
        terminals: Vec<Terminal>,
        inputs: Vec<TerminalInput>,
        files: &[&TerminalFile],
    ) {
        self.infos = terminals.into_iter().map(|terminal| (terminal.id, terminal)).collect();
        self.keys = pair_up(&self.infos);
        self.data = inputs.into_iter().map(|input| (input.terminal, input.data)).collect();
        self.files = files.iter().copied().copied().collect();
    }

    /// What the images say of terminals, by their numbers.
    pub(crate) fn known(&self) -> &HashMap<u32, Terminal> {
        &self.infos
    }

    /// Opens a description.
    ///
    /// # Errors
    /// If nobody hands an external one in; if a pair cannot be made with its number, or its path cannot be opened.
    pub(crate) fn open(&mut self, cx: &mut Opener<'_>, file: &TerminalFile) -> Result<OwnedFd> {
        let info = self.info(file)?;
        match info.kind {
            TerminalKind::Given => external(cx, &info),
            TerminalKind::Current => self.open_current(cx, file, &info),
            TerminalKind::Pair if self.is_ours(cx, &info) => inherited_terminal(cx, file),
            TerminalKind::Pair => self.open_pty(cx, file, &info),
            TerminalKind::Console | TerminalKind::Virtual | TerminalKind::Serial => {
                cx.open_by_path(&node(cx, file)?.opened_with(file.flags))
            }
        }
    }

    /// The husk of `task` leads a session now and has no children in it yet: they inherit its
    /// terminal.
    ///
    /// # Errors
    /// If the terminal cannot be opened, or does not become that of the session (`TIOCSCTTY`).
    pub(crate) fn session(&mut self, cx: &mut Opener<'_>, task: usize) -> Result<()> {
        let leader = cx.tasks[task].vpid.cast_unsigned();
        let Some(info) = self.controlling(cx, leader) else { return Ok(()) };
        let slave = self.slave(cx, &info)?;
        in_task(cx.tasks[task].remote()?, slave.as_fd(), |batch| {
            batch.call(syscall::ioctl(RemoteFd(0), libc::TIOCSCTTY, RemoteAddr(0)))
        })
    }

    /// When all descriptions are open: connects them and fills their queues.
    ///
    /// # Errors
    /// If a terminal cannot be opened, filled with what was queued, or given its settings.
    pub(crate) fn connect(&mut self, cx: &mut Opener<'_>) -> Result<()> {
        for task in 0..cx.tasks.len() {
            let leader = cx.tasks[task].vpid.cast_unsigned();
            let Some(info) = self.controlling(cx, leader) else { continue };
            let group = pid::group_seen_by(cx.tasks, task, info.group);
            if group == 0 || cx.tasks[task].image.is_zombie() {
                continue;
            }
            let slave = self.slave(cx, &info)?;
            let set = in_task(cx.tasks[task].remote()?, slave.as_fd(), |batch| {
                let group = batch.bytes(&group.to_le_bytes());
                batch.call(syscall::ioctl(RemoteFd(0), libc::TIOCSPGRP, group))
            });
            // A group whose last member has ended is no more.
            if let Err(e) = set {
                tracing::warn!("the terminal of task {leader} has no foreground group: {e}");
            }
        }
        for (key, pair) in self.pairs.drain() {
            let infos = self.infos.values().filter(|info| key_in(&self.keys, info) == key);
            self.orphan_masters.extend(finish(cx.files.orphan_pts_master, pair, infos)?);
        }
        Ok(())
    }
}

/// The instance of devpts and the number in it that each end of a pair belongs to.
/// CRIU's images do not tell the instance of a master that was opened outside of it:
/// such a one belongs to a slave of its number that has no other.
fn pair_up(infos: &HashMap<u32, Terminal>) -> HashMap<u32, (u32, u32)> {
    let key = |info: &Terminal| Some((info.devpts.unwrap_or(0), info.pair?));
    let mut keys: HashMap<u32, (u32, u32)> =
        infos.values().filter_map(|info| Some((info.id, key(info)?))).collect();
    let (masters, slaves): (Vec<_>, Vec<_>) =
        infos.values().filter(|info| info.pair.is_some()).partition(|info| is_master(info));
    let has_master = |slave: &Terminal| masters.iter().any(|m| key(m) == key(slave));
    for master in &masters {
        if slaves.iter().any(|slave| key(slave) == key(master)) {
            continue;
        }
        let other = slaves.iter().find(|slave| slave.pair == master.pair && !has_master(slave));
        if let Some(key) = other.and_then(|slave| key(slave)) {
            keys.insert(master.id, key);
        }
    }
    keys
}

fn key_in(keys: &HashMap<u32, (u32, u32)>, info: &Terminal) -> (u32, u32) {
    keys.get(&info.id).copied().unwrap_or_default()
}

fn is_master(info: &Terminal) -> bool {
    TtyNode::of(u64::from(info.rdev)) == Some(TtyNode::Master)
}

/// The path that a terminal was opened by.
fn node<'a>(cx: &Opener<'a>, file: &TerminalFile) -> Result<&'a PathFile> {
    let path = || cx.described.get(&file.path?)?.path();
    path().ok_or_else(|| Error::invalid("files.img", format!("terminal {} has no path", file.file)))
}

/// A terminal that the caller brings.
fn external(cx: &Opener<'_>, info: &Terminal) -> Result<OwnedFd> {
    let name = FileKey::of_terminal(info);
    match name.as_ref().and_then(|name| ext::inherited(cx.given, name)) {
        Some(file) => duplicate(file),
        None => {
            let key = name.and_then(|name| name.needed()).unwrap_or_default();
            Err(Error::Unsupported(format!(
                "a terminal is external: a restore without --inherit-fd fd[N]:{key}"
            )))
        }
    }
}

/// The caller's own terminal, in place of one that was outside of the tree.
fn inherited_terminal(cx: &Opener<'_>, file: &TerminalFile) -> Result<OwnedFd> {
    let own = [rustix::stdio::stdin(), rustix::stdio::stdout(), rustix::stdio::stderr()];
    let terminal = own.into_iter().find(|&fd| rustix::termios::isatty(fd));
    let terminal = terminal.ok_or_else(|| {
        Error::Unsupported("--shell-job without a terminal on the standard streams".to_owned())
    })?;
    debug_assert!(cx.shell_job);
    reopen(terminal, open_flags(file.flags))
}

impl TtyRestorer {
    fn key_of(&self, info: &Terminal) -> (u32, u32) {
        key_in(&self.keys, info)
    }

    fn info(&self, file: &TerminalFile) -> Result<Terminal> {
        self.infos.get(&file.terminal).cloned().ok_or_else(|| {
            let reason = format!("no terminal {} for file {}", file.terminal, file.file);
            Error::invalid(INFO, reason)
        })
    }

    /// Whether the end of a pair in the tree belongs to the caller's terminal. Where the
    /// caller takes masters as well, that is one without a path in the tree: runc asks
    /// for both always.
    fn is_ours(&self, cx: &Opener<'_>, info: &Terminal) -> bool {
        let mut files = self.files.iter().filter(|file| file.terminal == info.id);
        cx.shell_job
            && !(cx.files.orphan_pts_master && files.any(|file| node(cx, file).is_ok()))
            && info.settings.is_some()
            && self.master_of(info).is_none()
    }

    /// The description of the master of a pair, if the tree has it.
    fn master_of(&self, info: &Terminal) -> Option<TerminalFile> {
        let is_it = |file: &&TerminalFile| {
            self.infos
                .get(&file.terminal)
                .is_some_and(|other| is_master(other) && self.key_of(other) == self.key_of(info))
        };
        self.files.iter().find(is_it).copied()
    }

    fn open_pty(
        &mut self,
        cx: &mut Opener<'_>,
        file: &TerminalFile,
        info: &Terminal,
    ) -> Result<OwnedFd> {
        let pair = self.pair(cx, info)?;
        if is_master(info) {
            set_status_flags(&pair.master, file.flags)?;
            return duplicate(pair.master.as_fd());
        }
        let flags = open_flags(file.flags);
        cx.mounts.mount_terminals()?;
        // By its path, which may be one that a container runtime has given it. A slave
        // that was hung up had the path of whoever has the number now.
        if info.settings.is_some()
            && let Some(known) = &pair.slave
            && let Ok(path) = node(cx, file)
            && let Ok(slave) =
                cx.roots.open_own((path.mount, &path.path), flags, |found| is_slave(found, known))
        {
            return Ok(slave);
        }
        tty::open_slave(&pair.master, flags.bits().cast_signed())
            .context(|| format!("open the slave of terminal {}", self.key_of(info).1))
    }

    /// The pair that `info` is an end of; it is made if need be.
    fn pair(&mut self, cx: &mut Opener<'_>, info: &Terminal) -> Result<&Pair> {
        let key = self.key_of(info);
        if !self.pairs.contains_key(&key) {
            let pair = self.make(cx, info)?;
            self.pairs.insert(key, pair);
        }
        self.pairs.get(&key).ok_or_else(|| Error::invalid(INFO, "a pair without ends"))
    }

    fn make(&self, cx: &Opener<'_>, info: &Terminal) -> Result<Pair> {
        let key = self.key_of(info);
        let master_file = self.master_of(info);
        let master = open_master(cx, self.multiplexers(cx, info, master_file), key.1)?;
        let ends =
            || self.infos.values().filter(|info| self.key_of(info) == key && info.pair.is_some());
        let what = |text: &'static str| move || text.to_owned();
        let has_slave = ends().any(|info| {
            !is_master(info)
                || info.slave_closed
                || info.session != 0
                || self.data.contains_key(&info.id)
        });
        tty::lock_slave(&master, false).context(what("TIOCSPTLCK"))?;
        let slave = if has_slave {
            let flags = libc::O_RDWR | libc::O_NONBLOCK;
            Some(tty::open_slave(&master, flags).context(what("open a slave"))?)
        } else {
            None
        };
        if let Some(slave) = &slave {
            for info in ends() {
                self.fill(cx, slave, info)?;
            }
        }
        // Both ends have the same settings; without a slave, the master's will do.
        if let Some(info) = ends().find(|info| info.settings.is_some()) {
            info::write(slave.as_ref().unwrap_or(&master), info)?;
        }
        Ok(Pair { master, slave, has_master: master_file.is_some() })
    }

    /// Queues the data of one end; sets the owner of the slave's node.
    fn fill(&self, cx: &Opener<'_>, slave: &OwnedFd, info: &Terminal) -> Result<()> {
        let data = self.data.get(&info.id).map(Vec::as_slice).unwrap_or_default();
        if is_master(info) {
            return queue::put_output(slave, data);
        }
        if let Some((uid, gid)) = info.owner {
            let (uid, gid) = outside(cx.id_maps, uid, gid);
            rustix::fs::fchown(slave, uid, gid).context(|| "fchown a terminal".to_owned())?;
        }
        let of_it = self.files.iter().find(|file| file.terminal == info.id);
        if let Some(mode) = of_it.and_then(|file| node(cx, file).ok()?.mode) {
            rustix::fs::fchmod(slave, Mode::from_raw_mode(mode & 0o7777))
                .context(|| "fchmod a terminal".to_owned())?;
        }
        // In line mode the ends of lines depend on the settings.
        if let Some(settings) = &info.settings {
            info::set(slave, settings)?;
        }
        queue::put_input(slave, data)
    }

    /// The paths by which the master of a pair can be made: its own, or those next to
    /// the slave.
    fn multiplexers(
        &self,
        cx: &Opener<'_>,
        info: &Terminal,
        master: Option<TerminalFile>,
    ) -> Vec<(i32, Vec<u8>, OFlags)> {
        let flags = OFlags::RDWR | OFlags::NOCTTY;
        if let Some(path) = master.and_then(|file| node(cx, &file).ok()) {
            return vec![(path.mount, path.path.clone(), flags)];
        }
        let key = self.key_of(info);
        let slaves = self.files.iter().filter(|file| {
            self.infos.get(&file.terminal).is_some_and(|other| self.key_of(other) == key)
        });
        let mut all: Vec<_> = slaves
            .filter_map(|file| node(cx, file).ok())
            .map(|path| {
                let name = [parent(&path.path), b"/ptmx"].concat();
                (path.mount, name, flags)
            })
            .collect();
        // A slave that is bound to /dev/console.
        all.push((-1, b"/dev/pts/ptmx".to_vec(), flags));
        all
    }

    /// The terminal that controls the session of `leader`, if it is a pair of the images.
    fn controlling(&self, cx: &Opener<'_>, leader: u32) -> Option<Terminal> {
        let mut ends = self.infos.values().filter(|info| info.kind == TerminalKind::Pair);
        let found = ends.find(|info| info.session == leader && leader != 0)?;
        (!self.is_ours(cx, found)).then(|| found.clone())
    }

    /// A slave of a pair for our own use.
    fn slave(&mut self, cx: &mut Opener<'_>, info: &Terminal) -> Result<OwnedFd> {
        match &self.pair(cx, info)?.slave {
            Some(slave) => duplicate(slave.as_fd()),
            None => Err(Error::invalid(INFO, format!("terminal {} has no slave", info.id))),
        }
    }

    /// Opens `/dev/tty`, which only a task of the session can do.
    fn open_current(
        &self,
        cx: &mut Opener<'_>,
        file: &TerminalFile,
        info: &Terminal,
    ) -> Result<OwnedFd> {
        let member = cx
            .tasks
            .iter()
            .position(|task| task.image.tree.sid == info.session && !task.image.is_zombie());
        let member = member.ok_or_else(|| {
            Error::invalid(INFO, format!("/dev/tty of session {}, which has no task", info.session))
        })?;
        let path = &node(cx, file)?.path;
        let found = open_inside(cx.tasks[member].remote()?, path, OFlags::PATH)?;
        cx.check_opened(path, &found)?;
        is_node(&found, TtyNode::Current)?;
        reopen_inside(cx.tasks[member].remote()?, &found, open_flags(file.flags))
    }
}

/// Makes a master with the number `index`: the kernel hands out the lowest free one.
fn open_master(cx: &Opener<'_>, paths: Vec<(i32, Vec<u8>, OFlags)>, index: u32) -> Result<OwnedFd> {
    let mut last = None;
    for (mnt_id, path, flags) in paths {
        let open = || cx.roots.open_own((mnt_id, &path), flags, is_multiplexer);
        let mut spare = Vec::new();
        let mut next = open();
        loop {
            let master = match next {
                Ok(master) => master,
                Err(e) => {
                    last = Some(e);
                    break;
                }
            };
            match tty::pty_number(&master).context(|| "TIOCGPTN".to_owned())? {
                number if number == index => return Ok(master),
                number if number > index => {
                    return Err(Error::Os {
                        what: format!("make terminal pts/{index}, whose number is in use"),
                        source: rustix::io::Errno::BUSY.into(),
                    });
                }
                _ => spare.push(master),
            }
            next = open();
        }
    }
    Err(last.unwrap_or_else(|| Error::invalid(INFO, "a terminal without a path")))
}

/// Fails unless `found` is this slave: each file system of terminals has one of each number.
fn is_slave(found: &OwnedFd, slave: &OwnedFd) -> Result<()> {
    let stat = |file: &OwnedFd| rustix::fs::fstat(file).context(|| "fstat a terminal".to_owned());
    match same_inode(&stat(found)?, &stat(slave)?) {
        true => Ok(()),
        false => Err(Error::invalid(INFO, "a path of it leads to another terminal")),
    }
}

/// Fails unless opening `found` makes a pair.
fn is_multiplexer(found: &OwnedFd) -> Result<()> {
    is_node(found, TtyNode::Master)
}

/// Fails unless `found` is such a device: to open one can do something by itself.
fn is_node(found: &OwnedFd, node: TtyNode) -> Result<()> {
    let stat = rustix::fs::fstat(found).context(|| "fstat a terminal".to_owned())?;
    let is_device = FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice;
    match is_device && TtyNode::of(stat.st_rdev) == Some(node) {
        true => Ok(()),
        false => {
            Err(Error::invalid(INFO, format!("a path of it leads to another device than {node:?}")))
        }
    }
}

/// What can only be done when every description is open. A master that the tree does
/// not have goes to the caller, or ends: what has its slave is hung up then.
fn finish<'i>(
    orphan_masters: bool,
    pair: Pair,
    infos: impl Iterator<Item = &'i Terminal>,
) -> Result<Option<OwnedFd>> {
    let Pair { master, slave, has_master, .. } = pair;
    let mut is_hung_up = !has_master;
    for info in infos {
        if is_master(info) {
            tty::set_packet_mode(&master, info.packets).context(|| "TIOCPKT".to_owned())?;
            tty::lock_slave(&master, info.locked).context(|| "TIOCSPTLCK".to_owned())?;
        }
        if info.exclusive {
            let end = slave.as_ref().unwrap_or(&master);
            let end = if is_master(info) { &master } else { end };
            rustix::termios::ioctl_tiocexcl(end).context(|| "TIOCEXCL".to_owned())?;
        }
        is_hung_up &= info.settings.is_none();
    }
    Ok((!has_master && !is_hung_up && orphan_masters).then_some(master))
}

/// Makes a call on `file` inside a task, where it is descriptor 0 for that time. The
/// tables of the tasks are still empty.
fn in_task(
    husk: &mut Tracee,
    file: BorrowedFd<'_>,
    add: impl FnOnce(&mut Batch<'_>) -> Call,
) -> Result<()> {
    let mut transport = Transport::open(husk, TRANSPORT)?;
    let mut batch = husk.batch();
    transport.send(&mut batch, &[file])?;
    let call = add(&mut batch);
    batch.call(syscall::close(RemoteFd(0)));
    transport.close(&mut batch);
    batch.run()?.expect(call, || "ioctl of a terminal".to_owned())?;
    Ok(())
}

/// Opens a path inside a task and takes the description from there.
fn open_inside(husk: &mut Tracee, path: &[u8], flags: OFlags) -> Result<OwnedFd> {
    let what = || format!("open {}", String::from_utf8_lossy(path));
    open_below(husk, (RemoteFd::CWD, path), flags, what)
}

/// Opens what was found once more inside a task, with all rights of that. Not by its path, where something else may be by now,
/// and by this program's procfs: what the task has at `/proc` is as its images say.
fn reopen_inside(husk: &mut Tracee, found: &OwnedFd, flags: OFlags) -> Result<OwnedFd> {
    let numbers = format!("/proc/{}/fd", husk.pid());
    let place = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let numbers =
        rustix::fs::open(&numbers, place, Mode::empty()).context(|| format!("open {numbers}"))?;
    let below = Transport::lend(husk, numbers.as_fd())?;
    let there = Transport::lend(husk, found.as_fd())?;
    // What leads there is a link.
    let flags = flags.difference(OFlags::NOFOLLOW);
    let number = there.0.to_string();
    let what = || "open the terminal of a session".to_owned();
    let opened = open_below(husk, (below, number.as_bytes()), flags, what);
    let mut batch = husk.batch();
    batch.call(syscall::close(below));
    batch.call(syscall::close(there));
    batch.run()?;
    opened
}

fn open_below(
    husk: &mut Tracee,
    (dir, path): (RemoteFd, &[u8]),
    flags: OFlags,
    what: impl Fn() -> String,
) -> Result<OwnedFd> {
    let pid = husk.pid();
    let mut batch = husk.batch();
    let name = batch.cstr(path);
    let opened = batch.must(syscall::openat(dir, name, flags, Mode::empty()));
    let out = batch.run()?;
    let number = i32::try_from(out.expect(opened, &what)?).unwrap_or(-1);
    let ours = rustix::process::pidfd_getfd(&proc::pidfd(pid)?, number, PidfdGetfdFlags::empty());
    let mut batch = husk.batch();
    batch.call(syscall::close(number.into()));
    batch.run()?;
    ours.context(what)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// Whoever may change the tasks' root could put a device into its place that does something when it is opened.
    #[test]
    fn what_was_judged_is_opened_wherever_its_path_leads_by_now() {
        let dir = tempfile::tempdir().unwrap();
        let [path, other] = ["tty", "other"].map(|name| dir.path().join(name));
        std::fs::write(&path, "judged").unwrap();
        std::fs::write(&other, "another").unwrap();
        let (mut husk, _pidfd) = Tracee::spawn_husk(0, &[]).unwrap();
        let before = proc::numbers(husk.pid(), "fd").unwrap();
        let path = path.to_str().unwrap();
        let found = open_inside(&mut husk, path.as_bytes(), OFlags::PATH).unwrap();
        std::fs::rename(&other, path).unwrap();
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW;
        let opened = reopen_inside(&mut husk, &found, flags).unwrap();
        let text = std::io::read_to_string(std::fs::File::from(opened)).unwrap();
        assert_eq!(text, "judged");
        assert_eq!(proc::numbers(husk.pid(), "fd").unwrap(), before);
        husk.exit_with(0).unwrap();
    }
}
