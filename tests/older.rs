//! What is another way on the kernel that Debian 12 comes with (Linux 6.1): the pages of a task are
//! found without `PAGEMAP_SCAN`, changes of them by soft-dirty bits. And CRIU (3.17) runs there, so that
//! it and Torpor restore what the other has dumped.
//!
//! To be run under that kernel, by `scripts/kernel/test`.

use anyhow::{Context, Result, anyhow, bail, ensure};
use libtest_mimic::{Arguments, Trial};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use torpor_tests::build;
use torpor_tests::case::{Case, Outcome};
use torpor_tests::program::{self, Mode};

/// Programs in modes that have to do with the differences.
const CASES: &[(Mode, &[&str])] = &[
    (
        Mode::Plain,
        &[
            "everything",
            "mem_many_areas",
            "mem_sparse",
            "mem_zero_pages",
            "membarrier",
            "thread_many",
        ],
    ),
    (
        Mode::Rounds,
        &[
            "mem_advice",
            "mem_cow",
            "mem_dontfork",
            "mem_growsdown",
            "mem_holes",
            "mem_madvised_free",
            "mem_mlockall",
            "mem_random_maps",
            "mem_remap_after",
            "mem_written_on",
            "mem_zero_pages",
            "proc_tree",
            "shm_anonymous",
        ],
    ),
    (Mode::Cow, &["mem_cow", "mem_holes", "mem_wipeonfork"]),
    (Mode::Lazy, &["mem_holes", "mem_wipeonfork"]),
    (Mode::Ns, &["mnt_overlay", "netns_loopback", "uts_names"]),
    (Mode::UserNs, &["cred_ids", "mem_protections"]),
];

/// Programs that CRIU and Torpor restore for each other. Left out are those whose shared memory without a
/// name shows: CRIU makes a memfd of it.
const EXCHANGED: &[&str] = &[
    "cred_user",
    "dir_cwd",
    "epoll",
    "fifo",
    "file_sharing",
    "futex_robust",
    "ghost_file",
    "inotify",
    "mem_holes",
    "pipe_full",
    "proc_sessions",
    "proc_zombies",
    "pty_pair",
    "rlimits",
    "sig_actions",
    "sig_in_handler",
    "sig_pending",
    "signalfd",
    "thread_many",
    "thread_tls",
    "timer_itimers",
    "timer_posix",
    "timerfd",
    "unix_abstract",
    "unix_pairs",
];

/// Random histories of memory (`crates/engine/tests/history`): what is in the images after rounds, also
/// when the players have run on, and a player that is restored lazily.
const HISTORIES: [&str; 3] = ["0", "1", "2.0"];

/// The zoo's program, which plays a case.
const ZOO: &str = env!("CARGO_BIN_EXE_zoo");

fn main() -> Result<ExitCode> {
    let arguments = Arguments::from_args();
    if !arguments.list {
        build::everything()?;
    }
    let mut trials = vec![Trial::test("check", || Ok(check()?))];
    for &(mode, names) in CASES {
        for name in names {
            let case = Case { program: program::find(name)?, mode };
            trials.push(Trial::test(case.name(), move || Ok(play(&case, Path::new(ZOO))?)));
        }
    }
    for name in EXCHANGED {
        let case = Case { program: program::find(name)?, mode: Mode::Plain };
        trials.push(Trial::test(format!("{name}::exchanged"), move || Ok(exchange(&case)?)));
    }
    for which in HISTORIES {
        trials.push(Trial::test(format!("histories::{which}"), move || Ok(histories(which)?)));
    }
    Ok(libtest_mimic::run(&arguments, trials).exit_code())
}

fn check() -> Result<()> {
    let out = Command::new(build::criu()?).arg("check").output()?;
    let said = String::from_utf8_lossy(&out.stdout);
    let expected = "Changes of memory are tracked by soft-dirty bits.\nLooks good.\n";
    ensure!(out.status.success() && said == expected, "{said}");
    Ok(())
}

fn play(case: &Case, zoo: &Path) -> Result<()> {
    match case.run(zoo, false)? {
        Outcome::Pass => Ok(()),
        other => bail!("{other}"),
    }
}

/// Plays a case twice: dumped by the one and restored by the other.
fn exchange(case: &Case) -> Result<()> {
    for command in ["dump", "restore"] {
        let zoo = with_criu(command)?;
        play(case, &zoo).map_err(|e| anyhow!("where the {command} is CRIU's: {e}"))?;
    }
    Ok(())
}

/// The zoo's program with `tests/older/criu` told which command is to be CRIU's.
fn with_criu(command: &str) -> Result<PathBuf> {
    let path = build::area()?.join(format!("zoo-where-criu-does-{command}"));
    let fresh = path.with_extension(format!("{:?}", std::thread::current().id()));
    std::fs::write(&fresh, format!("#!/bin/sh\nCRIU={command} exec {ZOO} \"$@\"\n"))?;
    std::fs::set_permissions(&fresh, std::fs::Permissions::from_mode(0o755))?;
    std::fs::rename(fresh, &path)?;
    Ok(path)
}

fn histories(which: &str) -> Result<()> {
    let program = std::env::var_os("TORPOR_HISTORIES").context("TORPOR_HISTORIES is not set")?;
    let engine = program::repository().join("crates/engine");
    let mut play = Command::new(program);
    let out = play.env("TORPOR_HISTORY", which).current_dir(engine).output()?;
    let said = String::from_utf8_lossy(&out.stdout);
    ensure!(out.status.success(), "{said}{}", String::from_utf8_lossy(&out.stderr));
    Ok(())
}
