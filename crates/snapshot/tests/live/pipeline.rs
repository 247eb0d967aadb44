//! The pipelines of docs/snapshots.md: their steps, as a shell runs them.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use torpor_runtimes_tests::podman;
use torpor_snapshot::store;

use crate::authority::Authority;
use crate::fixture::{Fixture, shown};
use crate::registry::Registry;

/// The commands of the two jobs in the example with this number, with what this test has in place of a shop.
fn steps(number: usize) -> [Vec<String>; 2] {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/snapshots.md");
    let text = fs::read_to_string(page).unwrap();
    let example = text.split("```yaml").nth(number).unwrap().split("```").next().unwrap();
    let (release, deploy) = example.split_once("deploy:\n").unwrap();
    [release, deploy].map(|job| {
        let steps = job.lines().filter_map(|line| line.trim().strip_prefix("- "));
        // Whoever runs the jobs checks the repository out.
        steps.filter(|step| !step.starts_with("uses: ")).map(step).collect()
    })
}

/// A command of the example as this test runs it.
fn step(step: &str) -> String {
    let step = step.strip_prefix("run: ").unwrap_or(step);
    step.replace("http://127.0.0.1:3000/health", "exec:'/app ask page 3'")
        .replace("wget -q -O - exec:'/app ask page 3'", "/app ask page 3")
        // The registry of a test speaks no TLS.
        .replace(
            "skopeo copy",
            "skopeo --insecure-policy copy --src-tls-verify=false --dest-tls-verify=false",
        )
        .replace("podman push", "podman push --tls-verify=false")
        .replace("podman pull", "podman pull --tls-verify=false")
}

/// The cgroups of a container, in all hierarchies.
fn groups(id: &str) -> Vec<PathBuf> {
    let hierarchies = fs::read_dir("/sys/fs/cgroup").unwrap();
    let groups = hierarchies.map(|hierarchy| hierarchy.unwrap().path().join(id));
    groups.filter(|group| group.exists()).collect()
}

/// The repository that is built: an image of the files of the fixture's bundle, and a bundle that has only its
/// configuration.
fn repository(fixture: &Fixture) -> PathBuf {
    let repository = fixture.path("repository");
    fs::create_dir_all(repository.join("bundle")).unwrap();
    fs::rename(fixture.path("bundle/rootfs"), repository.join("image")).unwrap();
    let file = "FROM scratch\nCOPY image /\nCMD [\"/app\"]\n";
    fs::write(repository.join("Containerfile"), file).unwrap();
    let config = "bundle/config.json";
    fs::copy(fixture.path(config), repository.join(config)).unwrap();
    repository
}

/// A job on a machine of its own: a directory with the repository, what Podman and torpor keep there, and variables.
struct Job<'a> {
    fixture: &'a Fixture,
    dir: PathBuf,
    variables: Vec<(&'a str, String)>,
}

impl<'a> Job<'a> {
    fn new(fixture: &'a Fixture, name: &str, variables: &[(&'a str, &str)]) -> Self {
        let dir = fixture.path(name);
        fs::create_dir_all(dir.join("podman")).unwrap();
        let mut copy = Command::new("cp");
        copy.arg("-a").arg(fixture.path("repository")).arg(dir.join("checkout"));
        assert!(copy.status().unwrap().success());
        podman::configure(&dir.join("podman"), &fixture.path("bin"));
        let variables = variables.iter().map(|(key, value)| (*key, (*value).to_owned())).collect();
        Self { fixture, dir, variables }
    }

    /// Runs a command of the job, which has to end well.
    #[track_caller]
    fn run(&self, step: &str) -> Output {
        // The steps know the containers of the usual runc: these have names of their own.
        let shop = self.fixture.id("shop");
        let step = step
            .replace("--id shop ", &format!("--id {shop} "))
            .replace("delete --force shop", &format!("delete --force {shop}"));
        let path =
            format!("{}:{}", self.fixture.path("bin").display(), std::env::var("PATH").unwrap());
        let mut shell = Command::new("sh");
        shell.args(["-ec", &step]).current_dir(self.dir.join("checkout")).stdin(Stdio::null());
        shell.env("PATH", path).envs(self.variables.iter().map(|(key, value)| (key, value)));
        shell.envs(podman::variables(&self.dir.join("podman")));
        shell.env("TORPOR_STATE", self.dir.join("state"));
        shell.env("TORPOR_CACHE", self.dir.join("cache"));
        let output = shell.output().unwrap();
        assert!(output.status.success(), "{step}: {}", shown(&output));
        output
    }
}

