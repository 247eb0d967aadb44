//! Other machines of the pool: who they are, and how they are spoken to.
//!
//! Daemons show each other certificates of an authority that is the pool's own
//! (`--tls-ca`). Whoever has such a certificate may hand jobs over.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use torpor_tls::{authorities, proof};

use super::core::Queue;
use super::tls::Tls;
use crate::http::{Address, Client};

/// What begins the names of instructions that a program may have found and gone on to use.
const INSTRUCTIONS: [&str; 14] = [
    "avx", "sse", "ssse", "aes", "vaes", "sha", "bmi", "adx", "fma", "pclmul", "vpclmul", "movbe",
    "popcnt", "gfni",
];

/// How this daemon speaks to others.
///
/// # Errors
/// If certificates or keys cannot be read or used.
pub(super) fn client_config(tls: &Tls) -> io::Result<Option<Arc<rustls::ClientConfig>>> {
    let Some(authority) = &tls.authority else { return Ok(None) };
    let (chain, key) = proof(&tls.certificate, &tls.key).map_err(io::Error::other)?;
    let config = rustls::ClientConfig::builder()
        .with_root_certificates(authorities(authority).map_err(io::Error::other)?)
        .with_client_auth_cert(chain, key)
        .map_err(io::Error::other)?;
    Ok(Some(Arc::new(config)))
}

impl super::core::Core {
    /// Another machine of the pool, by its name.
    ///
    /// # Errors
    /// If the pool has no machine of that name, its address is none of HTTPS, or this daemon has no certificate to show.
    pub(super) fn peer(&self, name: &str) -> Result<Client, String> {
        let address = self.config.pool.get(name).ok_or_else(|| {
            let names: Vec<&str> = self.config.pool.keys().map(String::as_str).collect();
            match names.is_empty() {
                true => "this daemon is in no pool (\"pool\" of its configuration)".to_owned(),
                false => format!("there is no machine {name} in the pool: {}", names.join(", ")),
            }
        })?;
        let address: Address = address.parse()?;
        if !matches!(address, Address::Secure(_)) {
            return Err(format!("machine {name} needs an address that begins with https://"));
        }
        let tls = self.pool.clone().ok_or("a pool needs --tls-cert, --tls-key and --tls-ca")?;
        let silence = Duration::from_millis(self.config.peer_silence.unsigned_abs());
        Ok(Client { address, token: None, tls: Some(tls), silence })
    }
}

/// Another machine of the pool, its jobs, and what has happened to them there after event `after`.
///
/// # Errors
/// As [`peer`](super::core::Core::peer); if the machine does not answer, or refuses.
pub(super) fn shown(queue: &Queue, name: &str, after: u64) -> Result<Value, String> {
    let client = queue.lock().peer(name)?;
    let machine = client.json("GET", "/v1/machine", b"")?;
    let jobs = client.json("GET", "/v1/jobs?limit=50", b"")?;
    let path = format!("/v1/events?follow=0&after={after}");
    let answer = client.ask("GET", &path, &[], b"").map_err(|e| client.unreachable(&e))?;
    let events = answer.whole().map_err(|e| client.unreachable(&e))?;
    let events = String::from_utf8_lossy(&events);
    let events = events.lines().filter_map(|line| line.strip_prefix("data: "));
    let events: Vec<Value> = events.filter_map(|data| serde_json::from_str(data).ok()).collect();
    Ok(json!({ "machine": machine, "jobs": jobs, "events": events }))
}

/// Instructions of this machine's processors.
#[must_use]
pub(super) fn processor() -> BTreeSet<String> {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
    let words = line.split_once(':').map_or("", |(_, words)| words).split_whitespace();
    let counts = |word: &&str| INSTRUCTIONS.iter().any(|start| word.starts_with(start));
    words.filter(counts).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::super::config::Config;
    use super::super::core::Core;

    /// Jobs, with all that is in their memory, and certificates of the pool go to no one who is not asked for one.
    #[test]
    fn other_machines_are_spoken_to_by_https_only() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("jobs")).unwrap();
        let pool = ["http://b:1", "tcp:b:1", "unix:/b", "https://b:1"];
        let pool = pool.iter().map(|address| ((*address).to_owned(), (*address).to_owned()));
        let config = Config { pool: pool.collect(), ..Config::default() };
        let core = Core::open(dir.path().to_owned(), config).unwrap();
        for name in ["http://b:1", "tcp:b:1", "unix:/b"] {
            let why = core.peer(name).unwrap_err();
            assert!(why.contains("needs an address that begins with https://"), "{why}");
        }
        let why = core.peer("https://b:1").unwrap_err();
        assert!(why.contains("--tls-ca"), "this daemon has no certificate: {why}");
    }
}
