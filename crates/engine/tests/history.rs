//! Random histories of memory, dumped in rounds: after each round every byte of every
//! task is compared with what the images say, their parents included. Two histories of
//! three are sealed, one by each suite. Every other one ends with a copy-on-write dump, which
//! the tasks go on from at once: what counts is the memory that they had at the freeze.
//!
//! `TORPOR_HISTORIES` sets how many histories are played, `TORPOR_HISTORY` the first
//! one's seed. A failure names its seed.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::VecDeque;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

use torpor_engine::memory::keeper;
use torpor_engine::restore::layers::Pages;
use torpor_engine::seal::{self, OpenOptions, SealOptions};
use torpor_engine::{Event, Hooks, NoHooks, Options, Result};
use torpor_images::compress::Compression;
use torpor_images::{ImageDir, kind};
use torpor_seal::Suite;
use torpor_seal::keys::{AgeIdentity, Identities, Recipient};
use torpor_tracee::{Mapping, STUB_SIZE, parse_maps};

const PAGE: usize = 4096;
/// Histories of an ordinary run.
const HISTORIES: u64 = 60;
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
    child: Child,
    answers: ChildStdout,
}

impl Player {
    fn start(program: &Path, file: &Path) -> Self {
        let mut command = Command::new(program);
        command.arg(file).stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0);
        // With rseq(2) the kernel writes into memory when it moves a task to another processor.
        command.env("GLIBC_TUNABLES", "glibc.pthread.rseq=0");
        let mut child = command.spawn().unwrap();
        let answers = child.stdout.take().unwrap();
        Player { child, answers }
    }

    fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    fn step(&mut self, seed: u64, operations: u64) {
        self.begin(seed, operations);
        self.end();
    }

    fn begin(&mut self, seed: u64, operations: u64) {
        let line = format!("{seed} {operations}\n");
        self.child.stdin.as_mut().unwrap().write_all(line.as_bytes()).unwrap();
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
        let group = rustix::process::Pid::from_child(&self.child);
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        let _ = self.child.wait();
        // Children of the player, and the keeper that its end has ended.
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
        let (mut tasks, mut all) = (vec![root], Vec::new());
        while let Some(pid) = tasks.pop() {
            let children = format!("/proc/{pid}/task/{pid}/children");
            let children = std::fs::read_to_string(children).unwrap();
            let children = children.split_ascii_whitespace().map(|pid| pid.parse::<i32>().unwrap());
            tasks.extend(children.filter(|&child| !is_twin(child)));
            all.push(Self::of_task(pid));
        }
        all
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
            // What the dump itself has mapped is gone before the task goes on.
            let is_stub = mapping.end - mapping.start == STUB_SIZE && mapping.inode == 0;
            !mapping.shared && !mapping.name.starts_with("[v") && !is_stub
        };
        Memory {
            pid,
            mappings: parse_maps(&maps).into_iter().filter(is_wanted).map(read).collect(),
        }
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
            self.memory = Memory::of_tree(self.player.pid());
            self.player.begin(self.seed, 40);
        }
        Ok(())
    }
}

/// What has been compared.
#[derive(Debug, Default)]
struct Tally {
    tasks: u64,
    pages: u64,
    /// Those of them that come from a round before.
    clean: u64,
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
        let mut player = Player::start(self.program, self.file);
        let mut rounds: VecDeque<String> = VecDeque::new();
        player.step(numbers.below(u64::MAX), 20);
        for round in 0..ROUNDS {
            player.step(numbers.below(u64::MAX), 1 + numbers.below(25));
            // Knowledge can get lost, and images of another round be given.
            if numbers.below(12) == 0 {
                drop(keeper::take(player.pid()).unwrap());
            }
            let parent = match numbers.below(12) {
                0 => None,
                1 => rounds.get(1),
                _ => rounds.front(),
            };
            let name = format!("{round}");
            let options = Options {
                images_dir: self.area.join(&name),
                pid: player.pid(),
                parent_img: parent.map(|parent| format!("../{parent}").into()),
                track_mem: true,
                leave_running: true,
                auto_dedup: numbers.below(6) == 0 && !self.has_sums(),
                seal: self.seal.clone(),
                open: self.open.clone(),
                cow: seed.is_multiple_of(2),
                compress: self.compression(&mut numbers),
                ..Options::default()
            };
            let memory = self.dump(&options, round + 1 == ROUNDS, &mut player, numbers.0);
            let memory = memory.unwrap_or_else(|e| panic!("history {seed}, round {round}: {e}"));
            rounds.push_front(name);
            self.compare(&options, &memory, total)
                .unwrap_or_else(|e| panic!("history {seed}, round {round}: {e}"));
        }
    }

    /// Each round by itself: compressed ones and others build on each other.
    fn compression(&self, numbers: &mut Numbers) -> Option<Compression> {
        let ways = [None, Some(Compression::LZ4), Some(Compression::ZSTD)];
        let way = ways[usize::try_from(numbers.below(3)).unwrap()];
        way.filter(|_| !self.has_sums())
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
            let own = torpor_images::pagemap::Pagemap::read(&images, kind::PAGEMAP, id).unwrap();
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
