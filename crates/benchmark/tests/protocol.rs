//! Endpoints that misbehave: whatever they do is in the cell that it belongs to, and nothing is left.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests may stop at the first surprise")]

mod common;

use std::fs;
use std::process::Stdio;
use std::time::{Duration, Instant};

use common::fake::{Fake, Mischief};
use common::images::{NO_TLS, Pulls, save};
use common::{TestDir, kill, row, samples, success, wait};
use torpor_runtimes_tests::command::write_script;

const LIFE: &str = "filters: [operations.life.*, operations.sandbox.*, operations.container.*, operations.image.*]\n";

fn in_test_dir(settings: &str) -> (TestDir, Fake) {
    let test_dir = TestDir::new();
    let fake = Fake::start(&test_dir.path(""));
    test_dir.config(&format!("{LIFE}{settings}\n{}", fake.endpoint()));
    (test_dir, fake)
}

#[test]
fn a_whole_run_leaves_nothing() {
    let (test_dir, fake) = in_test_dir("runs: 6\nwarmup: 1");
    let said = success(&test_dir.run().output().unwrap());
    assert!(said.contains("operations.container.start"), "{said}");
    let results = test_dir.results();
    assert_eq!(results["complete"], true);
    let target = &results["targets"][0];
    assert_eq!(target["endpoint"], "fake v1.2.3, CRI v1");
    // The endpoint's own program is the one that listens at its socket: this test. No runtime was named.
    let this = std::env::current_exe().unwrap().canonicalize().unwrap();
    assert!(target["digests"][this.to_str().unwrap()].is_string(), "{target}");
    assert_eq!(target["runtime"], "", "{target}");
    for name in
        ["sandbox.create", "container.start", "container.answer", "life.total", "image.pull"]
    {
        let row = row(&results, &format!("operations.{name}"), "fake/x");
        assert_eq!((row["status"].as_str(), samples(row)), (Some("ok"), 6), "{row}");
        assert!(row["summary"]["interval"].is_array(), "{row}");
        // Each was warmed up for.
        assert!(!row.to_string().contains("\"cold\""), "{row}");
    }
    let stolen = results["calibration"]["stolen"].as_f64().unwrap();
    assert!((0.0..=100.0).contains(&stolen), "{stolen} %");
    let below = results["machine"]["facts"]["file system"].as_str().unwrap();
    assert!(below.contains(" on "), "{below}");
    // What the endpoint says that it has not is told in its own words.
    let checkpoint = row(&results, "operations.container.checkpoint", "fake/x");
    assert_eq!(checkpoint["status"], "unsupported");
    assert!(checkpoint["reason"].as_str().unwrap().contains("not implemented"), "{checkpoint}");
    assert_eq!(fake.left(), (0, 0, 0));
    test_dir.assert_clean();
    let page = std::fs::read_to_string(test_dir.path("out/report.html")).unwrap();
    for part in
        ["operations.container.start", "class=\"plot\"", "fake/x", "not implemented", "base64,"]
    {
        assert!(page.contains(part), "the report lacks {part}");
    }
    // No address of another place, but in the library: the page needs no network.
    let page = page.replacen(torpor_benchmark::chart::LIBRARY, "", 1);
    assert!(!page.contains("http://") && !page.contains("https://"));
    // The same command again has nothing to do.
    let calls = fake.calls("RunPodSandbox");
    success(&test_dir.run().output().unwrap());
    assert_eq!(fake.calls("RunPodSandbox"), calls);
}

#[test]
fn what_this_machine_lacks_is_said_before_anything_begins() {
    let test_dir = TestDir::new();
    let endpoint = |program: &str, handler: &str| {
        format!("endpoints: [{{name: a, {program}, handlers: [{{name: x{handler}}}]}}]")
    };
    let socket = "socket: /nonexistent/socket";
    for (settings, what) in [
        (endpoint("containerd: /nonexistent/containerd", ""), "no program /nonexistent/containerd"),
        (endpoint(socket, ", binary: /nonexistent/runc"), "no program /nonexistent/runc"),
        (endpoint(socket, ", binary: mistyped-runc"), "no program mistyped-runc"),
        (
            format!("criu: /nonexistent/criu\n{}", endpoint(socket, "")),
            "no program /nonexistent/criu",
        ),
        (format!("memory: [8, 1048576]\n{}", endpoint(socket, "")), "containers of 1048576 MiB"),
        (
            format!("pulled_image: /nonexistent/layout\n{}", endpoint(socket, "")),
            "OCI image layout: /nonexistent/layout/index.json",
        ),
    ] {
        test_dir.config(&settings);
        let output = test_dir.run().output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && said.contains(what), "{settings}: {said}");
        assert!(!test_dir.path("out/journal.jsonl").exists(), "{settings}");
    }
}

