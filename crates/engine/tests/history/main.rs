//! Random histories of memory, dumped in rounds: afterwards every byte of every task is
//! compared with what the images say, their parents included.
//!
//! A crowd of players has a root of its own and is dumped as one tree, so that one checkpoint
//! is one of many histories. The kinds of crowds differ in what the last round is, and in what becomes
//! of it. A copy-on-write dump is one that the players go on from at once: what counts is the
//! memory that they had at the freeze. After a lazy restore the histories go on while pages are
//! missing, in the restored players as in those that were dumped, and both must have the same
//! memory in the end.
//!
//! `TORPOR_HISTORY=CROWD` plays one crowd, `TORPOR_HISTORY=CROWD.PLAYER` one player of it, which
//! plays by itself what it played among the others. A failure says which.
#![allow(clippy::unwrap_used, clippy::panic)]

mod crowd;
mod images;
mod lend;
mod memory;

use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;

use crowd::{Crowd, Interrupt};
use memory::{Memory, PAGE};
use torpor_engine::inside::take_kept;
use torpor_engine::options::{self, Trust};
use torpor_engine::seal::{self, OpenOptions, SealOptions};
use torpor_engine::{NoHooks, Options};
use torpor_images::ImageDir;
use torpor_images::compress::Compression;
use torpor_seal::Suite;
use torpor_seal::keys::{AgeIdentity, Identities, Recipient};

/// Crowds of an ordinary run.
const CROWDS: u64 = 40;
const ROUNDS: usize = 3;
/// Processes that play crowds.
const WORKERS: u64 = 2;

/// The kinds of advice that a player knows.
const ADVICES: usize = 16;
/// Those of them that a history gets which is to be the same in two ways. Of guard pages the
/// kernel tells no pager, and what becomes of those that are moved depends on whether changes
/// are tracked.
const PLAIN_ADVICES: usize = 14;
/// Those of them that are given while pages may be missing. Of what children are not to get the kernel
/// tells no pager.
const LAZY_ADVICES: usize = 12;
/// Operations at most of the step that follows a restore.
const LAST_STEP: u64 = 50;

/// What becomes of the last round.
#[derive(Clone, Copy, PartialEq)]
enum End {
    /// It is restored, all memory at once.
    Restored,
    /// The players go on while it is made.
    CopyOnWrite,
    /// It is restored lazily.
    Lazy,
    /// The same with pages that come over a connection.
    Remote,
}

struct Kind {
    name: &'static str,
    end: End,
    seal: Option<Suite>,
    compress: bool,
    /// Pages that tasks share are saved once.
    relatives: bool,
}

/// The kinds of crowds, in turn.
#[rustfmt::skip]
const KINDS: [Kind; 10] = [
    Kind { name: "plain", end: End::Restored, seal: None, compress: false, relatives: false },
    Kind { name: "cow", end: End::CopyOnWrite, seal: None, compress: false, relatives: false },
    Kind { name: "lazy", end: End::Lazy, seal: None, compress: false, relatives: true },
    Kind { name: "sealed", end: End::Restored, seal: Some(Suite::Aes256Gcm), compress: false, relatives: true },
    Kind { name: "remote", end: End::Remote, seal: None, compress: false, relatives: false },
    Kind { name: "compressed", end: End::Lazy, seal: None, compress: true, relatives: true },
    Kind { name: "sealed cow", end: End::CopyOnWrite, seal: Some(Suite::Aes256Gcm), compress: false, relatives: true },
    Kind { name: "sealed lazy", end: End::Lazy, seal: Some(Suite::Aes256Gcm), compress: false, relatives: false },
    Kind { name: "sealed with sums", end: End::Restored, seal: Some(Suite::Aes256XtsHmacSha256), compress: false, relatives: true },
    Kind { name: "sealed compressed", end: End::CopyOnWrite, seal: Some(Suite::Aes256Gcm), compress: true, relatives: false },
];

