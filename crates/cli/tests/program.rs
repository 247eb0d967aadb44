//! The program under each of its names.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

fn program(name: &str, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_torpor"));
    command
        .arg0(name)
        .args(args)
        .env_remove("CRIU_CONFIG_FILE")
        .env("HOME", "/nonexistent")
        .stdin(Stdio::null());
    command
}

fn run(name: &str, args: &[&str]) -> Output {
    program(name, args).output().unwrap()
}

fn out(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn err(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn versions() {
    // Runtimes search this for the number.
    for args in [["--version"], ["-V"]] {
        let output = run("/usr/sbin/criu", &args);
        assert_eq!(out(&output), "Version: 4.2\n");
        assert!(output.status.success());
    }
    assert_eq!(
        out(&run("torpor", &["--version"])),
        format!("torpor {} (as criu: 4.2)\n", env!("CARGO_PKG_VERSION"))
    );
}

#[test]
fn help() {
    assert!(out(&run("torpor", &[])).contains("  image "));
    let output = run("criu", &["--help"]);
    assert!(output.status.success());
    assert!(out(&output).contains("--tcp-established") && out(&output).contains("pre-dump"));
    // No command is a mistake.
    assert_eq!(run("criu", &[]).status.code(), Some(1));
    for args in [&["dump", "--help"][..], &["help", "dump"], &["-h", "dump"]] {
        let output = run("torpor", args);
        assert!(output.status.success(), "{args:?}");
        assert!(out(&output).contains("Usage: torpor dump [OPTION...]"), "{}", out(&output));
        // Only what the command takes.
        assert!(out(&output).contains("--leave-running") && !out(&output).contains("--inherit-fd"));
    }
    for args in [["help", "--help"], ["help", "-h"]] {
        let output = run("torpor", &args);
        assert!(output.status.success() && out(&output).contains("Commands:"), "{args:?}");
    }
    // `-h` is brief, and says that there is more.
    for form in ["audit", "plan"] {
        let page = |word| out(&run("torpor", &["image", form, word]));
        let (brief, whole) = (page("-h"), page("--help"));
        assert!(brief.contains("see more with '--help'") && whole.len() > brief.len(), "{whole}");
        assert!(!whole.contains("see more with"), "{whole}");
    }
    let output = run("torpor", &["help", "cpuinfo", "check"]);
    assert!(out(&output).contains("Usage: torpor cpuinfo check"), "{}", out(&output));
    let nonsense = run("torpor", &["help", "nonsense"]);
    assert_eq!(nonsense.status.code(), Some(1));
    assert!(err(&nonsense).contains("there is no command nonsense"), "{}", err(&nonsense));
}

/// criu takes any option anywhere, but its help on a command has those that the command is about.
#[test]
fn the_help_of_criu_has_the_options_of_a_command() {
    let page = out(&run("criu", &["dump", "--help"]));
    assert!(page.contains("Usage: criu dump [OPTION...]"), "{page}");
    assert!(page.contains("--leave-running") && !page.contains("--inherit-fd"), "{page}");
    assert_eq!(page.matches("--tcp-established").count(), 1, "{page}");
    for word in ["--help", "-h"] {
        let output = run("criu", &["cpuinfo", word]);
        assert!(output.status.success() && out(&output).contains("check"), "{}", err(&output));
    }
    assert!(out(&run("criu", &["cpuinfo", "check", "--help"])).contains("--images-dir"));
}

/// Whoever reads may have seen enough, and a disk may be full: neither is a bug.
#[test]
fn what_cannot_be_printed_is_no_panic() {
    let dir = tempfile::tempdir().unwrap();
    let key = dir.path().join("key");
    assert!(run("torpor", &["key", "generate", key.to_str().unwrap()]).status.success());
    for (name, args) in [
        ("criu", &["--version"][..]),
        ("criu", &["check", "--feature", "list"]),
        ("torpor", &["key", "inspect", key.to_str().unwrap()]),
        ("torpor", &["check", "--feature", "list", "--json"]),
        ("torpor", &["completion", "bash"]),
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = program(name, args).stdout(writer).output().unwrap();
        assert_eq!((output.status.code(), err(&output)), (Some(1), String::new()), "{args:?}");
        let full = File::options().write(true).open("/dev/full").unwrap();
        let output = program(name, args).stdout(full).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        let expected = "Error: standard output: No space left on device (os error 28)\n";
        assert_eq!(err(&output), expected, "{args:?}");
    }
}

/// `benchmark compare` has a status of its own for what is worse.
#[test]
fn a_wrong_call_of_the_benchmark_is_no_regression() {
    for args in [&["benchmark", "compare", "one"][..], &["benchmark", "run", "--frobnicate"]] {
        let output = run("torpor", args);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", err(&output));
    }
}

/// Whichever way it is asked for, and nothing is done.
#[test]
fn every_command_that_is_listed_has_help() {
    let dir = tempfile::tempdir().unwrap();
    let asks = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_torpor"));
        let output = command.args(args).current_dir(dir.path()).output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", err(&output));
        out(&output)
    };
    let page = asks(&["--help"]);
    let listed = page.lines().skip_while(|line| *line != "Commands:").skip(1);
    let listed: Vec<&str> = listed.map_while(|line| line.split_whitespace().next()).collect();
    assert!(["dump", "cpuinfo", "migrate", "man"].iter().all(|name| listed.contains(name)));
    for name in listed.into_iter().filter(|&name| name != "help") {
        for args in [&["help", name][..], &[name, "--help"], &[name, "-h"]] {
            assert!(asks(args).contains(&format!("Usage: torpor {name}")), "{args:?}");
        }
    }
    assert!(asks(&["help", "queue", "submit"]).contains("Usage: torpor queue submit"));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

/// What each system is used by first shows how.
#[test]
fn help_has_examples() {
    for words in [
        "dump",
        "restore",
        "key generate",
        "migrate",
        "agent",
        "snapshot create",
        "snapshot run",
        "queue submit",
    ] {
        let args: Vec<&str> = ["help"].into_iter().chain(words.split(' ')).collect();
        let page = out(&run("torpor", &args));
        let examples = page.split_once("Examples:\n").map(|(_, examples)| examples);
        let line = format!("  torpor {words} ");
        assert!(examples.is_some_and(|examples| examples.contains(&line)), "{words}: {page}");
    }
}

#[test]
fn mistakes() {
    for (name, args, expected) in [
        ("criu", &["dump", "--frobnicate"][..], "Error: there is no option --frobnicate\n"),
        ("criu", &["frobnicate"], "Error: there is no command frobnicate\n"),
        ("criu", &["dump", "--manage-cgroups", "full"], "Error: dump takes no argument \"full\"\n"),
        ("criu", &["restore", "-S"], "Error: --restore-sibling needs --restore-detached\n"),
        ("criu", &["restore", "--exec-cmd"], "Error: --exec-cmd takes a command, after --\n"),
        ("criu", &["exec", "-t", "1"], "Error: exec is not supported: CRIU has deprecated it\n"),
        ("criu", &["dump", "-L", "/lib"], "Error: --libdir is not supported"),
        ("criu", &["restore", "-D", "/nonexistent"], "Error: images directory /nonexistent: "),
        ("criu", &["swrk"], "Error: swrk takes the number of a descriptor\n"),
        ("criu", &["swrk", "999"], "Error: swrk 999: Bad file descriptor"),
        (
            "criu",
            &["restore", "--policy-rule", "xx"],
            "Error: --policy-rule xx: it is no KEY=VALUE\n",
        ),
        ("criu", &["check", "--feature", "telepathy"], "Error: there is no feature telepathy\n"),
        ("torpor", &["key", "inspect", ""], "error: a value is required for '<KEY>...'"),
        ("torpor", &["check", "--tcp-close"], "Error: check has no option --tcp-close\n"),
        ("torpor", &["completion", "tcsh"], "error: invalid value 'tcsh' for '<SHELL>'\n"),
    ] {
        let output = run(name, args);
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        assert!(err(&output).starts_with(expected), "{args:?}: {}", err(&output));
    }
    // criu's scripts give the same options to every command.
    assert!(run("criu", &["check", "--feature", "list", "--tcp-close"]).status.success());
}

#[test]
fn a_dump_without_a_task() {
    let dir = tempfile::tempdir().unwrap();
    let images = dir.path().to_str().unwrap();
    let output = run("criu", &["dump", "-D", images, "-o", "dump.log", "-v4"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        err(&output).starts_with("Error: no task to dump is given\nHint: "),
        "{}",
        err(&output)
    );
    let log = fs::read_to_string(dir.path().join("dump.log")).unwrap();
    let first = log.lines().next().unwrap();
    // "(00.000123) Version: 4.2 …", and more seconds on a busy machine.
    let (time, rest) = first.split_once(' ').unwrap();
    let form: String = time.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
    assert_eq!(form, "(00.000000)", "{first}");
    assert!(rest.starts_with("Version: 4.2"), "{first}");
}

#[test]
fn errors_stand_in_the_log_as_scripts_expect_them() {
    let dir = tempfile::tempdir().unwrap();
    let images = dir.path().to_str().unwrap();
    let output = run("criu", &["restore", "-D", images, "-o", "restore.log"]);
    assert_eq!(output.status.code(), Some(1));
    let log = fs::read_to_string(dir.path().join("restore.log")).unwrap();
    // Level 2: no times, no information.
    assert!(log.lines().all(|line| line.starts_with("Error (")), "{log}");
    assert!(log.ends_with("Restoring FAILED.\n"), "{log}");
}

#[test]
fn logs_go_to_the_work_directory() {
    let (images, work) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (i, w) = (images.path().to_str().unwrap(), work.path().to_str().unwrap());
    run("criu", &["restore", "-D", i, "-W", w, "-o", "restore.log"]);
    assert!(work.path().join("restore.log").exists());
    assert!(!images.path().join("restore.log").exists());
    // What is not there is not made up.
    let output = run("criu", &["restore", "-D", i, "-W", "/nonexistent"]);
    assert!(err(&output).starts_with("Error: work directory /nonexistent"), "{}", err(&output));
}

#[test]
fn logs_go_to_special_places() {
    let dir = tempfile::tempdir().unwrap();
    let images = dir.path().to_str().unwrap();
    for place in ["-", "/dev/stdout"] {
        let output = run("criu", &["restore", "-D", images, "-o", place]);
        assert!(out(&output).ends_with("Restoring FAILED.\n"), "{place}: {}", err(&output));
    }
    // A link in a directory that others may write to is not followed.
    std::os::unix::fs::symlink("/dev/stdout", dir.path().join("log")).unwrap();
    let output = run("criu", &["restore", "-D", images, "-o", "log"]);
    assert!(err(&output).starts_with("Error: log file log: "), "{}", err(&output));
}

#[test]
fn configuration_files() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    fs::create_dir(path(".criu")).unwrap();
    fs::write(path(".criu/default.conf"), "log-file home.log\n").unwrap();
    fs::write(path("env.conf"), "log-file env.log\n").unwrap();
    fs::write(path("named.conf"), "log-file named.log\n").unwrap();
    let named = path("named.conf");
    let named = named.to_str().unwrap();
    let logs_to = |args: &[&str], env: bool| -> String {
        let images = tempfile::tempdir().unwrap();
        let mut command = program("criu", &["restore", "-D", images.path().to_str().unwrap()]);
        command.args(args).env("HOME", dir.path());
        if env {
            command.env("CRIU_CONFIG_FILE", path("env.conf"));
        }
        command.output().unwrap();
        let found = fs::read_dir(images.path()).unwrap().map(|e| e.unwrap().file_name());
        found.filter_map(|name| name.into_string().ok()).filter(|n| n.ends_with(".log")).collect()
    };
    assert_eq!(logs_to(&[], false), "home.log");
    assert_eq!(logs_to(&[], true), "env.log");
    assert_eq!(logs_to(&["--config", named], true), "named.log");
    assert_eq!(logs_to(&["--config", named, "-o", "x.log"], true), "x.log");
    assert_eq!(logs_to(&["--no-default-config"], false), "");
}

#[test]
fn checks() {
    let output = run("criu", &["check", "--feature", "pidfd_store", "--feature", "mnt_id"]);
    let said = "pidfd_store is supported\nmnt_id is supported\n";
    assert_eq!((out(&output).as_str(), output.status.code()), (said, Some(0)));
    // Kernels are built with it or without.
    let output = run("criu", &["check", "--feature", "apparmor_stacking"]);
    match output.status.code() {
        Some(0) => assert_eq!(out(&output), "apparmor_stacking is supported\n"),
        code => {
            assert_eq!(code, Some(1));
            assert!(err(&output).starts_with("Error: apparmor_stacking: "), "{}", err(&output));
        }
    }
    let list = out(&run("criu", &["check", "--feature", "list"]));
    for name in ["mem_dirty_track", "uffd-noncoop", "nsid", "get_rseq_conf"] {
        assert!(list.split_whitespace().any(|word| word == name), "{name}");
    }
    let names = out(&run("torpor", &["check", "--feature", "list", "--json"]));
    let names: Vec<String> = serde_json::from_str(&names).unwrap();
    assert_eq!(names.join(" "), list.trim_end());
}

#[test]
fn manual_pages() {
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("man");
    assert!(run("torpor", &["man", to.to_str().unwrap()]).status.success());
    let page = |name: &str| fs::read_to_string(to.join(name)).unwrap();
    assert!(page("torpor.1").contains("configuration files"));
    for name in ["torpor-image.1", "torpor-image-show.1", "torpor-completion.1"] {
        assert!(page(name).contains("SYNOPSIS"), "{name}");
    }
    assert!(page("torpor-restore.1").contains("restore \\-\\-images\\-dir checkpoint"));
    assert!(page("torpor-dump.1").contains("leave\\-running"));
    assert!(page("torpor-cpuinfo-check.1").contains("cpuinfo"));
    for opt in torpor_cli::options::Opt::all() {
        assert!(page("criu.8").contains(&opt.long.replace('-', "\\-")), "{}", opt.long);
    }
    // groff has nothing to complain about.
    for file in fs::read_dir(&to).unwrap() {
        let file = file.unwrap().path();
        if Path::new("/usr/bin/groff").exists() {
            let args = [OsStr::new("-man"), OsStr::new("-z"), OsStr::new("-ww"), file.as_os_str()];
            let output = Command::new("groff").args(args).output().unwrap();
            assert_eq!(err(&output), "", "{}", file.display());
        }
    }
}

#[test]
fn completions() {
    for shell in ["bash", "zsh", "fish"] {
        let output = run("torpor", &["completion", shell]);
        assert!(output.status.success());
        for word in ["torpor", "criu", "tcp-established", "completion"] {
            assert!(out(&output).contains(word), "{shell}: {word}");
        }
    }
    let script = out(&run("torpor", &["completion", "bash"]));
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(&file, script).unwrap();
    assert!(Command::new("bash").arg("-n").arg(file.path()).status().unwrap().success());
}

#[test]
fn images() {
    let dir = tempfile::tempdir().unwrap();
    let output = run("torpor", &["image", "show", dir.path().join("x.img").to_str().unwrap()]);
    assert!(!output.status.success() && err(&output).contains("x.img"), "{}", err(&output));
    assert!(out(&run("torpor", &["image", "--help"])).contains("Usage: torpor image"));
    let output = run("crit", &["show", "/nonexistent"]);
    assert!(err(&output).starts_with("crit: "), "{}", err(&output));
}

#[test]
fn processors() {
    let dir = tempfile::tempdir().unwrap();
    let images = dir.path().to_str().unwrap();
    let output = run("criu", &["cpuinfo", "check", "-D", images]);
    assert_eq!(output.status.code(), Some(1));
    assert!(err(&output).contains("cpuinfo.img"), "{}", err(&output));
    assert!(run("criu", &["cpuinfo", "dump", "-D", images]).status.success());
    for cap in ["--cpu-cap", "--cpu-cap=fpu", "--cpu-cap=none", "-v4"] {
        let output = run("criu", &["cpuinfo", "check", cap, "-D", images]);
        assert!(output.status.success(), "{}", err(&output));
    }
    let shown = out(&run("crit", &["show", dir.path().join("cpuinfo.img").to_str().unwrap()]));
    assert!(shown.contains("\"vendor_id\""), "{shown}");
    fs::write(dir.path().join("cpuinfo.img"), "nonsense").unwrap();
    let output = run("criu", &["cpuinfo", "check", "-D", images]);
    assert_eq!(output.status.code(), Some(1));
}

/// As of one image, so of all in a directory.
#[test]
fn what_was_saved_is_told_of_a_directory() {
    let dir = tempfile::tempdir().unwrap();
    let json = dir.path().join("json");
    fs::write(&json, r#"{"magic":"PSTREE","entries":[]}"#).unwrap();
    let image = dir.path().join("pstree.img");
    let words = ["image", "encode", "-i", json.to_str().unwrap(), "-o", image.to_str().unwrap()];
    assert!(run("torpor", &words).status.success());
    let output = run("torpor", &["image", "info", dir.path().to_str().unwrap()]);
    assert!(output.status.success(), "{}", err(&output));
    let said: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(said, serde_json::json!({"pstree.img": {"magic": "PSTREE", "count": 0}}));
}
