//! Configuration files: one option a line, without its dashes.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use torpor_seal::keys::provider::PREFIX;

use super::machine::{self, apply_machine};
use super::{Opt, OptValue, Set, Settings};

/// No configuration file is larger.
const MAX_SIZE: u64 = 1 << 20;

/// A configuration file that cannot be followed.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// It cannot be read.
    #[error("configuration file {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// A line makes no sense.
    #[error("configuration file {}, line {line}: {reason}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line's number.
        line: usize,
        /// What is wrong with it.
        reason: String,
    },
}

/// A line of a configuration file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    /// Its number, from 1.
    pub number: usize,
    /// The option.
    pub name: String,
    /// Its argument.
    pub value: Option<String>,
}

/// Applies the files that are read unless `--no-default-config` is given, and the
/// one that `--config` (already in `settings`) names, in CRIU's order.
///
/// # Errors
/// If one of them cannot be followed, or the named one is not there.
pub(crate) fn apply_defaults(settings: &mut Settings) -> Result<(), ConfigError> {
    if settings.default_config {
        apply_machine(settings, Path::new(machine::FILE))?;
    }
    let home = std::env::var_os("HOME").map(|home| Path::new(&home).join(".criu/default.conf"));
    let system = settings.default_config.then(|| PathBuf::from("/etc/criu/default.conf"));
    let home = home.filter(|_| settings.default_config);
    apply_in_order(
        settings,
        system.into_iter().chain(home).collect(),
        std::env::var_os("CRIU_CONFIG_FILE"),
    )
}

/// Whether nobody can say of a file that it is there: it is not, or its directory cannot be searched, as the home directory of
/// somebody else that `HOME` still names.
fn is_missing(path: &Path, error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{NotADirectory, NotFound, PermissionDenied};
    let unseen = |error: std::io::Error| error.kind() == PermissionDenied;
    match error.kind() {
        NotFound | NotADirectory => true,
        PermissionDenied => path.symlink_metadata().is_err_and(unseen),
        _ => false,
    }
}

/// `optional` files may be missing; that of the environment and `--config` may not.
fn apply_in_order(
    settings: &mut Settings,
    optional: Vec<PathBuf>,
    environment: Option<OsString>,
) -> Result<(), ConfigError> {
    for path in optional {
        match apply_file(settings, &path) {
            Err(ConfigError::Read { source, .. }) if is_missing(&path, &source) => {}
            other => other?,
        }
    }
    let environment = environment.filter(|name| !name.is_empty()).map(PathBuf::from);
    for path in environment.into_iter().chain(settings.config.clone()) {
        apply_file(settings, &path)?;
    }
    Ok(())
}

/// Where files are the administrator's, whoever names them.
const SYSTEM: &str = "/etc";

/// The options that a file from elsewhere may give: runtimes let the owner of a container
/// name a file (`org.criu.config`), who may have written it as well. What opens files or
/// sockets, runs programs, enters namespaces, leaves tasks in the caller's session with its
/// terminal, names keys or whom to trust is not for it.
const HARMLESS: &[&str] = &[
    "allow-uprobes",
    "auto-dedup",
    "close-outside",
    "compress",
    "cow",
    "dedup-relatives",
    "display-stats",
    "file-locks",
    "force-irmap",
    "ghost-fiemap",
    "ghost-limit",
    "leave-stopped",
    "link-remap",
    // The runtime has moved the restore into the container's cgroup already.
    "manage-cgroups",
    "log-file",
    "mntns-compat-mode",
    "orphan-pts-master",
    "pre-dump-mode",
    "skip-in-flight",
    "store-tmpfs",
    "tcp-close",
    "tcp-established",
    "timeout",
    "track-mem",
    "verbosity",
    "weak-sysctls",
    "wipe-on-fork",
];

/// The options that name a key, or whom to believe. In a file such names are whole paths:
/// otherwise a directory of images, once it is the current one, could bring its own.
const WHOLE_PATHS: &[&str] = &[
    "crl",
    "identity",
    "policy",
    "recipient",
    "sign-cert",
    "sign-key",
    "tls-cacert",
    "tls-cacrl",
    "tls-cert",
    "tls-key",
    "trust",
];

