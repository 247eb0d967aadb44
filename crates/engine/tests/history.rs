//! Random histories of memory, dumped in rounds: after each round every byte of every
//! task is compared with what the images say, their parents included. Two histories of
//! three are sealed, one by each suite. Every other one ends with a copy-on-write dump, which
//! the tasks go on from at once: what counts is the memory that they had at the freeze.
//!
//! The other half ends with a lazy restore: the history goes on while pages are missing, in the
//! restored tasks as in those that were dumped, and both must have the same memory in the
//! end. Where the images are plain the pages come over a connection, as from a lazy dump.
//!
//! `TORPOR_HISTORIES` sets how many histories are played, `TORPOR_HISTORY` the first
//! one's seed. A failure names its seed.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::{Read, Write};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use torpor_engine::memory::keeper;
use torpor_engine::memory::pages::{Found, Source};
use torpor_engine::options::{InheritFd, PageServer};
use torpor_engine::page_server::{Lender, Lent};
use torpor_engine::restore::layers::Pages;
use torpor_engine::seal::{self, OpenOptions, SealOptions};
use torpor_engine::{Event, Hooks, NoHooks, Options, Result};
use torpor_images::compress::Compression;
use torpor_images::pagemap::{Pagemap, PagemapWriter, Run};
use torpor_images::proto::MmEntry;
use torpor_images::{ImageDir, kind};
use torpor_seal::Suite;
use torpor_seal::keys::{AgeIdentity, Identities, Recipient};
use torpor_tracee::{Mapping, STUB_SIZE, parse_maps};

const PAGE: usize = 4096;
/// Histories of an ordinary run.
const HISTORIES: u64 = 40;
const ROUNDS: usize = 6;

/// A small generator: the histories are to be the same everywhere.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % limit
    }
}

/// The player, as the root of its tree.
struct Player {
    pid: i32,
    orders: File,
    answers: File,
    advices: usize,
}

impl Player {
    #[allow(clippy::zombie_processes, reason = "it is waited for when the player is dropped")]
    fn start(program: &Path, file: &Path, advices: usize) -> Self {
        let mut command = Command::new("setsid");
        command.arg(program).arg(file).stdin(Stdio::piped()).stdout(Stdio::piped());
        // No file that others write to while the player sleeps.
        command.stderr(Stdio::null());
        // With rseq(2) the kernel writes into memory when it moves a task to another processor.
        command.env("GLIBC_TUNABLES", "glibc.pthread.rseq=0");
        let mut child = command.spawn().unwrap();
        let orders = OwnedFd::from(child.stdin.take().unwrap()).into();
        let answers = OwnedFd::from(child.stdout.take().unwrap()).into();
        Player { pid: i32::try_from(child.id()).unwrap(), orders, answers, advices }
    }

    /// The one that images hold, which were made with `pipes`, as input and output.
    fn restore(options: &Options, pipes: &[String; 2]) -> Result<Self> {
        let (input, orders) = rustix::pipe::pipe().unwrap();
        let (answers, output) = rustix::pipe::pipe().unwrap();
        let inherit = [input, output]
            .into_iter()
            .zip(pipes)
            .map(|(fd, pipe)| InheritFd { fd: Arc::new(fd), key: pipe.replace(':', "") });
        let options = Options {
            inherit_fd: inherit.collect(),
            restore_detached: true,
            lazy_pages: true,
            ..options.clone()
        };
        let pid = torpor_engine::restore(&options, &mut NoHooks)?.pid;
        Ok(Player { pid, orders: orders.into(), answers: answers.into(), advices: PLAIN_ADVICES })
    }

    fn pipes(&self) -> [String; 2] {
        let link = |fd| std::fs::read_link(format!("/proc/{}/fd/{fd}", self.pid)).unwrap();
        [0, 1].map(|fd| link(fd).display().to_string())
    }

    fn step(&mut self, seed: u64, operations: u64) {
        self.begin(seed, operations);
        self.end();
    }

    fn begin(&mut self, seed: u64, operations: u64) {
        let line = format!("{seed} {operations} {}\n", self.advices);
        self.orders.write_all(line.as_bytes()).unwrap();
    }

    fn end(&mut self) {
        let mut answer = [0];
        let n = self.answers.read(&mut answer).unwrap();
        assert_eq!((n, answer), (1, *b"."), "the player has ended");
    }
}

