//! Images that CRIU 4.2 wrote are restored, and those that Torpor writes of the same program are
//! like them: see `tests/criu-4.2`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail, ensure};
use libtest_mimic::{Arguments, Failed, Trial};
use serde_json::Value;
use torpor_images::{ImageDir, Kind, kind};
use torpor_tests::build;
use torpor_tests::program::repository;
use torpor_tests::{foreign, former};

/// The modes of the program.
const MODES: [&str; 8] =
    ["plain", "shared", "locks", "sockets", "tcp-iptables", "tcp-nftables", "watches", "confined"];

/// Fields whose values differ by nature: numbers, addresses, times, registers.
const NATURAL: &[&str] = &[
    "id",
    "ino",
    "inode",
    "shmid",
    "start",
    "end",
    "pgoff",
    "peer",
    "portid",
    "name",
    "dev",
    "s_dev",
    "pid",
    "nspid",
    "fd",
    "tfd",
    "src_port",
    "dst_port",
    "dump_criu_run_id",
    "cwd_id",
    "root_id",
    "exe_file_id",
    "root_ids",
    "tv_sec",
    "tv_nsec",
    "tv_usec",
    "vsec",
    "vusec",
    "vnsec",
    "gpregs",
    "st_space",
    "xmm_space",
    "ymmh_space",
    "opmask_reg",
    "zmm_upper",
    "hi16_zmm",
    "xstate_bv",
    // Of the processor: AMD's have one bit more.
    "mxcsr_mask",
    "mm_start_stack",
    "mm_arg_start",
    "mm_arg_end",
    "mm_env_start",
    "mm_env_end",
    "mm_brk",
    "mm_start_brk",
    "mm_saved_auxv",
    "clear_tid_addr",
    "rseq_abi_pointer",
    "futex_rla",
    "blk_sigset",
    "handle",
    "inq_seq",
    "outq_seq",
    "timestamp",
    "snd_wl1",
    "snd_wnd",
    "max_window",
    "rcv_wnd",
    "rcv_wup",
    "regf_id",
    "pipe_id",
    "orig_id",
    "id_for",
    "build_id",
    "extra",
    "sched_nice",
    "rlimits",
    "ticks",
    "oom_score_adj",
    "loginuid",
    "flags_reg",
    "mm_id",
    "files_id",
    "xfeatures_mask",
    "pgid",
    "ppid",
    "sid",
    "sigaction",
    "pid_ns_id",
    "net_ns_id",
    "ipc_ns_id",
    "uts_ns_id",
    "mnt_ns_id",
    "user_ns_id",
    "cgroup_ns_id",
    "time_ns_id",
    "ns_id",
    "siginfo",
    "inode_id",
];

/// Fields that are there on some processors: not all have protection keys.
const OF_PROCESSOR: &[&str] = &["pkru"];

/// What docs/image-format.md names: where it says why Torpor's differ.
const NAMED: &[&str] = &[
    "core.thread_core.creds.no_new_privs",
    "ghost-file.size",
    "files.usk.backlog",
    "pstree.threads",
    "seccomp.seccomp_filters.flags",
];

/// Fields that Torpor has in fewer entries: who shares a directory shares its entry. Their values are
/// the same.
const SHARED: &[&str] = &["files.id", "files.type", "files.reg."];

fn main() -> Result<ExitCode> {
    let arguments = Arguments::from_args();
    let mut trials = Vec::new();
    if arguments.list {
        trials.extend(names().map(|name| Trial::test(name, || Ok(()))));
    } else {
        let world: &'static World = Box::leak(Box::new(World::new()?));
        for mode in MODES {
            trials.push(Trial::test(format!("{mode}::restored"), move || world.restore(mode)));
            trials.push(Trial::test(format!("{mode}::alike"), move || world.compare(mode)));
            trials.push(Trial::test(format!("{mode}::foreign"), move || world.strip(mode)));
            trials.push(Trial::test(format!("{mode}::former"), move || world.age(mode)));
        }
    }
    // They all work in one place.
    let arguments = Arguments { test_threads: Some(1), ..arguments };
    Ok(libtest_mimic::run(&arguments, trials).exit_code())
}

fn names() -> impl Iterator<Item = String> {
    let cases = ["restored", "alike", "foreign", "former"];
    MODES.iter().flat_map(move |mode| cases.map(|case| format!("{mode}::{case}")))
}

/// What all cases need.
#[derive(Debug)]
struct World {
    dir: tempfile::TempDir,
    criu: PathBuf,
    program: PathBuf,
    /// Whether it is the program that the images are of.
    is_the_one: bool,
}