/// The options that CRIU's requests have no field for.
const EXTENSIONS: &[&str] = &[
    "close-outside",
    "compress",
    "cow",
    "crl",
    "dedup-relatives",
    "encrypt",
    "identity",
    "policy",
    "policy-rule",
    "recipient",
    "record-working-set",
    "require-signature",
    "sign-cert",
    "sign-key",
    "store-tmpfs",
    "suite",
    "template",
    "threads",
    "trust",
    "wake-frozen",
    "wipe-on-fork",
];

/// Applies an option that a request gives as a line of a configuration file.
///
/// # Errors
/// If it is no line, or one that says what requests have a field for.
pub(crate) fn apply_extension(settings: &mut Settings, text: &str) -> Result<(), String> {
    let lines = parse_config(text).map_err(|(_, reason)| reason)?;
    let [line] = &lines[..] else { return Err("expected one option".to_owned()) };
    let bare = line.name.strip_prefix("no-").unwrap_or(&line.name);
    if Opt::find(bare).is_some() && !EXTENSIONS.contains(&bare) {
        let what = "has a field of its own, or no meaning in a request";
        return Err(format!("{} {what}", line.name));
    }
    apply_line(settings, line)
}

/// Applies one file.
///
/// # Errors
/// If it cannot be read or followed.
fn apply_file(settings: &mut Settings, path: &Path) -> Result<(), ConfigError> {
    apply_lines(settings, path, read(path), |_| Ok(()))
}

/// Applies a file that somebody else than the caller may have named: only one below
/// `/etc` may say what concerns the machine.
///
/// # Errors
/// If it cannot be read or followed, or says what it may not.
pub(crate) fn apply_foreign_file(settings: &mut Settings, path: &Path) -> Result<(), ConfigError> {
    let failed = |source| ConfigError::Read { path: path.into(), source };
    let real = path.canonicalize().map_err(failed)?;
    if real.starts_with(SYSTEM) {
        apply_file(settings, &real)
    } else {
        apply_lines(settings, &real, open_regular(&real).and_then(text_of), may_say)
    }
}

/// Whether `line` may stand in anybody's file.
fn may_say(line: &Line) -> Result<(), String> {
    let bare = line.name.strip_prefix("no-").unwrap_or(&line.name);
    if ![bare, &line.name].iter().any(|name| HARMLESS.contains(name)) {
        return Err(format!("{} counts only in files below {SYSTEM}", line.name));
    }
    if bare == "log-file" && !line.value.as_deref().is_some_and(is_name_of_log) {
        let what = "log-file takes a mere name that ends in .log";
        return Err(format!("in a file that is not below {SYSTEM}, {what}"));
    }
    Ok(())
}

/// Whether a path is the name of a log in the work directory: with Podman that is the bundle, whose other files a
/// restore reads.
fn is_name_of_log(path: &str) -> bool {
    let mut places = Path::new(path).components();
    matches!((places.next(), places.next()), (Some(Component::Normal(_)), None))
        && path.ends_with(".log")
}

fn apply_lines(
    settings: &mut Settings,
    path: &Path,
    text: std::io::Result<String>,
    may_say: impl Fn(&Line) -> Result<(), String>,
) -> Result<(), ConfigError> {
    let text = text.map_err(|source| ConfigError::Read { path: path.into(), source })?;
    let wrong = |(line, reason)| ConfigError::Line { path: path.into(), line, reason };
    for line in parse_config(&text).map_err(wrong)? {
        may_say(&line)
            .and_then(|()| apply_line(settings, &line))
            .map_err(|reason| wrong((line.number, reason)))?;
    }
    Ok(())
}

/// The text of a file of options.
pub(super) fn read(path: &Path) -> std::io::Result<String> {
    File::open(path).and_then(text_of)
}

/// A file, if it is one of bytes: nobody may write to a pipe for hours, and to open a device can do something by itself.
fn open_regular(path: &Path) -> std::io::Result<File> {
    use std::io::{Error, ErrorKind};
    let found = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    match File::from(found.try_clone()?).metadata()?.is_file() {
        true => File::open(format!("/proc/self/fd/{}", found.as_raw_fd())),
        false => Err(Error::new(ErrorKind::InvalidInput, "it is no regular file")),
    }
}

