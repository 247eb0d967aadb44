//! `docs/cli.md` is made from the table of options:
//! `UPDATE_DOCS=1 cargo test -p torpor-cli --test docs` writes it anew.

#![allow(clippy::unwrap_used)]

use std::fmt::Write;
use std::fs;
use std::path::Path;

use torpor_cli::options::{Command, GROUPS, Opt, Set};

const INTRODUCTION: &str = "\
# The command line

Made from the table of options in `crates/cli/src/options`; `torpor help COMMAND` tells the same.

One program has three names. `torpor` is its own; called as `criu` (a link) it takes CRIU's place, and
called as `crit` it is CRIU's image tool. Commands and options are CRIU's under both of the first two
names. `torpor` refuses an option that a command has no use for, `criu` takes any option with any
command, as scripts written for it expect.

Options may stand before and after the command. Long names may be cut short while they stay unambiguous.
An argument in brackets may be left out, and has to follow `=` (or the letter, as in `-v4`). Flags can be
negated: `--no-shell-job`.

Exit codes: 0 if it worked, 1 if not. A log goes to the standard error, or to the file of `--log-file`.
With `-v3` and more each line begins with the time since the start in parentheses; errors begin with
`Error (`, warnings with `Warn  (`.

Action scripts are run by a shell, in the work directory, with `CRTOOLS_SCRIPT_ACTION` (the stage),
`CRTOOLS_IMAGE_DIR` (the images directory) and, once it is known, `CRTOOLS_INIT_PID` (the root task). A
script that fails stops the work, except at `post-resume`. It gets `SIGTERM` if the program is ended while it runs. The stages of a dump: `pre-dump`,
`network-lock`, `post-dump`, `network-unlock`; of a restore: `pre-restore`, `setup-namespaces`,
`post-setup-namespaces`, `post-restore`, `network-unlock`, `pre-resume`, `post-resume`.

Configuration files hold options without their dashes, one a line; `#` begins a comment, and an argument
with spaces stands in double quotes (`\\\"` is a quote in them). They are read in this order, and the
command line or the RPC request comes after them: `/etc/torpor/torpor.toml`, `/etc/criu/default.conf`,
`~/.criu/default.conf`, the file that `CRIU_CONFIG_FILE` names, the file of `--config`.
`--no-default-config` leaves out the first three.

`/etc/torpor/torpor.toml` is the machine's configuration in one TOML file. Each setting is an option by its
long name: `true` or `false` for a flag, text or a number for an argument, a list where an option can be
repeated. Tables may bring order in and mean nothing.

```toml
policy = \"/etc/torpor/policy.toml\"     # docs/policy.md

[dump]
tcp-established = true
ghost-limit = \"16M\"
skip-mnt = [\"/run/host\"]
```
";

fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

fn spelling(opt: &Opt) -> String {
    let letter = opt.short.map(|letter| format!("`-{letter}`, ")).unwrap_or_default();
    let name = opt.long;
    match opt.argument() {
        None => format!("{letter}`--{name}`"),
        Some((value, false)) => format!("{letter}`--{name} {value}`"),
        Some((value, true)) => format!("{letter}`--{name}[={value}]`"),
    }
}

fn row(opt: &Opt) -> String {
    let commands: Vec<&str> = Command::all()
        .iter()
        .filter(|info| opt.commands & info.command.bit() != 0)
        .map(|info| info.words[0])
        .collect();
    let mut commands: Vec<&str> = commands;
    commands.dedup();
    let commands = if commands.len() > 9 { "all".to_owned() } else { commands.join(", ") };
    let help = match opt.set {
        Set::Refused(_, why) => format!("{}. **Not supported**: {why}", opt.help),
        _ => opt.help.to_owned(),
    };
    format!("| {} | {} | {commands} |", cell(&spelling(opt)), cell(&help))
}

fn page() -> String {
    let mut out = INTRODUCTION.to_owned();
    out.push_str("\n## Commands\n\n| command | what it does |\n|---|---|\n");
    for info in Command::all() {
        writeln!(out, "| `{}` | {} |", info.words.join(" "), cell(info.long_about)).unwrap();
    }
    out.push_str("\nOnly under the name `torpor`, with options of their own, which `torpor help COMMAND` tells:\n\n");
    out.push_str("| command | | its commands |\n|---|---|---|\n");
    let all = torpor_cli::help::tree(torpor_cli::program::Name::Torpor);
    let is_engines = |name: &str| Command::all().iter().any(|info| info.words[0] == name);
    for own in all.get_subcommands().filter(|own| !is_engines(own.get_name())) {
        let inner = own.get_subcommands().filter(|inner| !inner.is_hide_set());
        let inner: Vec<_> = inner.map(|inner| format!("`{}`", inner.get_name())).collect();
        let about = own.get_about().unwrap().to_string();
        writeln!(out, "| `{}` | {} | {} |", own.get_name(), cell(&about), inner.join(", "))
            .unwrap();
    }
    for group in GROUPS {
        let heading = "| option | what it does | commands |\n|---|---|---|";
        writeln!(out, "\n## {}\n\n{heading}", group.title).unwrap();
        for opt in group.options {
            writeln!(out, "{}", row(opt)).unwrap();
        }
    }
    out
}

#[test]
fn the_page_is_up_to_date() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/cli.md");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(&path, page()).unwrap();
    }
    let found = fs::read_to_string(&path).unwrap();
    assert!(
        found == page(),
        "docs/cli.md is old: UPDATE_DOCS=1 cargo test -p torpor-cli --test docs"
    );
}
