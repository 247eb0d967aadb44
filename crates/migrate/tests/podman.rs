//! Containers of Podman move, and that of the other host knows them.
//!
//! Both hosts are this one: each has a storage and a network of its own for Podman, and that of the agent has a
//! directory for the states of runc of its own.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;
use support::{Host, judge, pids_of, wait_until};
use torpor_runtimes_tests::command::{Run, write_script};
use torpor_runtimes_tests::podman::{IMAGE, Podman};
use torpor_runtimes_tests::redis::Redis;
use torpor_runtimes_tests::scratch::Scratch;

/// What a container does: it counts in a file of its own, and serves.
const WORK: &str = "i=0; while :; do i=$((i+1)); echo $i >/new; mv /new /count; sleep 0.01; done & \
                    exec redis-server --bind 0.0.0.0 --protected-mode no --save ''";
/// It only serves.
const SERVER: &str = "exec redis-server --bind 0.0.0.0 --protected-mode no --save ''";

/// Two directories, for two hosts.
fn scratches(name: &str) -> [Scratch; 2] {
    // The program is built by then.
    support::torpor();
    ["here", "there"].map(|side| Scratch::new(&format!("move-{name}-{side}")))
}

/// Two hosts.
struct Pair<'a> {
    /// The network that both have.
    network: &'a str,
    /// A directory that each has one of its own of.
    shared: PathBuf,
    podman: [Podman<'a>; 2],
    host: Host,
    agent: Host,
}

impl<'a> Pair<'a> {
    fn new([here, there]: &'a [Scratch; 2], subnets: [&str; 2], options: &[&str]) -> Self {
        let podman = [(here, subnets[0]), (there, subnets[1])]
            .map(|(scratch, subnet)| Podman::new(scratch, &["redis-server"], subnet));
        let subnet = format!("{}.0/24", subnets[0]);
        podman[1].run(&["network", "create", "--subnet", &subnet, here.name()]);
        let (host, agent) = (Host::new(), Host::new());
        let shared = here.dir("shared");
        let mut pair = Self { network: here.name(), shared, podman, host, agent };
        pair.start_agent(options);
        pair
    }

    /// An agent that has nothing of what this host has in `/run/runc`, in that of CNI, and in the directory `shared`.
    fn start_agent(&mut self, options: &[&str]) {
        let call = self.podman[1].call(&[]);
        let mut prefix = vec!["env".to_owned()];
        prefix.extend(
            call.get_envs().filter_map(|(name, value)| {
                Some(format!("{}={}", name.to_str()?, value?.to_str()?))
            }),
        );
        prefix.extend(call.get_program().to_str().map(str::to_owned));
        prefix.extend(call.get_args().take(1).map(|word| word.to_str().unwrap().to_owned()));
        let own = format!(
            "for dir in /run/runc /var/lib/cni {}; do \
             mkdir -p $dir && mount -t tmpfs own $dir || exit; done; exec \"$@\"",
            self.shared.display()
        );
        prefix.extend(["unshare", "--mount", "sh", "-c", &own, "agent"].map(str::to_owned));
        self.agent = Host::new();
        self.agent.prefix = prefix;
        self.agent.options = options.iter().map(|&word| word.to_owned()).collect();
        self.agent.start_agent();
    }

    /// Podman of the agent's host.
    fn there(&self, words: &[&str]) -> Command {
        let call = self.podman[1].call(words);
        let mut inside = Command::new(call.get_program());
        for (name, value) in call.get_envs() {
            inside.env(name, value.unwrap());
        }
        let agent = self.agent.agent.as_ref().unwrap().id();
        inside.arg(format!("--mount=/proc/{agent}/ns/mnt")).args(call.get_args());
        inside
    }

    /// Names of the containers that Podman of the agent's host knows.
    fn known_there(&self) -> String {
        self.there(&["ps", "--all", "--format", "{{.Names}}"]).succeed()
    }

    fn inspect_there(&self, name: &str) -> Value {
        let text = self.there(&["container", "inspect", name]).succeed();
        serde_json::from_str::<Value>(&text).unwrap()[0].clone()
    }

    fn start(&self, name: &str) -> Redis {
        self.start_with(name, &[])
    }

