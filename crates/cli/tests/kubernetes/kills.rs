//! Daemons that are killed at random points of their work while pods give way.

use std::collections::HashSet;
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::cluster::{Cluster, always, cluster, deployment, given, job, set, template};

/// How often somebody is killed, if `TORPOR_KILLS` says nothing else.
const KILLS: u64 = 50;
/// Who.
const DAEMONS: [&str; 7] =
    ["agent1", "agent2", "controller", "kubelet1", "kubelet2", "containerd1", "containerd2"];
/// How often a kubelet is killed while containers are created and started, if `TORPOR_KILLS` says nothing else.
const KILLS_OF_KUBELETS: u64 = 10;
/// Of how many processes of torpor-runc one is waited for, at most: each pod has two or three for either, not all of which live long
/// enough to be seen.
const PROCESSES: u64 = 9;
/// How long it is waited for: the pods have given way by then.
const SEEN: Duration = Duration::from_secs(20);
/// What runs: three replicas of two owners, and a Job.
const APPS: [(&str, usize); 3] = [("alike", 3), ("ordinal", 3), ("job", 1)];

/// Numbers that look random, and are the same for the same seed.
struct Draw(u64);

impl Draw {
    fn below(&mut self, end: u64) -> u64 {
        for shift in [13_i32, -7, 17] {
            self.0 ^= if shift > 0 { self.0 << shift } else { self.0 >> -shift };
        }
        self.0 % end
    }
}

/// The seed: that of the environment, or another each time.
fn seed() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    given("TORPOR_SEED").unwrap_or(now.as_secs()).max(1)
}

fn start(cluster: &Cluster) {
    // Not for ever, if somebody was killed who would have saved it.
    let brief = |mut object: Value, replicas: usize| {
        object["spec"]["replicas"] = json!(replicas);
        let template = object["spec"]["template"].take();
        object["spec"]["template"] = always(template);
        let pod = &mut object["spec"]["template"]["spec"];
        pod["terminationGracePeriodSeconds"] = json!(20);
        pod["containers"][0]["resources"] = json!({ "requests": { "cpu": "20m" } });
        object
    };
    cluster.apply(&brief(deployment("alike", 20), 3));
    cluster.apply(&brief(set("ordinal", &template("ordinal")), 3));
    let mut job = brief(job("job"), 1);
    job["spec"].as_object_mut().unwrap().remove("replicas");
    cluster.apply(&job);
}

/// The replicas of an owner that run, if they are as many as there are to be, and none of them is one of those that were there before.
fn new_of(
    cluster: &Cluster,
    (app, replicas): (&str, usize),
    before: &HashSet<String>,
) -> Option<HashSet<String>> {
    let pods = cluster.running(app);
    let all = cluster.get(&["pods", "-l", &format!("app={app}")]);
    let new = pods.iter().map(|pod| pod["metadata"]["uid"].as_str().unwrap().to_owned());
    let new: HashSet<String> = new.filter(|uid| !before.contains(uid)).collect();
    (new.len() == replicas && all["items"].as_array()?.len() == replicas).then_some(new)
}

/// The replicas that run, when all of them are others than before.
fn all_run(cluster: &Cluster, before: &HashSet<String>) -> HashSet<String> {
    cluster.until("all replicas run again", || {
        let mut uids = HashSet::new();
        for app in APPS {
            uids.extend(new_of(cluster, app, before)?);
        }
        Some(uids)
    })
}

/// Whether the pods have given way: the Job, which is suspended, has none, and the others are back.
fn has_given_way(cluster: &Cluster, before: &HashSet<String>) -> bool {
    let job = cluster.get(&["pods", "-l", "app=job"]);
    job["items"].as_array().is_some_and(Vec::is_empty)
        && APPS.iter().all(|app| app.0 == "job" || new_of(cluster, *app, before).is_some())
}

/// What the programs have counted so far: by what they chose when they began, how far.
fn counted(cluster: &Cluster) -> Vec<(String, usize)> {
    let all = fs::read_dir(cluster.place.path().join("shared")).unwrap().flatten();
    let began = all.map(|file| file.file_name().into_string().unwrap());
    let lines = |began: String| {
        let counts = cluster.works_once(&began);
        (began, counts.len())
    };
    began.map(lines).collect()
}

/// How many programs count: each replica's, and no other.
fn counting(cluster: &Cluster) -> usize {
    let before = counted(cluster);
    cluster.until("all programs that live count", || {
        let now = counted(cluster);
        let more = now.iter().filter(|(began, lines)| {
            before.iter().any(|(other, before)| other == began && lines > before)
        });
        let more = more.count();
        (more >= APPS.iter().map(|(_, replicas)| replicas).sum()).then_some(more)
    })
}

