//! Images that CRIU 4.2 wrote are restored, and those that Torpor writes of the same program are
//! like them: see `tests/criu-4.2`.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail, ensure};
use libtest_mimic::{Arguments, Failed, Trial};
use rustix::process::{Resource, Rlimit, getrlimit, setpriority_process, setrlimit};
use serde_json::Value;
use torpor_images::pagemap::Pagemap;
use torpor_images::proto::{CoreEntry, PstreeEntry};
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

/// Fields whose values differ by nature, and whose number of values does not.
const LISTS: &[&str] = &["mm_saved_auxv"];

/// The places of the signals 32 and 33 among the actions of an image, which has none for SIGKILL and SIGSTOP: glibc has its
/// own signals ignored in what posix_spawn(3) starts, and lets nobody change that.
const OF_GLIBC: Range<usize> = 29..31;

/// Fields that are there on some processors: not all have protection keys.
const OF_PROCESSOR: &[&str] = &["pkru"];

/// What docs/image-format.md names: where it says why Torpor's differ.
const NAMED: &[&str] = &[
    "core.thread_core.creds.no_new_privs",
    "ghost-file.size",
    "pagemap.code",
    "files.usk.backlog",
    "pstree.threads",
    "seccomp.seccomp_filters.flags",
];

/// Fields that Torpor has in fewer entries: those who share a directory share its entry. Their values are
/// the same.
const SHARED: &[&str] = &["files.id", "files.type", "files.reg."];

