//! The pipelines of docs/snapshots.md: their steps, as a shell runs them.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use torpor_runtimes_tests::podman;

use crate::authority::Authority;
use crate::fixture::{Fixture, shown};
use crate::registry::Registry;

/// The commands of the example with this number, with what this test has in place of a shop.
fn steps(number: usize) -> Vec<String> {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/snapshots.md");
    let text = fs::read_to_string(page).unwrap();
    let example = text.split("```yaml").nth(number).unwrap().split("```").next().unwrap();
    let steps = example.lines().filter_map(|line| line.trim().strip_prefix("- "));
    let steps = steps.map(|step| {
        let step = step.strip_prefix("run: ").unwrap_or(step);
        step.replace("http://127.0.0.1:3000/health", "exec:'/app ask page 3'")
            .replace("wget -q -O - exec:'/app ask page 3'", "/app ask page 3")
            // The registry of a test speaks no TLS.
            .replace(
                "skopeo copy",
                "skopeo --insecure-policy copy --src-tls-verify=false --dest-tls-verify=false",
            )
    });
    steps.collect()
}

/// The cgroups of a container, in all hierarchies.
fn groups(id: &str) -> Vec<PathBuf> {
    let hierarchies = fs::read_dir("/sys/fs/cgroup").unwrap();
    let groups = hierarchies.map(|hierarchy| hierarchy.unwrap().path().join(id));
    groups.filter(|group| group.exists()).collect()
}

/// What Podman keeps of a fixture's image.
struct Storage(PathBuf);

impl Storage {
    /// The repository that is built: an image of the files of the fixture's bundle, and a bundle that has only its
    /// configuration.
    fn new(fixture: &Fixture) -> Self {
        fs::rename(fixture.path("bundle/rootfs"), fixture.path("image")).unwrap();
        let file = "FROM scratch\nCOPY image /\nCMD [\"/app\"]\n";
        fs::write(fixture.path("Containerfile"), file).unwrap();
        let storage = Self(fixture.path("podman"));
        fs::create_dir(&storage.0).unwrap();
        podman::configure(&storage.0, &fixture.path("bin"));
        storage
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        podman::unmount(&self.0);
    }
}

#[test]
fn gitlab() {
    works("gitlab", 1, [("CI_COMMIT_TAG", "v1.2"), ("CI_JOB_ID", "gitlab")]);
}

#[test]
fn github() {
    works("github", 2, [("GITHUB_REF_NAME", "v1.2"), ("GITHUB_RUN_ID", "github")]);
}

/// All steps end well, and what they deploy comes from the snapshot.
#[track_caller]
fn works(name: &str, number: usize, variables: [(&str, &str); 2]) {
    let fixture = Fixture::new(name, 300);
    let _storage = Storage::new(&fixture);
    let registry = Registry::start(&fixture);
    let authority = Authority::new(&fixture, "ca");
    let (key, certificate) = authority.signer("maker");
    let steps = steps(number);
    assert_eq!(steps.len(), 12, "{steps:?}");
    let torpor = fixture.torpor(&[]).get_program().to_owned();
    let bin = fixture.path("bin");
    fs::create_dir(&bin).unwrap();
    std::os::unix::fs::symlink(torpor, bin.join("torpor")).unwrap();
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    for step in &steps {
        // The steps know the containers of the usual runc: these have names of their own.
        let own = |word: &str| format!("--id {}", fixture.id(word));
        let step = step.replace("--id shop", &own("shop"));
        let mut shell = Command::new("sh");
        shell.args(["-ec", &step]).current_dir(fixture.dir.path()).stdin(Stdio::null());
        shell.env("PATH", &path).env("REGISTRY", &registry.host).envs(variables);
        shell.env("SIGN_KEY", &key).env("SIGN_CERT", &certificate);
        shell.env("TRUST", authority.certificate());
        shell.envs(podman::variables(&fixture.path("podman")));
        shell.env("TORPOR_STATE", fixture.path("state")).env("TORPOR_CACHE", fixture.path("cache"));
        let output = shell.output().unwrap();
        if step.contains("--trust") {
            let delete = ["delete", "--force", &fixture.id("shop")];
            let delete = Command::new("runc").args(delete).output().unwrap();
            assert!(delete.status.success(), "{}", shown(&delete));
            // The process that brings its pages in is not in them, and does not keep runc from
            // removing them.
            assert_eq!(groups(&fixture.id("shop")), Vec::<PathBuf>::new());
            assert!(shown(&output).contains("snapshot"), "{}", shown(&output));
            // Not that it was started cold, and why.
            let said = String::from_utf8_lossy(&output.stdout);
            assert!(said.starts_with(&format!("{} snapshot ", fixture.id("shop"))), "{said}");
        }
        assert!(output.status.success(), "{step}: {}", shown(&output));
    }
}
