//! Each option, as it is written, and what it sets.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

use torpor_cli::options::{Command, Opt, OptValue, Set, Settings, parse};
use torpor_engine::options::{
    CgroupMode, CgroupRoot, CpuCap, FileValidation, JoinNsKind, NetworkLock, PreDumpMode,
};
use torpor_images::compress::Compression;
use torpor_seal::Suite;

fn args(line: &str) -> Vec<OsString> {
    line.split_whitespace().map(OsString::from).collect()
}

fn settings(line: &str) -> Settings {
    let mut settings = Settings::default();
    parse(args(line)).unwrap().apply(&mut settings).unwrap();
    settings
}

fn error_or_none(line: &str) -> Option<String> {
    let done = parse(args(line)).and_then(|found| found.apply(&mut Settings::default()));
    done.err().map(|error| error.to_string())
}

fn error(line: &str) -> String {
    error_or_none(line).unwrap()
}

type Row = (&'static str, fn(&Settings) -> bool);

fn is(path: &Option<std::path::PathBuf>, text: &str) -> bool {
    path.as_deref() == Some(Path::new(text))
}

fn external(settings: &Settings) -> Vec<String> {
    settings.engine.given.external.iter().map(ToString::to_string).collect()
}

/// Every option at least once, in each of its spellings.
const ROWS: &[Row] = &[
    ("-D img", |s| s.engine.images_dir == Path::new("img")),
    ("-Dimg", |s| s.engine.images_dir == Path::new("img")),
    ("--images-dir img", |s| s.engine.images_dir == Path::new("img")),
    ("--images-dir=img", |s| s.engine.images_dir == Path::new("img")),
    ("-W work", |s| is(&s.engine.work_dir, "work")),
    ("--work-dir work", |s| is(&s.engine.work_dir, "work")),
    ("--pidfile p", |s| is(&s.pidfile, "p")),
    ("--action-script a --action-script b", |s| s.action_scripts == ["a", "b"]),
    ("--close 7 --close 8", |s| s.close_fds == [7, 8]),
    ("--status-fd 5", |s| s.status_fd == Some(5)),
    ("--display-stats", |s| s.display_stats),
    ("--unprivileged", |s| s.unprivileged),
    ("--deprecated", |s| s.verbosity == 2),
    ("-h", |s| s.help),
    ("--help", |s| s.help),
    ("-V", |s| s.version),
    ("--version", |s| s.version),
    ("-t 12", |s| s.engine.pid == 12),
    ("-t12", |s| s.engine.pid == 12),
    ("--tree 12", |s| s.engine.pid == 12),
    ("-R", |s| s.engine.stop.leave_running),
    ("--leave-running", |s| s.engine.stop.leave_running),
    ("-s", |s| s.engine.leave_stopped),
    ("--leave-stopped", |s| s.engine.leave_stopped),
    ("-d", |s| s.detached && s.daemon()),
    ("--restore-detached", |s| s.detached),
    ("--daemon", |s| s.daemon()),
    ("-S", |s| s.engine.birth.sibling),
    ("--restore-sibling", |s| s.engine.birth.sibling),
    ("--exec-cmd", |s| s.exec_cmd),
    ("-j", |s| s.engine.shell_job),
    ("--shell-job", |s| s.engine.shell_job),
    ("--timeout 3", |s| s.engine.stop.timeout == Duration::from_secs(3)),
    ("--cpu-cap", |s| s.engine.cpu_cap == Some(CpuCap::ALL)),
    ("--cpu-cap=none", |s| s.engine.cpu_cap == Some(CpuCap::NONE)),
    ("--cpu-cap=fpu,ins", |s| {
        s.engine.cpu_cap == Some(CpuCap { fpu: true, cpu: false, ins: true })
    }),
    ("--external mnt[/a]:b --external net[7]:n", |s| external(s) == ["mnt[/a]:b", "net[7]:n"]),
    ("--fuse file[18:5a]:user_id=0:/mnt", |s| {
        s.fuse[0].to_string() == "file[18:5a]:user_id=0:/mnt"
    }),
    ("--inherit-fd fd[3]:pipe:[45]", |s| s.inherit_fd == [(3, "pipe:[45]".to_owned())]),
    ("-M /a:b", |s| external(s) == ["mnt[/a]:b"]),
    ("--ext-mount-map auto", |s| external(s) == ["mnt[]:"]),
    ("--enable-external-sharing", |s| s.external_sharing),
    ("--enable-external-masters", |s| s.external_masters),
    ("--veth-pair eth0=veth1@br0", |s| external(s) == ["veth[eth0]:veth1@br0"]),
    ("-x", |s| s.engine.files.ext_unix_sk),
    ("-x77", |s| external(s) == ["unix[77]"]),
    ("-x=77", |s| external(s) == ["unix[77]"]),
    ("--ext-unix-sk", |s| s.engine.files.ext_unix_sk),
    ("--ext-unix-sk=77", |s| external(s) == ["unix[77]"]),
    ("-l", |s| s.engine.files.locks),
    ("--file-locks", |s| s.engine.files.locks),
    ("--link-remap", |s| s.engine.files.link_remap),
    ("--ghost-limit 4096", |s| s.engine.files.ghost_limit == 4096),
    ("--ghost-limit 3K", |s| s.engine.files.ghost_limit == 3 << 10),
    ("--ghost-limit 3M", |s| s.engine.files.ghost_limit == 3 << 20),
    ("--ghost-limit=1G", |s| s.engine.files.ghost_limit == 1 << 30),
    ("--ghost-fiemap", |s| s.engine.files.ghost_fiemap),
    ("--threads 3", |s| s.engine.memory.workers() == 3),
    ("--evasive-devices", |s| s.engine.files.evasive_devices),
    ("--force-irmap", |s| s.engine.files.force_irmap),
    ("--irmap-scan-path /a --irmap-scan-path /b", |s| {
        s.engine.files.irmap_scan_paths == [Path::new("/a"), Path::new("/b")]
    }),
    ("--file-validation filesize", |s| s.engine.files.validation == FileValidation::FileSize),
    ("--file-validation buildid", |s| s.engine.files.validation == FileValidation::BuildId),
    ("--skip-file-rwx-check", |s| s.engine.files.skip_rwx_check),
    ("--strict", |s| s.engine.strict),
    ("--wake-frozen", |s| s.engine.birth.wake_frozen),
    ("--rounds s", |s| is(&s.rounds, "s")),
    ("--allow-uprobes", |s| s.engine.stop.allow_uprobes),
    ("--orphan-pts-master", |s| s.engine.files.orphan_pts_master),
    ("--tcp-established", |s| s.engine.network.tcp_established),
    ("--tcp-close", |s| s.engine.network.tcp_close),
    ("--close-outside", |s| s.engine.network.close_outside),
    ("--skip-in-flight", |s| s.engine.network.skip_in_flight),
    ("--network-lock nftables", |s| s.engine.network.lock == NetworkLock::Nftables),
    ("--network-lock skip", |s| s.engine.network.lock == NetworkLock::Skip),
    ("-r /root", |s| is(&s.engine.mounts.root, "/root")),
    ("--root /root", |s| is(&s.engine.mounts.root, "/root")),
    ("-J net:12", |s| {
        let ns = &s.engine.given.join_ns[0];
        ns.kind == JoinNsKind::Net && ns.file == Path::new("/proc/12/ns/net")
    }),
    ("--join-ns user:12,1,2", |s| s.engine.given.join_ns[0].ids == Some((1, 2))),
    ("--empty-ns net", |s| s.engine.network.empty),
    ("--empty-ns net --empty-ns none", |s| !s.engine.network.empty),
    ("--skip-mnt /a", |s| s.engine.mounts.skip == [Path::new("/a")]),
    ("--enable-fs a,b --enable-fs all", |s| s.engine.mounts.enable_fs == ["a", "b", "all"]),
    ("--store-tmpfs", |s| s.engine.mounts.stores_files),
    ("--mntns-compat-mode", |s| s.engine.mounts.compat_mode),
    ("--json", |s| s.json),
    ("--lsm-profile apparmor:x", |s| s.engine.birth.lsm_profile.as_deref() == Some("apparmor:x")),
    ("--lsm-mount-context c", |s| s.engine.mounts.lsm_context.as_deref() == Some("c")),
    ("--weak-sysctls", |s| s.engine.network.weak_sysctls),
    ("--manage-cgroups", |s| s.engine.cgroups.manage == CgroupMode::Soft),
    ("--manage-cgroups=full", |s| s.engine.cgroups.manage == CgroupMode::Full),
    ("--manage-cgroups=ignore", |s| s.engine.cgroups.manage == CgroupMode::Ignore),
    ("--cgroup-root cpu:/a", |s| {
        s.engine.cgroups.roots
            == [CgroupRoot { controller: Some("cpu".to_owned()), path: "/a".to_owned() }]
    }),
    ("--cgroup-props x", |s| s.engine.cgroups.props.as_deref() == Some("x")),
    ("--cgroup-props-file f", |s| is(&s.engine.cgroups.props_file, "f")),
    ("--cgroup-dump-controller cpu", |s| s.engine.cgroups.controllers == ["cpu"]),
    ("--cgroup-yard y", |s| is(&s.engine.cgroups.yard, "y")),
    ("--freeze-cgroup g", |s| is(&s.engine.cgroups.freeze, "g")),
    ("--cow", |s| s.engine.memory.cow),
    ("--dedup-relatives", |s| s.engine.memory.dedup_relatives),
    ("--wipe-on-fork", |s| s.engine.memory.wipe_on_fork),
    ("--compress lz4", |s| s.engine.memory.compress == Some(Compression::LZ4)),
    ("--compress=zstd:19", |s| s.engine.memory.compress == Some(Compression::Zstd(19))),
    ("--track-mem", |s| s.engine.memory.track),
    ("--prev-images-dir ../1", |s| is(&s.engine.memory.parent, "../1")),
    ("--auto-dedup", |s| s.engine.memory.auto_dedup),
    ("--pre-dump-mode read", |s| s.engine.memory.pre_dump_mode == PreDumpMode::Read),
    ("--pre-dump-mode splice", |s| s.engine.memory.pre_dump_mode == PreDumpMode::Splice),
    ("--lazy-pages", |s| s.engine.memory.lazy),
    ("--record-working-set", |s| {
        s.engine.memory.record_working_set == Some(Duration::from_secs(10))
    }),
    ("--record-working-set=3", |s| {
        s.engine.memory.record_working_set == Some(Duration::from_secs(3))
    }),
    ("--keep-template f", |s| is(&s.keep_template, "f")),
    ("--template f", |s| is(&s.engine.memory.template, "f")),
    ("--stream", |s| s.engine.stream),
    ("--page-server", |s| s.use_page_server),
    ("--address 10.0.0.1", |s| s.address.as_deref() == Some("10.0.0.1")),
    ("--port 99", |s| s.page_server.port == 99),
    ("--ps-socket 4", |s| s.ps_socket == Some(4)),
    ("--lazy-socket 5", |s| s.lazy_socket == Some(5)),
    ("--ps-compress", |s| s.page_server.compress),
    ("--tls", |s| s.tls),
    ("--tls-cacert f", |s| is(&s.tls_files.ca_cert, "f")),
    ("--tls-cacrl f", |s| is(&s.tls_files.ca_crl, "f")),
    ("--tls-cert f", |s| is(&s.tls_files.cert, "f")),
    ("--tls-key f", |s| is(&s.tls_files.key, "f")),
    ("--tls-no-cn-verify", |s| s.tls_files.no_cn_verify),
    ("--extra", |s| s.check_extra && !s.check_experimental),
    ("--experimental", |s| s.check_experimental && !s.check_extra),
    ("--all", |s| s.check_extra && s.check_experimental),
    ("--feature uffd", |s| s.features == ["uffd"]),
    ("-o log", |s| is(&s.log_file, "log")),
    ("--log-file log", |s| is(&s.log_file, "log")),
    ("", |s| s.verbosity == 2),
    ("-v", |s| s.verbosity == 3),
    ("-vv", |s| s.verbosity == 4),
    ("-v -v", |s| s.verbosity == 4),
    ("-vvvv", |s| s.verbosity == 6),
    ("-v4", |s| s.verbosity == 4),
    ("-v0", |s| s.verbosity == 0),
    ("-verbosity=0", |s| s.verbosity == 0),
    ("--verbosity", |s| s.verbosity == 3),
    ("--verbosity=1", |s| s.verbosity == 1),
    ("--config f", |s| is(&s.config, "f")),
    ("", |s| s.seal.encrypt.is_none()),
    ("--encrypt", |s| s.seal.encrypt == Some(true)),
    ("-e --no-encrypt", |s| s.seal.encrypt == Some(false)),
    ("-e", |s| s.seal.encrypt == Some(true)),
    ("--recipient age1x --recipient f", |s| s.seal.recipients == ["age1x", "f"]),
    ("--identity f --identity g", |s| s.seal.identities == ["f", "g"]),
    ("--suite aes-256-xts+hmac-sha256", |s| s.seal.suite == Suite::Aes256XtsHmacSha256),
    ("--sign-key f", |s| is(&s.seal.sign_key, "f")),
    ("--sign-cert f", |s| is(&s.seal.sign_cert, "f")),
    ("--trust f --trust g", |s| s.seal.trust == [Path::new("f"), Path::new("g")]),
    ("--crl f", |s| s.seal.crl == [Path::new("f")]),
    ("--require-signature", |s| s.seal.require_signature),
    ("--policy f", |s| is(&s.policy, "f")),
    ("--policy-rule a=1", |s| s.policy_rules == ["a=1"]),
    ("--host-key f", |s| is(&s.engine.trust.host_key, "f")),
    ("--host-key none", |s| s.engine.trust.host_key.is_none()),
    ("--files-as 7:8", |s| s.engine.trust.files_as == Some((7, 8, vec![]))),
    ("--files-as 7:8,9,10", |s| s.engine.trust.files_as == Some((7, 8, vec![9, 10]))),
    ("--no-default-config", |s| !s.default_config),
    // Negation, and short forms run together.
    ("--shell-job --no-shell-job", |s| !s.engine.shell_job),
    ("-jlR", |s| s.engine.shell_job && s.engine.files.locks && s.engine.stop.leave_running),
    ("-jt 5 -Rv4", |s| s.engine.pid == 5 && s.engine.stop.leave_running && s.verbosity == 4),
    // Names cut short.
    ("--tcp-e", |s| s.engine.network.tcp_established),
    ("--images=d", |s| s.engine.images_dir == Path::new("d")),
    ("--no-tcp-est --shell", |s| !s.engine.network.tcp_established && s.engine.shell_job),
];

#[test]
fn rows() {
    for (line, holds) in ROWS {
        assert!(holds(&settings(line)), "{line:?}: {:#?}", settings(line));
    }
}

#[test]
fn no_option_is_without_a_row() {
    for opt in Opt::all().filter(|opt| !matches!(opt.set, Set::Refused(..))) {
        let long = format!("--{}", opt.long);
        let used = |word: &str| word == long || word.starts_with(&format!("{long}="));
        let rows = ROWS.iter().filter(|(line, _)| line.split_whitespace().any(used));
        assert_ne!(rows.count(), 0, "{long} is not tested");
        if let Some(letter) = opt.short {
            let short = format!("-{letter}");
            let mut lines = ROWS.iter().map(|(line, _)| line);
            assert!(lines.any(|line| line.starts_with(&short)), "{short} is not tested");
        }
    }
}

#[test]
fn names_and_letters_are_unique() {
    let options: Vec<_> = Opt::all().collect();
    for (i, a) in options.iter().enumerate() {
        for b in &options[i + 1..] {
            assert_ne!(a.long, b.long);
            let shared = a.short.is_some() && a.short == b.short;
            assert!(!shared || b.long == "daemon", "--{} and --{}", a.long, b.long);
        }
        assert!(!a.help.is_empty() && !a.help.ends_with('.'), "{}", a.long);
        assert_ne!(a.commands, 0, "{}", a.long);
    }
}

/// What an option of CRIU takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// Nothing.
    Flag,
    /// Nothing, and `--no-` before its name turns it off.
    Switch,
    /// An argument.
    Value,
    /// An argument, glued on, or nothing.
    Optional,
}
use Form::{Flag, Optional, Switch, Value};