#[test]
fn the_order_is_that_of_the_seed() {
    let order = || {
        let (test_dir, _fake) = in_test_dir("runs: 4\nwarmup: 0\nseed: 7");
        success(&test_dir.run().output().unwrap());
        let results = test_dir.results();
        let row = row(&results, "operations.image.pull", "fake/x");
        let samples = row["samples"].as_array().unwrap();
        (results["seed"].clone(), samples.iter().map(|s| s["order"].clone()).collect::<Vec<_>>())
    };
    assert_eq!(order(), order());
    assert_eq!(order().0, 7);
}

#[test]
fn a_call_that_hangs_has_a_deadline() {
    let (test_dir, fake) = in_test_dir("runs: 5\nwarmup: 0\ndeadline: 5");
    fake.mischief("StartContainer", Mischief::Hang);
    success(&test_dir.run().output().unwrap());
    let results = test_dir.results();
    let start = row(&results, "operations.container.start", "fake/x");
    assert_eq!(start["status"], "failed");
    assert!(start["reason"].as_str().unwrap().contains("did not answer within 5 s"), "{start}");
    // It is given up after three times, and the rest goes on.
    assert_eq!(fake.calls("StartContainer"), 3);
    assert_eq!(samples(row(&results, "operations.image.pull", "fake/x")), 5);
    assert_eq!(fake.left(), (0, 0, 0));
    test_dir.assert_clean();
}

#[test]
fn while_it_waits_it_does_nothing() {
    let (test_dir, fake) = in_test_dir("runs: 1\nwarmup: 0\ndeadline: 100");
    fake.mischief("ExecSync", Mischief::Hang);
    let mut child = test_dir.run().spawn().unwrap();
    wait(|| fake.calls("ExecSync") > 0, || "it never came to the call".into());
    let used = |pid: u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let fields: Vec<u64> = stat
            .rsplit(')')
            .next()
            .unwrap()
            .split_whitespace()
            .filter_map(|w| w.parse().ok())
            .collect();
        // after the name: state, ten numbers, then user and system time in ticks of 10 ms
        fields[10] + fields[11]
    };
    let mut share = 1.0;
    // What it does beside the call may take a while on a busy machine; then it is over.
    for _ in 0..10 {
        let (begun, before) = (Instant::now(), used(child.id()));
        std::thread::sleep(Duration::from_secs(4));
        let ticks = used(child.id()) - before;
        share = f64::from(u32::try_from(ticks).unwrap()) / 100.0 / begun.elapsed().as_secs_f64();
        if share < 0.01 {
            break;
        }
    }
    kill(&mut child);
    assert!(share < 0.01, "{:.1} % of a processor while it waits", share * 100.0);
    test_dir.assert_clean();
}

#[test]
fn errors_are_told_in_their_cell() {
    for (mischief, word) in [
        (Mischief::Fail(2, "no space left".into()), "no space left"),
        (Mischief::Garbage, "CreateContainer failed"),
    ] {
        let (test_dir, fake) = in_test_dir("runs: 1\nwarmup: 0");
        fake.mischief("CreateContainer", mischief);
        success(&test_dir.run().output().unwrap());
        let results = test_dir.results();
        let create = row(&results, "operations.container.create", "fake/x");
        assert_eq!(create["status"], "failed");
        assert!(create["reason"].as_str().unwrap().contains(word), "{create}");
        assert_eq!(fake.left(), (0, 0, 0));
        test_dir.assert_clean();
    }
}

#[test]
fn a_runtime_that_crashes_ends_its_cells_alone() {
    let (test_dir, fake) = in_test_dir("runs: 5\nwarmup: 0\ndeadline: 2");
    fake.mischief("StopContainer", Mischief::Crash);
    success(&test_dir.run().output().unwrap());
    let results = test_dir.results();
    assert_eq!(results["complete"], true);
    let stop = row(&results, "operations.container.stop", "fake/x");
    assert_eq!(stop["status"], "failed", "{stop}");
    test_dir.assert_clean();
}

