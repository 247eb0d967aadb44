//! `torpor image plan` and `torpor image audit`: what a restore of images would do, and what of
//! it the policy does not allow, without a restore.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io::{ErrorKind, Write as _};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::ExitCode;

use clap::{Arg, ArgAction};
use serde_json::{Value as Json, json};
use torpor_engine::Audit;
use torpor_engine::options::{CgroupMode, CgroupRoot, Cgroups};
use torpor_policy::{Ask, Origin, Spec};
use torpor_worker::printable;

use crate::failure::Failure;
use crate::options::{self, Command, Settings};
use crate::{policy, program, seal};

/// What is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// What a restore would make, open, join, mount and connect.
    Plan,
    /// What the policy may limit, and what it does not allow.
    Audit,
}

/// For the help; the arguments are read by [`run`], which takes all options of a restore.
pub fn commands() -> impl Iterator<Item = clap::Command> {
    let plan = clap::Command::new("plan")
        .about("Print what a restore of a checkpoint would make, open, join and mount")
        .long_about(
            "Prints what a restore of the images in DIR would make, open, join, mount and connect, \
             by kind, with the tasks that it is for. It leaves out what any program may have and \
             no policy limits: memory and registers, options of sockets, pipes, timers; of \
             archives it says how much they make. Nothing is restored. Images that contradict themselves \
             are an error that names file and entry. Options of restore that matter count here, \
             too, such as --external.",
        )
        .override_usage("torpor image plan DIR [--json] [--bundle DIR] [OPTION OF RESTORE...]");
    let audit = clap::Command::new("audit")
        .about("Print what a checkpoint asks for, against the restore policy")
        .long_about(
            "Prints what the images in DIR ask for, and what of it the policy does not allow, \
             without restoring anything. The exit code is 0 if everything is allowed. Options of \
             restore that matter count here, too, such as --external.",
        )
        .override_usage("torpor image audit DIR [--json] [--bundle DIR] [OPTION OF RESTORE...]")
        .arg(Arg::new("no-images").long("no-images").action(ArgAction::SetTrue).help(
            "Instead of images, judge what the configuration of the bundle has a runtime do \
                     before it restores: root file system, mounts, control group; without --bundle, \
                     only whether there are such options, and policy and keys can be read",
        ))
        .arg(Arg::new("restarts").long("restarts").action(ArgAction::SetTrue).help(
            "With --no-images, judge as well what the container would have if its runtime started it anew",
        ));
    [plan, audit].into_iter().map(with_options)
}

fn with_options(command: clap::Command) -> clap::Command {
    command
        .arg(Arg::new("DIR").help("The directory of the images").required(true))
        .arg(Arg::new("json").long("json").action(ArgAction::SetTrue).help("Print JSON"))
        .arg(
            Arg::new("bundle")
                .long("bundle")
                .value_name("DIR")
                .help("Judge as if a runtime called for the container of this bundle"),
        )
        .arg(
            Arg::new("policy")
                .long("policy")
                .value_name("FILE")
                .help("The policy (default: /etc/torpor/policy.toml, if it is there)"),
        )
        .arg(
            Arg::new("policy-rule")
                .long("policy-rule")
                .value_name("RULE")
                .action(ArgAction::Append)
                .help("A rule in place of that of the policy, as it would stand in the file"),
        )
}