    /// Starts a container with a volume `data-NAME`.
    fn start_with(&self, name: &str, more: &[&str]) -> Redis {
        self.start_work(name, more, WORK)
    }

    fn start_work(&self, name: &str, more: &[&str], work: &str) -> Redis {
        let podman = &self.podman[0];
        let volume = format!("data-{name}:/data");
        let options =
            ["run", "--detach", "--name", name, "--network", self.network, "--volume", &volume];
        podman.run(&[&options[..], more, &[IMAGE, "sh", "-c", work]].concat());
        podman.expect_running(name);
        let address = format!("{}:6379", podman.address(name));
        self.connect(0, &address)
    }

    fn connect(&self, host: usize, address: &str) -> Redis {
        self.podman[host].network().inside(|| {
            let mut found = None;
            wait_until("the server answers", || {
                found = Redis::connect(address).ok();
                found.is_some()
            });
            found.unwrap()
        })
    }

    fn moves(&self, name: &str, more: &[&str]) -> Result<Value, String> {
        judge(&self.command(name, more).output().unwrap())
    }

    fn command(&self, name: &str, more: &[&str]) -> Command {
        let args = ["--runtime", "podman", name, "--json", &self.agent.address];
        let plain = self.host.migrate(&[more, &args].concat());
        let call = self.podman[0].call(&[]);
        let mut command = Command::new(call.get_program());
        for (name, value) in call.get_envs() {
            command.env(name, value.unwrap());
        }
        command.args(call.get_args().take(1)).arg(plain.get_program()).args(plain.get_args());
        command
    }

    /// The state of the process that looks after a container here.
    fn conmon_state(&self, name: &str) -> char {
        let conmon = &self.podman[0].inspect(name)["State"]["ConmonPid"];
        let stat = fs::read_to_string(format!("/proc/{conmon}/stat")).unwrap();
        stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()).unwrap()
    }

    fn volumes_there(&self) -> String {
        self.there(&["volume", "ls", "--quiet"]).succeed()
    }

    fn is_tidy(&self) -> bool {
        self.host.is_clean() && self.agent.is_clean()
    }
}

impl Drop for Pair<'_> {
    fn drop(&mut self) {
        if self.agent.agent.is_some() {
            if std::thread::panicking() {
                eprintln!("{}", self.agent.log());
            }
            let _ = self.there(&["rm", "--all", "--force", "--time", "0"]).finish();
        }
    }
}

fn has_ended(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['Z', 'X']))
}

fn number(text: &str) -> u64 {
    text.trim().parse().unwrap_or(0)
}