/// Has the pods of one node give way to the other, and come back. Once they have to go somebody is killed, perhaps.
fn give_way(
    cluster: &Cluster,
    [from, to]: [&str; 2],
    before: &HashSet<String>,
    kill: impl FnOnce(),
) -> HashSet<String> {
    let suspend = |value: bool| {
        let patch = json!({ "spec": { "suspend": value } }).to_string();
        cluster.kubectl("admin", &["patch", "job", "job", "-p", &patch], "").unwrap();
    };
    cluster.kubectl("admin", &["cordon", from], "").unwrap();
    cluster.kubectl("admin", &["uncordon", to], "").unwrap();
    suspend(true);
    let words = ["delete", "pods", "-l", "app in (alike,ordinal)", "--wait=false"];
    cluster.kubectl("admin", &words, "").unwrap();
    kill();
    suspend(false);
    all_run(cluster, before)
}

/// Kills a daemon when it has read and written so often, counted from its start, or when the pods have given way: there is
/// not as much to do each time. How often that was.
fn kill_at(cluster: &Cluster, daemon: &str, work: u64, before: &HashSet<String>) -> u64 {
    let killed = AtomicBool::new(false);
    thread::scope(|scope| {
        let over = scope.spawn(|| {
            cluster.until("the pods have given way", || {
                (killed.load(Ordering::Relaxed) || has_given_way(cluster, before)).then_some(())
            });
        });
        let done = loop {
            let done = cluster.work(daemon);
            if done >= work || over.is_finished() {
                break done;
            }
            thread::sleep(Duration::from_millis(10));
        };
        cluster.kill(daemon);
        killed.store(true, Ordering::Relaxed);
        done
    })
}

#[test]
fn whoever_is_killed_no_pod_is_lost_or_there_twice() {
    let Some(cluster) = cluster("whoever_is_killed_no_pod_is_lost_or_there_twice") else { return };
    let (mut draw, mut uids, began_before) = begin(&cluster);
    // First nobody is killed, which says how much there is to do for each daemon until the pods have given way.
    let whole = [["node1", "node2"], ["node2", "node1"]].map(|nodes| {
        let before = DAEMONS.map(|daemon| cluster.work(daemon));
        let mut after = before;
        uids = give_way(&cluster, nodes, &uids, || {
            cluster
                .until("the pods have given way", || has_given_way(&cluster, &uids).then_some(()));
            after = DAEMONS.map(|daemon| cluster.work(daemon));
        });
        counting(&cluster);
        (nodes, std::array::from_fn::<u64, 7, _>(|at| after[at] - before[at]))
    });
    for round in 1..=given("TORPOR_KILLS").unwrap_or(KILLS) {
        let victim = usize::try_from(draw.below(7)).unwrap();
        let daemon = DAEMONS[victim];
        // From the node that has the pods: the agent of another has next to nothing to do.
        let (nodes, work) = whole[usize::try_from((round - 1) % 2).unwrap()];
        let point = draw.below(work[victim].max(1));
        let since = Instant::now();
        let begun = cluster.work(daemon);
        let mut done = 0;
        uids = give_way(&cluster, nodes, &uids, || {
            done = kill_at(&cluster, daemon, begun + point, &uids) - begun;
        });
        let (all, took) = (work[victim], since.elapsed().as_secs_f32());
        let told = format!("{daemon} killed at {done} of {all} calls ({point} drawn), {took:.1} s");
        all_go_on(&cluster, &began_before, &format!("round {round}: {told}"));
    }
    end(&cluster);
}

/// Waits until so many processes of torpor-runc were seen that do something with containers of a node which are restored, or all
/// that there were. How many that is, and the last of them.
fn seen(cluster: &Cluster, node: &str, action: &str, number: usize) -> (usize, Option<i32>) {
    let root = cluster.place.path().join(node).join("runc/k8s.io");
    let until = Instant::now() + SEEN;
    let does_it = |pid: &i32| {
        // What has ended has no command line.
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).into_owned();
        let words: Vec<&str> = line.split('\0').filter(|word| !word.is_empty()).collect();
        let waits = || root.join(words.last().unwrap()).join("torpor-waits").exists();
        words.contains(&action)
            && words.contains(&root.to_str().unwrap())
            && (action == "create" || waits())
    };
    let (mut all, mut last) = (HashSet::new(), None);
    while all.len() < number && Instant::now() < until {
        let names = fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.file_name());
        let pids = names.filter_map(|name| name.to_str()?.parse().ok());
        for pid in pids.filter(does_it).filter(|pid| all.insert(*pid)).collect::<Vec<i32>>() {
            last = Some(pid);
        }
    }
    (all.len(), last)
}

/// Kills a kubelet while this process stands still, so that containerd gives its call up before it is answered.
fn kill_beside(cluster: &Cluster, kubelet: &str, process: Option<i32>) {
    let process = process.and_then(Pid::from_raw);
    // It may have ended.
    let send = |signal| process.map(|process| kill_process(process, signal));
    send(Signal::STOP);
    cluster.kill(kubelet);
    thread::sleep(Duration::from_secs(1));
    send(Signal::CONT);
}

