//! Files whose path does not lead to them: what `remap-fpath.img` says about them.
//!
//! An unlinked file becomes a *ghost*: its content is in the images, and while the
//! restore opens it, it has its old name again. A file that has lost this name but
//! has others gets a further one from the dump (`--link-remap`), which the restore
//! uses and removes.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use rustix::fs::{AtFlags, FileType, OFlags, Stat};
use rustix::io::Errno;
use torpor_images::proto::{FdTypes, FileEntry, RegFileEntry, RemapFilePathEntry, RemapType};
use torpor_images::remap::given_name;
use torpor_images::{ImageDir, kind};

use super::Found;
use super::description::{access, lookup, open_over_no_link, same_inode};
use super::own_names::{random, remove};
use super::regular::is_stateless;
use super::table::FileTable;
use super::{ghost, hidden, left_names};
use crate::error::{Context, Result};
use crate::external::External;
use crate::guardian::{Guardian, Undo};
use crate::namespace::mount::{MountNamespace, TreeMounts};
use crate::namespace::user::IdMaps;
use crate::options::Files;

/// What procfs's links end with when the name is gone.
pub(crate) const DELETED: &[u8] = b" (deleted)";

/// The dump half.
#[derive(Debug, Default)]
pub(crate) struct Remaps {
    entries: Vec<RemapFilePathEntry>,
    ghosts: HashMap<(u64, u64), u32>,
    links: HashMap<(u64, u64), u32>,
    /// Names that were given to files, removed again unless [`Remaps::keep`] is called.
    given: Vec<(OwnedFd, String)>,
}

/// What it takes to save files by their paths.
#[derive(Debug)]
pub(crate) struct Paths<'a> {
    /// Files that are left to the caller.
    pub external: &'a [External],
    /// Which files are kept.
    pub files: &'a Files,
    /// Whether terminals may be the caller's.
    pub shell_job: bool,
    /// Whether nothing may be left out.
    pub strict: bool,
    /// Whether the tasks go on.
    pub leave_running: bool,
    /// Where ghosts go.
    pub images: &'a ImageDir,
    /// The mounts that the tasks see.
    pub mounts: &'a TreeMounts,
    /// The ids of the tree's user namespace.
    pub id_maps: &'a IdMaps,
    /// Removes the names that files are given, if the supervisor is killed.
    pub guardian: &'a Guardian,
    /// The descriptions so far.
    pub table: &'a mut FileTable,
    /// Files whose path does not lead to them.
    pub remaps: &'a mut Remaps,
}

/// What the images call a file.
#[derive(Debug)]
pub(crate) struct Named {
    /// Its path.
    pub path: Vec<u8>,
    /// The mount that it leads through.
    pub mnt_id: i32,
    /// Whether another mount hides it there.
    pub is_hidden: bool,
}