impl World {
    fn new() -> Result<Self> {
        let home = repository().join("tests/criu-4.2");
        let dir = tempfile::tempdir()?;
        let program = dir.path().join("sleeper");
        run(Command::new("gcc")
            .args(["-O1", "-s", "-static", "-o"])
            .arg(&program)
            .arg(home.join("sleeper.c")))?;
        let images = dir.path().join("images");
        std::fs::create_dir(&images)?;
        run(Command::new("tar")
            .arg("-xJf")
            .arg(home.join("images.tar.xz"))
            .arg("-C")
            .arg(&images))?;
        build::torpor()?;
        let criu = build::criu()?;
        std::fs::create_dir_all("/var/tmp/criu-4.2")?;
        let is_the_one = has_build_id(&program, &images.join("plain"))?;
        Ok(World { dir, criu, program, is_the_one })
    }

    /// Dumps and restores the program, or restores images, in the directory that is returned.
    fn inside(&self, mode: &str, case: &str, images: Option<&Path>) -> Result<PathBuf> {
        let work = self.dir.path().join(format!("{mode}-{case}"));
        std::fs::create_dir(&work)?;
        let mut command = Command::new("unshare");
        command
            .args(["--pid", "--net", "--mount", "--fork", "--mount-proc"])
            .arg(repository().join("tests/criu-4.2/inside"))
            .args([&self.criu, &self.program])
            .arg(mode)
            .arg(&work)
            .args(images);
        let output = command.output()?;
        let said = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success() && said.trim().ends_with("good"), "{mode}: {said}{errors}");
        Ok(work)
    }

    fn restore(&self, mode: &str) -> Result<(), Failed> {
        if !self.is_the_one {
            println!(
                "SKIPPED {mode}::restored: this gcc makes another program than that of the images"
            );
            return Ok(());
        }
        // The restore may write there.
        let images = self.dir.path().join("images").join(mode);
        let restored = self.inside(mode, "restored", Some(&images));
        if std::arch::is_x86_feature_detected!("avx512f") {
            restored?;
            return Ok(());
        }
        // The processor that they are from used AVX-512: elsewhere the program would die of what it has in use.
        let lacks = "AVX-512 state, which this processor does not have";
        match restored {
            Err(error) if error.to_string().contains(lacks) => Ok(()),
            Err(error) => Err(error.into()),
            Ok(_) => Err("a program that uses AVX-512 was restored where there is none".into()),
        }
    }

    /// Dumps the program, restores it, and compares the images with CRIU's, and so what the dump
    /// leaves in the kernel: CRIU takes away rules that are exactly its own.
    fn compare(&self, mode: &str) -> Result<(), Failed> {
        let theirs = self.dir.path().join("images").join(mode);
        let ours = self.inside(mode, "alike", None)?.join("images");
        let mut differences = Fields::of(&theirs)?.differences(&Fields::of(&ours)?);
        if mode.starts_with("tcp-") {
            let [theirs, ours] = [rules(&theirs)?, rules(&ours)?];
            if theirs != ours {
                differences.push(format!("rules: {theirs:#?} / {ours:#?}"));
            }
        }
        if differences.is_empty() {
            return Ok(());
        }
        Err(format!("CRIU 4.2 / Torpor, of {mode}:\n{}", differences.join("\n")).into())
    }

    /// Dumps the program, and restores what others would have written of it: on any processor, so
    /// that more is shown than by images that were made on another one.
    fn strip(&self, mode: &str) -> Result<(), Failed> {
        self.changed(mode, "foreign", foreign::strip)
    }

    /// Dumps the program, and restores what Torpor has once written of it.
    fn age(&self, mode: &str) -> Result<(), Failed> {
        self.changed(mode, "former", former::make)
    }

    fn changed(
        &self,
        mode: &str,
        case: &str,
        change: fn(&Path) -> Result<()>,
    ) -> Result<(), Failed> {
        let images = self.inside(mode, &format!("before-{case}"), None)?.join("images");
        change(&images)?;
        self.inside(mode, case, Some(&images))?;
        Ok(())
    }
}

