//! Options in a file that the owner of a container names (`org.criu.config`): it may be whoever made the images.

use std::fs;
use std::path::Path;

use serde_json::json;

use torpor_runtimes_tests::command::Run;
use torpor_runtimes_tests::runc::cgroup_left;
use torpor_runtimes_tests::scratch::Scratch;

use super::{Asleep, Images, bundle};

/// They take nothing away from what the machine's administrator says, nor the configuration that images are compared with:
/// with Podman it lies in the work directory. And they leave no task in the session of whoever restores, which has a terminal.
#[test]
fn options_of_the_containers_owner() {
    let scratch = Scratch::new("images-options");
    scratch.configure("");
    let policy = "policy-rule capabilities.allow=[]\n";
    let options = scratch.join("options");
    let bundle = bundle(&scratch).configure(|config| {
        config["annotations"] = json!({"org.criu.config": options});
    });
    let asleep = Asleep::of(&scratch, &bundle);
    let place = scratch.join("bundle");
    let restore = |text: &str| {
        fs::write(&options, text).unwrap();
        let work = ["--work-path", place.to_str().unwrap()];
        let mut call = asleep.container.restore_call(&work);
        call.args(["--detach", asleep.container.id()]).fail();
        assert!(!cgroup_left(asleep.container.id()), "{text}: a cgroup is left");
        asleep.container.runc("state").arg(asleep.container.id()).fail();
    };
    let read = |path: &Path| fs::read(path).unwrap();
    scratch.reconfigure(policy);
    restore("");
    restore("tcp-established\n");
    fs::remove_file(&options).unwrap();
    let refused =
        asleep.container.restore_call(&[]).args(["--detach", asleep.container.id()]).fail();
    assert!(!refused.is_empty());
    scratch.reconfigure("");
    let (config, tree) = (place.join("config.json"), scratch.join("images/pstree.img"));
    let (configured, was) = (read(&config), read(&tree));
    restore("log-file config.json\n");
    assert_eq!(read(&config), configured);
    Images::of(&scratch).places(|_| true);
    restore("shell-job\n");
    fs::write(&tree, was).unwrap();
    fs::write(&options, "log-file own.log\nverbosity 4\n").unwrap();
    asleep.wakes();
    assert!(scratch.join("work/own.log").exists());
}
