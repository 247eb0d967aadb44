//! What a daemon is told: how many slots, which classes, which rules.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::Path;

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use torpor_images::compress::Compression;

use super::grant::Grant;
use crate::http::Address;
use crate::objects::{self, Objects};
use crate::preemption::Means;
use crate::scheduler::share::is_name;
use crate::scheduler::{Millis, Rules};
use crate::spec::{Percent, Room};

/// No lease is longer.
pub(crate) const LONGEST_LEASE: Millis = 3_600_000;
/// No lease is shorter: a sign of life takes time.
const SHORTEST_LEASE: Millis = 500;

/// The configuration of a daemon.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Config {
    /// How many jobs of one slot run at the same time (default: one for each processor).
    pub slots: Option<u32>,
    /// How jobs are scheduled.
    pub rules: Rules,
    /// The class of jobs that name none.
    pub default_class: String,
    /// In how many milliseconds of work a job is lost on average, since machine or daemon fail: from it follows how
    /// often jobs are saved although nobody preempts them (default: as it was seen, and a day at first).
    pub mean_time_between_failures: Option<Millis>,
    /// Milliseconds that a job runs at least between two checkpoints.
    pub shortest_interval: Millis,
    /// Milliseconds after which a job that is frozen in memory is turned into a checkpoint.
    pub sink_after: Millis,
    /// Processes and threads that a job may have that names no number itself (default: 4096; no limit
    /// if it is null).
    pub pids: Option<u64>,
    /// What a job may write that names no limit itself: bytes, or a part of what is free when it starts
    /// (default: "25%"; no limit if it is null).
    pub default_disk: Option<Room>,
    /// Bytes of memory that a job is thought to use for each of its slots while nobody knows (default: half
    /// of the machine's memory, shared by all slots).
    pub usual_memory: Option<u64>,
    /// Bytes of memory that are never given to jobs.
    pub memory_reserve: u64,
    /// Milliseconds after which a job ends whose `--wait` has vanished.
    pub orphan_after: Millis,
    /// Milliseconds between SIGTERM and SIGKILL.
    pub grace: Millis,
    /// How the memory in checkpoints is compressed: lz4 or zstd, with a level after a colon;
    /// not at all if it is null.
    pub compress: Option<String>,
    /// Other machines of the pool: their names, and their addresses (`https://HOST:PORT`).
    pub pool: BTreeMap<String, String>,
    /// Milliseconds after which a machine of the pool that says nothing counts as away.
    pub peer_silence: Millis,
    /// Bytes that all checkpoints may take (default: those that only protect jobs that run leave a
    /// tenth of the disk free, or 1 GiB if that is less). These are given up first, the largest
    /// before the others.
    pub images: Option<u64>,
    /// How long jobs that are over are known.
    pub retention: Retention,
    /// Bytes that the jobs of one owner may take by what was said of them when they were submitted (default: 256 MiB; no
    /// limit if it is null). Of those that are over the oldest are forgotten when half of it is taken.
    pub descriptions: Option<u64>,
    /// What owners may ask for in their jobs, by their names: `uid-N` on the Unix socket, else as tokens have them.
    /// Administrators may ask for everything.
    pub grants: BTreeMap<String, Grant>,
    /// What all others may ask for (default: everything).
    pub default_grant: Grant,
    /// Where checkpoints are kept apart from this machine: `dir:PATH`, or `s3://BUCKET/PREFIX`.
    pub store: Option<String>,
    /// Milliseconds without a sign of life in the store after which this daemon counts as gone.
    pub lease: Millis,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            slots: None,
            rules: Rules::default(),
            default_class: "normal".to_owned(),
            mean_time_between_failures: None,
            shortest_interval: 60_000,
            sink_after: 60_000,
            pids: Some(4096),
            default_disk: Some(Room::OfFree(Percent::new(25))),
            usual_memory: None,
            memory_reserve: 256 << 20,
            orphan_after: 60_000,
            grace: 10_000,
            compress: Some("lz4".to_owned()),
            pool: BTreeMap::new(),
            peer_silence: 60_000,
            images: None,
            retention: Retention::default(),
            descriptions: Some(256 << 20),
            grants: BTreeMap::new(),
            default_grant: Grant::default(),
            store: None,
            lease: 60_000,
        }
    }
}