impl Kind {
    /// Whether pages can only be verified all together, so that none can be taken away.
    fn has_sums(&self) -> bool {
        self.seal == Some(Suite::Aes256XtsHmacSha256)
    }

    fn advices(&self) -> usize {
        if self.end == End::CopyOnWrite { ADVICES } else { PLAIN_ADVICES }
    }
}

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

/// The numbers of some players.
type Players = Range<u64>;

/// What all crowds need.
struct Ground {
    /// Where images go.
    images: PathBuf,
    program: PathBuf,
    /// What the players map.
    file: PathBuf,
    content: Vec<u8>,
    seal: SealOptions,
    open: OpenOptions,
}

impl Ground {
    fn prepare(dir: &Path, images: &Path) -> Self {
        let program = dir.join("player");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/history/player.c");
        let mut compiler = Command::new("cc");
        compiler
            .args(["-O1", "-Wall", "-Werror", "-pthread", "-static", "-o"])
            .arg(&program)
            .arg(source);
        assert!(compiler.status().unwrap().success());
        let file = dir.join("file");
        let content: Vec<u8> = (0..80 * PAGE).map(|i| u8::try_from(i / 7 % 251).unwrap()).collect();
        std::fs::write(&file, &content).unwrap();
        let (seal, open) = keys(&dir.join("key"));
        Ground { images: images.to_owned(), program, file, content, seal, open }
    }
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

/// Players of each crowd: `TORPOR_LONG` says that there is time for thousands of histories.
fn crowd_size() -> u64 {
    if std::env::var_os("TORPOR_LONG").is_some() { 50 } else { 15 }
}

fn main() {
    // `cargo test NAME` with the name of a test elsewhere.
    if std::env::args().skip(1).any(|a| !a.starts_with('-') && !"history".contains(a.as_str())) {
        return;
    }
    let number = |text: &str| text.parse::<u64>().unwrap();
    let only = std::env::var("TORPOR_HISTORY").ok();
    let (crowds, player) =
        match only.as_deref().map(|only| only.split_once('.').unwrap_or((only, ""))) {
            None => (0..CROWDS, None),
            Some((crowd, "")) => (number(crowd)..number(crowd) + 1, None),
            Some((crowd, player)) => (number(crowd)..number(crowd) + 1, Some(number(player))),
        };
    let dir = tempfile::tempdir().unwrap();
    // There are thousands of them, which are all removed again.
    let images = tempfile::tempdir_in("/dev/shm").unwrap();
    let ground = Ground::prepare(dir.path(), images.path());
    let work = |worker| {
        let mine = crowds.clone().filter(|crowd| crowd % WORKERS == worker);
        catch_unwind(AssertUnwindSafe(|| play_all(&ground, mine, player))).unwrap_or(1)
    };
    let workers = (0..WORKERS).map(|worker| torpor_sys::process::fork(|| work(worker)).unwrap());
    let workers: Vec<i32> = workers.collect();
    for worker in workers {
        let status = torpor_sys::process::wait(worker, true).unwrap().unwrap().1;
        assert_eq!(status, torpor_sys::process::Status::Exited(0), "see above");
    }
    let histories = (crowds.end - crowds.start) * if player.is_some() { 1 } else { crowd_size() };
    println!("test result: ok. {histories} histories");
}

/// Plays crowds; the exit status.
fn play_all(ground: &Ground, crowds: impl Iterator<Item = u64>, player: Option<u64>) -> i32 {
    rustix::process::set_child_subreaper(Some(rustix::process::getpid())).unwrap();
    let mut failed = false;
    for number in crowds {
        let area = ground.images.join(number.to_string());
        std::fs::create_dir(&area).unwrap();
        let kind = &KINDS[usize::try_from(number).unwrap() % KINDS.len()];
        let players = player.map_or(0..crowd_size(), |player| player..player + 1);
        let mut game = Game { ground, area, kind, players, number, tally: Tally::default() };
        let told = catch_unwind(AssertUnwindSafe(|| game.play()));
        let failures = match told {
            Ok(told) => told.err().unwrap_or_default(),
            Err(_) => vec![Failure::of_all("it panicked")],
        };
        for Failure { player, what } in failures {
            let which = player.map_or(number.to_string(), |player| format!("{number}.{player}"));
            println!("history {which} ({}) failed: {what}", kind.name);
            println!("  again: TORPOR_HISTORY={which} cargo test -p torpor-engine --test history");
            failed = true;
        }
        println!("crowd {number} ({}): {:?}", kind.name, game.tally);
        if kind.relatives && player.is_none() && game.tally.relatives == 0 {
            println!("crowd {number} failed: its tasks have nothing in common");
            failed = true;
        }
        std::fs::remove_dir_all(&game.area).unwrap();
    }
    failed.into()
}

/// What has been compared.
#[derive(Debug, Default)]
struct Tally {
    tasks: u64,
    pages: u64,
    /// Those of them that come from a round before.
    clean: u64,
    /// Those of them that are saved with a relative.
    relatives: u64,
    /// Tasks that went on after they were restored.
    restored: u64,
}

/// A crowd, and what is done to it.
struct Game<'a> {
    ground: &'a Ground,
    area: PathBuf,
    kind: &'a Kind,
    players: Players,
    number: u64,
    tally: Tally,
}