#[test]
fn a_container_of_podman_moves() {
    let scratches = scratches("podman");
    let shared = scratches[0].join("shared");
    let allow = ["--allow-volume", shared.to_str().unwrap()];
    let pair = Pair::new(&scratches, ["10.97.101", "10.97.102"], &allow);
    for (mode, more) in [
        ("stop-and-copy", &["--mode", "stop-and-copy"][..]),
        ("pre-copy", &[]),
        ("post-copy", &["--mode", "post-copy"]),
        ("hybrid", &["--mode", "hybrid"]),
    ] {
        let here = &pair.podman[0];
        let mount = format!("{}:/shared", scratches[0].dir(&format!("shared/{mode}")).display());
        let mut client = pair.start_with(mode, &["--volume", &mount, "--restart", "always"]);
        let (task, conmon) = (here.pid(mode), here.inspect(mode)["State"]["ConmonPid"].clone());
        client.number(&["INCRBY", "kept", "5"]);
        let change = "echo changed >/file; rm /bin/yes; echo volume >/data/file; echo directory >/shared/file; \
                      umask 027; echo kept >/dev/shm/kept";
        here.run(&["exec", mode, "sh", "-c", change]);
        let address = format!("{}:6379", here.address(mode));
        let before = number(&here.run(&["exec", mode, "cat", "/count"]));
        assert!(before > 0);

        let report = pair.moves(mode, &[more, &["--with-volume", "/shared"]].concat()).unwrap();
        assert_eq!(report["mode"], mode);
        assert!(report["rounds"][0]["pages"].as_u64().unwrap() > 0, "{report}");
        assert_eq!(here.run(&["ps", "--all", "--quiet"]), "", "Podman here has forgotten it");
        // Podman would have started it again when it saw it end.
        let died = ["events", "--stream=false", "--filter", "event=died", "--format", "{{.Name}}"];
        assert_eq!(here.run(&died), "", "{mode}");
        for pid in [task.to_string(), conmon.to_string()] {
            wait_until("it has ended here", || has_ended(&pid));
        }
        assert_eq!(pair.known_there(), mode);
        let state = pair.inspect_there(mode);
        assert_eq!(
            (&state["State"]["Status"], &state["State"]["Pid"]),
            (&"running".into(), &report["pid"])
        );
        // It has not begun anew, has the address that it had, and its files have come.
        let networks = &state["NetworkSettings"]["Networks"];
        assert_eq!(
            format!("{}:6379", networks[pair.network]["IPAddress"].as_str().unwrap()),
            address
        );
        assert_eq!(pair.connect(1, &address).number(&["INCR", "kept"]), 6, "{mode}");
        let look = "cat /file /data/file /shared/file /dev/shm/kept; stat -c %a /dev/shm/kept; ls -d /bin/yes /bin/no 2>&1 | wc -l; test ! -e /bin/yes";
        let seen = pair.there(&["exec", mode, "sh", "-c", look]).succeed();
        assert_eq!(seen, "changed\nvolume\ndirectory\nkept\n640\n2", "{mode}");
        let count = || number(&pair.there(&["exec", mode, "cat", "/count"]).succeed());
        let arrived = count();
        assert!(arrived >= before, "{mode}: {before}, then {arrived}");
        wait_until("it counts there", || count() > arrived);
        // Podman there is told when it ends.
        pair.there(&["stop", "--time", "0", mode]).succeed();
        assert_eq!(pair.inspect_there(mode)["State"]["Status"], "exited");
        pair.there(&["rm", mode]).succeed();
        wait_until("both tidy up", || pair.is_tidy());
    }
    assert_eq!(pair.host.phases("source"), ["moved"; 4]);
    assert_eq!(pair.agent.phases("destination"), ["moved"; 4]);
}

#[test]
fn a_container_of_podman_that_cannot_come_stays() {
    let scratches = scratches("podman-stays");
    let mut pair = Pair::new(&scratches, ["10.97.103", "10.97.104"], &[]);
    let mut client = pair.start("one");
    client.number(&["INCRBY", "kept", "5"]);
    let pid = pair.podman[0].pid("one");
    let kept = pair.podman[0].inspect("one")["StaticDir"].as_str().unwrap().to_owned();
    let files = || {
        let names = fs::read_dir(&kept).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    };
    let before = files();
    let mut expected = 5;
    let mut stays = |pair: &Pair<'_>, more: &[&str]| {
        let error = pair.moves("one", more).unwrap_err();
        assert_eq!(pair.podman[0].pid("one"), pid, "{error}");
        pair.podman[0].expect_running("one");
        expected += 1;
        assert_eq!(client.number(&["INCR", "kept"]), expected, "its client stays connected");
        wait_until("both tidy up", || pair.is_tidy());
        wait_until("nothing is left there", || pair.known_there().is_empty());
        assert_eq!(pair.volumes_there(), "", "{error}");
        assert_eq!(files(), before, "nothing is left here: {error}");
        error
    };
    let error = stays(&pair, &["--mode", "pipelined"]);
    assert!(error.contains("pipelined") && error.contains("--mode pre-copy"), "{error}");

    // All of it is there. It cannot be made, or is made and told to run, and does not come to that.
    for (point, mode, why) in [
        ("setup-namespaces", "stop-and-copy", "the destination: restore"),
        ("pre-resume", "pre-copy", "the destination could not let the tasks run"),
        ("pre-resume", "hybrid", "the destination could not let the tasks run"),
    ] {
        let script = format!("--restore-option=test $CRTOOLS_SCRIPT_ACTION != {point}");
        pair.agent.stop_agent();
        pair.start_agent(&["--restore-option=--action-script", &script]);
        let error = stays(&pair, &["--mode", mode]);
        assert!(error.contains(why), "{point}: {error}");
        wait_until("it is written down", || pair.agent.phases("destination") == ["stayed"]);
    }
    assert_eq!(pair.host.phases("source"), ["stayed"; 3]);
    // Podman here is told when it ends.
    assert_ne!(pair.conmon_state("one"), 'T');

    pair.agent.stop_agent();
    pair.start_agent(&[]);
    pair.there(&["rmi", IMAGE]).succeed();
    let error = stays(&pair, &[]);
    assert!(error.contains(&format!("podman pull {IMAGE}")), "{error}");
    let said = pair.moves("one", &["--dry-run"]).unwrap_err();
    assert!(said.contains("it would not move"), "{said}");
    let error = pair.moves("nobody", &[]).unwrap_err();
    assert!(error.contains("podman knows no container nobody"), "{error}");
}