impl Paths<'_> {
    /// The path of a file as the images have it. One that does not lead to it any more is noted
    /// for the description `id`.
    ///
    /// # Errors
    /// Refused, if there is no such path and none can be made.
    pub(crate) fn name(&mut self, found: &Found, id: u32) -> Result<Named> {
        let mnt_id = found.info.mnt_id;
        if found.fs_type == PROC {
            let path = self.name_in_proc(found, id)?;
            return Ok(Named { path, mnt_id, is_hidden: false });
        }
        match self.mounts.find(mnt_id) {
            Some((space, _)) => self.name_in(space, found, id),
            None => self.name_from_outside(found),
        }
    }

    /// The path of a file that was opened before its task has entered a mount namespace.
    fn name_from_outside(&self, found: &Found) -> Result<Named> {
        let device = found.stat.st_rdev;
        // All nodes of such a device are alike.
        let stateless = |now: &Stat| is_stateless(now) && is_stateless(&found.stat);
        let is_same =
            |now: &Stat| same_inode(now, &found.stat) || stateless(now) && now.st_rdev == device;
        let writes = access(found.flags()) != OFlags::RDONLY && !is_stateless(&found.stat);
        let (link, mnt_id) = (found.link_bytes(), found.info.mnt_id);
        let way = self.mounts.other_way(mnt_id, link, writes, is_same);
        let (path, way) = way.ok_or_else(|| {
            found.refuse(format!(
                "it was opened through mount {mnt_id} outside of the tree's mount namespaces, \
                 where no path leads to it; --external file[{mnt_id:x}:{0:x}] leaves it to the \
                 caller, who gives the restore --inherit-fd fd[N]:file[{mnt_id:x}:{0:x}]",
                found.stat.st_ino
            ))
        })?;
        tracing::debug!("{} is {} in the tree", found.link.display(), path.display());
        Ok(Named { path: path.into_os_string().into_vec(), mnt_id: way, is_hidden: false })
    }

    fn name_in(&mut self, space: &MountNamespace, found: &Found, id: u32) -> Result<Named> {
        let link = found.link_bytes();
        let mnt_id = found.info.mnt_id;
        if lookup(space.root.as_fd(), link)?.is_some_and(|now| same_inode(&now, &found.stat)) {
            return Ok(Named { path: link.to_vec(), mnt_id, is_hidden: false });
        }
        let Some(name) = link.strip_suffix(DELETED) else {
            if hidden::can_be_opened(self.mounts, found) {
                return Ok(Named { path: link.to_vec(), mnt_id, is_hidden: true });
            }
            return Err(found.refuse(
                "its path leads elsewhere: a later mount hides it; unmount that, or close the file",
            ));
        };
        let is_dir = FileType::from_raw_mode(found.stat.st_mode) == FileType::Directory;
        if found.stat.st_nlink == 0 || is_dir {
            self.note_ghost(found, id)?;
        } else {
            self.note_link(found, id, name)?;
        }
        Ok(Named { path: name.to_vec(), mnt_id, is_hidden: false })
    }

    /// The path of a file of procfs. Its inodes come and go, so the path is all there
    /// is. It may be that of a process that has ended.
    fn name_in_proc(&mut self, found: &Found, id: u32) -> Result<Vec<u8>> {
        let Some((space, mount)) = self.mounts.find(found.info.mnt_id) else {
            return Err(found.refuse("it was opened through a procfs outside of the tree"));
        };
        let link = found.link_bytes();
        if lookup(space.root.as_fd(), link)?.is_some() {
            return Ok(link.to_vec());
        }
        let name = link.strip_suffix(DELETED).unwrap_or(link);
        let inside = Path::new(OsStr::from_bytes(name)).strip_prefix(&mount.mountpoint).ok();
        let pid = inside
            .and_then(|path| path.iter().next()?.to_str()?.parse().ok())
            .ok_or_else(|| found.refuse("it is gone, and only the kernel could make it again"))?;
        if mount.pid_ns.is_some() {
            return Err(found.refuse("its process has ended, in a nested pid namespace; close it"));
        }
        self.remaps.note(id, pid, RemapType::Procfs);
        Ok(name.to_vec())
    }

    fn note_ghost(&mut self, found: &Found, id: u32) -> Result<()> {
        if is_made_by_kernel(found.fs_type) {
            return Err(found.refuse("it is gone, and only the kernel could make it again"));
        }
        let key = (found.stat.st_dev, found.stat.st_ino);
        let ghost = match self.remaps.ghosts.get(&key) {
            Some(&known) => known,
            None => {
                let ghost = u32::try_from(self.remaps.ghosts.len() + 1).unwrap_or(u32::MAX);
                ghost::save(self.images, self.files.ghost_limit, self.id_maps, found, ghost)?;
                self.remaps.ghosts.insert(key, ghost);
                ghost
            }
        };
        self.remaps.note(id, ghost, RemapType::Ghost);
        Ok(())
    }

    /// Gives the file a further name, and notes a description of that.
    fn note_link(&mut self, found: &Found, id: u32, name: &[u8]) -> Result<()> {
        if !self.files.link_remap {
            return Err(found.refuse(
                "its name was removed while others lead to it; --link-remap gives it one",
            ));
        }
        if self.leave_running {
            let path = String::from_utf8_lossy(name);
            tracing::warn!("{path} cannot be restored: its task goes on, and it gets no name");
        }
        let key = (found.stat.st_dev, found.stat.st_ino);
        let link = match self.remaps.links.get(&key) {
            Some(&known) => known,
            None => {
                let link = self.table.next_id();
                let path = self.give_name(found, name)?;
                let reg = RegFileEntry {
                    id: link,
                    name: path,
                    mnt_id: self.mounts.number_in_images(found.info.mnt_id),
                    mode: Some(found.stat.st_mode),
                    fown: found.fown,
                    ..RegFileEntry::default()
                };
                self.table.push(FileEntry {
                    id: link,
                    r#type: FdTypes::Reg.into(),
                    reg: Some(reg),
                    ..FileEntry::default()
                });
                self.remaps.links.insert(key, link);
                link
            }
        };
        self.remaps.note(id, link, RemapType::Linked);
        Ok(())
    }

    /// Links the file into its old directory, or the nearest one above that exists. A link in the place of one leads to a
    /// directory where the tasks might make no file. No images of another tree have a name with this number: to throw
    /// them away removes none but theirs, also where all may make files.
    fn give_name(&mut self, found: &Found, name: &[u8]) -> Result<Vec<u8>> {
        // A file system of a user namespace takes only files of its own users.
        let _owner = self.id_maps.own_files().context(|| "become the owner of files".to_owned())?;
        let mut dir = parent(name);
        loop {
            let (space, _) = self
                .mounts
                .find(found.info.mnt_id)
                .ok_or_else(|| found.refuse("its mount is gone"))?;
            let flags = OFlags::PATH | OFlags::DIRECTORY;
            let nameless = |e| found.refuse(format!("it cannot be given a name: {e}"));
            let at = match open_over_no_link(space.root.as_fd(), dir, flags) {
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) if dir.len() > 1 => {
                    dir = parent(dir);
                    continue;
                }
                opened => opened.map_err(nameless)?,
            };
            let base = given_name(random().map_err(nameless)?);
            self.guardian.watch_file(&left_names::undo(&at, base.as_bytes())?, at.as_fd())?;
            match rustix::fs::linkat(&found.file, "", &at, &base, AtFlags::EMPTY_PATH) {
                Ok(()) => {
                    let path = join(dir, base.as_bytes());
                    tracing::warn!(
                        "{} keeps a file for the restore; to throw the images away: torpor image discard",
                        String::from_utf8_lossy(&path)
                    );
                    self.remaps.given.push((at, base));
                    return Ok(path);
                }
                // A directory that was removed while it was open.
                Err(Errno::NOENT) if dir.len() > 1 => dir = parent(dir),
                Err(e) => return Err(nameless(e)),
            }
        }
    }
}

