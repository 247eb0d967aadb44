//! Who asks, and what they may.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::config::Config;
use super::taking::NotTaken;
use crate::spec::{Spec, User};

/// Who asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Identity {
    /// Under which name jobs are counted; `None`: whatever they say themselves.
    pub owner: Option<String>,
    /// Who jobs run as; `None`: whatever they say themselves.
    pub user: Option<User>,
    /// Whether they may see and change what is not theirs.
    pub admin: bool,
    /// Whether it is another machine of the pool.
    pub machine: bool,
}

impl Identity {
    /// Who is at the other end of a Unix socket: root and the daemon's own user may all.
    #[must_use]
    pub(crate) fn of_peer(uid: u32, gid: u32) -> Self {
        let own = rustix::process::geteuid().as_raw();
        if uid == 0 || uid == own {
            return Self { owner: None, user: None, admin: true, machine: false };
        }
        let user = User { uid, gid, groups: Vec::new() };
        Self { owner: Some(format!("uid-{uid}")), user: Some(user), admin: false, machine: false }
    }

    /// Another machine of the pool, which has shown its certificate.
    #[must_use]
    pub(crate) fn of_machine() -> Self {
        Self { owner: None, user: None, admin: true, machine: true }
    }

    /// Puts in a submission what its sender has no say in.
    pub(crate) fn apply(&self, spec: &mut Spec) {
        if let Some(owner) = &self.owner {
            spec.owner.clone_from(owner);
        }
        if let Some(user) = &self.user {
            spec.user.clone_from(user);
        }
    }

    /// Holds a submission, whose owner is known, to what its sender is granted.
    ///
    /// # Errors
    /// If it asks for more.
    pub(super) fn bound(&self, config: &Config, spec: &mut Spec) -> Result<(), NotTaken> {
        if self.admin {
            return Ok(());
        }
        let grant = config.grant_of(&spec.owner);
        grant.apply(spec, &config.default_class).map_err(NotTaken::Beyond)
    }

    /// Whether they may see and change jobs of an owner.
    #[must_use]
    pub(crate) fn may(&self, owner: &str) -> bool {
        self.admin || self.owner.as_deref() == Some(owner)
    }
}

/// Those who may ask over the network, by the word that they prove it with.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Tokens(Vec<Token>);

/// One of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Token {
    token: String,
    owner: String,
    #[serde(default)]
    admin: bool,
    #[serde(default = "nobody")]
    uid: u32,
    #[serde(default = "nobody")]
    gid: u32,
}

fn nobody() -> u32 {
    65534
}

/// Shorter words could be guessed.
const SHORTEST: usize = 16;

impl Tokens {
    /// Reads a file of them: a list in JSON.
    ///
    /// # Errors
    /// If the file cannot be read, is no list of tokens, or has a token that is too short.
    pub(crate) fn read(path: &Path) -> Result<Self, String> {
        let say = |e: &dyn std::fmt::Display| format!("{}: {e}", path.display());
        let text = fs::read_to_string(path).map_err(|e| say(&e))?;
        let tokens: Self = serde_json::from_str(&text).map_err(|e| say(&e))?;
        if tokens.0.iter().any(|token| token.token.len() < SHORTEST) {
            return Err(say(&format!("a token must have {SHORTEST} characters at least")));
        }
        Ok(tokens)
    }

    /// Who has this token. All are compared to their end, so that the time it takes says
    /// nothing about them.
    #[must_use]
    pub(crate) fn identity(&self, given: &str) -> Option<Identity> {
        let same = |token: &Token| {
            let (a, b) = (token.token.as_bytes(), given.as_bytes());
            let differ =
                a.iter().zip(b).fold(a.len() ^ b.len(), |sum, (x, y)| sum | usize::from(x ^ y));
            differ == 0
        };
        let found =
            self.0.iter().fold(None, |found, token| if same(token) { Some(token) } else { found });
        found.map(|token| Identity {
            owner: Some(token.owner.clone()),
            user: Some(User { uid: token.uid, gid: token.gid, groups: Vec::new() }),
            admin: token.admin,
            machine: false,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_say_who_asks() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokens");
        fs::write(&path, r#"[{"token": "0123456789abcdef", "owner": "ann", "uid": 7}]"#).unwrap();
        let tokens = Tokens::read(&path).unwrap();
        let ann = tokens.identity("0123456789abcdef").unwrap();
        assert!(ann.may("ann") && !ann.may("bob"));
        let mut spec = Spec { owner: "bob".into(), ..Spec::default() };
        ann.apply(&mut spec);
        assert_eq!((spec.owner.as_str(), spec.user.uid, spec.user.gid), ("ann", 7, 65534));
        for wrong in ["", "0123456789abcde", "0123456789abcdeg", "0123456789abcdef0"] {
            assert_eq!(tokens.identity(wrong), None);
        }
        fs::write(&path, r#"[{"token": "short", "owner": "ann"}]"#).unwrap();
        assert!(Tokens::read(&path).is_err());
    }
}
