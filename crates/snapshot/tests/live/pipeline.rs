//! The pipeline of docs/snapshots.md: its steps, as a shell runs them.

use std::fs;
use std::process::{Command, Stdio};

use crate::place::{Place, shown};
use crate::registry::Registry;

/// The commands of the example, with what this test has in place of a shop.
fn steps() -> Vec<String> {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/snapshots.md");
    let text = fs::read_to_string(page).unwrap();
    let example = text.split("```yaml").nth(1).unwrap().split("```").next().unwrap();
    let steps = example.lines().filter_map(|line| line.trim().strip_prefix("- "));
    steps
        .map(|step| {
            step.replace("http://127.0.0.1:3000/health", "exec:'/app ask page 3'")
                .replace("wget -q -O - exec:'/app ask page 3'", "/app ask page 3")
        })
        .collect()
}

#[test]
fn the_example_works() {
    let place = Place::new("pipeline", 300);
    let registry = Registry::start(&place);
    let steps = steps();
    assert_eq!(steps.len(), 6, "{steps:?}");
    let torpor = place.torpor(&[]).get_program().to_owned();
    let bin = place.path("bin");
    fs::create_dir(&bin).unwrap();
    std::os::unix::fs::symlink(torpor, bin.join("torpor")).unwrap();
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let job = format!("{}", std::process::id());
    for step in &steps {
        let mut shell = Command::new("sh");
        shell.args(["-ec", step]).current_dir(place.dir.path()).stdin(Stdio::null());
        shell.env("PATH", &path).env("REGISTRY", &registry.host);
        shell.env("CI_COMMIT_TAG", "v1.2").env("CI_JOB_ID", &job);
        shell.env("TORPOR_STATE", place.path("state")).env("TORPOR_CACHE", place.path("cache"));
        let output = shell.output().unwrap();
        let done = output.status.success();
        if step.contains("--id shop") {
            let delete = Command::new("runc").args(["delete", "--force", "shop"]).output().unwrap();
            assert!(delete.status.success(), "{}", shown(&delete));
        }
        assert!(done, "{step}: {}", shown(&output));
    }
}