/// What a group has left that is given up is not there for ever: others are measured beside it.
#[test]
fn what_could_not_be_removed_is_removed_when_it_can_be() {
    let test_dir = TestDir::new();
    let fake = Fake::start(&test_dir.path(""));
    let filters = "filters: [operations.life.*, operations.image.*]";
    test_dir.config(&format!("{filters}\nruns: 5000\nwarmup: 0\n{}", fake.endpoint()));
    fake.mischief("RemovePodSandbox", Mischief::Fail(2, "device or resource busy".into()));
    let mut tool = test_dir.run();
    let mut child = tool.stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    // Three lives have failed, each with what the ones before have left.
    let tried = || fake.calls("RemovePodSandbox") >= 2 + 3 + 4;
    wait(tried, || "no life has failed".into());
    fake.recover();
    let sandboxes = || fake.left().0;
    wait(|| sandboxes() == 0, || format!("{} sandboxes are left", sandboxes()));
    // It was the run that did it, which goes on, and not what removes all at its end.
    let pulls = fake.calls("PullImage");
    wait(|| fake.calls("PullImage") > pulls, || "the run has come to its end".into());
    kill(&mut child);
    wait(|| fake.left() == (0, 0, 0), || format!("left: {:?}", fake.left()));
    test_dir.assert_clean();
}

#[test]
fn a_runtime_that_comes_back_is_left_clean() {
    let (test_dir, fake) = in_test_dir("runs: 1\nwarmup: 0\ndeadline: 100");
    fake.mischief("StopContainer", Mischief::Crash);
    let mut child = test_dir.run().spawn().unwrap();
    wait(|| fake.calls("StopContainer") > 0, || "it never came to the call".into());
    kill(&mut child);
    assert_ne!(fake.left(), (0, 0, 0));
    // As when its service is started again: longer than one call of the keeper takes.
    std::thread::sleep(Duration::from_secs(3));
    fake.recover();
    wait(|| fake.left() == (0, 0, 0), || format!("left: {:?}", fake.left()));
    test_dir.assert_clean();
}

#[test]
fn two_runs_do_not_meet_at_an_endpoint() {
    let (test_dir, fake) = in_test_dir("runs: 1\nwarmup: 0\ndeadline: 100");
    fake.mischief("StopContainer", Mischief::Hang);
    let mut child = test_dir.run().spawn().unwrap();
    wait(|| fake.calls("StopContainer") > 0, || "it never came to the call".into());
    let left = fake.left();
    // Whatever its directories: the endpoint is the same.
    let other = TestDir::new();
    other.config(&format!("{LIFE}runs: 1\nwarmup: 0\n{}", fake.endpoint()));
    let refused = other.run().output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(1) && said.contains("another run measures"), "{said}");
    assert_eq!(fake.left(), left);
    other.assert_clean();
    // At another endpoint it may be at work, and says that both are disturbed.
    let elsewhere = Fake::start(&other.path(""));
    other.config(&format!(
        "filters: [operations.image.*]\nruns: 1\nwarmup: 0\n{}",
        elsewhere.endpoint()
    ));
    let mut beside = other.run();
    beside.arg("--again").env("TMPDIR", test_dir.path("tmp"));
    let beside = beside.output().unwrap();
    success(&beside);
    let said = String::from_utf8_lossy(&beside.stderr);
    assert!(said.contains("another run is at work on this machine"), "{said}");
    fake.recover();
    kill(&mut child);
    wait(|| fake.left() == (0, 0, 0), || format!("left: {:?}", fake.left()));
    test_dir.assert_clean();
    // Then it is the other's turn.
    other.config(&format!("{LIFE}runs: 1\nwarmup: 0\n{}", fake.endpoint()));
    success(&other.run().arg("--again").output().unwrap());
}

#[test]
fn a_program_that_hangs_holds_nothing_up() {
    let test_dir = TestDir::new();
    let fake = Fake::start(&test_dir.path(""));
    let program = test_dir.path("hangs");
    write_script(&program, "#!/bin/sh\nexec sleep 1000\n");
    let endpoint = fake.endpoint();
    let endpoint =
        endpoint.replace("{name: x}", &format!("{{name: x, binary: {}}}", program.display()));
    test_dir.config(&format!("filters: [operations.image.*]\nruns: 1\nwarmup: 0\n{endpoint}"));
    let version =
        test_dir.tool().arg("version").arg(test_dir.path("config.yaml")).output().unwrap();
    let said = success(&version);
    assert!(said.contains("hangs: it did not end within"), "{said}");
    let output = test_dir.run().output().unwrap();
    success(&output);
    assert!(String::from_utf8_lossy(&output.stderr).contains("hangs --version: it did not end"));
    assert_eq!(samples(row(&test_dir.results(), "operations.image.pull", "fake/x")), 1);
    test_dir.assert_clean();
}