impl Config {
    /// Reads a configuration file, in JSON.
    ///
    /// # Errors
    /// If it cannot be read, or holds what makes no sense.
    pub(crate) fn read(path: &Path) -> Result<Self, String> {
        let say = |e: &dyn fmt::Display| format!("{}: {e}", path.display());
        let text = fs::read_to_string(path).map_err(|e| say(&e))?;
        let config = Self::parse(&text).map_err(|e| say(&e))?;
        config.check().map_err(|e| say(&e))?;
        Ok(config)
    }

    /// Serde would take an array for the settings in their order.
    fn parse(text: &str) -> serde_json::Result<Self> {
        serde_json::from_str::<BTreeMap<String, IgnoredAny>>(text)?;
        serde_json::from_str(text)
    }

    fn check(&self) -> Result<(), String> {
        if self.slots == Some(0) {
            return Err("a machine needs at least one slot".to_owned());
        }
        if self.pids == Some(0) {
            return Err(
                "a job needs at least one process: pids must be above 0, or null".to_owned()
            );
        }
        let guarantee = self.rules.guarantee;
        if guarantee.every <= 0 || guarantee.slice <= 0 {
            return Err("a guarantee needs times above 0".to_owned());
        }
        if self.retention.age.is_some_and(|age| age < 0) {
            return Err("the retention needs an age of 0 or more".to_owned());
        }
        if self.peer_silence <= 0 {
            return Err(
                "a machine that answers needs time: peer_silence must be above 0".to_owned()
            );
        }
        if let Some(method) = &self.compress {
            method.parse::<Compression>().map_err(|e| format!("compress is {method:?}: {e}"))?;
        }
        for (name, address) in &self.pool {
            let address =
                address.parse().map_err(|e| format!("machine {name} of the pool: {e}"))?;
            if !matches!(address, Address::Secure(_)) {
                return Err(format!("machine {name} of the pool: use https://HOST:PORT"));
            }
        }
        if let Some(place) = &self.store {
            Objects::at(place)?;
        }
        if !(SHORTEST_LEASE..=LONGEST_LEASE).contains(&self.lease) {
            return Err(format!("the lease must be from {SHORTEST_LEASE} to {LONGEST_LEASE} ms"));
        }
        self.check_times()?;
        self.check_shares()?;
        self.check_grants()?;
        let has_default = self.rules.classes.contains_key(&self.default_class);
        if !has_default && self.default_class != Self::default().default_class {
            return Err(format!(
                "default_class is {:?}, and no such class is configured",
                self.default_class
            ));
        }
        for (name, class) in &self.rules.classes {
            if class.slice.is_some_and(|slice| slice <= 0) {
                return Err(format!("the slice of class {name} must be above 0"));
            }
            if class.recipient.is_some() != class.identity.is_some() {
                return Err(format!(
                    "class {name} needs both recipient and identity: its jobs are sealed, and \
                     brought back"
                ));
            }
        }
        Ok(())
    }

    fn check_times(&self) -> Result<(), String> {
        let times = [
            ("shortest_interval", self.shortest_interval),
            ("sink_after", self.sink_after),
            ("orphan_after", self.orphan_after),
            ("grace", self.grace),
        ];
        if let Some((name, _)) = times.into_iter().find(|&(_, time)| time < 0) {
            return Err(format!("{name} is a time, and must not be below 0"));
        }
        if self.mean_time_between_failures.is_some_and(|time| time <= 0) {
            return Err("mean_time_between_failures must be above 0".to_owned());
        }
        Ok(())
    }

