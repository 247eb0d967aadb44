//! From the words of a command line to what they ask for.

use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use torpor_engine::options::Given;
use torpor_worker::Report;

use crate::failure::{Failure, caught, lines, quiet_about_output};
use crate::hooks::{Actions, write_pidfile};
use crate::options::{self, Command, Invocation, Opt, Settings, SettingsError, UsageError};
use crate::{COMPATIBLE, check, help, log, pages, policy, rpc, seal, stats, work};

/// The name that the program was called by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Name {
    /// Its own.
    Torpor,
    /// As a replacement of `criu`.
    Criu,
    /// As a replacement of `crit`.
    Crit,
    /// As containerd's runtime, in front of runc.
    Runc,
    /// As a plugin of kubectl.
    Kubectl,
    /// In front of conmon, for a container of Podman that comes from another host.
    Conmon,
}

impl Name {
    /// From the program's path.
    #[must_use]
    pub fn of(program: Option<&OsStr>) -> Self {
        let base = program.and_then(|p| Path::new(p).file_name());
        match base.and_then(OsStr::to_str) {
            Some("criu") => Self::Criu,
            Some("crit") => Self::Crit,
            Some(torpor_kubernetes::wrapper::NAME) => Self::Runc,
            Some(torpor_kubernetes::plugin::NAME) => Self::Kubectl,
            Some(torpor_migrate::CONMON) => Self::Conmon,
            _ => Self::Torpor,
        }
    }

    /// As it is written.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Torpor => "torpor",
            Self::Criu => "criu",
            Self::Crit => "crit",
            Self::Runc => torpor_kubernetes::wrapper::NAME,
            Self::Kubectl => torpor_kubernetes::plugin::NAME,
            Self::Conmon => torpor_migrate::CONMON,
        }
    }
}

/// Runs the program with its command line, and says how it went.
#[must_use]
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    quiet_about_output();
    let mut args = args.into_iter();
    let program = args.next().unwrap_or_default();
    let name = Name::of(Some(&program));
    if name == Name::Crit {
        return torpor_crit::crit(
            std::iter::once(program).chain(args),
            &seal::configured_identities(),
        );
    }
    if name == Name::Runc {
        return torpor_kubernetes::wrapper::run(args);
    }
    if name == Name::Conmon {
        return torpor_migrate::conmon(Path::new(&program), args);
    }
    let args: Vec<OsString> = args.collect();
    log::get();
    match run(name, args) {
        Ok(code) => code,
        Err(failure) => {
            // What is in the log on the screen need not be there twice.
            let silent = log::get().is_silent();
            if !silent && (!failure.logged || log::get().is_file()) {
                let _ = writeln!(io::stderr(), "Error: {}", lines(&failure.text).join("\n"));
            }
            if let Some(hint) = failure.hint.as_ref().filter(|_| !silent) {
                let _ = writeln!(
                    io::stderr(),
                    "Hint: {}",
                    hint.lines().map(log::escaped).collect::<Vec<_>>().join("\n")
                );
            }
            ExitCode::from(failure.status)
        }
    }
}

impl From<UsageError> for Failure {
    fn from(error: UsageError) -> Self {
        Self::invalid(error.to_string()).hint("--help lists commands and options")
    }
}

impl From<options::ConfigError> for Failure {
    fn from(error: options::ConfigError) -> Self {
        Self::invalid(error.to_string())
    }
}

impl From<SettingsError> for Failure {
    fn from(error: SettingsError) -> Self {
        match error {
            SettingsError::Usage(error) => error.into(),
            SettingsError::Config(error) => error.into(),
        }
    }
}

fn run(name: Name, args: Vec<OsString>) -> Result<ExitCode, Failure> {
    let json = args.iter().take_while(|word| *word != "--").any(|word| word == "--json");
    let result = caught(|| {
        let own = match name {
            Name::Torpor => help::own_command(&args),
            Name::Kubectl => Some(help::kubectl(&args)),
            _ => help::cpuinfo(name, &args),
        };
        own.unwrap_or_else(|| perform_command(name, args))
    });
    if let (true, Err(failure)) = (json, &result) {
        // Where nobody can read it, that is why it failed.
        let _ = caught(|| {
            stats::outcome(Err(failure.clone())).print();
            Ok(())
        });
    }
    result
}