/// The lines of the rules that a dump left, in no order, without what is another one each time: the
/// client's port, the run's id, how many packets there were.
fn rules(images: &Path) -> Result<Vec<String>> {
    let words = |line: &str| {
        let words = line.split_whitespace().filter(|word| !word.starts_with('['));
        let words = words.map(|word| word.trim_end_matches(','));
        let words = words.map(|word| match word.parse::<u16>() {
            Ok(32768..) => "PORT",
            _ if word.starts_with("CRIU-") => "CRIU",
            _ => word,
        });
        words.collect::<Vec<_>>().join(" ")
    };
    let text = std::fs::read_to_string(images.join("rules"))?;
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    // A set has its elements on several lines, in any order.
    let lines = lines.map(|line| words(line).replace("elements = { ", "").replace(" }", ""));
    let mut lines: Vec<_> = lines.filter(|line| !line.is_empty()).collect();
    lines.sort();
    Ok(lines)
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("{command:?}"))?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// Whether the images in `dir` say of their program what is true of `program`.
fn has_build_id(program: &Path, dir: &Path) -> Result<bool> {
    let files: Vec<torpor_images::proto::FileEntry> =
        ImageDir::open(dir)?.read_all(kind::FILES, 0)?;
    let id = files.iter().find_map(|file| file.reg.as_ref().filter(|reg| !reg.build_id.is_empty()));
    let id = &id.context("no build id in files.img")?.build_id;
    let wanted: Vec<u8> = id.iter().flat_map(|word| word.to_le_bytes()).collect();
    let bytes = std::fs::read(program)?;
    Ok(bytes.windows(wanted.len()).any(|window| window == wanted))
}

/// The values of each field of each kind of image, by the path to it.
#[derive(Debug, Default)]
struct Fields {
    kinds: BTreeSet<String>,
    values: BTreeMap<String, Vec<String>>,
    /// How many there are of those whose values differ by nature, by the path to them.
    natural: BTreeMap<String, usize>,
}

impl Fields {
    fn of(dir: &Path) -> Result<Self> {
        let mut fields = Fields::default();
        for name in ImageDir::open(dir)?.names()? {
            let known = Kind::of_file(&name).map(|(kind, _)| kind);
            let Some(kind) = known.filter(|_| name.ends_with(".img")) else { continue };
            let kind = kind.file_name(0).trim_end_matches(".img").trim_end_matches("-0").to_owned();
            if ["pages", "pagemap", "pagemap-shmem"].contains(&kind.as_str()) {
                continue;
            }
            let view = torpor_crit::View { pretty: true, sizes_only: false };
            let image = torpor_crit::decode_file(&dir.join(&name), view, &Default::default())?;
            fields.add(&kind, &image["entries"]);
            fields.kinds.insert(kind);
        }
        if fields.kinds.is_empty() {
            bail!("{} has no images", dir.display());
        }
        Ok(fields)
    }

    fn add(&mut self, path: &str, value: &Value) {
        match value {
            Value::Object(object) => {
                for (key, value) in object.iter().map(|(key, value)| (key.as_str(), value)) {
                    let path = format!("{path}.{key}");
                    if key.starts_with("torpor_") || OF_PROCESSOR.contains(&key) {
                        continue;
                    }
                    if NATURAL.contains(&key) {
                        *self.natural.entry(path).or_default() += 1;
                    } else {
                        self.add(&path, value);
                    }
                }
            }
            Value::Array(items) => {
                let items = items.iter().filter(|item| !is_watched(item));
                items.for_each(|item| self.add(path, item));
            }
            value => self.values.entry(path.to_owned()).or_default().push(value.to_string()),
        }
    }

    fn differences(&self, other: &Fields) -> Vec<String> {
        let kinds = self.kinds.symmetric_difference(&other.kinds);
        let mut all: Vec<String> = kinds.map(|kind| format!("only one has {kind}.img")).collect();
        let paths: BTreeSet<&String> = self.values.keys().chain(other.values.keys()).collect();
        let is_one_of = |all: &[&str], path: &str| all.iter().any(|named| path.starts_with(named));
        let natural: BTreeSet<&String> = self.natural.keys().chain(other.natural.keys()).collect();
        for path in natural.into_iter().filter(|path| !is_one_of(NAMED, path)) {
            let [a, b] = [self, other].map(|fields| fields.natural.get(path).copied().unwrap_or(0));
            let is_shared = is_one_of(SHARED, path);
            if (is_shared && (a == 0) != (b == 0)) || (!is_shared && a != b) {
                all.push(format!("{path}: there {a} times / {b} times"));
            }
        }
        for path in paths.into_iter().filter(|path| !is_one_of(NAMED, path)) {
            let sorted = |fields: &Fields| {
                let mut values = fields.values.get(path).cloned().unwrap_or_default();
                values.sort();
                if is_one_of(SHARED, path) {
                    values.dedup();
                }
                values
            };
            let (a, b) = (sorted(self), sorted(other));
            if a != b {
                all.push(format!("{path}: {a:?} / {b:?}"));
            }
        }
        all
    }
}

/// Whether an entry of `files.img` is Torpor's for what is watched: the only ones with `O_PATH`.
fn is_watched(entry: &Value) -> bool {
    entry["reg"]["flags"].as_str().is_some_and(|flags| flags.contains("0x200000"))
}