/// CRIU's options, by its manual and help: the name, the letter, the form.
const CRIU: &[(&str, Option<char>, Form)] = &[
    ("tree", Some('t'), Value),
    ("restore-detached", Some('d'), Switch),
    ("restore-sibling", Some('S'), Switch),
    ("leave-stopped", Some('s'), Flag),
    ("leave-running", Some('R'), Flag),
    ("images-dir", Some('D'), Value),
    ("pidfile", None, Value),
    ("work-dir", Some('W'), Value),
    ("cpu-cap", None, Optional),
    ("exec-cmd", None, Flag),
    ("freeze-cgroup", None, Value),
    ("weak-sysctls", None, Switch),
    ("lazy-pages", None, Flag),
    ("stream", None, Switch),
    ("mntns-compat-mode", None, Switch),
    ("network-lock", None, Value),
    ("external", None, Value),
    ("tcp-established", None, Switch),
    ("skip-in-flight", None, Switch),
    ("tcp-close", None, Switch),
    ("root", Some('r'), Value),
    ("evasive-devices", None, Switch),
    ("link-remap", None, Switch),
    ("ghost-limit", None, Value),
    ("action-script", None, Value),
    ("shell-job", Some('j'), Switch),
    ("file-locks", Some('l'), Switch),
    ("libdir", Some('L'), Value),
    ("timeout", None, Value),
    ("force-irmap", None, Switch),
    ("irmap-scan-path", None, Value),
    ("manage-cgroups", None, Optional),
    ("cgroup-root", None, Value),
    ("cgroup-props", None, Value),
    ("cgroup-props-file", None, Value),
    ("cgroup-dump-controller", None, Value),
    ("cgroup-yard", None, Value),
    ("lsm-profile", None, Value),
    ("lsm-mount-context", None, Value),
    ("skip-mnt", None, Value),
    ("enable-fs", None, Value),
    ("inherit-fd", None, Value),
    ("empty-ns", None, Value),
    ("join-ns", Some('J'), Value),
    ("file-validation", None, Value),
    ("extra", None, Switch),
    ("experimental", None, Switch),
    ("all", None, Flag),
    ("feature", None, Value),
    ("log-file", Some('o'), Value),
    ("log-pid", None, Switch),
    ("verbosity", Some('v'), Optional),
    ("display-stats", None, Switch),
    ("json", None, Switch),
    ("track-mem", None, Switch),
    ("prev-images-dir", None, Value),
    ("page-server", None, Switch),
    ("auto-dedup", None, Switch),
    ("pre-dump-mode", None, Value),
    ("address", None, Value),
    ("port", None, Value),
    ("ps-socket", None, Value),
    ("ps-compress", None, Switch),
    ("daemon", Some('d'), Switch),
    ("status-fd", None, Value),
    ("tls-cacert", None, Value),
    ("tls-cacrl", None, Value),
    ("tls-cert", None, Value),
    ("tls-key", None, Value),
    ("tls", None, Switch),
    ("tls-no-cn-verify", None, Flag),
    ("config", None, Value),
    ("no-default-config", None, Flag),
    ("help", Some('h'), Flag),
    ("version", Some('V'), Flag),
    ("close", None, Value),
    ("ext-unix-sk", Some('x'), Optional),
    ("ext-mount-map", Some('M'), Value),
    ("enable-external-sharing", None, Flag),
    ("enable-external-masters", None, Flag),
    ("veth-pair", None, Value),
    ("orphan-pts-master", None, Switch),
    ("unprivileged", None, Switch),
    ("ghost-fiemap", None, Flag),
    ("skip-file-rwx-check", None, Flag),
    ("allow-uprobes", None, Flag),
    ("deprecated", None, Switch),
];