/// Carries out `image plan` or `image audit` with these arguments.
///
/// # Errors
/// Damaged images; an option that a restore does not have; a policy that makes no sense, or a key that cannot be read.
pub fn run(form: Form, args: &[OsString]) -> Result<ExitCode, Failure> {
    let mut as_json = false;
    let (mut has_images, mut restarts) = (true, false);
    let mut bundle = None;
    let mut rest = vec![];
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        match arg.to_str() {
            Some("--json") => as_json = true,
            Some("--no-images") if form == Form::Audit => has_images = false,
            Some("--restarts") if form == Form::Audit => restarts = true,
            Some(word @ ("--help" | "-h")) => {
                let name = if form == Form::Plan { "plan" } else { "audit" };
                for mut command in commands().filter(|command| command.get_name() == name) {
                    let short = word == "-h";
                    let page =
                        if short { command.render_help() } else { command.render_long_help() };
                    print!("{page}");
                }
                return Ok(ExitCode::SUCCESS);
            }
            Some("--bundle") => {
                let missing = || Failure::invalid("option --bundle needs an argument: DIR");
                bundle = Some(args.next().cloned().ok_or_else(missing)?);
            }
            _ if arg.as_bytes().starts_with(b"--bundle=") => {
                let dir = &arg.as_bytes()[b"--bundle=".len()..];
                bundle = Some(OsStr::from_bytes(dir).to_owned());
            }
            _ => rest.push(arg.clone()),
        }
    }
    let found = options::parse(rest)?;
    program::check_options(Command::Restore, &found)?;
    let mut settings = options::settings(&found)?;
    match found.words.as_slice() {
        [] => {}
        [word, ..] if !has_images => {
            return Err(Failure::invalid(format!("{:?} is no option", word.display()))
                .hint("--no-images takes no directory"));
        }
        [dir] => settings.engine.images_dir = dir.into(),
        _ => return Err(Failure::invalid("it takes one directory")),
    }
    if let Some(bundle) = &bundle {
        let spec = policy::spec(Path::new(bundle))?.ok_or_else(|| {
            Failure::invalid(format!("{} is no bundle of a container", bundle.display()))
        })?;
        if !found.options.iter().any(|given| given.opt.long == "manage-cgroups") {
            manage_groups(&mut settings.engine.cgroups, &spec, Path::new(bundle));
        }
        settings.engine.trust.spec = Some(spec);
    }
    let audit = match has_images {
        true => audit(settings)?,
        false => audit_configuration(settings, Path::new(&bundle.unwrap_or_default()), restarts)?,
    };
    let text = match (form, as_json) {
        (Form::Plan, true) => plan_as_json(&audit).to_string() + "\n",
        (Form::Plan, false) => listed(&audit, |_| true),
        (Form::Audit, true) => json_of(&audit).to_string() + "\n",
        (Form::Audit, false) => text_of(&audit),
    };
    let mut stdout = std::io::stdout();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        // A reader that goes away early is no failure.
        Err(e) if e.kind() != ErrorKind::BrokenPipe => {
            return Err(Failure::io("standard output", &e));
        }
        _ => {}
    }
    let fine = form == Form::Plan || audit.violations.is_empty();
    Ok(if fine { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A runtime has the control groups of a container managed, below the one that it has made for it.
fn manage_groups(groups: &mut Cgroups, spec: &Spec, bundle: &Path) {
    groups.manage = CgroupMode::Soft;
    if groups.roots.is_empty() {
        // One that the runtime chooses is known to it alone; what is judged is what lies below.
        let chosen = || format!("/{}", bundle.file_name().unwrap_or_default().to_string_lossy());
        let path = spec.group().map_or_else(chosen, str::to_owned);
        groups.roots.push(CgroupRoot { controller: None, path });
    }
}

fn audit(mut settings: Settings) -> Result<Audit, Failure> {
    policy::load(&mut settings)?;
    seal::load(&mut settings, seal::Images::Read)?;
    settings.merge().map_err(Failure::invalid)?;
    settings.adopt_descriptors().map_err(Failure::invalid)?;
    Ok(torpor_engine::audit(&settings.engine)?)
}

/// What a runtime does by the configuration of a container from elsewhere, if there is one, before it calls for a restore; and
/// what it could do afterwards, if it restarts the container by itself.
fn audit_configuration(
    mut settings: Settings,
    bundle: &Path,
    restarts: bool,
) -> Result<Audit, Failure> {
    policy::load(&mut settings)?;
    seal::load(&mut settings, seal::Images::Read)?;
    let trust = &settings.engine.trust;
    let mut violations = Vec::new();
    if let Some(spec) = &trust.spec {
        violations.extend(trust.policy.judge_configuration(spec, bundle));
        if restarts {
            violations.extend(trust.policy.judge_start(spec));
        }
    }
    Ok(Audit { requests: vec![], violations, allowing: vec![], origin: Origin::Elsewhere })
}

fn plan_as_json(audit: &Audit) -> Json {
    let items: Vec<Json> = audit.requests.iter().map(torpor_policy::Request::to_json).collect();
    json!({ "made_here": audit.origin == Origin::Here, "items": items })
}

fn json_of(audit: &Audit) -> Json {
    let requests = audit.requests.iter().filter(|request| !request.ask.is_neutral());
    let requests: Vec<Json> = requests.map(torpor_policy::Request::to_json).collect();
    let violations = audit
        .violations
        .iter()
        .map(|v| json!({ "image": v.image, "task": v.task, "rule": v.rule, "text": v.text }));
    json!({
        "made_here": audit.origin == Origin::Here,
        "allowed": audit.violations.is_empty(),
        "violations": violations.collect::<Vec<_>>(),
        "allowing": audit.allowing,
        "requests": requests,
    })
}

/// Items by kind; what several tasks ask for alike stands there once.
fn listed(audit: &Audit, wanted: impl Fn(&Ask) -> bool) -> String {
    let mut kinds: BTreeMap<&str, BTreeMap<String, Vec<u32>>> = BTreeMap::new();
    for request in audit.requests.iter().filter(|request| wanted(&request.ask)) {
        let texts = kinds.entry(request.ask.kind()).or_default();
        texts.entry(printable(&request.ask.to_string())).or_default().extend(request.task);
    }
    let mut out = match audit.origin {
        Origin::Here => "made on this host\n".to_owned(),
        Origin::Elsewhere => "not known to be made on this host\n".to_owned(),
    };
    for (kind, texts) in kinds {
        out += &format!("\n{kind}\n");
        for (text, mut tasks) in texts {
            tasks.sort_unstable();
            tasks.dedup();
            let tasks: Vec<String> = tasks.iter().map(ToString::to_string).collect();
            out += &match tasks.as_slice() {
                [] => format!("  {text}\n"),
                [one] => format!("  task {one}: {text}\n"),
                many => format!("  tasks {}: {text}\n", many.join(", ")),
            };
        }
    }
    out
}

/// What is asked for, and what of it is not allowed.
fn text_of(audit: &Audit) -> String {
    let mut out = listed(audit, |ask| !ask.is_neutral());
    if audit.violations.is_empty() {
        return out + "\neverything is allowed\n";
    }
    out += &format!("\nnot allowed ({})\n", audit.violations.len());
    for violation in &audit.violations {
        out += &format!("  {}\n", printable(&violation.to_string()));
    }
    if !audit.allowing.is_empty() {
        out += "\nlines of a policy that would allow it\n";
    }
    audit.allowing.iter().for_each(|line| out += &format!("  {}\n", printable(line)));
    out
}