/// What went wrong with a player, or with the crowd as a whole.
#[derive(Debug)]
struct Failure {
    player: Option<u64>,
    what: String,
}

impl Failure {
    fn of_all(what: impl ToString) -> Self {
        Failure { player: None, what: what.to_string() }
    }
}

impl Game<'_> {
    fn play(&mut self) -> Result<(), Vec<Failure>> {
        let mut numbers =
            Numbers(self.number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let mut rounds: VecDeque<String> = VecDeque::new();
        let advices = self.kind.advices();
        let mut crowd = Crowd::start(self.ground, &self.players);
        for round in 0..ROUNDS {
            crowd.step(numbers.below(u64::MAX), 40, advices);
            // Knowledge can get lost.
            if numbers.below(12) == 0 {
                drop(take_kept(crowd.pid).unwrap());
            }
            let is_last = round + 1 == ROUNDS;
            let options = self.options(&mut numbers, &rounds, crowd.pid, is_last);
            let whole = |e| vec![Failure::of_all(format!("round {round}: {e}"))];
            let saved = self.dump(&options, is_last, &mut crowd, numbers.0).map_err(whole)?;
            rounds.push_front(round.to_string());
            if is_last || numbers.below(2) == 0 {
                self.compare(&options, &saved)?;
            }
            if is_last && self.kind.end != End::CopyOnWrite {
                return self.restore(&options, crowd, &saved, numbers.0);
            }
        }
        Ok(())
    }

    /// The options of the next round.
    fn options(
        &self,
        numbers: &mut Numbers,
        rounds: &VecDeque<String>,
        pid: i32,
        is_last: bool,
    ) -> Options {
        // Images of another round can be given.
        let parent = match numbers.below(12) {
            0 => None,
            1 => rounds.get(1),
            _ => rounds.front(),
        };
        // Compressed rounds and others build on each other.
        let ways = [None, Some(Compression::LZ4), Some(Compression::ZSTD)];
        let way = ways[usize::try_from(numbers.below(3)).unwrap()];
        Options {
            images_dir: self.area.join(rounds.len().to_string()),
            pid,
            stop: options::Stop { leave_running: true, ..options::Stop::default() },
            memory: options::Memory {
                parent: parent.map(|parent| format!("../{parent}").into()),
                track: true,
                auto_dedup: numbers.below(6) == 0 && !self.kind.has_sums(),
                cow: is_last && self.kind.end == End::CopyOnWrite,
                compress: way.filter(|_| self.kind.compress),
                dedup_relatives: self.kind.relatives && (is_last || numbers.below(2) == 0),
                ..options::Memory::default()
            },
            trust: Trust {
                seal: self.kind.seal.map(|suite| SealOptions { suite, ..self.ground.seal.clone() }),
                open: self.ground.open.clone(),
                ..Trust::default()
            },
            ..Options::default()
        }
    }

    /// Makes a round. Returns the memory that it is to have, of each player.
    fn dump(
        &self,
        options: &Options,
        is_last: bool,
        crowd: &mut Crowd,
        seed: u64,
    ) -> torpor_engine::Result<Vec<Vec<Memory>>> {
        if options.memory.cow {
            let advices = self.kind.advices();
            let mut hooks = Interrupt { crowd, seed, advices, memory: Vec::new() };
            torpor_engine::dump(options, &mut hooks)?;
            let Interrupt { crowd, memory, .. } = hooks;
            crowd.end();
            return Ok(memory);
        }
        // Of memory that changes while it is copied tasks have nothing in common.
        match is_last || options.memory.dedup_relatives {
            true => torpor_engine::dump(options, &mut NoHooks)?,
            false => torpor_engine::pre_dump(options, &mut NoHooks)?,
        };
        Ok(crowd.memory())
    }

    /// Compares the memory of all players with the images of a round.
    fn compare(&mut self, round: &Options, saved: &[Vec<Memory>]) -> Result<(), Vec<Failure>> {
        let mut images = ImageDir::open(&round.images_dir).unwrap();
        let checked = seal::open(&mut images, round).map_err(|e| vec![Failure::of_all(e)])?;
        assert_eq!(checked.sealed, self.kind.seal.is_some());
        let (ground, tally) = (self.ground, &mut self.tally);
        let name = round.images_dir.file_name().unwrap().display();
        let told = saved.iter().map(|tasks| {
            let told = images::compare(&images, tasks, ground, tally);
            told.map_err(|what| format!("round {name}: {what}"))
        });
        each(&self.players, told)?;
        images.verify_pages().map_err(|e| vec![Failure::of_all(e)])
    }

    /// Lets histories go on in two ways: in the tasks that were dumped, and in those that are
    /// restored.
    fn restore(
        &mut self,
        options: &Options,
        mut crowd: Crowd,
        saved: &[Vec<Memory>],
        seed: u64,
    ) -> Result<(), Vec<Failure>> {
        let (pipes, players) = (crowd.pipes(), crowd.players().to_vec());
        let lazy_pages = self.kind.end != End::Restored;
        let mut options = options.clone();
        let memory = &mut options.memory;
        (memory.parent, memory.auto_dedup, memory.lazy) = (None, false, lazy_pages);
        let advices = if lazy_pages { LAZY_ADVICES } else { PLAIN_ADVICES };
        crowd.step(seed, LAST_STEP, advices);
        let expected = crowd.memory();
        drop(crowd);
        if self.kind.end == End::Remote {
            let compress = seed.is_multiple_of(2).then_some(Compression::LZ4);
            lend::lend(&mut options, saved.iter().flatten(), compress);
        }
        let restored = Crowd::restore(&options, &pipes, &players);
        let mut restored = restored.map_err(|e| vec![Failure::of_all(e)])?;
        drop(options);
        restored.step(seed, LAST_STEP, advices);
        restored.wait_for_pages();
        let found = restored.memory();
        drop(restored);
        self.tally.restored += found.iter().map(|tasks| tasks.len() as u64).sum::<u64>();
        let told = found.iter().zip(&expected).map(|(found, expected)| {
            let told = memory::compare(found, expected);
            told.map_err(|what| format!("restored: {what}"))
        });
        each(&self.players, told)
    }
}

/// The failures of those players that have failed.
fn each(
    players: &Players,
    told: impl Iterator<Item = Result<(), String>>,
) -> Result<(), Vec<Failure>> {
    let failed = players
        .clone()
        .zip(told)
        .filter_map(|(player, told)| told.err().map(|what| Failure { player: Some(player), what }));
    let failed: Vec<Failure> = failed.collect();
    if failed.is_empty() { Ok(()) } else { Err(failed) }
}