impl Drop for Job<'_> {
    fn drop(&mut self) {
        podman::unmount(&self.dir.join("podman"));
    }
}

#[test]
fn gitlab() {
    works("gitlab", 1, ["CI_COMMIT_TAG", "CI_JOB_ID"]);
}

#[test]
fn github() {
    works("github", 2, ["GITHUB_REF_NAME", "GITHUB_RUN_ID"]);
}

/// All steps end well, and what they deploy comes from the snapshot, on a machine that has only what the registry has. So
/// does what is started cold there. The next release stores no pages again.
#[track_caller]
fn works(name: &str, number: usize, [tag, id]: [&str; 2]) {
    let fixture = Fixture::new(name, 300);
    repository(&fixture);
    let registry = Registry::start(&fixture);
    let [ours, others] = ["ca", "other"].map(|name| Authority::new(&fixture, name));
    let (key, certificate) = ours.signer("maker");
    let bin = fixture.path("bin");
    fs::create_dir(&bin).unwrap();
    std::os::unix::fs::symlink(fixture.torpor(&[]).get_program(), bin.join("torpor")).unwrap();
    let [release, deploy] = steps(number);
    assert_eq!((release.len(), deploy.len()), (13, 7), "{release:?} {deploy:?}");
    let [first, second, there] = ["first", "second", "there"].map(|job| fixture.id(job));
    let host = ("REGISTRY", registry.host.as_str());
    let signs = [host, ("SIGN_KEY", &key), ("SIGN_CERT", &certificate)];

    let job = Job::new(&fixture, "first", &[&signs[..], &[(tag, "v1"), (id, &first)]].concat());
    release.iter().for_each(|step| drop(job.run(step)));
    drop(job);
    // What it had on its machine is not on the other one.
    fs::rename(fixture.path("first"), fixture.path("gone")).unwrap();

    let (bundles, trust) =
        (fixture.path("there/bundles").display().to_string(), ours.certificate());
    let variables = [host, ("BUNDLES", &bundles), ("TRUST", &trust), (tag, "v1"), (id, &there)];
    let mut job = Job::new(&fixture, "there", &variables);
    for (trust, from) in [(trust.clone(), "snapshot"), (others.certificate(), "cold")] {
        job.variables.push(("TRUST", trust));
        let outputs: Vec<Output> = deploy.iter().map(|step| job.run(step)).collect();
        let output = outputs.last().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(said.starts_with(&format!("{} {from} ", fixture.id("shop"))), "{}", shown(output));
    }
    job.run("runc delete --force shop");
    // The process that brings its pages in is not in them, and does not keep runc from removing them.
    assert_eq!(groups(&fixture.id("shop")), Vec::<PathBuf>::new());

    fixture.configure(|config| config["process"]["args"][4] = "2".into());
    fs::copy(fixture.path("bundle/config.json"), fixture.path("repository/bundle/config.json"))
        .unwrap();
    let job = Job::new(&fixture, "second", &[&signs[..], &[(tag, "v2"), (id, &second)]].concat());
    release[..5].iter().for_each(|step| drop(job.run(step)));
    let layers = |tag: &str| {
        let reference = format!("{}/shop:{tag}", registry.host).parse().unwrap();
        let manifest = store::manifest(&*store::open(&reference).unwrap()).unwrap();
        manifest.layers.into_iter().map(|layer| layer.digest).collect::<Vec<_>>()
    };
    let (before, after) = (layers("latest"), layers(&format!("candidate-{second}")));
    assert!(after.contains(&before[1]) && after.len() == 3, "{after:?} after {before:?}");
}