fn text_of(file: File) -> std::io::Result<String> {
    use std::io::{Error, ErrorKind, Read};
    let mut text = String::new();
    file.take(MAX_SIZE + 1).read_to_string(&mut text)?;
    if u64::try_from(text.len()).is_ok_and(|len| len > MAX_SIZE) {
        return Err(Error::new(ErrorKind::FileTooLarge, format!("it is over {MAX_SIZE} bytes")));
    }
    Ok(text)
}

/// Refuses a `value` that must be a whole path in a file, and is none.
///
/// # Errors
/// If it is relative.
pub(super) fn whole_path(name: &str, value: &OsStr) -> Result<(), String> {
    let bytes = value.as_bytes();
    let is_path = !["age1", PREFIX].iter().any(|prefix| bytes.starts_with(prefix.as_bytes()));
    if WHOLE_PATHS.contains(&name) && is_path && !Path::new(value).is_absolute() {
        return Err(format!("{name} {}: in a file this takes a whole path", value.display()));
    }
    Ok(())
}

fn apply_line(settings: &mut Settings, line: &Line) -> Result<(), String> {
    if matches!(line.name.as_str(), "config" | "help" | "version" | "no-default-config") {
        return Err(format!("{} has no meaning in a configuration file", line.name));
    }
    let value = line.value.as_ref().map(OsStr::new);
    if let Some(value) = value {
        whole_path(&line.name, value)?;
    }
    let negated = line
        .name
        .strip_prefix("no-")
        .and_then(Opt::find)
        .filter(|opt| matches!(opt.set, Set::Flag(_)));
    let value = match (&line.value, negated) {
        (Some(value), _) => OptValue::Some(value.as_ref()),
        (None, Some(_)) => OptValue::Negated,
        (None, None) => OptValue::None,
    };
    let opt = Opt::find(&line.name).or(negated).ok_or_else(|| {
        format!("there is no option {:?}{}", line.name, Opt::meant(&line.name, ""))
    })?;
    opt.apply(settings, value)
}

/// The lines of a configuration file.
///
/// # Errors
/// The number of the line that is wrong, and why.
pub fn parse_config(text: &str) -> Result<Vec<Line>, (usize, String)> {
    let mut lines = Vec::new();
    for (index, raw) in text.lines().enumerate() {
        let number = index + 1;
        let words = words(raw).map_err(|reason| (number, reason))?;
        let mut words = words.into_iter();
        let Some(name) = words.next() else { continue };
        let value = words.next();
        if words.next().is_some() {
            return Err((number, "an option takes one argument; quote it if it has spaces".into()));
        }
        lines.push(Line { number, name, value });
    }
    Ok(lines)
}