#[test]
fn every_option_of_criu_is_there_in_the_same_form() {
    for &(name, letter, form) in CRIU {
        let opt = Opt::find(name).unwrap_or_else(|| panic!("--{name}"));
        assert_eq!(opt.short, letter, "--{name}");
        let takes = match opt.argument() {
            None => Flag,
            Some((_, false)) => Value,
            Some((_, true)) => Optional,
        };
        assert_eq!(takes, if form == Switch { Flag } else { form }, "--{name}");
        if form == Switch {
            assert_eq!(error_or_none(&format!("--no-{name}")), None);
        }
    }
}

#[test]
fn defaults_are_those_of_criu() {
    let settings = Settings::default();
    let engine = &settings.engine;
    assert_eq!(engine.images_dir, Path::new("."));
    assert_eq!(engine.files.ghost_limit, 1 << 20);
    assert_eq!(engine.stop.timeout, Duration::from_secs(10));
    // CRIU's is iptables, which leaves its tables behind; it reads in the images which one it was.
    assert_eq!(engine.network.lock, NetworkLock::Any);
    assert_eq!(engine.files.validation, FileValidation::BuildId);
    assert_eq!(engine.memory.pre_dump_mode, PreDumpMode::Splice);
    assert_eq!(engine.cgroups.manage, CgroupMode::Ignore);
    // Untold: what the floating point unit and the instructions need.
    assert_eq!(engine.cpu_cap, None);
    assert_eq!(settings.verbosity, 2);
    assert!(settings.default_config);
}