    fn check_shares(&self) -> Result<(), String> {
        let shares = &self.rules.shares;
        if shares.half_life <= 0 {
            return Err("the half_life of shares must be above 0".to_owned());
        }
        let mut all = shares.projects.iter().chain(&shares.owners);
        // Who has none would have as much as who is not named.
        if let Some((name, share)) = all.find(|&(_, &share)| share <= 0.0) {
            return Err(format!("the share of {name} is {share}: it must be above 0"));
        }
        match self.rules.quotas.keys().find(|name| !is_name(name)) {
            Some(name) => {
                Err(format!("the quota of {name:?}: quotas are of owner:NAME or project:NAME"))
            }
            None => Ok(()),
        }
    }

    /// A class that is misspelt would leave its owners without any.
    fn check_grants(&self) -> Result<(), String> {
        let is_class = |name: &&String| {
            **name == self.default_class || self.rules.classes.contains_key(name.as_str())
        };
        let named = self.grants.iter().map(|(name, grant)| (format!("the grant of {name}"), grant));
        for (whose, grant) in named.chain([("default_grant".to_owned(), &self.default_grant)]) {
            grant.check().map_err(|e| format!("{whose}: {e}"))?;
            let mut classes = grant.classes.iter().flatten();
            if let Some(class) = classes.find(|name| !is_class(name)) {
                return Err(format!("{whose}: no class {class:?} is configured"));
            }
        }
        Ok(())
    }

    /// What an owner who is no administrator may ask for.
    #[must_use]
    pub(super) fn grant_of(&self, owner: &str) -> &Grant {
        self.grants.get(owner).unwrap_or(&self.default_grant)
    }

    /// Seals something for each class whose checkpoints are sealed, and opens it again: what could not be
    /// opened would be found out when a job has given way, and is lost.
    ///
    /// # Errors
    /// If the recipient of a class is none, or its identity cannot be read or does not open what is
    /// sealed for that recipient.
    pub(crate) fn try_keys(&self) -> Result<(), String> {
        for (name, class) in &self.rules.classes {
            let Some((recipient, identity)) = class.recipient.as_ref().zip(class.identity.as_ref())
            else {
                continue;
            };
            // A program that keeps a key may ask somebody each time.
            if !identity.to_string_lossy().starts_with("provider:") {
                objects::try_keys(recipient, identity).map_err(|e| format!("class {name}: {e}"))?;
            }
        }
        Ok(())
    }

    /// Lets jobs give way by these means only.
    pub(crate) fn allow_only(&mut self, means: &[Means]) {
        for class in self.rules.classes.values_mut() {
            class.means = means.to_vec();
        }
        self.rules.other.means = means.to_vec();
    }

    /// As many slots as there are.
    #[must_use]
    pub(crate) fn slots(&self) -> u32 {
        let processors = || std::thread::available_parallelism().map_or(1, |n| n.get());
        self.slots.unwrap_or_else(|| u32::try_from(processors()).unwrap_or(1))
    }
}

/// How long jobs that are over are known.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Retention {
    /// Milliseconds since the end of a job (default: 30 days; null: for ever).
    pub age: Option<Millis>,
    /// As many of them at most, the newest (default: 10,000; null: all).
    pub jobs: Option<usize>,
}

