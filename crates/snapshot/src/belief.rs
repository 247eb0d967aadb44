//! Which bundle or image, command and mounts a start uses. They are the caller's, or those of a snapshot that
//! may be believed: somebody who is trusted has signed it, this machine has made it, or it says what this
//! machine knows of its place already. Whoever can write where another one lies could otherwise have any directory
//! of this machine mounted, and any command run.

use std::fmt::Write;

use serde_json::Value;

use crate::changes::SetId;
use crate::description::Origin;
use crate::error::{Error, Result};
use crate::mounts::Bind;
use crate::source::Source;

/// What the caller of a start says of what is started.
#[derive(Debug, Clone, Copy)]
pub struct Said<'a> {
    /// What it is of.
    pub from: Option<&'a Source>,
    /// What it runs instead of what that says; empty if nothing is said.
    pub command: &'a [String],
    /// What it has mounted.
    pub binds: &'a [Bind],
}

/// What a start uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Granted {
    /// What the container is of. Of its mounts those are the caller's that the caller mounts there, too.
    pub origin: Origin,
    /// As much of it as this machine remembers: without mounts that only the caller has vouched for.
    pub lasting: Origin,
}

impl Said<'_> {
    /// The origin that is the caller's alone, if it says what is started.
    #[must_use]
    pub fn origin(&self) -> Option<Origin> {
        let from = self.from?.to_string();
        Some(Origin { from, command: self.command.to_owned(), mounts: Vec::new() })
    }

    /// What a snapshot says, with what the caller says in its place.
    #[must_use]
    pub fn over(&self, origin: &Origin) -> Origin {
        let mut origin = origin.clone();
        if let Some(from) = self.from {
            origin.from = from.to_string();
        }
        if !self.command.is_empty() {
            origin.command = self.command.to_owned();
        }
        origin
    }

    fn mounts_at(&self, claimed: &Bind) -> bool {
        self.binds.iter().any(|own| own.is_at(claimed))
    }

    /// What a start uses of what a snapshot claims: all of it if the snapshot is `believed`, else what the caller
    /// says as well, or what is `known` of its place here.
    ///
    /// # Errors
    /// If it claims more. It is named, and how it can be allowed.
    pub fn grant(
        &self,
        claimed: &Origin,
        believed: bool,
        known: Option<&Origin>,
    ) -> Result<Granted> {
        let origin = self.over(claimed);
        if believed {
            return Ok(Granted { lasting: origin.clone(), origin });
        }
        let nothing = Origin::default();
        let known = known.unwrap_or(&nothing);
        let (mut asks, mut pass) = (Vec::new(), String::new());
        if self.from.is_none() && claimed.from != known.from {
            asks.push(format!("{:?}", claimed.from));
            let _ = write!(pass, " --from {}", word(&claimed.from));
        }
        let mut lasting = origin.clone();
        lasting.mounts.retain(|mount| known.mounts.contains(mount));
        for mount in &claimed.mounts {
            if !self.mounts_at(mount) && !known.mounts.contains(mount) {
                asks.push(format!("a mount of {mount}"));
                let _ = write!(pass, " --mount {}", word(&mount.option()));
            }
        }
        let is_new = !claimed.command.is_empty() && claimed.command != known.command;
        if self.command.is_empty() && is_new {
            asks.push(format!("the command {:?}", claimed.command));
            pass += " --";
            claimed.command.iter().for_each(|part| pass.extend([" ", &word(part)]));
        }
        if asks.is_empty() {
            return Ok(Granted { origin, lasting });
        }
        Err(Error::new(format!(
            "the snapshot asks for {}: nobody who is believed has signed it, and it was not made here",
            asks.join(", and for ")
        ))
        .hint(format!("a signature allows it (--trust, --cosign-key), or its caller:{pass}")))
    }
}

/// Whether a container with this configuration gets programs from a snapshot that run as another user or group: one
/// that is `believed`, or one whose container could be such a user by itself.
#[must_use]
pub fn set_id(believed: bool, config: &Value) -> SetId {
    let process = &config["process"];
    let bounding = process["capabilities"]["bounding"].as_array();
    let has = |name: &str| bounding.is_some_and(|all| all.iter().any(|own| own == name));
    let may = has("CAP_SETUID") && has("CAP_SETGID") && process["noNewPrivileges"] != true;
    if believed || may { SetId::Taken } else { SetId::Refused }
}