#[test]
fn what_is_not_supported_is_named() {
    for opt in Opt::all() {
        if let Set::Refused(..) = opt.set {
            let error = opt.apply(&mut Settings::default(), OptValue::None).unwrap_err();
            assert!(error.contains(opt.long) && error.contains("not supported"), "{error}");
        }
    }
    assert!(error("-L /lib").contains("--libdir is not supported"));
    assert!(error("--log-pid").contains("--log-pid is not supported"));
}

#[test]
fn mistakes_are_named() {
    for (line, expected) in [
        ("--frobnicate", "there is no option --frobnicate"),
        ("--leave-runing", "there is no option --leave-runing; did you mean --leave-running?"),
        ("-Z", "there is no option -Z"),
        ("-t", "option --tree needs an argument: PID"),
        ("--images-dir", "option --images-dir needs an argument: DIR"),
        ("--shell-job=yes", "option --shell-job takes no argument"),
        ("--tcp", "--tcp may be any of --tcp-established, --tcp-close"),
        ("--tree x", "--tree x: it is not a number in range"),
        ("--port 65536", "--port 65536: it is not a number in range"),
        ("--ghost-limit 1T", "--ghost-limit 1T: it is not a size"),
        ("--threads 0", "--threads 0: it is not a number in range"),
        ("--ghost-limit 99999999999G", "--ghost-limit 99999999999G: it is not a size"),
        (
            "--external gpu[0]",
            "--external gpu[0]: external resources of type \"gpu\" are not known",
        ),
        (
            "--fuse file[1:2]:fd=3:/mnt",
            "--fuse file[1:2]:fd=3:/mnt: \"fd=3\" is no option of a FUSE mount",
        ),
        ("--inherit-fd 3:x", "--inherit-fd 3:x: expected fd[NUMBER]:KEY"),
        ("--inherit-fd fd[-1]:x", "--inherit-fd fd[-1]:x: expected fd[NUMBER]:KEY"),
        (
            "--join-ns pid:1",
            "--join-ns pid:1: namespace \"pid\" is none of ipc, mnt, net, time, user, uts",
        ),
        ("--empty-ns mnt", "--empty-ns mnt: only net can be left empty"),
        ("--cpu-cap=gpu", "--cpu-cap gpu: \"gpu\" is none of fpu, cpu, ins, all, none"),
        ("--lsm-profile x", "--lsm-profile x: expected apparmor:NAME or selinux:NAME"),
        ("--images-dir=", "--images-dir : the path is empty"),
    ] {
        assert_eq!(error(line), expected);
    }
}

