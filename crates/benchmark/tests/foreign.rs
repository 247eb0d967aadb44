//! A containerd that was there, with a pod of somebody else in it: the benchmark goes, the pod stays as it was.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests may stop at the first surprise")]

mod common;

use std::path::Path;
use std::process::Stdio;

use common::daemon::Daemon;
use common::{TestDir, kill, row, samples, success, wait};

#[test]
fn what_belongs_to_others_stays_as_it_was() {
    let test_dir = TestDir::new();
    let daemon = Daemon::start(test_dir.path("daemon"), Path::new("/usr/bin/containerd"), None);
    daemon.import();
    daemon.pod();
    let before = daemon.all();
    assert_eq!(before.iter().filter(|line| line.contains("RUNNING")).count(), 2, "{before:?}");
    let config = |runs: u32| {
        test_dir.config(&format!(
            "runs: {runs}\nwarmup: 0\nfilters: [operations.container.*, operations.image.*]\nendpoints:\n\
             - name: here\n  socket: {}\n  cgroup_parent: /{}\n  handlers: [{{name: runc}}]\n",
            daemon.socket(),
            daemon.group,
        ))
    };
    config(1);
    success(&test_dir.run().output().unwrap());
    let results = test_dir.results();
    for name in ["container.start", "image.pull"] {
        let row = row(&results, &format!("operations.{name}"), "here/runc");
        assert_eq!((row["status"].as_str(), samples(row)), (Some("ok"), 1), "{row}");
    }
    assert_eq!(daemon.all(), before);
    test_dir.assert_clean();

    // While a container of its own runs.
    config(1000);
    let mut tool = test_dir.run();
    let mut child =
        tool.arg("--again").stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    let running = || daemon.all().iter().filter(|line| line.contains("RUNNING")).count();
    wait(|| running() > 2, || "it has started nothing".into());
    kill(&mut child);
    test_dir.assert_clean();
    wait(|| daemon.all() == before, || format!("{:?} instead of {before:?}", daemon.all()));
}
