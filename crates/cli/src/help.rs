//! Help, manual pages and completions, all from the table of options.

use std::ffi::OsString;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Arg, ArgAction, Args, FromArgMatches, Subcommand};
use clap_complete::Shell;
use torpor_benchmark::BenchmarkCommand;
use torpor_crit::ImageCommand;
use torpor_kubernetes::KubernetesCommand;
use torpor_migrate::{AgentCommand, MigrateCommand};
use torpor_queue::QueueCommand;
use torpor_snapshot::command::SnapshotCommand;
use torpor_worker::Class;

use crate::audit::{self, Form};
use crate::failure::Failure;
use crate::key::{self, KeyCommand};
use crate::options::{Command, CommandInfo, GROUPS, Opt, Set};
use crate::program::Name;
use crate::{policy, seal, worker};

const ABOUT: &str =
    "Put running processes and containers to sleep in files, and wake them up again";

const LONG_ABOUT: &str = "Torpor saves a running process, or a whole container, to a directory of \
    image files (a dump), and brings it back from there, on this machine or another, with its \
    memory, open files, timers and connections as they were (a restore). The images are CRIU's, \
    and so are commands and options: called by the name criu, the program takes its place under \
    container runtimes.";

const FILES: &str = "Options can also be given in configuration files, one a line, without the \
    dashes: /etc/torpor/torpor.toml (in TOML), /etc/criu/default.conf, ~/.criu/default.conf, the file that the environment variable \
    CRIU_CONFIG_FILE names, and the file given by --config. Later ones override earlier ones, and \
    the command line overrides them all. Flags can be negated with no-, as in --no-shell-job.";

const COMMAND_PAGE: &str =
    "{about}\n\n{before-help}{usage-heading} {usage}\n\n{all-args}{after-help}";

/// Lines are wrapped here, or at the edge of a narrower terminal.
const WIDTH: usize = 100;