impl Drop for Player {
    /// Ends the whole tree: its members are those of the group.
    fn drop(&mut self) {
        let group = rustix::process::Pid::from_raw(self.pid).unwrap();
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        // The player, its children, the keeper and the pager that its end has ended.
        while let Ok(Some(_)) = torpor_sys::process::wait(-1, true) {}
    }
}

fn main() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    // `cargo test NAME` with the name of a test elsewhere.
    if std::env::args().skip(1).any(|a| !a.starts_with('-') && !"history".contains(a.as_str())) {
        return;
    }
    rustix::process::set_child_subreaper(Some(rustix::process::getpid())).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("player");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/history/player.c");
    let mut compiler = Command::new("cc");
    compiler.args(["-O1", "-Wall", "-Werror", "-pthread", "-o"]).arg(&program).arg(source);
    assert!(compiler.status().unwrap().success());
    let file = dir.path().join("file");
    let content: Vec<u8> = (0..80 * PAGE).map(|i| u8::try_from(i / 7 % 251).unwrap()).collect();
    std::fs::write(&file, &content).unwrap();
    let (seal, open) = keys(&dir.path().join("key"));
    let first = number("TORPOR_HISTORY").unwrap_or(1);
    let histories = number("TORPOR_HISTORIES").unwrap_or(HISTORIES);
    let mut total = Tally::default();
    for seed in first..first + histories {
        println!("history {seed}");
        let area = dir.path().join(seed.to_string());
        std::fs::create_dir(&area).unwrap();
        let seal = match seed % 3 {
            0 => None,
            1 => Some(seal.clone()),
            _ => Some(SealOptions { suite: Suite::Aes256XtsHmacSha256, ..seal.clone() }),
        };
        let open = open.clone();
        let history =
            History { area, program: &program, file: &file, content: &content, seal, open };
        history.play(seed, &mut total);
        std::fs::remove_dir_all(&history.area).unwrap();
    }
    println!("{total:?}");
    // Else nothing has been shown.
    assert!(total.clean > total.pages / 20, "pages are hardly ever found unchanged: {total:?}");
    println!("test result: ok. {histories} histories");
}

/// A new key in `file`: to seal for it, and to open with it.
fn keys(file: &Path) -> (SealOptions, OpenOptions) {
    let (identity, text) = AgeIdentity::generate().unwrap();
    std::fs::write(file, text.as_bytes()).unwrap();
    let recipients = Recipient::parse(&identity.recipient().to_string()).unwrap().into();
    let identities = Identities::new(&[file.display().to_string()]).unwrap();
    let seal = SealOptions { recipients, signer: None, suite: Suite::Aes256Gcm };
    (seal, OpenOptions { identities, ..OpenOptions::default() })
}

/// The memory of a task at some moment: its private mappings, and their pages as far as they
/// can be read. Guard pages cannot, nor pages behind the end of a file.
struct Memory {
    pid: i32,
    mappings: Vec<(Mapping, Vec<Page>)>,
}

/// A page, if it can be read.
type Page = Option<Box<[u8; PAGE]>>;

impl Memory {
    /// That of a tree whose members all rest.
    fn of_tree(root: i32) -> Vec<Self> {
        tree(root).into_iter().map(Self::of_task).collect()
    }

    fn of_task(pid: i32) -> Self {
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
        let memory = File::open(format!("/proc/{pid}/mem")).unwrap();
        let read = |mapping: Mapping| {
            let page = |address| {
                let mut page = Box::new([0; PAGE]);
                memory.read_exact_at(&mut *page, address).is_ok().then_some(page)
            };
            let pages = (mapping.start..mapping.end).step_by(PAGE).map(page).collect();
            (mapping, pages)
        };
        let is_wanted = |mapping: &Mapping| {
            // What the dump itself has mapped is gone before the task goes on. It is never here
            // in the arena, where a history may have made a mapping of its size.
            let is_stub = mapping.end - mapping.start == STUB_SIZE
                && mapping.inode == 0
                && !ARENA.contains(&mapping.start);
            !mapping.shared && !mapping.name.starts_with("[v") && !is_stub
        };
        Memory {
            pid,
            mappings: parse_maps(&maps).into_iter().filter(is_wanted).map(read).collect(),
        }
    }
}