/// A word as a shell and a terminal take it, so with nothing in it that a terminal obeys.
fn word(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_+-./:=,@%".contains(c);
    match !text.is_empty() && text.chars().all(plain) {
        true => text.to_owned(),
        false => format!("'{}'", text.escape_debug().to_string().replace("\\'", "'\\''")),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn bind(source: &str, destination: &str) -> Bind {
        format!("source={source},destination={destination}").parse().unwrap()
    }

    fn origin(from: &str, command: &[&str], mounts: &[Bind]) -> Origin {
        let command = command.iter().map(|&word| word.to_owned()).collect();
        Origin { from: from.to_owned(), command, mounts: mounts.to_vec() }
    }

    const NOTHING: Said<'static> = Said { from: None, command: &[], binds: &[] };

    #[test]
    fn a_stranger_gets_nothing_that_was_not_said() {
        let from = "runc:/own".parse().unwrap();
        let said = Said { from: Some(&from), ..NOTHING };
        let refused = |said: Said<'_>, claimed: &Origin, known: Option<&Origin>| {
            let error = said.grant(claimed, false, known).unwrap_err();
            (error.to_string(), error.hint.unwrap())
        };
        let (text, hint) = refused(NOTHING, &origin("runc:/theirs", &[], &[]), None);
        assert!(
            text.contains("\"runc:/theirs\"") && hint.contains("--from runc:/theirs"),
            "{hint}"
        );
        let image = refused(NOTHING, &origin("podman:evil", &[], &[]), None);
        assert!(image.0.contains("\"podman:evil\""), "{image:?}");
        let claimed = origin("runc:/own", &["sh", "-c", "it's \u{1b}[2J"], &[]);
        let (text, hint) = refused(said, &claimed, None);
        assert!(text.contains("the command [\"sh\""), "{text}");
        assert!(hint.ends_with("-- sh -c 'it'\\''s \\u{1b}[2J'"), "{hint}");
        let claimed = origin("runc:/own", &[], &[bind("/", "/spare")]);
        let (text, hint) = refused(said, &claimed, None);
        assert!(text.contains("a mount of \"/\" at \"/spare\""), "{text}");
        assert!(hint.contains("--mount type=bind,source=/,destination=/spare"), "{hint}");
        // Another of the caller's does not vouch for it, nor does what is known of something else.
        let binds = [bind("/", "/other")];
        refused(Said { binds: &binds, ..said }, &claimed, None);
        refused(said, &claimed, Some(&origin("runc:/own", &[], &[bind("/", "/elsewhere")])));
        refused(NOTHING, &claimed, Some(&origin("runc:/other", &[], &claimed.mounts)));
    }

    #[test]
    fn the_callers_word_is_enough_and_counts_for_this_start() {
        let from = "runc:/own".parse().unwrap();
        let (command, binds) = (["cat".to_owned()], [bind("/mine", "/spare/")]);
        let said = Said { from: Some(&from), command: &command, binds: &binds };
        let claimed = origin("runc:/theirs", &["cat"], &[bind("/theirs", "/spare")]);
        let granted = said.grant(&claimed, false, None).unwrap();
        assert_eq!(granted.lasting, origin("runc:/own", &["cat"], &[]));
        // The caller's command is run, whatever the snapshot says.
        let claimed = origin("runc:/theirs", &["rm"], &[]);
        let granted = said.grant(&claimed, false, None).unwrap();
        assert_eq!(granted.origin, origin("runc:/own", &["cat"], &[]));
    }

    #[test]
    fn what_is_believed_or_known_is_granted() {
        let claimed = origin("runc:/own", &["cat"], &[bind("/data", "/spare")]);
        let all = Granted { origin: claimed.clone(), lasting: claimed.clone() };
        assert_eq!(NOTHING.grant(&claimed, true, None).unwrap(), all);
        assert_eq!(NOTHING.grant(&claimed, false, Some(&claimed)).unwrap(), all);
    }

    #[test]
    fn programs_of_other_users_are_of_who_could_be_one() {
        let config = |bounding: &[&str], closed: bool| {
            let capabilities = serde_json::json!({ "bounding": bounding });
            serde_json::json!({ "process": {
                "capabilities": capabilities, "noNewPrivileges": closed
            } })
        };
        let (few, both) = (["CAP_CHOWN", "CAP_SETUID"], ["CAP_SETGID", "CAP_SETUID"]);
        assert_eq!(set_id(false, &config(&few, false)), SetId::Refused);
        assert_eq!(set_id(false, &config(&both, true)), SetId::Refused);
        assert_eq!(set_id(false, &Value::Null), SetId::Refused);
        assert_eq!(set_id(false, &config(&both, false)), SetId::Taken);
        assert_eq!(set_id(true, &config(&few, true)), SetId::Taken);
    }
}