/// Whoever takes part in a migration of it is killed: it goes on, and nothing is left.
#[test]
fn a_container_of_podman_stays_when_its_migration_is_killed() {
    let scratches = scratches("podman-killed");
    let mut pair = Pair::new(&scratches, ["10.97.107", "10.97.108"], &[]);
    let mut client = pair.start("one");
    let mut migration =
        pair.command("one", &["--id", "one", "--bandwidth", "10K"]).spawn().unwrap();
    wait_until("it takes a round", || pair.host.path("work/source/one/1").exists());
    migration.kill().unwrap();
    migration.wait().unwrap();
    wait_until("it has stayed", || pair.host.phases("source") == ["stayed"]);
    wait_until("it is written down", || pair.agent.phases("destination") == ["stayed"]);
    wait_until("both tidy up", || pair.is_tidy());
    assert_eq!(client.number(&["INCR", "kept"]), 1);

    // The agent, or the command, when Podman there has made the container and its runtime is about to make the tasks.
    let [reached, released] = ["reached", "released"].map(|name| scratches[1].join(name));
    let script = format!(
        "test $CRTOOLS_SCRIPT_ACTION != setup-namespaces || {{ touch {}; until test -e {}; do sleep 0.01; done; }}",
        reached.display(),
        released.display()
    );
    pair.agent.stop_agent();
    pair.start_agent(&["--restore-option=--action-script", &format!("--restore-option={script}")]);
    let mut migration = pair.command("one", &["--mode", "stop-and-copy"]).spawn().unwrap();
    wait_until("it is made", || reached.exists());
    pair.agent.stop_agent();
    fs::write(&released, "").unwrap();
    assert!(!migration.wait().unwrap().success());
    assert_eq!(client.number(&["INCR", "kept"]), 2);
    for file in [&reached, &released] {
        fs::remove_file(file).unwrap();
    }
    pair.agent.start_agent();
    let mut migration = pair.command("one", &["--mode", "post-copy"]).spawn().unwrap();
    wait_until("it is made", || reached.exists());
    wait_until("whoever looks after it here looks away", || pair.conmon_state("one") == 'T');
    migration.kill().unwrap();
    migration.wait().unwrap();
    fs::write(&released, "").unwrap();
    assert_eq!(client.number(&["INCR", "kept"]), 3);
    wait_until("and looks on again", || pair.conmon_state("one") != 'T');
    wait_until("nothing is left there", || pair.known_there().is_empty());
    wait_until("no volume is left there", || pair.volumes_there().is_empty());
    wait_until("both tidy up", || pair.is_tidy());
    assert_eq!(pair.agent.phases("destination"), ["stayed"; 2]);
    pair.podman[0].expect_running("one");
}

