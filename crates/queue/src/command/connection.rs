//! How a client finds its daemon.

use std::env::VarError;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use torpor_worker::{Class, Outcome};

use crate::http::{Address, Client, DEFAULT, is_cut_off};

/// A daemon answers within this time, also if it asks another machine first that is away.
const SILENCE: Duration = Duration::from_secs(120);

/// The daemon that the environment names: `TORPOR_QUEUE`, and for the network
/// `TORPOR_QUEUE_TOKEN` and `TORPOR_QUEUE_CA`.
///
/// # Errors
/// If the address is none, or the file of authorities cannot be read.
pub(super) fn client() -> Result<Client, String> {
    let address = variable("TORPOR_QUEUE")?.unwrap_or_else(|| DEFAULT.to_owned());
    let address: Address = address.parse().map_err(|e| format!("TORPOR_QUEUE: {e}"))?;
    let token = variable("TORPOR_QUEUE_TOKEN")?;
    let tls = match std::env::var_os("TORPOR_QUEUE_CA") {
        Some(path) => Some(authority(Path::new(&path))?),
        None => None,
    };
    Ok(Client { address, token, tls, silence: SILENCE })
}

/// What a variable of the environment says; one that is empty says nothing.
///
/// # Errors
/// If it cannot be part of a request: what another daemon would be asked for instead.
fn variable(name: &str) -> Result<Option<String>, String> {
    match std::env::var(name) {
        Ok(text) if text.contains(char::is_control) => {
            Err(format!("{name} holds a control character, like the end of a line"))
        }
        Ok(text) => Ok(Some(text).filter(|text| !text.is_empty())),
        Err(VarError::NotPresent) => Ok(None),
        Err(VarError::NotUnicode(_)) => Err(format!("{name} is no UTF-8")),
    }
}

fn authority(path: &Path) -> Result<Arc<rustls::ClientConfig>, String> {
    let roots = torpor_tls::authorities(path).map_err(|e| e.to_string())?;
    let config = rustls::ClientConfig::builder().with_root_certificates(roots);
    Ok(Arc::new(config.with_no_client_auth()))
}

/// Why a daemon has not done what it was asked.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub struct Refusal {
    class: Class,
    /// The status of the answer, if that is why.
    status: Option<u16>,
    /// Whether it was asked, and has not answered to the end.
    is_cut_off: bool,
    text: String,
}

impl Refusal {
    /// Whether there was no daemon that could have refused.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.class == Class::PeerLost
    }

    /// Whether there was one, which went away or was silent before it had answered: it may have done what it was asked.
    #[must_use]
    pub fn is_cut_off(&self) -> bool {
        self.is_cut_off
    }

    /// Whether there is nothing of that name.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        self.status == Some(404)
    }

    /// Whether the daemon has decided that: it would say the same again.
    #[must_use]
    pub fn is_meant(&self) -> bool {
        self.status.is_some_and(|status| (400..500).contains(&status))
    }

    /// Whether it is more than may be, whenever it is sent.
    #[must_use]
    pub(crate) fn is_too_much(&self) -> bool {
        self.status == Some(413)
    }

    /// Whether it may be sent as soon as the job has read what came before it.
    #[must_use]
    pub(crate) fn is_too_early(&self) -> bool {
        self.status == Some(429)
    }

    /// Several in one.
    ///
    /// # Errors
    /// If the list is not empty.
    pub fn all(refusals: Vec<Self>) -> Result<(), Self> {
        let Some(class) = refusals.first().map(|first| first.class) else { return Ok(()) };
        let mut texts: Vec<String> = refusals.into_iter().map(String::from).collect();
        // A daemon that does not answer says the same of each.
        texts.dedup();
        Err(Self { class, status: None, is_cut_off: false, text: texts.join("; ") })
    }
}

impl From<Refusal> for Outcome {
    fn from(Refusal { class, text, .. }: Refusal) -> Self {
        Self::failed(class, text)
    }
}

impl From<Refusal> for String {
    fn from(refusal: Refusal) -> Self {
        refusal.text
    }
}

impl Client {
    /// Asks for something in JSON.
    ///
    /// # Errors
    /// If no daemon answers, this user may not ask it, or it refuses; if its answer is no JSON.
    pub fn json(&self, method: &str, path: &str, body: &[u8]) -> Result<Value, Refusal> {
        self.json_with(method, path, &[], body)
    }

    /// Asks for something in JSON, with further headers.
    ///
    /// # Errors
    /// As [`json`](Self::json).
    pub(crate) fn json_with(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Result<Value, Refusal> {
        let failed = |class, text| Refusal { class, status: None, is_cut_off: false, text };
        let lost = |e: io::Error| {
            let class = if self.closed(&e).is_some() { Class::Forbidden } else { Class::PeerLost };
            Refusal { is_cut_off: is_cut_off(&e), ..failed(class, self.unreachable(&e)) }
        };
        let answer = self.ask(method, path, headers, body).map_err(lost)?;
        let status = answer.status;
        let body = answer.whole().map_err(lost)?;
        let value: Value = serde_json::from_slice(&body).map_err(|e| {
            failed(Class::Protocol, format!("the daemon's answer makes no sense: {e}"))
        })?;
        if status < 300 {
            return Ok(value);
        }
        let detail = value["detail"].as_str().map(str::to_owned);
        Err(Refusal {
            class: if matches!(status, 401 | 403) { Class::Forbidden } else { Class::Refused },
            status: Some(status),
            is_cut_off: false,
            text: detail.unwrap_or_else(|| format!("the daemon answered with {status}")),
        })
    }

    /// What to do about a daemon that does not answer.
    #[must_use]
    pub fn unreachable(&self, error: &io::Error) -> String {
        let hint = self.closed(error).unwrap_or_else(|| {
            "start one with torpor queue serve, or name it in TORPOR_QUEUE".to_owned()
        });
        format!("ask the daemon at {}: {error} ({hint})", self.address)
    }

    /// Whose the socket is, if an error says that this user may not open it.
    fn closed(&self, error: &io::Error) -> Option<String> {
        let Address::Unix(path) = &self.address else { return None };
        if error.kind() != io::ErrorKind::PermissionDenied {
            return None;
        }
        let user = rustix::process::geteuid().as_raw();
        let whose = match path.metadata() {
            Ok(meta) => {
                let (owner, group, mode) = (meta.uid(), meta.gid(), meta.mode() & 0o777);
                format!("it belongs to user {owner} and group {group}, and has the mode {mode:03o}")
            }
            Err(_) => "a directory above it is closed to them".to_owned(),
        };
        Some(format!("user {user} may not open this socket: {whose}"))
    }
}
