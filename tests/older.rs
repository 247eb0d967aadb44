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
            "refuse_port_level",
            "refuse_ports",
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

/// Programs in containers that Torpor restores from CRIU's images. Not the other way round: of a container in the
/// cgroup of whoever dumps it, CRIU makes no cgroup namespace.
const CONTAINERS_OF_CRIU: &[&str] = &[
    "everything",
    "ghost_tmpfs",
    "mnt_bind_chain",
    "mnt_binds",
    "mnt_overlay",
    "netns_loopback",
    "sysv_sem",
    "tcp_pair",
    "tcp_queues",
    "udp",
    "unix_path_gone",
    "uts_names",
];

/// Who puts a container of runc's to sleep, and who wakes it up.
const RUNC: [[&str; 2]; 3] = [["criu", "torpor"], ["torpor", "criu"], ["torpor", "torpor"]];

/// The ways of memory from the one to the other (`tests/older/memory`).
const WAYS: [&str; 4] = ["rounds", "server", "lazy", "migration"];

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
    for name in CONTAINERS_OF_CRIU {
        let case = Case { program: program::find(name)?, mode: Mode::Ns };
        let play = move || Ok(play(&case, &with_criu("dump")?)?);
        trials.push(Trial::test(format!("{name}::container_of_criu"), play));
    }
    for [dump, restore] in RUNC {
        let name = format!("runc::{dump}_{restore}");
        trials.push(Trial::test(name, move || Ok(script("container", &[dump, restore])?)));
    }
    for way in WAYS {
        for [first, second] in [["criu", "torpor"], ["torpor", "criu"]] {
            let name = format!("memory::{way}::{first}_{second}");
            trials.push(Trial::test(name, move || Ok(script("memory", &[way, first, second])?)));
        }
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
        Outcome::Pass | Outcome::Refused(_) => Ok(()),
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

/// Runs a script of `tests/older`.
fn script(name: &str, arguments: &[&str]) -> Result<()> {
    let script = program::repository().join("tests/older").join(name);
    let out = Command::new(script).args(arguments).output()?;
    let said = [out.stdout, out.stderr].concat();
    ensure!(out.status.success(), "{}", String::from_utf8_lossy(&said));
    Ok(())
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