/// What `torpor completion` is told.
#[derive(Args, Debug)]
struct CompletionCommand {
    /// The shell whose script is printed.
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

/// What `torpor man` is told.
#[derive(Args, Debug)]
struct ManCommand {
    /// Where the pages go. Is made if it is not there.
    #[arg(value_name = "DIRECTORY")]
    directory: PathBuf,
}

fn completion_tree() -> clap::Command {
    let about = "Print a completion script: bash, zsh, fish or elvish";
    single::<CompletionCommand>("completion", about).arg_required_else_help(true)
}

fn man_tree() -> clap::Command {
    let about = "Write the manual pages to a directory";
    single::<ManCommand>("man", about).arg_required_else_help(true)
}

fn image_tree() -> clap::Command {
    let image = group::<ImageCommand>("image", "Look into images, or turn them into JSON and back");
    image.subcommands(audit::commands())
}

fn key_tree() -> clap::Command {
    group::<KeyCommand>("key", "Make keys for sealed images, and look into them")
}

/// A command with subcommands of its own.
fn group<C: Subcommand>(name: &'static str, about: &'static str) -> clap::Command {
    // What the type says of itself would take the place of the line.
    C::augment_subcommands(clap::Command::new(name).max_term_width(WIDTH))
        .about(about)
        .long_about(None)
        .subcommand_required(true)
        .arg_required_else_help(true)
}

/// A command with options of its own.
fn single<C: Args>(name: &'static str, about: &'static str) -> clap::Command {
    C::augment_args(clap::Command::new(name).max_term_width(WIDTH)).about(about).long_about(None)
}

fn benchmark_tree() -> clap::Command {
    group::<BenchmarkCommand>("benchmark", "Measure container runtimes through the CRI")
}

fn queue_tree() -> clap::Command {
    group::<QueueCommand>("queue", "Run jobs; long ones give way to urgent ones and lose nothing")
}

fn snapshot_tree() -> clap::Command {
    group::<SnapshotCommand>("snapshot", "Start applications warm, from snapshots")
}

fn kubernetes_tree() -> clap::Command {
    group::<KubernetesCommand>("kubernetes", "Let pods give way, and come back with their state")
}

fn migrate_tree() -> clap::Command {
    single::<MigrateCommand>("migrate", "Move a running container to another host")
}

fn agent_tree() -> clap::Command {
    single::<AgentCommand>("agent", "Take in containers that other hosts migrate to this one")
}

/// The systems that are built on the engine.
fn system(name: &str, args: &[OsString]) -> Option<Result<ExitCode, Failure>> {
    Some(match name {
        "benchmark" => {
            let done = carried_out(benchmark_tree(), args, torpor_benchmark::run);
            done.map_err(|failure| match failure.class {
                Class::Usage => Failure { status: torpor_benchmark::WRONG_CALL, ..failure },
                _ => failure,
            })
        }
        "queue" => carried_out(queue_tree(), args, torpor_queue::run)
            .map_err(|failure| Failure { status: torpor_queue::OWN_ERROR, ..failure }),
        "kubernetes" => carried_out(kubernetes_tree(), args, torpor_kubernetes::run),
        "snapshot" => carried_out(snapshot_tree(), args, |command| {
            torpor_snapshot::command::run(command, seal::configured_identities)
        }),
        "migrate" => carried_out(migrate_tree(), args, torpor_migrate::migrate),
        "agent" => carried_out(agent_tree(), args, torpor_migrate::agent),
        _ => return None,
    })
}

/// `kubectl torpor`: the commands of `torpor kubernetes`.
///
/// # Errors
/// If the words are no command of it, or the command fails.
pub fn kubectl(args: &[OsString]) -> Result<ExitCode, Failure> {
    carried_out(kubernetes_tree(), args, torpor_kubernetes::run)
}

/// Carries out what clap makes of a command line. What clap has to say it says itself.
fn carried_out<C: FromArgMatches, E: Into<Failure>>(
    tree: clap::Command,
    args: &[OsString],
    run: impl FnOnce(C) -> Result<ExitCode, E>,
) -> Result<ExitCode, Failure> {
    let program = OsString::from(format!("torpor {}", tree.get_name()));
    let tree = tree.no_binary_name(false).bin_name(program.to_string_lossy().into_owned());
    let found = tree.try_get_matches_from(std::iter::once(&program).chain(args));
    match found.and_then(|found| C::from_arg_matches(&found)) {
        Ok(command) => run(command).map_err(Into::into),
        Err(error) => {
            // Fails only if nobody reads it.
            let _ = error.print();
            if error.use_stderr() {
                return Err(Failure { logged: true, ..Failure::invalid(error.to_string()) });
            }
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Carries out `args` if they are a command that only `torpor` has.
pub(crate) fn own_command(args: &[OsString]) -> Option<Result<ExitCode, Failure>> {
    let (first, rest) = args.split_first()?;
    let result = match first.to_str()? {
        "image" if rest.first().is_some_and(|word| word == "audit") => {
            audit::run(Form::Audit, &rest[1..])
        }
        "image" if rest.first().is_some_and(|word| word == "plan") => {
            audit::run(Form::Plan, &rest[1..])
        }
        "image" => {
            let run = |command| {
                torpor_crit::run(command, &seal::configured_identities(), &policy::made_here)
            };
            carried_out(image_tree(), rest, run)
        }
        "key" => carried_out(key_tree(), rest, key::run),
        torpor_worker::COMMAND => worker::run(),
        "completion" => carried_out(completion_tree(), rest, completion),
        "man" => carried_out(man_tree(), rest, man),
        "help" => help(rest),
        "cpuinfo" if rest.is_empty() => help(args),
        "cpuinfo" => return cpuinfo(Name::Torpor, args),
        name => return system(name, rest),
    };
    Some(result)
}

/// The help of `cpuinfo`, whose commands are those of criu, if `args` ask for it.
pub fn cpuinfo(name: Name, args: &[OsString]) -> Option<Result<ExitCode, Failure>> {
    let [first, word] = args else { return None };
    if first != "cpuinfo" || !is_help(word) {
        return None;
    }
    if let Some(mut page) = page(name, ["cpuinfo"].into_iter()) {
        // A reader that goes away early is no failure.
        let _ = write!(io::stdout(), "{}", page.render_long_help());
    }
    Some(Ok(ExitCode::SUCCESS))
}

fn is_help(word: &OsString) -> bool {
    word == "--help" || word == "-h"
}

/// `help [COMMAND [COMMAND]]`, which is what its own `--help` asks for.
fn help(words: &[OsString]) -> Result<ExitCode, Failure> {
    let words = words.iter().filter(|word| !is_help(word));
    let words: Vec<String> = words.map(|word| word.to_string_lossy().into_owned()).collect();
    let command = Command::all().iter().find(|info| info.words == words).map(|info| info.command);
    if words.is_empty() || command.is_some() {
        print(Name::Torpor, command);
        return Ok(ExitCode::SUCCESS);
    }
    let mut page = page(Name::Torpor, words.iter().map(String::as_str)).ok_or_else(|| {
        Failure::invalid(format!("there is no command {}", words.join(" ")))
            .hint("torpor help lists all of them")
    })?;
    // A reader that goes away early is no failure.
    let _ = write!(io::stdout(), "{}", page.render_long_help());
    Ok(ExitCode::SUCCESS)
}

/// Prints the help of the program, or of one of its commands.
pub fn print(name: Name, command: Option<Command>) {
    let info = command.and_then(|command| Command::all().iter().find(|i| i.command == command));
    let mut page = info.map_or_else(|| tree(name), |info| add_own_options(leaf(name, info), info));
    // A reader that goes away early is no failure.
    let _ = write!(io::stdout(), "{}", page.render_help());
}

/// The program, or one of its commands, if there is one of these words.
fn page<'w>(name: Name, words: impl Iterator<Item = &'w str>) -> Option<clap::Command> {
    let mut page = tree(name);
    page.build();
    for word in words {
        page = page.find_subcommand(word)?.clone();
    }
    Some(page)
}

/// The program as clap sees it. `torpor` has the options under its commands, `criu`
/// takes any of them anywhere.
#[must_use]
pub fn tree(name: Name) -> clap::Command {
    let mut root = clap::Command::new(name.as_str())
        .version(env!("CARGO_PKG_VERSION"))
        .about(ABOUT)
        .long_about(LONG_ABOUT)
        .after_help(FILES)
        .override_usage(format!("{} COMMAND [OPTION...]", name.as_str()))
        .max_term_width(WIDTH)
        .disable_help_flag(true)
        .disable_version_flag(true)
        .disable_help_subcommand(true);
    if name == Name::Torpor {
        root =
            root.after_help(format!("torpor help COMMAND tells more about a command.\n\n{FILES}"));
    }
    for info in Command::all() {
        root = add_command(root, name, info);
    }
    match name {
        Name::Torpor => {
            root = root
                .subcommand(image_tree())
                .subcommand(key_tree())
                .subcommand(migrate_tree())
                .subcommand(agent_tree())
                .subcommand(snapshot_tree())
                .subcommand(kubernetes_tree())
                .subcommand(queue_tree())
                .subcommand(benchmark_tree())
                .subcommand(completion_tree())
                .subcommand(man_tree())
                .subcommand(plain("help").about("Print help on a command"));
            ["help", "version"]
                .iter()
                .filter_map(|long| Opt::find(long))
                .fold(root, |root, opt| root.arg(arg(opt, "Options", opt.short)))
        }
        _ => add_options(root, |_| true),
    }
}

fn plain(name: &str) -> clap::Command {
    clap::Command::new(name.to_owned()).disable_help_flag(true).disable_help_subcommand(true)
}

/// Adds a command of one word, or of two as a command within a command.
fn add_command(root: clap::Command, name: Name, info: &CommandInfo) -> clap::Command {
    let mut leaf = leaf(name, info);
    if name == Name::Torpor {
        leaf = add_own_options(leaf, info);
    }
    match info.words {
        [outer, inner] => {
            let leaf = leaf.name(*inner);
            if root.find_subcommand(outer).is_some() {
                return root.mut_subcommand(*outer, |cmd| cmd.subcommand(leaf));
            }
            let about = "Write or check what a processor can do";
            root.subcommand(plain(outer).about(about).subcommand_required(true).subcommand(leaf))
        }
        _ => root.subcommand(leaf),
    }
}

/// A command without its options.
fn leaf(name: Name, info: &CommandInfo) -> clap::Command {
    let full = format!("{} {}", name.as_str(), info.words.join(" "));
    let argument = if info.command == Command::Swrk { " FD" } else { "" };
    let mut leaf = plain(info.words.first().copied().unwrap_or_default())
        .about(info.about)
        .long_about(info.long_about)
        .before_help(info.long_about)
        .help_template(COMMAND_PAGE)
        .max_term_width(WIDTH)
        .override_usage(format!("{full}{argument} [OPTION...]"));
    if !info.examples.is_empty() {
        let lines: Vec<String> =
            info.examples.iter().map(|line| format!("  {} {line}", name.as_str())).collect();
        leaf = leaf.after_help(format!("Examples:\n{}", lines.join("\n")));
    }
    if info.command == Command::Swrk {
        leaf = leaf.arg(Arg::new("FD").help("Number of the socket's descriptor"));
    }
    leaf
}

/// Adds the options that a command takes.
fn add_own_options(leaf: clap::Command, info: &CommandInfo) -> clap::Command {
    add_options(leaf, |opt| opt.commands & info.command.bit() != 0)
}

fn add_options(mut command: clap::Command, wanted: impl Fn(&Opt) -> bool) -> clap::Command {
    let mut letters = Vec::new();
    for group in GROUPS {
        for opt in group.options.iter().filter(|opt| wanted(opt)) {
            // -d is two options' letter: one of them is enough here.
            let letter = opt.short.filter(|letter| !letters.contains(letter));
            letters.extend(letter);
            command = command.arg(arg(opt, group.title, letter));
        }
    }
    command
}

fn arg(opt: &'static Opt, heading: &'static str, letter: Option<char>) -> Arg {
    let mut arg = Arg::new(opt.long).long(opt.long).help_heading(heading);
    if let Some(letter) = letter {
        arg = arg.short(letter);
    }
    arg = match opt.argument() {
        None => arg.action(ArgAction::SetTrue),
        Some((name, false)) => arg.value_name(name).action(ArgAction::Append),
        Some((name, true)) => {
            arg.value_name(name).num_args(0..=1).require_equals(true).action(ArgAction::Append)
        }
    };
    match opt.set {
        Set::Refused(_, why) => arg.help(format!("{} (not supported: {why})", opt.help)),
        _ => arg.help(opt.help),
    }
}

/// For all names of the program.
fn completion(CompletionCommand { shell }: CompletionCommand) -> Result<ExitCode, Failure> {
    let mut script = Vec::new();
    for name in [Name::Torpor, Name::Criu] {
        clap_complete::generate(shell, &mut tree(name), name.as_str(), &mut script);
    }
    print!("{}", String::from_utf8_lossy(&script));
    Ok(ExitCode::SUCCESS)
}

fn man(ManCommand { directory }: ManCommand) -> Result<ExitCode, Failure> {
    write_manual(&directory).map_err(|e| Failure::io(directory.display(), &e))?;
    Ok(ExitCode::SUCCESS)
}

/// Writes the manual pages: one for each command of `torpor`, and one for `criu`.
///
/// # Errors
/// If the directory cannot be made or written to.
fn write_manual(dir: &Path) -> io::Result<()> {
    fs::create_dir_all(dir)?;
    let mut root = tree(Name::Torpor);
    root.build();
    write_page(&root, "torpor", "1", dir)?;
    for sub in root.get_subcommands() {
        let name = format!("torpor-{}", sub.get_name());
        write_page(sub, &name, "1", dir)?;
        // What the program calls itself by is nobody's to call.
        for inner in sub.get_subcommands().filter(|inner| !inner.is_hide_set()) {
            write_page(inner, &format!("{name}-{}", inner.get_name()), "1", dir)?;
        }
    }
    write_page(&tree(Name::Criu), "criu", "8", dir)
}

fn write_page(command: &clap::Command, name: &str, section: &str, dir: &Path) -> io::Result<()> {
    // The long description stands in the page already.
    let command = command.clone().name(name.to_owned()).before_help("");
    let usage = command.clone().render_usage().to_string();
    let usage = usage.trim_start_matches("Usage:").trim().replace('-', "\\-");
    let page = clap_mangen::Man::new(command.clone())
        .title(name.to_uppercase())
        .section(section)
        .source(format!("Torpor {}", env!("CARGO_PKG_VERSION")))
        .manual("Torpor");
    let mut out = Vec::new();
    page.render_title(&mut out)?;
    page.render_name_section(&mut out)?;
    // clap_mangen would list every option here.
    writeln!(out, ".SH SYNOPSIS\n{usage}")?;
    page.render_description_section(&mut out)?;
    if command.get_arguments().next().is_some() {
        page.render_options_section(&mut out)?;
    }
    if command.has_subcommands() {
        page.render_subcommands_section(&mut out)?;
    }
    if let Some(more) = command.get_after_help() {
        write_notes(&mut out, &more.to_string())?;
    }
    fs::write(dir.join(format!("{name}.{section}")), out)
}

/// What stands below the options: examples, or paragraphs.
fn write_notes(out: &mut Vec<u8>, text: &str) -> io::Result<()> {
    let (heading, text) = match text.strip_prefix("Examples:\n") {
        Some(lines) => {
            ("EXAMPLES", lines.lines().map(str::trim).collect::<Vec<_>>().join("\n.br\n"))
        }
        None => ("NOTES", text.replace("\n\n", "\n.PP\n")),
    };
    writeln!(out, ".SH {heading}\n{}", text.replace('-', "\\-"))
}