/// Podman hangs when the container is stopped: whoever cancels does not wait for it, and it is none the worse for that.
#[test]
fn podman_that_hangs_in_the_pause_can_be_cancelled() {
    let scratches = scratches("podman-hangs");
    let pair = Pair::new(&scratches, ["10.97.109", "10.97.110"], &[]);
    let mut client = pair.start("one");
    let [bin, reached] = ["bin", "reached"].map(|name| pair.host.path(name));
    fs::create_dir(&bin).unwrap();
    // Nobody else sleeps for so long.
    let sleeps = format!("300000.{}", std::process::id());
    let own = Command::new("sh").args(["-c", "command -v podman"]).succeed();
    let script = format!(
        "#!/bin/sh\ncase \"$*\" in *--export*) sleep {sleeps} & touch {}; wait;; *) exec {} \"$@\";; esac\n",
        reached.display(),
        own.trim()
    );
    write_script(&bin.join("podman"), &script);
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let mut migration = pair.command("one", &["--id", "one"]).env("PATH", path).spawn().unwrap();
    wait_until("Podman hangs", || reached.exists());
    let mut cancel = pair.host.migrate(&["--cancel", "one"]).spawn().unwrap();
    wait_until("somebody has cancelled", || cancel.try_wait().unwrap().is_some());
    assert!(!migration.wait().unwrap().success());
    assert_eq!(client.number(&["INCR", "kept"]), 1);
    wait_until("what it has started ends", || pids_of(&["sleep", &sleeps]).is_empty());
    wait_until("both tidy up", || pair.is_tidy());
    assert_eq!(pair.host.phases("source"), ["stayed"]);
    pair.podman[0].expect_running("one");
    pair.moves("one", &[]).unwrap();
    assert!(pair.known_there().contains("one"));
}