impl Default for Retention {
    fn default() -> Self {
        const DAY: Millis = 24 * 3_600_000;
        Self { age: Some(30 * DAY), jobs: Some(10_000) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheduler::Class;

    #[test]
    fn what_is_left_out_stays_as_it_is() {
        let read = |text: &str| serde_json::from_str::<Config>(text).unwrap();
        assert_eq!(read("{}"), Config::default());
        let mut changed = Config { slots: Some(4), ..Config::default() };
        changed.rules.reserved = 1;
        changed.rules.guarantee.every = 1000;
        let text = r#"{ "slots": 4, "rules": { "reserved": 1, "guarantee": { "every": 1000 } } }"#;
        assert_eq!(read(text), changed);
        assert!(changed.rules.classes.contains_key("urgent"));
    }

    #[test]
    fn a_list_is_no_configuration() {
        assert_eq!(Config::parse("{}").unwrap(), Config::default());
        for text in ["[]", "[4]", "null", "7"] {
            let error = Config::parse(text).unwrap_err().to_string();
            assert!(error.contains("expected a map"), "{text}: {error}");
        }
    }

    #[test]
    fn room_is_bytes_or_a_part() {
        let read = |text: &str| {
            let text = format!(r#"{{ "default_disk": {text} }}"#);
            serde_json::from_str::<Config>(&text).map(|config| config.default_disk)
        };
        assert_eq!(Config::default().default_disk, read("\"25%\"").unwrap());
        assert_eq!(read("4096").unwrap(), Some(Room::Bytes(4096)));
        assert_eq!(read("null").unwrap(), None);
        for wrong in ["\"0%\"", "\"101%\"", "\"25\"", "-1", "\"a lot\""] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
        assert_eq!(Percent::new(25).of(1 << 40), (1_u64 << 40) / 100 * 25);
    }

    #[test]
    fn nonsense_is_named() {
        for (text, word) in [
            (r#"{ "slots": 0 }"#, "slot"),
            (r#"{ "lease": 10 }"#, "lease"),
            (r#"{ "peer_silence": 0 }"#, "peer_silence"),
            (r#"{ "pids": 0 }"#, "pids"),
            (r#"{ "retention": { "age": -1 } }"#, "retention"),
            (r#"{ "compress": "brotli" }"#, "compress"),
            (r#"{ "compress": "zstd:99" }"#, "compress"),
            (r#"{ "default_class": "bacth" }"#, "bacth"),
            (r#"{ "grace": -1 }"#, "grace"),
            (r#"{ "mean_time_between_failures": 0 }"#, "mean_time_between_failures"),
            (r#"{ "pool": { "b": "b.example:7777" } }"#, "machine b"),
            (r#"{ "pool": { "b": "http://b.example:7777" } }"#, "machine b"),
            (r#"{ "grants": { "ann": { "classes": ["bacth"] } } }"#, "bacth"),
            (r#"{ "default_grant": { "projects": [] } }"#, "projects"),
            (r#"{ "grants": { "ann": { "pids": 0 } } }"#, "grant of ann"),
            (r#"{ "rules": { "quotas": { "ann": { "slots": 1 } } } }"#, "ann"),
            (r#"{ "rules": { "shares": { "owners": { "ann": 0 } } } }"#, "ann"),
            (r#"{ "rules": { "shares": { "half_life": 0 } } }"#, "half_life"),
            (r#"{ "rules": { "guarantee": { "slice": 0 } } }"#, "guarantee"),
            (r#"{ "rules": { "classes": { "a": { "recipient": "r" } } } }"#, "class a"),
        ] {
            let config: Config = serde_json::from_str(text).unwrap();
            assert!(config.check().unwrap_err().contains(word), "{text}");
        }
    }

    /// A job that has given way could not be brought back.
    #[test]
    fn what_is_sealed_can_be_opened() {
        let dir = tempfile::tempdir().unwrap();
        let [own, other] = ["own", "other"].map(|name| {
            let (identity, secret) = torpor_seal::keys::AgeIdentity::generate().unwrap();
            let path = dir.path().join(name);
            fs::write(&path, &*secret).unwrap();
            (path, identity.recipient().to_string())
        });
        let tried = |recipient: &str, identity: &Path| {
            let class = Class {
                recipient: Some(recipient.to_owned()),
                identity: Some(identity.to_owned()),
                ..Class::default()
            };
            let mut config = Config::default();
            config.rules.classes.insert("secret".to_owned(), class);
            config.try_keys()
        };
        assert_eq!(tried(&own.1, &own.0), Ok(()));
        for (recipient, identity) in [
            (own.1.as_str(), other.0.as_path()),
            ("nobody", own.0.as_path()),
            (own.1.as_str(), Path::new("/nowhere")),
        ] {
            assert!(tried(recipient, identity).unwrap_err().contains("class secret"));
        }
    }
}