#[test]
fn options_stand_anywhere() {
    for line in ["-D d dump -t 1 -j", "dump -t 1 -D d -j", "-jt1 -Dd dump"] {
        let found = parse(args(line)).unwrap();
        assert_eq!(found.command().unwrap().unwrap().0, Command::Dump);
        let s = settings(line);
        assert!(s.engine.pid == 1 && s.engine.shell_job && s.engine.images_dir == Path::new("d"));
    }
}

#[test]
fn commands() {
    let command = |line: &str| {
        let found = parse(args(line)).unwrap();
        let command = found.command().map(|found| found.map(|(command, _)| command));
        command.map_err(|e| e.to_string())
    };
    for info in Command::all() {
        assert_eq!(command(&info.words.join(" ")), Ok(Some(info.command)));
        assert_eq!(info.command.name(), info.words.join(" "));
    }
    assert_eq!(command("-v4 cpuinfo -D x check"), Ok(Some(Command::CpuinfoCheck)));
    assert_eq!(command("-v4"), Ok(None));
    let meant = |word, other| Err(format!("there is no command {word}; did you mean {other}?"));
    assert_eq!(command("cpuinfo"), meant("cpuinfo", "cpuinfo dump"));
    assert_eq!(command("dumb"), meant("dumb", "dump"));
    assert_eq!(command("sleep"), Err("there is no command sleep".to_owned()));
}

