//! What the policy for restores says. The engine is asked: only it knows all files and options that it is made of.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

use super::{ALLOW, AgentSettings, FOREIGN};
use crate::engine::{SELF, hear};
use crate::error::{Context, Error, Result};
use crate::runtime::Runtime;

/// Violations of the policy that are told.
const MAX_TOLD: usize = 20;

/// Has images judged as a restore would, of a container with this bundle.
///
/// # Errors
/// If the policy forbids something in the images, or they cannot be read.
pub(super) fn images(settings: &AgentSettings, images: &Path, bundle: Option<&Path>) -> Result<()> {
    let mut audit = audit(settings);
    audit.args(FOREIGN).arg("--tcp-established").arg(images);
    if let Some(bundle) = bundle {
        audit.arg("--bundle").arg(bundle);
    }
    ask(audit)
}

/// Has the configuration in a bundle judged: what its runtime does by it comes before the restore, and stays.
///
/// # Errors
/// If the policy forbids something in the configuration, or it cannot be read.
pub(super) fn configuration(
    settings: &AgentSettings,
    bundle: &Path,
    runtime: Runtime,
) -> Result<()> {
    let mut audit = audit(settings);
    audit.arg("--no-images").arg("--bundle").arg(bundle);
    if runtime == Runtime::Podman {
        // By its restart policy, or to look how it is, and nobody is asked then.
        audit.arg("--restarts");
    }
    ask(audit)
}

/// Has the options of restores looked at: what is wrong with them would be wrong with whatever comes.
///
/// # Errors
/// If there is no such option of a restore, or a file that one of them names cannot be read: what it is.
pub(super) fn options(settings: &AgentSettings) -> Result<()> {
    let mut audit = audit(settings);
    audit.arg("--no-images");
    match answer(audit)? {
        (_, true) => Ok(()),
        (said, false) => Err(Error::refused_with(
            format!("--restore-option: {}", said["text"].as_str().unwrap_or_default()),
            "torpor restore --help lists the options; files have absolute paths",
        )),
    }
}

/// Restores have other working directories than the agent, too.
fn audit(settings: &AgentSettings) -> Command {
    let mut audit = Command::new(SELF);
    audit.args(["image", "audit", "--json"]).args(&settings.restore_options);
    audit.current_dir(&settings.work_dir);
    audit
}

fn ask(audit: Command) -> Result<()> {
    let (said, is_allowed) = answer(audit)?;
    verdict(&said, is_allowed)
}

/// What the engine says, and whether that is yes.
fn answer(mut audit: Command) -> Result<(Value, bool)> {
    let output = hear(&mut audit).context(|| "ask the policy".to_owned())?;
    let said = serde_json::from_slice(&output.stdout).map_err(|_| {
        let text = String::from_utf8_lossy(&output.stderr);
        let why = match text.trim().trim_start_matches("Error: ") {
            "" => "its answer cannot be understood",
            why => why,
        };
        Error::refused(format!("the policy cannot be asked: {why}"))
    })?;
    Ok((said, output.status.success()))
}

/// What the engine has said of a policy, or why it could not be asked: an option that it has not, a file that is not there.
fn verdict(said: &Value, is_allowed: bool) -> Result<()> {
    let violations = said["violations"].as_array().map_or(&[][..], Vec::as_slice);
    let word = |it: &Value, key: &str| it[key].as_str().unwrap_or_default().to_owned();
    let told = |it| format!("{} ({})", word(it, "text"), word(it, "rule"));
    let texts: Vec<String> = violations.iter().map(told).collect();
    match (texts.as_slice(), said["text"].as_str()) {
        ([], _) if is_allowed => Ok(()),
        ([], Some(why)) => Err(Error::refused_with(
            format!("the policy cannot be asked: {why}"),
            "there: look at the --restore-option of torpor agent",
        )),
        ([], None) => Err(Error::refused("the policy does not say what it allows")),
        (texts, _) => Err(Error::refused_with(
            format!("the policy does not allow: {}", texts[..texts.len().min(MAX_TOLD)].join("; ")),
            ALLOW,
        )),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;

    #[test]
    fn why_a_policy_cannot_be_asked_is_told() {
        let said = json!({"class": "kernel", "text": "policy /none: No such file or directory"});
        let error = verdict(&said, false).unwrap_err();
        assert!(
            error.to_string().ends_with("asked: policy /none: No such file or directory"),
            "{error}"
        );
        assert!(error.hint().unwrap().contains("--restore-option"));
        let said = json!({"violations": [{"text": "a socket", "rule": "foreign.sockets"}]});
        let error = verdict(&said, false).unwrap_err();
        assert_eq!(error.to_string(), "the policy does not allow: a socket (foreign.sockets)");
        assert!(verdict(&json!({"violations": []}), true).is_ok());
    }
}