/// The words of a line: split at white space, `"` keeps it together, `\"` within is
/// a quote, `#` outside begins a comment.
fn words(line: &str) -> Result<Vec<String>, String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quoted = false;
    let mut chars = line.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\\' if quoted && chars.peek() == Some(&'"') => {
                word.get_or_insert_default().push('"');
                chars.next();
            }
            '"' => {
                quoted = !quoted;
                word.get_or_insert_default();
            }
            '#' if !quoted => break,
            c if c.is_whitespace() && !quoted => words.extend(word.take()),
            c => word.get_or_insert_default().push(c),
        }
    }
    if quoted {
        return Err("a quote is not closed".into());
    }
    words.extend(word);
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::FileType;
    use std::fs::write;

    fn line(number: usize, name: &str, value: Option<&str>) -> Line {
        Line { number, name: name.into(), value: value.map(str::to_owned) }
    }

    #[test]
    fn lines() {
        let text = "# a comment\n\ntcp-established\n  work-dir \"/a/my \\\"work\\\" dir\"  # why\n\
            log-file\tx#y\nlsm-mount-context \"\"\nroot \"a#b\\n\"";
        assert_eq!(
            parse_config(text),
            Ok(vec![
                line(3, "tcp-established", None),
                line(4, "work-dir", Some("/a/my \"work\" dir")),
                line(5, "log-file", Some("x")),
                line(6, "lsm-mount-context", Some("")),
                line(7, "root", Some("a#b\\n")),
            ])
        );
        assert_eq!(parse_config("a\nb c d").unwrap_err().0, 2);
        assert_eq!(parse_config("a \"b").unwrap_err().0, 1);
    }

    fn applied(text: &str) -> Result<Settings, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.conf");
        write(&path, text).unwrap();
        let mut settings = Settings::default();
        apply_file(&mut settings, &path).map_err(|e| e.to_string())?;
        Ok(settings)
    }

    #[test]
    fn options() {
        let settings = applied(
            "tcp-established\nghost-limit 2M\nmanage-cgroups full\nno-shell-job\nverbosity 4\n",
        )
        .unwrap();
        assert!(settings.engine.network.tcp_established && !settings.engine.shell_job);
        assert_eq!(settings.engine.files.ghost_limit, 2 << 20);
        assert_eq!(settings.verbosity, 4);
    }

    #[test]
    fn sealing() {
        let settings = applied(
            "encrypt\nrecipient age1xyz\nrecipient provider:/bin/kms:a\nrecipient /a.crt\n\
             identity /a.key\nidentity provider:/bin/kms\nsuite aes-256-xts+hmac-sha256\n\
             sign-key /s.key\nsign-cert /s.crt\ntrust /ca.crt\ncrl /ca.crl\nrequire-signature\n",
        )
        .unwrap();
        let seal = settings.seal;
        assert_eq!(seal.encrypt, Some(true));
        assert_eq!(seal.recipients, ["age1xyz", "provider:/bin/kms:a", "/a.crt"]);
        assert_eq!(seal.identities, ["/a.key", "provider:/bin/kms"]);
        assert_eq!(seal.suite, torpor_seal::Suite::Aes256XtsHmacSha256);
        assert!(seal.require_signature);
        assert_eq!((seal.trust.len(), seal.crl.len()), (1, 1));
        assert_eq!(seal.sign_key.zip(seal.sign_cert), Some(("/s.key".into(), "/s.crt".into())));
    }

    #[test]
    fn mistakes_name_file_and_line() {
        for (text, reason) in [
            ("\nfrobnicate", "line 2: there is no option \"frobnicate\""),
            ("dump", "line 1: there is no option \"dump\""),
            ("config x", "line 1: config has no meaning in a configuration file"),
            ("tree", "line 1: --tree: an argument is missing"),
            ("shell-job yes", "line 1: --shell-job yes: it takes no argument"),
            ("no-tree 5", "line 1: there is no option \"no-tree\""),
            ("libdir /x", "line 1: --libdir is not supported"),
            ("identity key.pem", "line 1: identity key.pem: in a file this takes a whole path"),
            ("trust ../ca.pem", "line 1: trust ../ca.pem: in a file this takes a whole path"),
        ] {
            let error = applied(text).unwrap_err();
            assert!(error.contains("x.conf") && error.contains(reason), "{error}");
        }
    }

    #[test]
    fn files_of_others_may_not_weaken_the_machine() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.conf");
        let apply = |path: &Path, text: &str| {
            write(path, text).unwrap();
            let mut settings = Settings::default();
            apply_foreign_file(&mut settings, path).map(|()| settings).map_err(|e| e.to_string())
        };
        let settings = apply(&path, "tcp-established\nno-file-locks\nlog-file own.log\n").unwrap();
        assert!(settings.engine.network.tcp_established && !settings.engine.files.locks);
        assert_eq!(settings.log_file, Some("own.log".into()));

        for opt in Opt::all().filter(|opt| !HARMLESS.contains(&opt.long)) {
            for name in [opt.long.to_owned(), format!("no-{}", opt.long)] {
                let error = apply(&path, &format!("{name} x")).unwrap_err();
                assert!(error.contains("line 1: "), "{error}");
                assert!(error.contains("only in files below /etc"), "{error}");
            }
        }
        for name in [
            "/tmp/x",
            "../x",
            "a/b",
            "..",
            "",
            "/",
            "/x.log",
            "../x.log",
            "config.json",
            "-",
            "x.log/",
        ] {
            let error = apply(&path, &format!("log-file \"{name}\"")).unwrap_err();
            assert!(error.contains("a mere name"), "{name}: {error}");
        }
        // The session of whoever restores comes with its terminal.
        let error = apply(&path, "tcp-established\nshell-job\n").unwrap_err();
        assert!(error.contains("line 2: shell-job counts only in files below /etc"), "{error}");
        assert!(HARMLESS.iter().chain(EXTENSIONS).all(|name| Opt::find(name).is_some()));

        // Neither a link nor a detour makes it a file of the system.
        let detour = Path::new("/etc/..").join(path.strip_prefix("/").unwrap());
        assert!(apply(&detour, "action-script x").unwrap_err().contains("below /etc"));
    }

    /// The owner of a container names one, and a restore of root's opens it.
    #[test]
    fn files_of_others_are_files() {
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("fifo");
        let mode = Mode::RUSR | Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, FileType::Fifo, mode, 0).unwrap();
        for path in [fifo.as_path(), Path::new("/dev/null"), dir.path()] {
            let error = apply_foreign_file(&mut Settings::default(), path).unwrap_err();
            assert!(error.to_string().ends_with("it is no regular file"), "{error}");
        }
    }

    #[test]
    fn later_files_win() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        write(path("system"), "verbosity 5\ntcp-established\nlog-file system").unwrap();
        write(path("home"), "verbosity 6\nlog-file home").unwrap();
        write(path("environment"), "log-file environment\nno-tcp-established").unwrap();
        write(path("named"), "log-file named").unwrap();
        let optional = || vec![path("system"), path("missing"), path("home")];

        let mut settings = Settings::default();
        apply_in_order(&mut settings, optional(), None).unwrap();
        assert_eq!(settings.log_file, Some("home".into()));
        assert!(settings.verbosity == 6 && settings.engine.network.tcp_established);

        apply_in_order(&mut settings, optional(), Some(path("environment").into())).unwrap();
        assert_eq!(settings.log_file, Some("environment".into()));
        assert!(!settings.engine.network.tcp_established);

        settings.config = Some(path("named"));
        apply_in_order(&mut settings, optional(), Some(path("environment").into())).unwrap();
        assert_eq!(settings.log_file, Some("named".into()));

        settings.config = Some(path("missing"));
        let error = apply_in_order(&mut settings, optional(), None).unwrap_err();
        assert!(error.to_string().contains("missing"), "{error}");
    }

    /// `HOME` is not always changed with the user.
    #[test]
    fn the_home_of_somebody_else_has_no_file() {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path().join("home");
        std::fs::create_dir(&home).unwrap();
        let file = home.join("default.conf");
        write(&file, "frobnicate").unwrap();
        let set_mode = |path: &Path, mode| {
            std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode))
        };
        // Root without the right to all files: a thread cannot take that back.
        let apply = |path: &Path| {
            let path = path.to_owned();
            let apply = move || {
                torpor_sys::confine::keep_capabilities(0).unwrap();
                apply_in_order(&mut Settings::default(), vec![path], None)
                    .map_err(|error| error.to_string())
            };
            std::thread::spawn(apply).join().unwrap()
        };
        assert!(apply(&file).unwrap_err().contains("frobnicate"));
        set_mode(&file, 0).unwrap();
        assert!(apply(&file).unwrap_err().contains("Permission denied"));
        apply(&file.join("default.conf")).unwrap();
        set_mode(&home, 0).unwrap();
        apply(&file).unwrap();
        set_mode(&home, 0o700).unwrap();
    }

    #[test]
    fn endless_files_end() {
        let error = apply_file(&mut Settings::default(), Path::new("/dev/zero")).unwrap_err();
        assert!(error.to_string().contains("/dev/zero"), "{error}");
    }

    proptest::proptest! {
        #[test]
        fn any_text_comes_to_an_end(text: String) {
            let _ = parse_config(&text);
        }

        #[test]
        fn quoted_arguments_come_back(value: String) {
            proptest::prop_assume!(!value.contains(['\n', '\r']) && !value.ends_with('\\') && !value.contains("\\\""));
            let line = format!("root \"{}\"", value.replace('"', "\\\""));
            let lines = parse_config(&line).unwrap();
            proptest::prop_assert_eq!(lines[0].value.as_deref(), Some(value.as_str()));
        }
    }
}