/// The ids of all tasks of a tree, but for twins.
fn tree(root: i32) -> Vec<i32> {
    let (mut waiting, mut all) = (vec![root], Vec::new());
    while let Some(pid) = waiting.pop() {
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
        let children = children.unwrap();
        let children = children.split_ascii_whitespace().map(|pid| pid.parse::<i32>().unwrap());
        waiting.extend(children.filter(|&child| !is_twin(child)));
        all.push(pid);
    }
    all
}

/// Waits until the tasks of a tree miss no pages any more: others could not read them before.
fn wait_for_pages(root: i32) {
    let misses = |pid: i32| {
        let maps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
        maps.lines().any(|line| line.starts_with("VmFlags:") && line.contains(" um"))
    };
    while tree(root).into_iter().any(misses) {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// Whether a task is the copy of another one in a copy-on-write dump.
fn is_twin(pid: i32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap() == "torpor-twin\n"
}

/// Looks at the memory of the tree in the last moment of the freeze, and has it go on.
struct Interrupt<'a> {
    player: &'a mut Player,
    seed: u64,
    memory: Vec<Memory>,
}

impl Hooks for Interrupt<'_> {
    fn notify(&mut self, event: Event) -> Result<()> {
        if matches!(event, Event::NetworkUnlock) {
            self.memory = Memory::of_tree(self.player.pid);
            self.player.begin(self.seed, 40);
        }
        Ok(())
    }
}

/// The kinds of advice that the player knows.
const ADVICES: usize = 16;
/// Those of them that a history gets which is to be the same in two ways. Of guard pages the
/// kernel tells no pager, and what becomes of those that are moved depends on whether changes
/// are tracked.
const PLAIN_ADVICES: usize = 14;
/// Operations of the step that follows a lazy restore.
const LAZY_STEP: u64 = 25;
/// Where histories take place; the rest of a task depends on its id and on chance.
const ARENA: Range<u64> = 0x1000_0000_0000..0x1000_0060_0000;

/// The private pages of a task's arena.
type Arena = BTreeMap<u64, Page>;

/// Those of all tasks of a tree.
fn arenas(tree: &[Memory]) -> Vec<Arena> {
    let arena = |memory: &Memory| {
        let mappings = memory.mappings.iter();
        let pages = mappings.flat_map(|(m, pages)| (m.start..).step_by(PAGE).zip(pages.clone()));
        pages.filter(|(address, _)| ARENA.contains(address)).collect()
    };
    tree.iter().map(arena).collect()
}

/// The first difference between two arenas, behind all others.
fn difference(found: &Arena, expected: &Arena) -> Option<(Reverse<u64>, String)> {
    let mut addresses: Vec<u64> = found.keys().chain(expected.keys()).copied().collect();
    addresses.sort_unstable();
    let at = addresses.into_iter().find(|at| found.get(at) != expected.get(at))?;
    let page = |arena: &Arena| arena.get(&at).cloned().flatten();
    let bytes = page(found).into_iter().zip(page(expected)).next();
    let byte = bytes.and_then(|(found, expected)| (0..PAGE).find(|&i| found[i] != expected[i]));
    let byte = byte.unwrap_or(0);
    let word = |arena: &Arena| match arena.get(&at) {
        Some(Some(page)) => format!("{:x} at byte {byte}", page[byte]),
        Some(None) => "not readable".to_owned(),
        None => "not mapped".to_owned(),
    };
    Some((Reverse(at), format!("{} instead of {}", word(found), word(expected))))
}