/// Nothing keeps it here, and nothing moves: the engine and Podman of both hosts were asked.
#[test]
fn a_container_of_podman_is_looked_at() {
    let scratches = scratches("podman-look");
    let mut pair = Pair::new(&scratches, ["10.97.105", "10.97.106"], &[]);
    let mut client = pair.start_with("one", &["--publish", "127.0.0.1:16379:6379"]);
    let output = pair.command("one", &["--dry-run"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("publishes ports of its host: 16379"), "{said}");
    pair.agent.stop_agent();
    pair.start_agent(&["--allow-ports"]);
    let output = pair.command("one", &["--dry-run"]).output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    let lines = told.lines().filter(|line| line.contains("pre-copy instead of pipelined"));
    assert_eq!(lines.count(), 1, "{told}");
    let said = judge(&output).unwrap();
    assert_eq!(
        (&said["mode"], &said["refused"]),
        (&"pre-copy".into(), &Value::Array(vec![])),
        "{said}"
    );
    assert!(said["memory_bytes"].as_u64().unwrap() > 0, "{said}");
    pair.podman[0].expect_running("one");
    assert_eq!(client.number(&["INCR", "kept"]), 1);
    assert_eq!(pair.known_there(), "");
    wait_until("both tidy up", || pair.is_tidy());
}

/// What Podman of the source exports is changed on its way, by whoever has that host.
#[test]
fn what_podman_was_not_told_does_not_come() {
    let scratches = scratches("podman-hostile");
    let pair = Pair::new(&scratches, ["10.97.111", "10.97.112"], &[]);
    // Its files are replaced on their way, and it may have none of them open.
    let mut client = pair.start_work("one", &[], SERVER);
    let [bin, change, victim] = ["bin", "change", "victim"].map(|name| pair.host.path(name));
    for dir in [&bin, &victim] {
        fs::create_dir(dir).unwrap();
    }
    fs::write(victim.join("file"), "kept").unwrap();
    let own = Command::new("sh").args(["-c", "command -v podman"]).succeed();
    // What is exported is unpacked, changed by the script `change`, and packed again.
    let script = format!(
        "#!/bin/sh\nset -e\n{own} \"$@\"\ncase \"$*\" in *--export*) ;; *) exit;; esac\n\
         while [ \"$1\" != --export ]; do shift; done\narchive=$2\n\
         dir=$(mktemp -d {scratch}/XXXXXX)\ntar xf \"$archive\" -C \"$dir\"\ncd \"$dir\"\n\
         . {change}\ntar cf \"$archive\" *\n",
        own = own.trim(),
        scratch = scratches[0].path().display(),
        change = change.display()
    );
    write_script(&bin.join("podman"), &script);
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let up = format!("{}{}", "../".repeat(30), &victim.to_str().unwrap()[1..]);
    let away = victim.display();
    let volume = format!(
        "sed -i 's|\"rbind\"|\"rbind\", \"volume-opt=type=bind\", \"volume-opt=device={away}\"|' \
         config.dump"
    );
    let link = format!(
        "mkdir new; ln -s {away} new/link; tar cf rootfs-diff.tar new/link; rm new/link; mkdir new/link; touch new/link/file; tar rf rootfs-diff.tar new/link/file"
    );
    for (changes, why) in [
        (format!("echo '[\"{up}\"]' >deleted.files"), "deleted.files"),
        (link, "rootfs-diff.tar"),
        (volume, "volume-opt=type=bind"),
        (
            "sed -i 's|\"id\":|\"secrets\": [{\"name\": \"password\"}], \"id\":|' config.dump"
                .to_owned(),
            "\"secrets\" does not come along",
        ),
        (
            format!(
                "sed -i 's|\"rootfsImageName\": \"{IMAGE}\"|\"rootfsImageName\": \"localhost/evil\"|' config.dump"
            ),
            "localhost/evil",
        ),
    ] {
        fs::write(&change, &changes).unwrap();
        let output = pair.command("one", &["--mode", "stop-and-copy"]).env("PATH", &path).output();
        let error = judge(&output.unwrap()).unwrap_err();
        assert!(error.contains(why), "{changes}: {error}");
        wait_until("both tidy up", || pair.is_tidy());
        assert_eq!((pair.known_there(), pair.volumes_there()), (String::new(), String::new()));
        assert_eq!(fs::read_to_string(victim.join("file")).unwrap(), "kept", "{changes}");
        pair.podman[0].expect_running("one");
    }
    assert_eq!(client.number(&["INCR", "kept"]), 1, "its client stays connected");
    // What Podman's reader would put before the name of a file, and this one does not see, does not come. The file may.
    fs::write(&change, format!("mkdir new; ln -s {away} new/link; {PREFIXED}")).unwrap();
    let output = pair.command("one", &["--mode", "stop-and-copy"]).env("PATH", &path).output();
    judge(&output.unwrap()).unwrap();
    assert!(pair.known_there().contains("one"));
    assert_eq!(fs::read_to_string(victim.join("file")).unwrap(), "kept");
    assert_eq!(pair.there(&["exec", "one", "cat", "/file"]).succeed(), "evil");
}

/// Makes an archive of the link `new/link`, and of a `file` with that as its prefix, in a format that nobody knows.
const PREFIXED: &str = r#"tar cf whole new/link; head --bytes=512 whole >rootfs-diff.tar
perl -e '
    my @fields = ("file", "0000644", "0000000", "0000000", "00000000004", "00000000000", " " x 8, "0", "",
        "ustar\0", "xx", "", "", "0000000", "0000000", "new/link", "");
    my $head = pack("a100 a8 a8 a8 a12 a12 a8 a a100 a6 a2 a32 a32 a8 a8 a155 a12", @fields);
    substr($head, 148, 8) = sprintf("%06o\0 ", unpack("%32C*", $head));
    print $head, "evil", "\0" x (508 + 1024);
' >>rootfs-diff.tar"#;

/// What its configuration has Podman do is judged as that of a container of runc is: before anything is stopped.
#[test]
fn the_policy_judges_what_podman_would_mount() {
    let scratches = scratches("podman-policy");
    let rules = ["mounts.sources=[\"/nowhere\"]", "capabilities.allow=[\"CAP_KILL\"]"];
    let options = rules.map(|rule| format!("--restore-option=--policy-rule={rule}"));
    let pair = Pair::new(&scratches, ["10.97.113", "10.97.114"], &[&options[0], &options[1]]);
    let mount = format!("{}:/shared", scratches[0].dir("shared/own").display());
    let mut client = pair.start_with("one", &["--volume", &mount]);
    let said = pair.command("one", &["--dry-run"]).output().unwrap();
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    for error in [said, pair.moves("one", &[]).unwrap_err()] {
        assert!(error.contains("/shared/own") && error.contains("mounts.sources"), "{error}");
        // Podman would start it anew with these, by its restart policy, and ask nobody.
        assert!(error.contains("CAP_SETUID") && error.contains("(capabilities.allow)"), "{error}");
    }
    assert_eq!(pair.known_there(), "");
    assert_eq!(client.number(&["INCR", "kept"]), 1);
}