#[test]
fn an_endpoint_that_wants_tls_of_registries_is_told_apart() {
    let (test_dir, fake) = in_test_dir("runs: 1\nwarmup: 0");
    fake.state.lock().unwrap().pulls = Pulls::Https;
    success(&test_dir.run().output().unwrap());
    let results = test_dir.results();
    let life = row(&results, "operations.life.total", "fake/x");
    let reason = life["reason"].as_str().unwrap();
    assert!(life["status"] == "failed" && reason.contains(NO_TLS), "{life}");
    assert!(reason.contains("insecure") && reason.contains("docs/benchmark.md"), "{life}");
    // What that leads to is there.
    let docs = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/benchmark.md"));
    assert!(docs.unwrap().contains("**CRI-O**"));
    assert_eq!(fake.left(), (0, 0, 0));
    test_dir.assert_clean();
    // As the configuration says that is described there.
    fake.state.lock().unwrap().pulls = Pulls::Http;
    success(&test_dir.run().arg("--again").output().unwrap());
    let results = test_dir.results();
    for name in ["life.total", "image.pull"] {
        let row = row(&results, &format!("operations.{name}"), "fake/x");
        assert_eq!((row["status"].as_str(), samples(row)), (Some("ok"), 1), "{row}");
    }
}

/// As CRI-O says it, in the words of a call that has failed.
#[test]
fn an_endpoint_that_is_told_to_make_no_checkpoints_does_not_fail() {
    let (test_dir, fake) = in_test_dir("runs: 1\nwarmup: 0");
    let said = "checkpoint/restore support not available";
    fake.mischief("CheckpointContainer", Mischief::Fail(2, said.into()));
    success(&test_dir.run().output().unwrap());
    let results = test_dir.results();
    let checkpoint = row(&results, "operations.container.checkpoint", "fake/x");
    let reason = checkpoint["reason"].as_str().unwrap();
    assert_eq!(checkpoint["status"], "unsupported", "{checkpoint}");
    assert!(reason.contains(said) && reason.contains("enable_criu_support"), "{checkpoint}");
    assert_eq!(fake.calls("CheckpointContainer"), 1);
    assert_eq!(fake.left(), (0, 0, 0));
}

#[test]
fn control_groups_have_the_parent_that_is_named() {
    for (parent, status) in [("bench.slice", "ok"), ("/bench", "failed")] {
        let test_dir = TestDir::new();
        let fake = Fake::start(&test_dir.path(""));
        let endpoint = fake
            .endpoint()
            .replace("  handlers", &format!("  cgroup_parent: {parent}\n  handlers"));
        test_dir.config(&format!("{LIFE}runs: 1\nwarmup: 0\n{endpoint}"));
        success(&test_dir.run().output().unwrap());
        let parents = fake.state.lock().unwrap().parents.clone();
        assert!(!parents.is_empty() && parents.iter().all(|one| one == parent), "{parents:?}");
        let results = test_dir.results();
        let life = row(&results, "operations.life.total", "fake/x");
        assert_eq!(life["status"], status, "{life}");
        if status == "failed" {
            assert!(life["reason"].as_str().unwrap().contains("did not receive slice"), "{life}");
        }
        assert_eq!(fake.left(), (0, 0, 0));
    }
}

#[test]
fn the_image_that_is_named_is_pulled() {
    let test_dir = TestDir::new();
    let fake = Fake::start(&test_dir.path(""));
    fake.state.lock().unwrap().pulls = Pulls::Http;
    let layout = test_dir.path("layout");
    let digest = save(&layout, b"a layer that only this image has");
    test_dir.config(&format!(
        "filters: [operations.image.*]\nruns: 2\nwarmup: 0\npulled_image: {}\n{}",
        layout.display(),
        fake.endpoint()
    ));
    success(&test_dir.run().output().unwrap());
    let results = test_dir.results();
    let pull = row(&results, "operations.image.pull", "fake/x");
    assert_eq!((pull["status"].as_str(), samples(pull)), (Some("ok"), 2), "{pull}");
    let pulled = fake.state.lock().unwrap().pulled.clone();
    assert_eq!(pulled.iter().filter(|one| **one == digest).count(), 2, "{pulled:?}");
    let told = results["targets"][0]["facts"]["pulled image"].as_str().unwrap();
    assert!(told.starts_with(&format!("{digest}, ")), "{told}");
    assert_eq!(fake.left(), (0, 0, 0));
    test_dir.assert_clean();
    // Samples of another image are not mixed with those of this one.
    let journal = test_dir.path("out/journal.jsonl");
    let lines = fs::read_to_string(&journal).unwrap();
    fs::write(&journal, lines.replace("\"complete\"\n", "")).unwrap();
    fs::remove_dir_all(&layout).unwrap();
    save(&layout, b"another");
    let refused = test_dir.run().output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(
        refused.status.code() == Some(1) && said.contains("the pulled image of fake/x"),
        "{said}"
    );
}

