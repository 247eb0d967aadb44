//! The dump half of terminals.

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::FileType;
use torpor_images::proto::{
    FdTypes, FileEntry, RegFileEntry, TtyDataEntry, TtyFileEntry, TtyInfoEntry, TtyPtyEntry,
    TtyType,
};
use torpor_images::{ImageDir, kind};
use torpor_sys::tty;

use super::{TtyNode, info, queue};
use crate::dump::pids::Pids;
use crate::dump::tasks::Task;
use crate::error::{Context, Error, Result};
use crate::external::External;
use crate::file::description::{duplicate, inside, lookup};
use crate::file::remap::{DELETED, Paths, parent};
use crate::file::{Found, ext};
use crate::namespace::mount::TreeMounts;

/// The file system of terminals.
const DEVPTS: i64 = libc::DEVPTS_SUPER_MAGIC;

/// The terminals that the dump has met.
#[derive(Debug, Default)]
pub(crate) struct TtyDumper {
    met: Vec<Met>,
}

/// One end of a pair, or another terminal.
#[derive(Debug)]
struct Met {
    node: TtyNode,
    /// The devpts instance that a pair is in; else the device.
    instance: u64,
    /// The number of a pair.
    index: u32,
    info: TtyInfoEntry,
    file: OwnedFd,
    /// The refusal for the case that its other end is not met.
    alone: Error,
}

impl TtyDumper {
    /// Describes the file, or says that it is of another kind (`None`).
    ///
    /// # Errors
    /// Refused, if the terminal that `/dev/tty` stood for is hung up, or a terminal was opened
    /// outside of the tree; if the kernel does not tell what it is set to.
    pub(crate) fn describe(
        &mut self,
        paths: &mut Paths<'_>,
        tasks: &[Task],
        found: &Found,
    ) -> Result<Option<FileEntry>> {
        let is_device = FileType::from_raw_mode(found.stat.st_mode) == FileType::CharacterDevice;
        let Some(node) = TtyNode::of(found.stat.st_rdev) else { return Ok(None) };
        if !is_device || found.is_path_only() {
            return Ok(None);
        }
        let tty_info_id = self.terminal(paths, tasks, found, node)?;
        let tty = TtyFileEntry {
            id: found.id,
            tty_info_id,
            flags: found.flags(),
            fown: found.fown,
            regf_id: path(paths, found)?,
        };
        Ok(Some(FileEntry { tty: Some(tty), ..found.entry(FdTypes::Tty) }))
    }

    /// After the last descriptor of the tree: what belongs to the kind as a whole. A terminal may be the
    /// caller's (`shell_job`), or its master handed to the caller of the restore (`orphan_masters`).
    ///
    /// # Errors
    /// Refused, if the master of a slave, or a controlling terminal, is outside of the tree (and no
    /// option leaves it there); if a queue cannot be read, or an image cannot be written.
    pub(crate) fn finish(
        &mut self,
        (shell_job, orphan_masters): (bool, bool),
        images: &ImageDir,
        tasks: &[Task],
        pids: &Pids,
    ) -> Result<()> {
        self.check_pairs(shell_job || orphan_masters)?;
        self.find_sessions(shell_job, tasks, pids)?;
        let mut data = Vec::new();
        for master in self.met.iter().filter(|met| met.node == TtyNode::Master) {
            let slave = self.met.iter().find(|met| master.is_paired_with(met));
            data.extend(queued(master, slave)?);
        }
        let infos: Vec<_> = self.met.iter().map(|met| met.info.clone()).collect();
        images.write_unless_empty(kind::TTY_INFO, 0, &infos)?;
        Ok(images.write_unless_empty(kind::TTY_DATA, 0, &data)?)
    }
}