#[test]
fn what_follows_two_dashes_is_left_alone() {
    let found = parse(args("restore --exec-cmd -- prog -x --foo")).unwrap();
    assert_eq!(found.rest, args("prog -x --foo"));
    assert_eq!(found.words, args("restore"));
    // A single dash is a word.
    assert_eq!(parse(args("-")).unwrap().words, args("-"));
}

#[test]
fn spread_options_come_together() {
    let mut s = settings("--page-server --address h --port 9 --tls --tls-key k");
    s.merge().unwrap();
    let server = s.engine.memory.page_server.unwrap();
    assert_eq!((server.address.as_deref(), server.port), (Some("h"), 9));
    assert!(is(&server.tls.unwrap().key, "k"));
    // Without --page-server, an address is that of a server to be.
    let mut s = settings("--address h --port 9");
    s.merge().unwrap();
    assert!(s.engine.memory.page_server.is_none());

    let mut s = settings("--external mnt[]:m --enable-external-sharing");
    s.merge().unwrap();
    assert_eq!(external(&s), ["mnt[]:ms"]);
    assert!(settings("--enable-external-masters").merge().is_err());
}

#[test]
fn descriptors_must_be_open_and_places_apart() {
    for line in [
        "--inherit-fd fd[9999]:x",
        "--status-fd 9999",
        "--ps-socket 9999",
        "--lazy-socket 9999",
        "--close 9999",
    ] {
        let mut s = settings(line);
        let adopted = s.adopt_descriptors().and_then(|()| s.adopt_own_descriptors());
        let error = adopted.unwrap_err();
        assert!(error.contains("9999"), "{error}");
    }
    let error = settings("--fuse file[1:2]::/m --fuse file[1:3]::/m/n").adopt_descriptors();
    assert!(error.is_err_and(|e| e.starts_with("--fuse file[1:3]::/m/n: its place is on")));
    let mut s = settings("--inherit-fd fd[0]:x");
    s.adopt_descriptors().unwrap();
    assert_eq!(s.engine.given.inherit_fd[0].key, "x");
}

proptest::proptest! {
    #[test]
    fn any_arguments_come_to_an_end(args: Vec<String>) {
        if let Ok(found) = parse(args.into_iter().map(OsString::from)) {
            let _ = found.apply(&mut Settings::default());
            let _ = found.command();
        }
    }
}