/// A command of CRIU's, with its options.
fn perform_command(name: Name, args: Vec<OsString>) -> Result<ExitCode, Failure> {
    let found = options::parse(args)?;
    let command = found.command()?;
    let settings = options::settings(&found)?;
    if settings.version {
        println!("{}", version(name));
        return Ok(ExitCode::SUCCESS);
    }
    let Some((command, words)) = command else {
        help::print(name, None);
        return Ok(if settings.help { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    };
    if settings.help {
        help::print(name, Some(command));
        return Ok(ExitCode::SUCCESS);
    }
    perform(name, command, settings, words, &found)
}

/// What `--version` prints. Runtimes read the number behind `Version:`.
fn version(name: Name) -> String {
    match name {
        Name::Torpor => {
            format!("torpor {} (as criu: {COMPATIBLE})", env!("CARGO_PKG_VERSION"))
        }
        _ => format!("Version: {COMPATIBLE}"),
    }
}

/// Refuses words that no command takes, and options that make no sense together.
fn check_words(
    name: Name,
    command: Command,
    words: &[OsString],
    found: &Invocation,
    settings: &Settings,
) -> Result<(), Failure> {
    if command != Command::Swrk
        && let Some(word) = words.first()
    {
        let text = format!("{} takes no argument {:?}", command.name(), word.display());
        return Err(Failure::invalid(text)
            .hint("arguments of --verbosity, --cpu-cap, --manage-cgroups and --ext-unix-sk follow =: --cpu-cap=none"));
    }
    if settings.exec_cmd == found.rest.is_empty() {
        return Err(Failure::invalid("--exec-cmd takes a command, after --")
            .hint("restore --images-dir DIR --exec-cmd -- program argument"));
    }
    if settings.engine.birth.sibling && !settings.detached {
        return Err(Failure::invalid("--restore-sibling needs --restore-detached"));
    }
    if settings.exec_cmd && settings.detached {
        return Err(Failure::invalid("--exec-cmd and --restore-detached exclude each other"));
    }
    // CRIU takes any option with any command, and scripts give common sets of them.
    if name == Name::Torpor { check_options(command, found) } else { Ok(()) }
}

/// Refuses options that `command` does not have.
///
/// # Errors
/// If one of those that were found is an option of other commands only.
pub(crate) fn check_options(command: Command, found: &Invocation) -> Result<(), Failure> {
    for given in &found.options {
        let alike = |opt: &&'static Opt| {
            opt.long == given.opt.long || (opt.short.is_some() && opt.short == given.opt.short)
        };
        if !Opt::all().filter(alike).any(|opt| opt.commands & command.bit() != 0) {
            let text = format!("{} has no option --{}", command.name(), given.opt.long);
            return Err(Failure::invalid(text)
                .hint(format!("torpor {} --help lists what it has", command.name())));
        }
    }
    Ok(())
}

/// Makes settings ready for `command`: what they leave out, keys, directories, the log.
///
/// # Errors
/// If they make no sense together; if a key, a policy or a directory is missing.
pub fn prepare(
    name: Name,
    command: Command,
    settings: Settings,
    words: &[OsString],
    found: &Invocation,
) -> Result<Settings, Failure> {
    check_words(name, command, words, found, &settings)?;
    let mut settings = complete(command, settings, found)?;
    // One that serves pages has nothing to serve in a directory that is not there.
    let receives = command == Command::PageServer && !settings.engine.memory.lazy;
    if name == Name::Torpor && (receives || matches!(command, Command::Dump | Command::PreDump)) {
        make_directory(&settings.engine.images_dir)?;
    }
    load_keys(command, &mut settings)?;
    work::prepare(&mut settings)?;
    Ok(settings)
}

/// Fills in what follows from the command.
///
/// # Errors
/// If options contradict each other; if a descriptor is not open, or a policy cannot be read.
pub(crate) fn complete(
    command: Command,
    mut settings: Settings,
    found: &Invocation,
) -> Result<Settings, Failure> {
    if settings.exec_cmd {
        settings.exec_command = Some(found.rest.clone());
    }
    // The workers of a service find these under the same numbers.
    if command != Command::Service {
        settings.adopt_descriptors().map_err(Failure::invalid)?;
    }
    settings.adopt_own_descriptors().map_err(Failure::invalid)?;
    // The page server of a lazy dump is the dump itself.
    settings.use_page_server |= command == Command::Dump && settings.engine.memory.lazy;
    settings.merge().map_err(Failure::invalid)?;
    if command == Command::Restore {
        policy::load(&mut settings)?;
    }
    Ok(settings)
}

fn perform(
    name: Name,
    command: Command,
    settings: Settings,
    words: &[OsString],
    found: &Invocation,
) -> Result<ExitCode, Failure> {
    if matches!(command, Command::Swrk | Command::Service | Command::Check | Command::Exec) {
        check_words(name, command, words, found, &settings)?;
        return without_images(command, complete(command, settings, found)?, words);
    }
    // The kernel ends all tasks of a pid namespace with its first process, as `unshare --pid --fork` makes this one.
    if command == Command::Restore && settings.detached && rustix::process::getpid().is_init() {
        let text = "this is the first process of its pid namespace, with which the tasks would end";
        return Err(Failure::invalid(text).hint("restore them without --restore-detached"));
    }
    let mut settings = prepare(name, command, settings, words, found)?;
    let result = in_images(name, command, &mut settings);
    if result.is_err() && log::get().is_file() {
        let file = settings.log_file.unwrap_or_default();
        return result.map_err(|f| match f.hint {
            None => {
                f.hint(format!("the log is {}", settings.engine.work_dir().join(file).display()))
            }
            Some(_) => f,
        });
    }
    result
}

/// The commands that no images directory belongs to.
fn without_images(
    command: Command,
    settings: Settings,
    words: &[OsString],
) -> Result<ExitCode, Failure> {
    match command {
        Command::Swrk => rpc::swrk(settings, words),
        Command::Service => rpc::service(settings),
        Command::Check => check::run(&settings),
        _ => Err(Failure::unsupported("exec is not supported: CRIU has deprecated it")),
    }
}

/// Keys are named relative to the directory that the command is given in.
fn load_keys(command: Command, settings: &mut Settings) -> Result<(), Failure> {
    match command {
        Command::Dump | Command::PreDump => seal::load(settings, seal::Images::Write),
        Command::Restore | Command::Dedup | Command::LazyPages | Command::PageServer => {
            seal::load(settings, seal::Images::Read)
        }
        _ => Ok(()),
    }
}

/// Who gives options by hand learns which of them came to nothing.
fn refusing_unused(name: Name, settings: &Settings) -> Settings {
    let mut asked = settings.clone();
    asked.engine.given.refuse_unused = true;
    asked.engine.given.refuse_unused_places = name == Name::Torpor;
    asked
}

/// The commands that work on an images directory.
fn in_images(name: Name, command: Command, settings: &mut Settings) -> Result<ExitCode, Failure> {
    let mut hooks = Actions::new(settings, name == Name::Torpor);
    match command {
        Command::Dump => {
            let report = work::dump(&refusing_unused(name, settings), &mut hooks)?;
            drop(hooks);
            stats::display(settings, &report);
        }
        Command::PreDump => {
            let report = work::pre_dump(settings, &mut hooks)?;
            drop(hooks);
            stats::display(settings, &report);
        }
        Command::Restore if settings.keep_template.is_some() => {
            work::keep_template(settings)?;
            stats::done(settings, Report::default);
        }
        Command::Restore => {
            let report = work::restore(&refusing_unused(name, settings), &mut hooks)?;
            drop(hooks);
            stats::display(settings, &report);
            // The tasks have it. As long as this process had the mount of a FUSE server as well, nobody could unmount
            // that, and with its connection clients would wait for a server that has ended.
            settings.engine.given = Given::default();
            after_restore(settings, report.pid)?;
        }
        Command::PageServer => return pages::page_server(settings),
        Command::LazyPages => return pages::lazy_pages(settings),
        Command::Dedup => stats::display(settings, &work::dedup(settings)?),
        Command::CpuinfoDump => {
            work::cpuinfo_dump(settings)?;
            stats::done(settings, Report::default);
        }
        Command::CpuinfoCheck => {
            work::cpuinfo_check(settings)?;
            stats::done(settings, Report::default);
        }
        other => {
            return Err(Failure::unsupported(format!("{} is not supported", other.name())));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The tasks run: become the command of `--exec-cmd`, or wait for the root task
/// unless told otherwise.
fn after_restore(settings: &Settings, root: i32) -> Result<(), Failure> {
    if let Some(command) = &settings.exec_command {
        return Err(work::become_parent(command));
    }
    if !settings.detached {
        work::wait_for_end(root)?;
    }
    Ok(())
}

fn make_directory(path: &Path) -> Result<(), Failure> {
    use std::os::unix::fs::DirBuilderExt;
    match std::fs::DirBuilder::new().mode(0o700).create(path) {
        Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => {
            Err(Failure::io(format_args!("images directory {}", path.display()), &e))
        }
        _ => Ok(()),
    }
}

/// Writes the pid of this process for `--pidfile`.
///
/// # Errors
/// If the file cannot be written.
pub(crate) fn write_own_pidfile(settings: &Settings) -> Result<(), Failure> {
    let Some(file) = &settings.pidfile else { return Ok(()) };
    let pid = i32::try_from(std::process::id()).unwrap_or(0);
    write_pidfile(file, pid)
        .map_err(|e| Failure::io(format_args!("pid file {}", file.display()), &e))
}