#[test]
fn killed_at_any_call_it_goes_on_where_it_was() {
    let (test_dir, fake) = in_test_dir("runs: 12\nwarmup: 1\nseed: 3");
    fs::create_dir(test_dir.path("out")).unwrap();
    // As somebody leaves it who is killed while he writes.
    fs::write(test_dir.path("out/.torpor-benchmark-0"), "{").unwrap();
    let mut kills = 0;
    let mut further = 7;
    loop {
        let held = fake.all_calls() + further;
        fake.state.lock().unwrap().held = Some(held);
        let mut child = test_dir.run().spawn().unwrap();
        while child.try_wait().unwrap().is_none() && fake.all_calls() < held {
            std::thread::sleep(Duration::from_millis(2));
        }
        if let Some(status) = child.try_wait().unwrap() {
            assert!(status.success());
            break;
        }
        kill(&mut child);
        kills += 1;
        // Its keeper removes what it has made.
        wait(|| fake.left() == (0, 0, 0), || format!("left: {:?}", fake.left()));
        test_dir.assert_clean();
        // Each time a little further, so that it comes to its end.
        further += 23;
    }
    let results = test_dir.results();
    assert!(kills > 3, "it was killed {kills} times only");
    assert_eq!(results["complete"], true);
    assert!(results["repeated"].as_u64().unwrap() <= kills, "{}", results["repeated"]);
    for name in ["container.start", "image.pull"] {
        let row = row(&results, &format!("operations.{name}"), "fake/x");
        let samples = row["samples"].as_array().unwrap();
        let orders: std::collections::BTreeSet<u64> =
            samples.iter().map(|s| s["order"].as_u64().unwrap()).collect();
        assert_eq!((samples.len(), orders.len()), (13, 13), "each sample once: {row}");
        // The first of its kind after each interruption is told apart, and counts.
        let cold = samples.iter().filter(|sample| sample["cold"] == true).count() as u64;
        assert!((1..=kills).contains(&cold), "{cold} cold ones of {kills} kills: {row}");
        assert_eq!(row["summary"]["n"], 12, "{row}");
    }
    let page = fs::read_to_string(test_dir.path("out/report.html")).unwrap();
    assert!(page.contains("samples met an endpoint that nothing had warmed up"));
    assert_eq!(fs::read_dir(test_dir.path("out")).unwrap().count(), 3, "a half file is left");
    assert!(page.contains(", cold: "));
}

#[test]
fn results_are_written_as_they_come() {
    let (test_dir, fake) = in_test_dir("runs: 1000\nwarmup: 0");
    let mut child = test_dir.run().spawn().unwrap();
    let path = test_dir.path("out/results.json");
    let has_samples = || {
        path.exists()
            && test_dir.results()["rows"].as_array().unwrap().iter().any(|r| samples(r) > 0)
    };
    wait(has_samples, || "no sample is in the results while it runs".into());
    assert_eq!(test_dir.results()["complete"], false);
    let page = test_dir.path("out/report.html");
    wait(|| page.exists(), || "there are results, and no report".into());
    kill(&mut child);
    wait(|| fake.left() == (0, 0, 0), || format!("left: {:?}", fake.left()));
    test_dir.assert_clean();
}

#[test]
fn another_configuration_does_not_go_on_with_a_run() {
    let (test_dir, fake) = in_test_dir("runs: 1\nwarmup: 0");
    success(&test_dir.run().output().unwrap());
    test_dir.config(&format!("{LIFE}runs: 2\nwarmup: 0\n{}", fake.endpoint()));
    let refused = test_dir.run().output().unwrap();
    assert!(!refused.status.success());
    assert!(String::from_utf8_lossy(&refused.stderr).contains("--again"));
    success(&test_dir.run().arg("--again").output().unwrap());
    assert_eq!(samples(row(&test_dir.results(), "operations.image.pull", "fake/x")), 2);
}