fn main() -> Result<ExitCode> {
    let arguments = Arguments::from_args();
    let mut trials = Vec::new();
    let place = tempfile::tempdir()?;
    if arguments.list {
        trials.extend(names().map(|name| Trial::test(name, || Ok(()))));
    } else {
        let world: &'static World = Box::leak(Box::new(World::new(place.path())?));
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

/// Limits that the kernel sets by how much memory a machine has.
const OF_MEMORY: [(Resource, u32); 2] =
    [(Resource::Nproc, libc::RLIMIT_NPROC), (Resource::Sigpending, libc::RLIMIT_SIGPENDING)];

/// Has what is started here and these images have the same limits: the lower ones of this machine and of the one that the
/// images are from.
fn meet_limits(images: &Path) -> Result<()> {
    let images = ImageDir::open(images)?;
    let tree: Vec<PstreeEntry> = images.read_all(kind::PSTREE, 0)?;
    for task in tree {
        let mut core: CoreEntry = images.read_one(kind::CORE, task.pid.into())?;
        let limits = core.tc.as_mut().and_then(|tc| tc.rlimits.as_mut());
        let Some(limits) = limits else { continue };
        for (resource, number) in OF_MEMORY {
            let there = limits.rlimits.get_mut(usize::try_from(number)?);
            let there = there.context("it has too few limits")?;
            let most = getrlimit(resource).maximum.unwrap_or(u64::MAX).min(there.max);
            (there.cur, there.max) = (most, most);
            setrlimit(resource, Rlimit { current: Some(most), maximum: Some(most) })?;
        }
        images.write_one(kind::CORE, task.pid.into(), &core)?;
    }
    Ok(())
}

fn names() -> impl Iterator<Item = String> {
    let cases = ["restored", "alike", "foreign", "former"];
    MODES.iter().flat_map(move |mode| cases.map(|case| format!("{mode}::{case}")))
}

/// What all cases need.
#[derive(Debug)]
struct World {
    dir: PathBuf,
    criu: PathBuf,
    /// The program that the images are of: their restore looks at its build id.
    program: PathBuf,
}

impl World {
    fn new(dir: &Path) -> Result<Self> {
        let home = repository().join("tests/criu-4.2");
        let program = dir.join("sleeper");
        let unpack = format!(
            "xz -dc {0}/sleeper.xz >{1} && chmod +x {1}",
            home.display(),
            program.display()
        );
        run(Command::new("sh").args(["-c", &unpack]))?;
        let images = dir.join("images");
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
        ensure!(is_the_one, "sleeper.xz is not the program that the images are of");
        MODES.iter().try_for_each(|mode| meet_limits(&images.join(mode)))?;
        // Nobody had made the program nice that the images are of.
        setpriority_process(None, 0)?;
        Ok(World { dir: dir.to_owned(), criu, program })
    }

    /// Dumps and restores the program, or restores images, in the directory that is returned.
    fn inside(&self, mode: &str, case: &str, images: Option<&Path>) -> Result<PathBuf> {
        let work = self.dir.join(format!("{mode}-{case}"));
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
        // The restore may write there.
        let images = self.dir.join("images").join(mode);
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
        let theirs = self.dir.join("images").join(mode);
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

/// The bit of `vma_entry.status` of private mappings of files.
const FILE_PRIVATE: u32 = 1 << 6;

/// How many pages of each kind of memory the images of a process have. The size of its stack, which is what its kernel
/// and its machine tell it, is left out.
fn pages_of_process(images: &ImageDir, id: u64) -> Result<BTreeMap<String, u64>> {
    let mm: torpor_images::proto::MmEntry = images.read_one(kind::MM, id)?;
    let mut counts = BTreeMap::new();
    for run in Pagemap::read(images, kind::PAGEMAP, id)?.runs {
        ensure!(run.present && !run.in_parent && run.relative.is_none(), "{run:?}");
        for at in (run.vaddr..).step_by(4096).take(usize::try_from(run.pages)?) {
            let vma = mm.vmas.iter().find(|vma| (vma.start..vma.end).contains(&at));
            let vma = vma.with_context(|| format!("mm-{id}: no mapping at {at:x}"))?;
            let is_stack = vma.flags & libc::MAP_GROWSDOWN.cast_unsigned() != 0;
            let is_code = vma.prot & libc::PROT_EXEC.cast_unsigned() != 0;
            let is_code = is_code && vma.status & FILE_PRIVATE != 0;
            let memory =
                if is_code { "code" } else { &format!("{:#x} {:#x}", vma.status, vma.prot) };
            let count = counts.entry(memory.to_owned()).or_default();
            *count = if is_stack { 1 } else { *count + 1 };
        }
    }
    Ok(counts)
}

/// The runs of pages that the images of an object of shared memory have.
fn pages_of_object(images: &ImageDir, id: u64) -> Result<String> {
    let runs = Pagemap::read(images, kind::SHMEM_PAGEMAP, id)?.runs;
    let runs = runs.iter().map(|run| (run.vaddr, run.pages, run.present, run.in_parent));
    Ok(format!("{:?}", runs.collect::<Vec<_>>()))
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
        let images = ImageDir::open(dir)?;
        for name in images.names()? {
            let known = Kind::of_file(&name);
            let Some((kind, id)) = known.filter(|_| name.ends_with(".img")) else { continue };
            let title =
                kind.file_name(0).trim_end_matches(".img").trim_end_matches("-0").to_owned();
            if kind == kind::PAGEMAP {
                for (memory, pages) in pages_of_process(&images, id)? {
                    fields.add(&format!("{title}.{memory}"), &pages.into());
                }
            } else if kind == kind::SHMEM_PAGEMAP {
                fields.add(&title, &pages_of_object(&images, id)?.into());
            } else if kind != kind::PAGES {
                let view = torpor_crit::View { pretty: true, sizes_only: false };
                let image = torpor_crit::decode_file(&dir.join(&name), view, &Default::default())?;
                fields.add(&title, &image["entries"]);
            }
            fields.kinds.insert(title);
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
                    if LISTS.contains(&key) {
                        let len = value.as_array().map_or(0, Vec::len);
                        self.add(&path, &len.into());
                    } else if NATURAL.contains(&key) {
                        *self.natural.entry(path).or_default() += 1;
                    } else {
                        self.add(&path, value);
                    }
                }
            }
            Value::Array(items) => {
                let left_out = if path.ends_with(".sigactions") { OF_GLIBC } else { 0..0 };
                for (at, item) in items.iter().enumerate() {
                    if !left_out.contains(&at) && !is_watched(item) {
                        self.add(path, item);
                    }
                }
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