/// Leaves the pages of `tree` out of its images, as a lazy dump does, and serves them from a process
/// that ends with its client.
fn lend(options: &mut Options, tree: &[Memory]) {
    let images = ImageDir::open(&options.images_dir).unwrap();
    let mut lent = Lent::default();
    for task in tree {
        leave_out(&images, u64::from(task.pid.cast_unsigned()), &mut lent);
    }
    let local = PageServer { address: Some("127.0.0.1".to_owned()), ..PageServer::default() };
    let any = Some(local.clone());
    let own = Options { lazy_pages: true, page_server: any, ..Options::default() };
    let lender = Lender::listen(&own).unwrap().unwrap();
    options.page_server = Some(PageServer { port: lender.port().unwrap(), ..local });
    let serve = || {
        lender.serve(&lent).map_or(1, |restore| {
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
    let mm: MmEntry = images.read_one(kind::MM, id).unwrap();
    let can_wait = |at: u64| {
        let mut vmas = mm.vmas.iter();
        vmas.any(|v| (v.start..v.end).contains(&at) && torpor_engine::lazy::may_wait(v))
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
            runs.push(Run { vaddr: at, pages: 1, lazy, present: there, in_parent: false });
            if lazy {
                memory.write_all_at(&page, at).unwrap();
                let found = Found { start: at, end: at + PAGE as u64, clean: false };
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

/// What has been compared.
#[derive(Debug, Default)]
struct Tally {
    tasks: u64,
    pages: u64,
    /// Those of them that come from a round before.
    clean: u64,
    /// Tasks that went on while their pages were brought in.
    lazy: u64,
    /// Histories whose pages came over a connection.
    remote: u64,
}

struct History<'a> {
    area: PathBuf,
    program: &'a Path,
    file: &'a Path,
    content: &'a [u8],
    seal: Option<SealOptions>,
    open: OpenOptions,
}

impl History<'_> {
    fn play(&self, seed: u64, total: &mut Tally) {
        let mut numbers = Numbers(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let mut rounds: VecDeque<String> = VecDeque::new();
        let cow = seed.is_multiple_of(2);
        let advices = if cow { ADVICES } else { PLAIN_ADVICES };
        let mut player = Player::start(self.program, self.file, advices);
        player.step(numbers.below(u64::MAX), 20);
        let pipes = player.pipes();
        for round in 0..ROUNDS {
            player.step(numbers.below(u64::MAX), 1 + numbers.below(25));
            // Knowledge can get lost, and images of another round be given.
            if numbers.below(12) == 0 {
                drop(keeper::take(player.pid).unwrap());
            }
            let parent = match numbers.below(12) {
                0 => None,
                1 => rounds.get(1),
                _ => rounds.front(),
            };
            let name = format!("{round}");
            let options = Options {
                images_dir: self.area.join(&name),
                pid: player.pid,
                parent_img: parent.map(|parent| format!("../{parent}").into()),
                track_mem: true,
                leave_running: true,
                auto_dedup: numbers.below(6) == 0 && !self.has_sums(),
                seal: self.seal.clone(),
                open: self.open.clone(),
                cow,
                // Pages that are served are taken out of files that hold nothing else.
                compress: self.compression(&mut numbers).filter(|_| cow || round + 1 < ROUNDS),
                ..Options::default()
            };
            let memory = self.dump(&options, round + 1 == ROUNDS, &mut player, numbers.0);
            let memory = memory.unwrap_or_else(|e| panic!("history {seed}, round {round}: {e}"));
            rounds.push_front(name);
            self.compare(&options, &memory, total)
                .unwrap_or_else(|e| panic!("history {seed}, round {round}: {e}"));
            if round + 1 == ROUNDS && !options.cow {
                let lazy = self.restore_lazily(&options, player, &pipes, numbers.0, total);
                return lazy.unwrap_or_else(|e| panic!("history {seed}, restored lazily: {e}"));
            }
        }
    }

    /// Each round by itself: compressed ones and others build on each other.
    fn compression(&self, numbers: &mut Numbers) -> Option<Compression> {
        let ways = [None, Some(Compression::LZ4), Some(Compression::ZSTD)];
        let way = ways[usize::try_from(numbers.below(3)).unwrap()];
        way.filter(|_| !self.has_sums())
    }

    /// Lets a history go on in two ways: in the tasks that were dumped, and in those that are
    /// restored, whose pages come meanwhile.
    fn restore_lazily(
        &self,
        options: &Options,
        mut player: Player,
        pipes: &[String; 2],
        seed: u64,
        total: &mut Tally,
    ) -> std::result::Result<(), String> {
        let saved = Memory::of_tree(player.pid);
        player.step(seed, LAZY_STEP);
        let mut expected = arenas(&Memory::of_tree(player.pid));
        drop(player);
        let mut options = Options { parent_img: None, auto_dedup: false, ..options.clone() };
        let remote = self.seal.is_none();
        if remote {
            lend(&mut options, &saved);
        }
        let mut restored = Player::restore(&options, pipes).map_err(|e| e.to_string())?;
        drop(options);
        restored.step(seed, LAZY_STEP);
        wait_for_pages(restored.pid);
        let found = arenas(&Memory::of_tree(restored.pid));
        drop(restored);
        total.lazy += found.len() as u64;
        total.remote += u64::from(remote);
        if found.len() != expected.len() {
            return Err(format!("{} tasks instead of {}", found.len(), expected.len()));
        }
        for found in &found {
            let differences = expected.iter().map(|expected| difference(found, expected));
            match differences.enumerate().min_by_key(|(_, difference)| difference.clone()) {
                Some((at, None)) => drop(expected.swap_remove(at)),
                Some((_, Some((Reverse(at), what)))) => return Err(format!("{at:x}: {what}")),
                None => return Err("a task too many".to_owned()),
            }
        }
        Ok(())
    }

    /// Makes a round. Returns the memory that it is to have.
    fn dump(
        &self,
        options: &Options,
        is_last: bool,
        player: &mut Player,
        seed: u64,
    ) -> Result<Vec<Memory>> {
        if is_last && options.cow {
            let mut hooks = Interrupt { player, seed, memory: Vec::new() };
            torpor_engine::dump(options, &mut hooks)?;
            let Interrupt { player, memory, .. } = hooks;
            player.end();
            return Ok(memory);
        }
        match is_last {
            true => torpor_engine::dump(options, &mut NoHooks)?,
            false => torpor_engine::pre_dump(options, &mut NoHooks)?,
        };
        Ok(Memory::of_tree(options.pid))
    }

    /// Whether pages can only be verified all together, so that none can be taken away.
    fn has_sums(&self) -> bool {
        self.seal.as_ref().is_some_and(|seal| seal.suite == Suite::Aes256XtsHmacSha256)
    }

    /// Compares the memory of a tree with the images of a round.
    fn compare(
        &self,
        round: &Options,
        tree: &[Memory],
        total: &mut Tally,
    ) -> std::result::Result<(), String> {
        let mut images = ImageDir::open(&round.images_dir).unwrap();
        let checked = seal::open(&mut images, round).map_err(|e| e.to_string())?;
        assert_eq!(checked.sealed, self.seal.is_some());
        for task in tree {
            let id = u64::from(task.pid.cast_unsigned());
            let pages = Pages::load(&images, kind::PAGEMAP, id).map_err(|e| e.to_string())?;
            let own = Pagemap::read(&images, kind::PAGEMAP, id).unwrap();
            let clean = own.runs.iter().filter(|run| run.in_parent).map(|run| run.pages);
            total.clean += clean.sum::<u64>();
            total.pages += own.runs.iter().map(|run| run.pages).sum::<u64>();
            total.tasks += 1;
            self.compare_task(task, &pages)
                .map_err(|e| format!("task {} of {}: {e}", task.pid, round.pid))?;
        }
        images.verify_pages().map_err(|e| e.to_string())
    }

    fn compare_task(&self, task: &Memory, pages: &Pages) -> std::result::Result<(), String> {
        for (mapping, memory) in &task.mappings {
            let len = usize::try_from(mapping.end - mapping.start).unwrap();
            let mut expected = self.without_pages(mapping, len);
            let mut saved = vec![false; len / PAGE];
            for (stretch, range) in pages.within(mapping.start..mapping.end) {
                let at = usize::try_from(range.start - mapping.start).unwrap();
                let end = usize::try_from(range.end - mapping.start).unwrap();
                stretch.read(range.start, &mut expected[at..end]).map_err(|e| e.to_string())?;
                saved[at / PAGE..end / PAGE].fill(true);
            }
            for (number, expected) in expected.chunks(PAGE).enumerate() {
                let address = mapping.start + (number * PAGE) as u64;
                let Some(page) = &memory[number] else { continue };
                // Files other than the history's are not looked at, where nothing is saved.
                let foreign = mapping.inode != 0 && !self.is_own(mapping) && !saved[number];
                if page.as_slice() != expected && !foreign {
                    let at = page.iter().zip(expected).position(|(a, b)| a != b).unwrap_or(0);
                    return Err(format!(
                        "{address:x} in {:x}-{:x} {:?}: byte {at} is {:x}, {:x} in the images ({})",
                        mapping.start,
                        mapping.end,
                        mapping.name,
                        page[at],
                        expected[at],
                        if saved[number] { "saved" } else { "not saved" },
                    ));
                }
            }
        }
        Ok(())
    }

    fn is_own(&self, mapping: &Mapping) -> bool {
        Path::new(&mapping.name) == self.file
    }

    /// What a mapping holds where no page is saved.
    fn without_pages(&self, mapping: &Mapping, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        if self.is_own(mapping) {
            let from = usize::try_from(mapping.offset).unwrap().min(self.content.len());
            let n = len.min(self.content.len() - from);
            bytes[..n].copy_from_slice(&self.content[from..from + n]);
        }
        bytes
    }
}