#[test]
fn runtimes_tell_their_versions_and_results_are_found() {
    let (test_dir, _fake) = in_test_dir("runs: 1\nwarmup: 0");
    let tool = |words: &[&str], path: &str| {
        success(&test_dir.tool().args(words).arg(test_dir.path(path)).output().unwrap())
    };
    let said = tool(&["version"], "config.yaml");
    assert!(said.starts_with(concat!("torpor benchmark ", env!("CARGO_PKG_VERSION"))), "{said}");
    assert!(said.contains("fake: fake v1.2.3, CRI v1"), "{said}");
    success(&test_dir.run().output().unwrap());
    // A report of its own makes no difference: it is made from the results.
    let text = test_dir.path("reports");
    let text = text.to_str().unwrap();
    tool(&["report", "--output", text], "out");
    let markdown = std::fs::read_to_string(test_dir.path("reports/report.md")).unwrap();
    assert!(markdown.contains("operations.container.start"), "{markdown}");
    assert!(test_dir.path("reports/report.html").is_file());
    // What is damaged does not hide what is whole.
    std::fs::create_dir(test_dir.path("damaged")).unwrap();
    std::fs::write(test_dir.path("damaged/results.json"), "{").unwrap();
    tool(&["index"], "");
    let index = std::fs::read_to_string(test_dir.path("index.html")).unwrap();
    for part in ["report.html", "fake/x", "damaged"] {
        assert!(index.replace("&#x2f;", "/").contains(part), "{part}: {index}");
    }
}

#[test]
fn no_runtime_is_guessed_where_none_is_configured() {
    let test_dir = TestDir::new();
    let fake = Fake::start(&test_dir.path(""));
    // A kubelet of somebody else would keep it from what answers: processes of its own, and a /run with one socket.
    let script = "mount -t tmpfs none /run && mkdir /run/crio && \
                  ln -s $0 /run/crio/crio.sock && exec \"$@\"";
    let mut command = std::process::Command::new("unshare");
    command.args([
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
        "sh",
        "-c",
        script,
    ]);
    command.arg(&fake.socket).arg(env!("CARGO_BIN_EXE_torpor-benchmark"));
    command.args(["run", "--runs", "1", "--filter", "operations.image.pull", "--output"]);
    command.arg(test_dir.path("out")).env("TMPDIR", test_dir.path("tmp"));
    success(&command.stdin(std::process::Stdio::null()).output().unwrap());
    let results = test_dir.results();
    let target = &results["targets"][0];
    assert_eq!((&target["name"], &target["runtime"]), (&"fake-1.2.3/default".into(), &"".into()));
    let digests = target["digests"].as_object().unwrap();
    assert!(!digests.keys().any(|name| name.ends_with("/runc")), "{target}");
    assert!(digests.keys().any(|name| name.ends_with("/busybox")), "{target}");
    assert_eq!(fake.left(), (0, 0, 0));
}

#[test]
fn as_many_at_a_time_as_were_asked_for() {
    let test_dir = TestDir::new();
    let fake = Fake::start(&test_dir.path(""));
    fake.state.lock().unwrap().together = 3;
    test_dir.config(&format!(
        "filters: [scalability.*]\nruns: 1\nwarmup: 0\nscale: [6]\nconcurrency: 3\n{}",
        fake.endpoint()
    ));
    success(&test_dir.run().output().unwrap());
    let results = test_dir.results();
    let row = row(&results, "scalability.containers-6.start", "fake/x");
    assert_eq!((row["status"].as_str(), samples(row)), (Some("ok"), 1), "{row}");
    assert_eq!(fake.state.lock().unwrap().most_asked, 3);
    assert_eq!(fake.left(), (0, 0, 0));
}

#[test]
fn those_that_do_not_run_any_more_are_no_scale() {
    let test_dir = TestDir::new();
    let fake = Fake::start(&test_dir.path(""));
    fake.state.lock().unwrap().ends_early = true;
    test_dir.config(&format!(
        "filters: [scalability.*]\nruns: 1\nwarmup: 0\nscale: [2]\n{}",
        fake.endpoint()
    ));
    success(&test_dir.run().output().unwrap());
    let results = test_dir.results();
    let row = row(&results, "scalability.containers-2.start", "fake/x");
    assert_eq!(row["status"], "failed", "{row}");
    assert!(row["reason"].as_str().unwrap().contains("2 of 2 containers do not run"), "{row}");
    assert_eq!(fake.left(), (0, 0, 0));
}