#[test]
fn a_kubelet_that_is_killed_while_containers_begin_costs_no_pod_its_work() {
    let test = "a_kubelet_that_is_killed_while_containers_begin_costs_no_pod_its_work";
    let Some(cluster) = cluster(test) else { return };
    let (mut draw, mut uids, began_before) = begin(&cluster);
    for round in 1..=given("TORPOR_KILLS").unwrap_or(KILLS_OF_KUBELETS) {
        let (nodes, kubelet) = match round % 2 {
            1 => (["node1", "node2"], "kubelet2"),
            _ => (["node2", "node1"], "kubelet1"),
        };
        let action = if draw.below(4) == 0 { "create" } else { "start" };
        let number = 1 + usize::try_from(draw.below(PROCESSES)).unwrap();
        let mut at = 0;
        uids = give_way(&cluster, nodes, &uids, || {
            let (found, process) = seen(&cluster, nodes[1], action, number);
            kill_beside(&cluster, kubelet, process);
            at = found;
        });
        let told = format!("{kubelet} killed at process {at} of {action} ({number} drawn)");
        all_go_on(&cluster, &began_before, &format!("round {round}: {told}"));
    }
    end(&cluster);
}

/// Starts what runs, and says what everything is drawn by: that, the pods, and the programs that have begun.
fn begin(cluster: &Cluster) -> (Draw, HashSet<String>, HashSet<String>) {
    let seed = seed();
    eprintln!("TORPOR_SEED={seed}");
    start(cluster);
    let uids = all_run(cluster, &HashSet::new());
    (Draw(seed), uids, programs(cluster))
}

/// Seven programs count, and they are those that did before: the daemons are back within 5 s, which costs no pod its work.
fn all_go_on(cluster: &Cluster, began_before: &HashSet<String>, told: &str) {
    assert_eq!(counting(cluster), 7, "{told}");
    let anew: Vec<String> = programs(cluster).difference(began_before).cloned().collect();
    eprintln!("{told}: {} of 7 began anew", anew.len());
    assert!(anew.is_empty(), "{told}: {}", events(cluster, &anew));
}

/// Ends what runs.
fn end(cluster: &Cluster) {
    cluster.kubectl("admin", &["uncordon", "node1", "node2"], "").unwrap();
    cluster.delete(&["deployment/alike", "statefulset/ordinal", "job/job"]);
    nothing_is_left(cluster);
}

/// What the programs chose when they began.
fn programs(cluster: &Cluster) -> HashSet<String> {
    counted(cluster).into_iter().map(|(began, _)| began).collect()
}

/// What is told of the pods that programs began in which began anew: why they did.
fn events(cluster: &Cluster, anew: &[String]) -> String {
    let pods: HashSet<String> =
        anew.iter().flat_map(|began| cluster.works_once(began)).map(|(_, pod)| pod).collect();
    let all = cluster.get(&["events", "--sort-by=.lastTimestamp"]);
    let line = |event: &Value| {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let pod = text(&event["involvedObject"]["name"]);
        let words = ["lastTimestamp", "reason", "message"].map(|name| text(&event[name]));
        pods.contains(&pod).then(|| format!("{pod}: {}", words.join(": ")))
    };
    let lines: Vec<String> =
        all["items"].as_array().into_iter().flatten().filter_map(line).collect();
    let objects = cluster.kubectl("admin", &["get", "pods,pcp", "-o", "yaml"], "");
    format!("{}\n{}", lines.join("\n"), objects.unwrap_or_default())
}

/// Nothing of pods that are gone is left on the nodes.
fn nothing_is_left(cluster: &Cluster) {
    cluster.until("no checkpoint is left", || {
        cluster.get(&["pcp"])["items"].as_array()?.is_empty().then_some(())
    });
    let none = |what: &str, script: &str| {
        cluster.until(&format!("nothing is left: {what}"), || {
            let found = cluster.inside(&["sh", "-c", script]).stdout;
            found.is_empty().then_some(())
        });
    };
    let place = cluster.place.path().display();
    none(
        "checkpoints of nodes",
        &format!("find {place}/node*/torpor/checkpoints/default -mindepth 1"),
    );
    none("names in the store", &format!("grep pod-checkpoint {place}/store/index.json"));
    none("blobs in the store", &format!("ls {place}/store/blobs/sha256"));
    let programs = "for p in /proc/[0-9]*; do [ $p != /proc/$$ ] || continue; c=$(tr '\\0' ' ' <$p/cmdline 2>/dev/null); case $c in \
                    *torpor-runc*|*/criu*|*'began='*) echo $p $c;; esac; \
                    grep -s -e torpor-guard -e torpor-undo $p/comm; done";
    none("processes", programs);
    let groups = format!("/sys/fs/cgroup/freezer/{}-node*", cluster.name());
    none("frozen groups", &format!("grep -rls FROZEN --include freezer.state {groups}"));
    none("mounts", &format!("grep '{place}/node[12]/state/.*rootfs' /proc/self/mounts"));
}
