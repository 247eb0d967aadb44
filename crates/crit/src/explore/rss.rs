//! Which pages of each process are in the images.

use serde_json::{Value as Json, json};
use torpor_images::pagemap::{Pagemap, page_size};
use torpor_images::proto::{MmEntry, VmaEntry};
use torpor_images::{ImageDir, kind};

use super::{Files, Holdings, area, hex, inconsistent, live_tasks, printable};
use crate::error::Result;

/// Those of all tasks.
pub(super) struct Resident(Vec<TaskRuns>);

struct TaskRuns {
    pid: u32,
    runs: Vec<Pages>,
}

/// Pages one behind the other.
struct Pages {
    start: u64,
    count: u64,
    /// Whether they begin in an area that an earlier run has shown.
    goes_on: bool,
    /// The areas that begin there.
    areas: Vec<CountedArea>,
}

struct CountedArea {
    start: u64,
    pages: u64,
    /// The file that it shows.
    name: Option<String>,
}

impl Resident {
    /// Reads which pages there are.
    ///
    /// # Errors
    /// If an image is missing or damaged, or pages are in no memory area.
    pub(super) fn read(dir: &ImageDir) -> Result<Self> {
        let files = Files::read(dir)?;
        let of_task = |pid| Ok(TaskRuns { pid, runs: runs(dir, &files, pid)? });
        Ok(Self(live_tasks(dir)?.into_iter().map(of_task).collect::<Result<_>>()?))
    }
}

fn runs(dir: &ImageDir, files: &Files, pid: u32) -> Result<Vec<Pages>> {
    let mm: MmEntry = dir.read_one(kind::MM, pid.into())?;
    let pagemap = Pagemap::read_unbacked(dir, kind::PAGEMAP, pid.into())?;
    let mut vmas = mm.vmas.iter().peekable();
    let mut last: Option<&VmaEntry> = None;
    let mut runs = Vec::new();
    for run in &pagemap.runs {
        let goes_on = last.is_some_and(|vma| vma.end > run.vaddr);
        let mut areas = Vec::new();
        while vmas.next_if(|vma| vma.end <= run.vaddr).is_some() {}
        while let Some(vma) = vmas.next_if(|vma| vma.start < run.range().end) {
            let pages = vma.end.saturating_sub(vma.start) / page_size();
            let name = (vma.status & area::FILE != 0).then(|| files.mapped(vma));
            areas.push(CountedArea { start: vma.start, pages, name });
            last = Some(vma);
        }
        if !goes_on && areas.is_empty() {
            let reason = format!("the pages at {:#x} are in no memory area", run.vaddr);
            return Err(inconsistent(dir, kind::PAGEMAP, pid, &reason));
        }
        runs.push(Pages { start: run.vaddr, count: run.pages, goes_on, areas });
    }
    Ok(runs)
}

impl Holdings for Resident {
    fn text(&self) -> String {
        let mut text = String::new();
        for TaskRuns { pid, runs } in &self.0 {
            text += &format!("{pid}\n");
            for Pages { start, count, goes_on, areas } in runs {
                let mut column = format!("{start:x} / {count}");
                let shown = areas.iter().map(|CountedArea { start, pages, name }| {
                    let name = name.as_ref().map(|name| format!(" {}", printable(name)));
                    format!("{start:08x} / {pages:<8}{}", name.unwrap_or_default())
                });
                for line in goes_on.then(|| "~".to_owned()).into_iter().chain(shown) {
                    text += &format!("\t{:24}{line}\n", std::mem::take(&mut column));
                }
                text += &format!("\t{:23}\n", "");
            }
        }
        text
    }

    fn tasks(&self) -> Vec<Json> {
        let object = |TaskRuns { pid, runs }: &TaskRuns| {
            let pages: Vec<Json> = runs.iter().map(as_json).collect();
            json!({ "pid": pid, "pages": pages })
        };
        self.0.iter().map(object).collect()
    }
}

fn as_json(run: &Pages) -> Json {
    let area = |CountedArea { start, pages, name }: &CountedArea| json!({ "start": hex(*start), "pages": pages, "name": name });
    let areas: Vec<Json> = run.areas.iter().map(area).collect();
    json!({
        "start": hex(run.start), "count": run.count, "continues": run.goes_on, "areas": areas,
    })
}