impl TtyDumper {
    /// The number of the terminal, which is described if it is new.
    fn terminal(
        &mut self,
        paths: &Paths<'_>,
        tasks: &[Task],
        found: &Found,
        node: TtyNode,
    ) -> Result<u32> {
        let what = |text: &'static str| move || text.to_owned();
        let (instance, index) = match node {
            TtyNode::Master => (
                instance(paths.mounts, found)?,
                tty::pty_number(&found.file).context(what("TIOCGPTN"))?,
            ),
            TtyNode::Slave(index) => (found.stat.st_dev, index),
            _ => (found.stat.st_rdev, 0),
        };
        let known = |met: &&Met| (met.node, met.instance, met.index) == (node, instance, index);
        if let Some(known) = self.met.iter().find(known) {
            return Ok(known.info.id);
        }
        let (uid, gid) = inside(paths.id_maps, &found.stat);
        let is_pair = matches!(node, TtyNode::Master | TtyNode::Slave(_));
        let mut info = TtyInfoEntry {
            id: self.number(node, index),
            r#type: kind_of(paths.external, found, node).into(),
            rdev: number(found, found.stat.st_rdev)?,
            // Of a master, the instance that it is in: its node may be elsewhere.
            dev: Some(number(found, if is_pair { instance } else { found.stat.st_dev })?),
            uid: Some(uid),
            gid: Some(gid),
            pty: is_pair.then_some(TtyPtyEntry { index }),
            ..TtyInfoEntry::default()
        };
        if info.r#type() != TtyType::ExtTty {
            refuse_discipline(found)?;
        }
        info::read(&found.file, &mut info)?;
        match node {
            TtyNode::Master => {
                info.locked = tty::is_slave_locked(&found.file).context(what("TIOCGPTLCK"))?;
                info.packet_mode = tty::is_packet_mode(&found.file).context(what("TIOCGPKT"))?;
                info.torpor_slave_closed = queue::has_closed_slave(&found.file)?.then_some(true);
            }
            TtyNode::Current if info.termios.is_none() => {
                return Err(found.refuse("the terminal that it stood for is hung up"));
            }
            TtyNode::Current => info.sid = session_of(tasks, found.task),
            _ => {}
        }
        let file = duplicate(found.file.as_fd())?;
        let alone = found.refuse(
            "the other end of the terminal is outside of the tree; --shell-job leaves it to the \
             caller's terminal, --external tty[…] to a descriptor",
        );
        let id = info.id;
        self.met.push(Met { node, instance, index, info, file, alone });
        Ok(id)
    }

    /// A new number for a terminal. CRIU finds the number of a pair in it, and in its lowest bit
    /// whether it is the master's: that is how it numbers them.
    fn number(&self, node: TtyNode, index: u32) -> u32 {
        /// From here on for what is no pair, and for pairs of other instances with the same number.
        const OTHERS: u32 = 1 << 24;
        let of_pair = match node {
            TtyNode::Master => Some(index << 1 | 1),
            TtyNode::Slave(index) => Some(index << 1),
            _ => None,
        };
        let is_free = |id: &u32| self.met.iter().all(|met| met.info.id != *id);
        of_pair.into_iter().chain(OTHERS..).find(is_free).unwrap_or(u32::MAX)
    }

    /// A slave that is not hung up has a master; it must be known who brings it back.
    fn check_pairs(&mut self, allowed: bool) -> Result<()> {
        let masters: Vec<_> = self
            .met
            .iter()
            .filter(|met| met.node == TtyNode::Master)
            .map(|met| (met.instance, met.index))
            .collect();
        let alone = self.met.iter().position(|met| {
            matches!(met.node, TtyNode::Slave(_))
                && met.info.r#type() == TtyType::Pty
                && met.info.termios.is_some()
                && !masters.contains(&(met.instance, met.index))
        });
        match alone {
            Some(at) if !allowed => Err(self.met.swap_remove(at).alone),
            _ => Ok(()),
        }
    }

    /// Fills in which session each terminal controls. A task whose controlling terminal
    /// has not been met has it from outside.
    fn find_sessions(&mut self, shell_job: bool, tasks: &[Task], pids: &Pids) -> Result<()> {
        for met in &mut self.met {
            let (session, group) = match met.node {
                TtyNode::Master => {
                    tty::session_and_group(&met.file).context(|| "TIOCGSID".to_owned())?
                }
                TtyNode::Slave(_) => controlled(tasks, met.info.rdev),
                _ => continue,
            };
            met.info.sid = virtual_session(tasks, session);
            met.info.pgrp = pids.group(group).map_or(0, i32::cast_unsigned);
        }
        for task in tasks {
            let device = task.stat.tty_nr.cast_unsigned();
            let known = self.met.iter().any(|met| match met.node {
                TtyNode::Master => device == slave_device(met.index),
                _ => met.info.rdev == device,
            });
            let leads = task.stat.sid == task.tgid;
            if device != 0 && leads && !known && !shell_job {
                return Err(Error::refused(
                    task.pid,
                    format!("its controlling terminal {device:x}"),
                    "is not open in the tree; --shell-job leaves it to the caller's terminal",
                ));
            }
        }
        Ok(())
    }
}

impl TtyDumper {
    /// Whether a terminal that is left to the caller is this one.
    pub(crate) fn has_external(&self, rdev: u64, dev: u64) -> bool {
        let mut infos = self.met.iter().map(|met| &met.info);
        infos.any(|info| {
            let is = (u64::from(info.rdev), info.dev.map(u64::from)) == (rdev, Some(dev));
            info.r#type() == TtyType::ExtTty && is
        })
    }
}

impl Met {
    fn is_paired_with(&self, slave: &Met) -> bool {
        matches!(slave.node, TtyNode::Slave(_))
            && (self.instance, self.index) == (slave.instance, slave.index)
    }
}

/// A line discipline takes what the line brings to where no terminal is (`pppd`, `slattach`): a device of the network, say.
fn refuse_discipline(found: &Found) -> Result<()> {
    match tty::line_discipline(&found.file) {
        Ok(number) if number != 0 => Err(found.refuse(format!(
            "it has line discipline {number}, which is not kept; end who has set it (TIOCSETD) first"
        ))),
        // It may be hung up.
        _ => Ok(()),
    }
}

