//! Serves the pages of a tree over a connection, as a lazy dump does.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use torpor_engine::Options;
use torpor_engine::inside::{PageSpan, Pages, Source};
use torpor_engine::options::{self, PageServer};
use torpor_engine::page_server::{Lender, Lent, Loan};
use torpor_images::compress::Compression;
use torpor_images::pagemap::{Pagemap, PagemapWriter, Run};
use torpor_images::{ImageDir, kind};
use torpor_policy::memory::ProcessMemory;

use crate::memory::{Memory, PAGE};

/// Leaves the pages of `tree` out of its images, as a lazy dump does, and serves them from a process
/// that ends with its client, as they are or compressed.
pub fn lend<'a>(
    options: &mut Options,
    tree: impl Iterator<Item = &'a Memory>,
    compress: Option<Compression>,
) {
    let images = ImageDir::open(&options.images_dir).unwrap();
    let mut lent = Lent::default();
    for task in tree {
        leave_out(&images, u64::from(task.pid.cast_unsigned()), &mut lent);
    }
    let local = PageServer { address: Some("127.0.0.1".to_owned()), ..PageServer::default() };
    let any = Some(local.clone());
    let own = Options {
        memory: options::Memory { lazy: true, page_server: any, ..options::Memory::default() },
        ..Options::default()
    };
    let lender = Lender::prepare(&own).unwrap().unwrap();
    lender.listen().unwrap();
    let id = images.inventory().unwrap().dump_criu_run_id.unwrap();
    options.memory.page_server = Some(PageServer { port: lender.port().unwrap(), ..local });
    let serve = || {
        let loan = Loan { lent: &lent, id: &id, seal: None, compress };
        lender.serve(loan).map_or(1, |restore| {
            restore.answer(true);
            0
        })
    };
    torpor_sys::process::fork(serve).unwrap();
}

/// Takes those pages of a task out of its images that can wait.
fn leave_out(images: &ImageDir, id: u64, lent: &mut Lent) {
    let pages = Pages::load(images, kind::PAGEMAP, id).unwrap();
    let pages_id = Pagemap::read(images, kind::PAGEMAP, id).unwrap().pages_id;
    let memory = ProcessMemory::read(images, u32::try_from(id).unwrap()).unwrap();
    let can_wait = |at: u64| {
        let mut areas = memory.areas.iter();
        areas.any(|area| area.range().contains(&at) && torpor_engine::lazy::may_wait(area))
    };
    // Each page at its address, as in the memory of the task.
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let memory = Arc::new(File::from(rustix::fs::memfd_create("memory", flags).unwrap()));
    let (mut runs, mut present) = (Vec::new(), Vec::new());
    for stretch in pages.stretches() {
        for at in stretch.range.clone().step_by(PAGE) {
            let mut page = [0; PAGE];
            stretch.read(at, &mut page).unwrap();
            let lazy = can_wait(at) && !stretch.is_zero();
            let there = !lazy && !stretch.is_zero();
            runs.push(Run { vaddr: at, pages: 1, lazy, present: there, ..Run::default() });
            if lazy {
                memory.write_all_at(&page, at).unwrap();
                let found = PageSpan { start: at, end: at + PAGE as u64, ..PageSpan::default() };
                lent.push(id, Source::Served(Arc::clone(&memory)), found);
            } else if there {
                present.extend(page);
            }
        }
    }
    let mut pagemap = PagemapWriter::create(images, kind::PAGEMAP, id, pages_id).unwrap();
    runs.into_iter().for_each(|run| pagemap.push(run).unwrap());
    pagemap.finish().unwrap();
    let mut file = images.raw_file_create(kind::PAGES, pages_id.into()).unwrap();
    file.write_all(&present).unwrap();
}