impl Remaps {
    fn note(&mut self, orig_id: u32, remap_id: u32, kind: RemapType) {
        self.entries.push(RemapFilePathEntry { orig_id, remap_id, remap_type: Some(kind.into()) });
    }

    /// What takes the names away that were given to files.
    ///
    /// # Errors
    /// If a descriptor cannot be duplicated.
    pub(crate) fn undos(&self) -> Result<Vec<Undo>> {
        self.given.iter().map(|(dir, name)| left_names::undo(dir, name.as_bytes())).collect()
    }

    /// Leaves the names that were given to files: only through them can a restore find the files
    /// when the tasks have ended. The guardian is not to know of them any more.
    pub(crate) fn keep(&mut self) {
        self.given.clear();
    }

    /// Writes the image.
    ///
    /// # Errors
    /// If the image cannot be written.
    pub(crate) fn write(&self, images: &ImageDir) -> Result<()> {
        Ok(images.write_unless_empty(kind::REMAP_FPATH, 0, &self.entries)?)
    }
}

impl Drop for Remaps {
    fn drop(&mut self) {
        for (dir, name) in self.given.drain(..) {
            remove(dir.as_fd(), name.as_bytes(), AtFlags::empty());
        }
    }
}

/// The file system of processes.
const PROC: i64 = libc::PROC_SUPER_MAGIC;

/// File systems whose files are views of kernel objects.
fn is_made_by_kernel(fs_type: i64) -> bool {
    /// sysfs, cgroup, cgroup2, debugfs, tracefs, securityfs (linux/magic.h).
    const KERNEL: [i64; 6] =
        [0x6265_6572, 0x27_e0eb, 0x6367_7270, 0x6462_6720, 0x7472_6163, 0x7363_6673];
    KERNEL.contains(&fs_type)
}

/// The path up to its last component: `/` for those in the root directory.
pub(crate) fn parent(path: &[u8]) -> &[u8] {
    match path.iter().rposition(|&c| c == b'/') {
        Some(0) | None => b"/",
        Some(at) => &path[..at],
    }
}

/// The last component of a path.
pub(crate) fn base(path: &[u8]) -> &[u8] {
    path.iter().rposition(|&c| c == b'/').map_or(path, |at| &path[at + 1..])
}

fn join(dir: &[u8], name: &[u8]) -> Vec<u8> {
    let dir = dir.strip_suffix(b"/").unwrap_or(dir);
    [dir, b"/", name].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_taken_apart() {
        assert_eq!((parent(b"/a/b"), base(b"/a/b")), (&b"/a"[..], &b"b"[..]));
        assert_eq!((parent(b"/a"), base(b"/a")), (&b"/"[..], &b"a"[..]));
        assert_eq!(join(b"/", b"x"), b"/x");
        assert_eq!(join(b"/a", b"x"), b"/a/x");
    }
}