fn number(found: &Found, device: u64) -> Result<u32> {
    u32::try_from(device).map_err(|_| found.refuse("its device number does not fit the images"))
}

fn kind_of(external: &[External], found: &Found, node: TtyNode) -> TtyType {
    if ext::external_tty(external, found.stat.st_rdev, found.stat.st_dev).is_some() {
        return TtyType::ExtTty;
    }
    match node {
        TtyNode::Master | TtyNode::Slave(_) => TtyType::Pty,
        TtyNode::Current => TtyType::Ctty,
        TtyNode::Console => TtyType::Console,
        TtyNode::Virtual => TtyType::Vt,
        TtyNode::Serial => TtyType::Serial,
    }
}

/// The devpts instance of a master: its node lies there, or the kernel has taken the
/// directory `pts` next to the node (Documentation/filesystems/devpts.rst).
fn instance(mounts: &TreeMounts, found: &Found) -> Result<u64> {
    if found.fs_type == DEVPTS {
        return Ok(found.stat.st_dev);
    }
    let Some((space, _)) = mounts.find(found.info.mnt_id) else { return Ok(0) };
    let pts = [parent(found.link_bytes()), b"/pts"].concat();
    Ok(lookup(space.root.as_fd(), &pts)?.map_or(0, |stat| stat.st_dev))
}

/// Describes the path that a terminal was opened by, as a further file. That of a slave
/// that is hung up is gone, and needs no remap: the restore makes it for a moment.
fn path(paths: &mut Paths<'_>, found: &Found) -> Result<Option<u32>> {
    let is_external =
        ext::external_tty(paths.external, found.stat.st_rdev, found.stat.st_dev).is_some();
    if is_external || paths.mounts.find(found.info.mnt_id).is_none() && paths.shell_job {
        return Ok(None);
    }
    if paths.mounts.find(found.info.mnt_id).is_none() {
        return Err(found.refuse(format!(
            "it was opened outside of the tree's mount namespaces; --shell-job (of runc checkpoint, \
             too) leaves it to the caller's terminal, --external tty[{:x}:{:x}] to a descriptor",
            found.stat.st_rdev, found.stat.st_dev
        )));
    }
    let link = found.link_bytes();
    let id = paths.table.next_id();
    let reg = RegFileEntry {
        id,
        flags: found.flags(),
        name: link.strip_suffix(DELETED).unwrap_or(link).to_vec(),
        mnt_id: paths.mounts.number_in_images(found.info.mnt_id),
        mode: Some(found.stat.st_mode),
        fown: found.fown,
        ..RegFileEntry::default()
    };
    let r#type = FdTypes::Reg.into();
    paths.table.push(FileEntry { id, r#type, reg: Some(reg), ..FileEntry::default() });
    Ok(Some(id))
}

/// The session of a task, as the images know it.
fn session_of(tasks: &[Task], task: usize) -> u32 {
    tasks[task].number("NSsid").map_or(0, i32::cast_unsigned)
}

fn virtual_session(tasks: &[Task], session: i32) -> u32 {
    let member = tasks.iter().position(|task| session != 0 && task.stat.sid == session);
    member.map_or(0, |task| session_of(tasks, task))
}

/// Session and foreground group of the tasks that a terminal controls.
fn controlled(tasks: &[Task], device: u32) -> (i32, i32) {
    let task = tasks.iter().find(|task| task.stat.tty_nr.cast_unsigned() == device);
    task.map_or((0, 0), |task| (task.stat.sid, task.stat.tpgid))
}

/// The number of a slave device, as `/proc/PID/stat` and stat(2) have it.
fn slave_device(index: u32) -> u32 {
    (index & 0xff) | 136 << 8 | (index & !0xff) << 12
}

/// What is queued in a pair, one entry for each end that has data.
fn queued(master: &Met, slave: Option<&Met>) -> Result<Vec<TtyDataEntry>> {
    let output = queue::take_output(&master.file)?;
    let mut all = Vec::new();
    if slave.is_some() || !output.is_empty() {
        let end = open_slave(master)?;
        let input = queue::without_packets(&master.file, || {
            queue::put_output(&end, &output)?;
            let input = queue::take_input(&end)?;
            queue::put_input(&end, &input)?;
            Ok(input)
        })?;
        if let Some(slave) = slave.filter(|_| !input.is_empty()) {
            all.push(TtyDataEntry { tty_id: slave.info.id, data: input });
        }
    }
    if !output.is_empty() {
        all.push(TtyDataEntry { tty_id: master.info.id, data: output });
    }
    Ok(all)
}

/// A description of the slave for ourselves; a program may have locked it again.
fn open_slave(master: &Met) -> Result<OwnedFd> {
    let what = || format!("open the slave of terminal {}", master.index);
    let lock = |on| tty::lock_slave(&master.file, on).context(|| "TIOCSPTLCK".to_owned());
    if master.info.locked {
        lock(false)?;
    }
    let end = tty::open_slave(&master.file, libc::O_RDWR | libc::O_NONBLOCK).context(what);
    if master.info.locked {
        lock(true)?;
    }
    end
}
