//! Connections with certificates at both ends.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::path::Path;

use support::{Counter, Host, judge, wait_until};
use torpor_runtimes_tests::certificates::{self, OF_AGENTS};

/// The options that name an authority, and a certificate of its for `name`.
fn certificates(dir: &Path, name: &str) -> Vec<String> {
    certificates::certificates(dir, name, OF_AGENTS)
}

fn agent_with(options: &[String]) -> Host {
    let mut there = Host::new();
    there.listen = "127.0.0.1:0".to_owned();
    there.options = options.to_vec();
    there.start_agent();
    there
}

#[test]
fn every_mode_is_encrypted() {
    let keys = tempfile::tempdir().unwrap();
    let options = certificates(keys.path(), "127.0.0.1");
    let there = agent_with(&options);
    let modes = ["stop-and-copy", "pre-copy", "pipelined", "post-copy", "hybrid"];
    for (mode, connections) in modes.into_iter().zip(["1", "3", "1", "3", "3"]) {
        let here = Host::new();
        let mut counter = Counter::start(5000, 50);
        let pid = counter.pid.to_string();
        let args = ["--pid", &pid, "--mode", mode, "--json", &there.address];
        let args = [&args[..], &["--connections", connections]].concat();
        let report = judge(&here.migrate(&args).args(&options).output().unwrap()).unwrap();
        assert!(report["bytes"].as_u64().unwrap() > 5000 * 4096, "{report}");
        wait_until("it has ended here", || counter.has_ended_here());
        counter.goes_on();
    }
}

#[test]
fn strangers_and_other_names_are_refused() {
    let keys = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let own = certificates(keys[0].path(), "127.0.0.1");
    let strange = certificates(keys[1].path(), "127.0.0.1");
    let there = agent_with(&own);
    let named = certificates(keys[2].path(), "elsewhere");
    let elsewhere = agent_with(&named);
    let here = Host::new();
    let counter = Counter::start(100, 1);
    let pid = counter.pid.to_string();
    for (address, options) in
        [(&there.address, &strange[..]), (&there.address, &[]), (&elsewhere.address, &named[..])]
    {
        let args = ["--pid", &pid, "--json", address];
        let error = judge(&here.migrate(&args).args(options).output().unwrap()).unwrap_err();
        assert!(error.contains("TLS") || error.contains("link"), "{error}");
        counter.goes_on();
    }
    assert!(there.phases("destination").is_empty());
    let output = here.migrate(&["--pid", &pid, "--ca", "x", "127.0.0.1:1"]).output().unwrap();
    assert!(judge(&output).unwrap_err().contains("together"));
}
