//! The descriptors of each process.

use serde_json::{Value as Json, json};
use torpor_images::proto::{FdinfoEntry, FsEntry, TaskKobjIdsEntry};
use torpor_images::{ImageDir, kind};

use super::{Files, Holdings, Name, live_tasks, printable};
use crate::error::Result;

/// Those of all tasks.
pub(super) struct Descriptors(Vec<TaskDescriptors>);

struct TaskDescriptors {
    pid: u32,
    /// Their numbers, and what they refer to.
    fds: Vec<(u32, Name)>,
    /// The working directory and the root.
    directories: Option<[String; 2]>,
}

impl Descriptors {
    /// Reads the descriptors.
    ///
    /// # Errors
    /// If an image is missing or damaged.
    pub(super) fn read(dir: &ImageDir) -> Result<Self> {
        let files = Files::read(dir)?;
        let of_task = |pid: u32| {
            let ids: TaskKobjIdsEntry = dir.read_one(kind::IDS, pid.into())?;
            let fds: Vec<FdinfoEntry> = dir.read_all(kind::FDINFO, ids.files_id.into())?;
            let fds = fds.iter().map(|fd| (fd.fd, files.name(fd.r#type, fd.id))).collect();
            let fs = dir.read_opt::<FsEntry>(kind::FS, pid.into())?;
            let directories = fs.map(|fs| [fs.cwd_id, fs.root_id].map(|id| files.path(id)));
            Ok(TaskDescriptors { pid, fds, directories })
        };
        Ok(Self(live_tasks(dir)?.into_iter().map(of_task).collect::<Result<_>>()?))
    }
}

impl Holdings for Descriptors {
    fn text(&self) -> String {
        let mut text = String::new();
        for TaskDescriptors { pid, fds, directories } in &self.0 {
            text += &format!("{pid}\n");
            for (fd, name) in fds {
                text += &format!("\t{fd:7}: {}\n", name.printable());
            }
            if let Some([cwd, root]) = directories {
                text += &format!("\t{:>7}: {}\n", "cwd", printable(cwd));
                text += &format!("\t{:>7}: {}\n", "root", printable(root));
            }
        }
        text
    }

    fn tasks(&self) -> Vec<Json> {
        let object = |TaskDescriptors { pid, fds, directories }: &TaskDescriptors| {
            let fd = |(fd, name): &(u32, Name)| json!({ "fd": fd, "name": name.text() });
            let fds: Vec<Json> = fds.iter().map(fd).collect();
            let [cwd, root] = [0, 1].map(|at| directories.as_ref().map(|both| &both[at]));
            json!({ "pid": pid, "fds": fds, "cwd": cwd, "root": root })
        };
        self.0.iter().map(object).collect()
    }
}
