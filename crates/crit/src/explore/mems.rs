//! The memory areas of each process.

use std::collections::HashMap;

use serde_json::{Value as Json, json};
use torpor_images::proto::{MmEntry, VmaEntry};
use torpor_images::{ImageDir, kind};

use super::{Files, Holdings, area, hex, live_tasks, printable};
use crate::error::Result;

/// Those of all tasks.
pub(super) struct Areas(Vec<TaskAreas>);

struct TaskAreas {
    pid: u32,
    exe: String,
    areas: Vec<ShownArea>,
}

struct ShownArea {
    vma: VmaEntry,
    /// What it shows, unless that is memory of its own.
    name: Option<String>,
}

impl ShownArea {
    fn is(&self, status: u32) -> bool {
        self.vma.status & status != 0
    }
}

impl Areas {
    /// Reads the areas.
    ///
    /// # Errors
    /// If an image is missing or damaged.
    pub(super) fn read(dir: &ImageDir) -> Result<Self> {
        let files = Files::read(dir)?;
        // What is shared is numbered in the order in which it is met.
        let mut shared: HashMap<u64, usize> = HashMap::new();
        let mut all = Vec::new();
        for pid in live_tasks(dir)? {
            let mm: MmEntry = dir.read_one(kind::MM, pid.into())?;
            let areas = mm.vmas.iter().map(|vma| {
                let next = shared.len() + 1;
                let mut number = || *shared.entry(vma.shmid).or_insert(next);
                let name = match vma.status {
                    status if status & area::SYSVIPC != 0 => format!("ips[{}]", number()),
                    status if status & area::ANON_SHARED != 0 => format!("shmem[{}]", number()),
                    status if status & area::SOCKET != 0 => format!("packet[{}]", number()),
                    status if status & area::FILE != 0 => files.mapped(vma),
                    status if status & area::STACK != 0 => "[stack]".to_owned(),
                    status if status & area::VSYSCALL != 0 => "[vsyscall]".to_owned(),
                    status if status & area::VDSO != 0 => "[vdso]".to_owned(),
                    _ => return ShownArea { vma: *vma, name: None },
                };
                ShownArea { vma: *vma, name: Some(name) }
            });
            let areas = areas.collect();
            all.push(TaskAreas { pid, exe: files.path(mm.exe_file_id), areas });
        }
        Ok(Self(all))
    }
}

impl Holdings for Areas {
    fn text(&self) -> String {
        let mut text = String::new();
        for TaskAreas { pid, exe, areas } in &self.0 {
            text += &format!("{pid}\n\t{:40}{}\n", "exe", printable(exe));
            for area in areas {
                let range = format!("{:08x}-{:08x}", area.vma.start, area.vma.end);
                let name = area.name.as_ref().map(|name| format!(" {}", printable(name)));
                let (name, part) = (name.unwrap_or_default(), part_of_file(area));
                let other = if area.is(area::REGULAR) { "" } else { " *" };
                text += &format!("\t{range:36}{}{name}{part}{other}\n", protection(area.vma.prot));
            }
        }
        text
    }

    fn tasks(&self) -> Vec<Json> {
        let object = |TaskAreas { pid, exe, areas }: &TaskAreas| {
            let areas: Vec<Json> = areas.iter().map(as_json).collect();
            json!({ "pid": pid, "exe": exe, "areas": areas })
        };
        self.0.iter().map(object).collect()
    }
}

fn as_json(area: &ShownArea) -> Json {
    let vma = &area.vma;
    json!({
        "start": hex(vma.start),
        "end": hex(vma.end),
        "protection": protection(vma.prot),
        "name": area.name,
        "offset": area.is(area::FILE).then(|| hex(vma.pgoff)),
        "shared": area.is(area::FILE_SHARED | area::ANON_SHARED | area::SYSVIPC | area::SOCKET),
    })
}

/// Where in its file an area begins, and whether it is shared.
fn part_of_file(area: &ShownArea) -> String {
    let offset = area.vma.pgoff;
    let offset = match area.is(area::FILE) && offset != 0 {
        true => format!(" + {offset:#x}"),
        false => String::new(),
    };
    let shared = if area.is(area::FILE_SHARED) { " (s)" } else { "" };
    format!("{offset}{shared}")
}

fn protection(prot: u32) -> String {
    let bit = |bit, letter| if prot & bit != 0 { letter } else { '-' };
    [bit(1, 'r'), bit(2, 'w'), bit(4, 'x')].iter().collect()
}
