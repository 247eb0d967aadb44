//! What the kernel shows of the processes of a container, against what a plan lists and what the
//! container was given before.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use torpor_runtimes_tests::command::{Run, command};

/// File systems of which each new one is another: of those that this host has mounted none may show up.
const OWN: [&str; 6] = ["devpts", "mqueue", "overlay", "proc", "sysfs", "tmpfs"];
/// Devices that the groups of every container allow, and all pseudo terminals (major 136).
const DEVICES: [(u32, u32); 9] =
    [(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 1), (5, 2), (10, 200)];
const TERMINALS: u32 = 136;
/// The lists of sockets below /proc/self/net, and the column with the number of a socket.
const SOCKETS: [(&str, usize); 11] = [
    ("icmp", 9),
    ("netlink", 9),
    ("packet", 8),
    ("raw", 9),
    ("raw6", 9),
    ("tcp", 9),
    ("tcp6", 9),
    ("udp", 9),
    ("udp6", 9),
    ("udplite", 9),
    ("unix", 6),
];

/// A line of mountinfo.
#[derive(Debug)]
struct Mounted {
    id: String,
    device: String,
    root: String,
    at: String,
    read_only: bool,
    kind: String,
}

/// An open file.
#[derive(Debug)]
struct Opened {
    link: String,
    /// Its device and number; the device that it is, if it is one.
    file: (u64, u64),
    device: Option<(u32, u32)>,
    /// Of a file that has a path.
    mount: Option<String>,
    writes: bool,
}

/// What the kernel shows of one process.
#[derive(Debug)]
pub(crate) struct Shown {
    namespaces: Vec<(&'static str, PathBuf)>,
    status: BTreeMap<String, String>,
    /// The hard limits; `None` is none.
    limits: BTreeMap<String, Option<u64>>,
    /// The niceness, the policy of scheduling, `oom_score_adj`.
    served: (i64, i64, i64),
    groups: String,
    /// What its group of devices allows, where there is one.
    devices: BTreeSet<String>,
    mounts: Vec<Mounted>,
    files: Vec<Opened>,
    mapped: BTreeSet<String>,
    /// Where it is, and whether that is in its own mounts.
    place: (PathBuf, bool),
    /// Devices and set-id programs in file systems that are its own.
    nodes: BTreeSet<String>,
}

/// What a plan lists, as texts.
#[derive(Debug)]
pub(crate) struct Plan(pub(crate) Vec<String>);

impl Plan {
    fn has(&self, item: &str) -> bool {
        self.0.iter().any(|listed| listed == item || listed.starts_with(&format!("{item} ")))
    }

    /// What is listed at a mount point.
    fn at<'a>(&'a self, place: &str) -> impl Iterator<Item = &'a str> + use<'a> {
        let start = format!("mount at {place:?}: ");
        self.0.iter().filter_map(move |item| item.strip_prefix(&start))
    }

    fn opens(&self, path: &str) -> bool {
        self.has(&format!("opens {path:?}"))
    }
}

/// What is the host's.
struct Host {
    shown: Shown,
    sockets: BTreeSet<String>,
}

impl Host {
    fn now() -> Self {
        let mut sockets = BTreeSet::new();
        for (list, column) in SOCKETS {
            let text = fs::read_to_string(format!("/proc/self/net/{list}")).unwrap_or_default();
            let numbers = text.lines().filter_map(|line| line.split_whitespace().nth(column));
            sockets.extend(numbers.filter(|&number| number != "0").map(ToOwned::to_owned));
        }
        Host { shown: Shown::of("self").unwrap(), sockets }
    }
}

impl Shown {
    /// `None` if it is gone.
    pub(crate) fn of(pid: &str) -> Option<Self> {
        const KINDS: [&str; 7] = ["cgroup", "ipc", "mnt", "net", "pid", "user", "uts"];
        let proc = PathBuf::from(format!("/proc/{pid}"));
        let read = |name: &str| fs::read_to_string(proc.join(name)).ok();
        let space = |kind| Some((kind, fs::read_link(proc.join("ns").join(kind)).ok()?));
        let status = read("status")?;
        let pairs = status.lines().filter_map(|line| line.split_once(":\t"));
        let stat = read("stat")?;
        let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split(' ').collect();
        let field = |number: usize| fields.get(number)?.parse::<i64>().ok();
        let groups = read("cgroup")?;
        let mounts: Vec<Mounted> = read("mountinfo")?.lines().filter_map(mounted).collect();
        let nodes = if pid == "self" { BTreeSet::new() } else { nodes(&proc, &mounts) };
        let cwd = fs::read_link(proc.join("cwd")).ok()?;
        let is_root = fs::read_link(proc.join("root")).ok()? == Path::new("/");
        let inside = proc.join("root").join(cwd.strip_prefix("/").unwrap_or(&cwd));
        let same = number(&fs::metadata(proc.join("cwd")).ok()?)
            == fs::metadata(inside).map_or((0, 0), |meta| number(&meta));
        Some(Shown {
            namespaces: KINDS.into_iter().map(space).collect::<Option<_>>()?,
            status: pairs.map(|(k, v)| (k.to_owned(), v.trim().to_owned())).collect(),
            limits: limits(&read("limits")?),
            // By proc_pid_stat(5): the fields 19 and 41, of which the first two are cut off.
            served: (field(16)?, field(38)?, read("oom_score_adj")?.trim().parse().ok()?),
            devices: devices(&groups),
            groups,
            mapped: mapped(&read("maps")?),
            files: files(&proc)?,
            mounts,
            place: (cwd, same || !is_root),
            nodes,
        })
    }

    /// What of it nobody gave: `given` is what the container was before.
    pub(crate) fn more_than(&self, given: &Shown, plan: &Plan) -> Option<String> {
        let host = Host::now();
        self.other_space(given, &host)
            .or_else(|| self.more_rights(given, plan))
            .or_else(|| self.more_service(given, &host))
            .or_else(|| self.other_group(given))
            .or_else(|| self.other_mount(given, plan, &host))
            .or_else(|| {
                self.files.iter().find_map(|file| self.other_file(file, given, plan, &host))
            })
            .or_else(|| self.other_mapping(given, plan))
            .or_else(|| {
                let node = self.nodes.iter().find(|node| !given.nodes.contains(*node))?;
                Some(format!("a file that nobody gave: {node}"))
            })
    }

    fn other_space(&self, given: &Shown, host: &Host) -> Option<String> {
        let hosts = self.namespaces.iter().zip(&host.shown.namespaces);
        let mut more = hosts.filter(|(own, host)| own == host && !given.namespaces.contains(own));
        more.next().map(|((kind, _), _)| format!("the host's {kind} namespace"))
    }

    fn more_rights(&self, given: &Shown, plan: &Plan) -> Option<String> {
        let bits = |of: &Shown, set: &str| u64::from_str_radix(&of.status[set], 16).unwrap();
        let sets = ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"];
        let all = |of: &Shown| sets.iter().fold(0, |all, set| all | bits(of, set));
        let more = all(self) & !all(given);
        if more != 0 {
            return Some(format!("capabilities {more:x}"));
        }
        for lock in ["NoNewPrivs", "Seccomp"] {
            if given.status[lock] != "0" && self.status[lock] == "0" {
                return Some(format!("{lock} is off"));
            }
        }
        for (line, item) in [("Uid", "user id"), ("Gid", "group id"), ("Groups", "group id")] {
            for id in self.status[line].split_whitespace() {
                if !plan.has(&format!("{item} {id}")) {
                    return Some(format!("the {item} {id}, which the plan does not list"));
                }
            }
        }
        None
    }

    fn more_service(&self, given: &Shown, host: &Host) -> Option<String> {
        for (name, limit) in &self.limits {
            let most = |of: &Shown| of.limits[name].unwrap_or(u64::MAX);
            if limit.unwrap_or(u64::MAX) > most(given).max(most(&host.shown)) {
                return Some(format!("the limit {name}"));
            }
        }
        let (nice, policy, oom) = self.served;
        let real_time = [1, 2, 6].contains(&policy); // SCHED_FIFO, SCHED_RR, SCHED_DEADLINE
        let least = |own: i64, given: i64, host: i64| own < given.min(host);
        let (was, here) = (given.served, host.shown.served);
        (real_time || least(nice, was.0, here.0) || least(oom, was.2, here.2))
            .then(|| format!("to be served before others: {:?}", self.served))
    }

    fn other_group(&self, given: &Shown) -> Option<String> {
        let lacks = |line: &&str| {
            let below = |own: &str| *line == own || line.starts_with(&format!("{own}/"));
            // In a hierarchy that others have mounted meanwhile everybody is at the root.
            let same = |own: &str| hierarchy(own) == hierarchy(line);
            let is_new = line.ends_with(":/") && !given.groups.lines().any(same);
            !given.groups.lines().any(below) && !is_new
        };
        if let Some(group) = self.groups.lines().find(lacks) {
            return Some(format!("the group {group}"));
        }
        let device = self.devices.iter().find(|device| !given.devices.contains(*device))?;
        Some(format!("devices by its group: {device}"))
    }

    fn other_mount(&self, given: &Shown, plan: &Plan, host: &Host) -> Option<String> {
        let mut places: BTreeMap<&str, usize> = BTreeMap::new();
        for mount in &self.mounts {
            *places.entry(&mount.at).or_default() += 1;
            if !plan.at(&mount.at).any(|listed| mount.is(listed, given, &host.shown)) {
                let listed: Vec<_> = plan.at(&mount.at).collect();
                return Some(format!("{mount:?}, of which the plan has {listed:?}"));
            }
        }
        let more = places.into_iter().find(|(at, count)| plan.at(at).count() < *count);
        more.map(|(at, count)| format!("{count} mounts at {at}, more than the plan lists"))
    }

    fn other_file(&self, file: &Opened, given: &Shown, plan: &Plan, host: &Host) -> Option<String> {
        let found = |what: &str| Some(format!("{what}: {file:?}"));
        if given.files.iter().any(|g| (g.file, &g.link) == (file.file, &file.link)) {
            return None;
        }
        let socket = file.link.strip_prefix("socket:[").and_then(|rest| rest.strip_suffix(']'));
        if socket.is_some_and(|number| host.sockets.contains(number)) {
            return found("a socket of the host's network namespace");
        }
        if let Some((major, minor)) = file.device
            && !DEVICES.contains(&(major, minor))
            && major != TERMINALS
        {
            return found("a device that nobody gave");
        }
        let Some(mount) = &file.mount else { return None };
        let Some(mount) = self.mounts.iter().find(|mounted| mounted.id == *mount) else {
            return found("an open file outside of its mounts");
        };
        if file.writes && mount.read_only {
            return found("a file that is writable on a mount that is not");
        }
        (!plan.opens(without_end(&file.link)))
            .then(|| format!("a file that the plan does not list: {file:?}"))
    }

    fn other_mapping(&self, given: &Shown, plan: &Plan) -> Option<String> {
        let known = |path: &&String| plan.opens(path) || given.mapped.contains(*path);
        if let Some(path) = self.mapped.iter().find(|path| !known(path)) {
            return Some(format!("it has mapped {path:?}, which the plan does not list"));
        }
        let (place, inside) = &self.place;
        (!inside).then(|| format!("it is at {}, outside of its mounts", place.display()))
    }
}

impl Mounted {
    /// Whether it is what a plan lists at its place.
    fn is(&self, listed: &str, given: &Shown, host: &Shown) -> bool {
        let narrow = listed.strip_suffix(", read-only");
        if narrow.is_some() && !self.read_only {
            return false;
        }
        let hosts = || host.mounts.iter().any(|mount| mount.device == self.device);
        let listed = narrow.unwrap_or(listed);
        if let Some((root, kind)) = listed.split_once("file system ")
            && (root.is_empty() || root == format!("{:?} of ", self.root))
        {
            return kind == self.kind && !(OWN.contains(&kind) && hosts());
        }
        let mut whole = given.mounts.iter().filter(|mount| self.is_part(mount)).peekable();
        // What runc masks files with, and groups, of which it gives its own. All else that it gives the
        // container had before.
        if listed == "what is given as \"/dev/null\"" && whole.peek().is_none() {
            return self.shows(Path::new("/dev/null"));
        }
        if listed == format!("what is given as {:?}", self.at) && self.kind == "cgroup" {
            return self.read_only && given.mounts.iter().any(|g| g.device == self.device);
        }
        whole.any(|mount| self.read_only || !mount.read_only)
    }

    fn is_part(&self, whole: &Mounted) -> bool {
        whole.device == self.device && Path::new(&self.root).starts_with(&whole.root)
    }

    fn shows(&self, path: &Path) -> bool {
        let device = fs::metadata(path).map_or(0, |meta| meta.dev());
        let device = format!("{}:{}", libc::major(device), libc::minor(device));
        let named = path.file_name().is_none_or(|name| Path::new(&self.root).ends_with(name));
        self.device == device && named
    }
}

fn mounted(line: &str) -> Option<Mounted> {
    let (words, behind) = line.split_once(" - ")?;
    let words: Vec<&str> = words.split(' ').collect();
    let word = |index: usize| Some((*words.get(index)?).to_owned());
    Some(Mounted {
        id: word(0)?,
        device: word(2)?,
        root: word(3)?,
        at: word(4)?,
        read_only: words.get(5)?.split(',').any(|option| option == "ro"),
        kind: behind.split(' ').next()?.to_owned(),
    })
}

fn number(meta: &Metadata) -> (u64, u64) {
    (meta.dev(), meta.ino())
}

fn device(meta: &Metadata) -> Option<(u32, u32)> {
    let kind = meta.file_type();
    let number = meta.rdev();
    (kind.is_block_device() || kind.is_char_device())
        .then(|| (libc::major(number), libc::minor(number)))
}

fn without_end(path: &str) -> &str {
    path.strip_suffix(" (deleted)").unwrap_or(path)
}

fn files(proc: &Path) -> Option<Vec<Opened>> {
    let mut all = vec![];
    for entry in fs::read_dir(proc.join("fd")).ok()?.flatten() {
        // What is closed meanwhile is left out: other tests of this process open and close all the time.
        let Ok(link) = fs::read_link(entry.path()) else { continue };
        let Ok(meta) = fs::metadata(entry.path()) else { continue };
        let info = proc.join("fdinfo").join(entry.file_name());
        let Ok(info) = fs::read_to_string(info) else { continue };
        let field = |name: &str| info.lines().find_map(|line| line.strip_prefix(name));
        let link = link.to_str().unwrap_or_default().to_owned();
        let in_memory = link.starts_with("/memfd:") || !link.starts_with('/');
        let flags = u32::from_str_radix(field("flags:\t")?, 8).unwrap();
        all.push(Opened {
            file: number(&meta),
            device: device(&meta),
            mount: (!in_memory).then(|| field("mnt_id:\t").unwrap().to_owned()),
            writes: flags & libc::O_ACCMODE.cast_unsigned() != 0,
            link,
        });
    }
    Some(all)
}

/// The paths of files that are mapped.
fn mapped(maps: &str) -> BTreeSet<String> {
    let paths = maps.lines().filter_map(|line| Some(&line[line.find(" /")? + 1..]));
    // Shared memory without a file has such names.
    let named = paths.filter(|path| !path.starts_with("/SYSV") && *path != "/dev/zero (deleted)");
    named.map(|path| without_end(path).to_owned()).collect()
}

fn limits(text: &str) -> BTreeMap<String, Option<u64>> {
    let line = |line: &str| {
        // The name takes 26 columns, each limit 21.
        let (name, rest) = line.split_at_checked(26)?;
        let hard = rest.split_whitespace().nth(1)?;
        Some((name.trim().to_owned(), hard.parse().ok()))
    };
    text.lines().skip(1).filter_map(line).collect()
}

/// The name of the hierarchy that a line of /proc/PID/cgroup is of.
fn hierarchy(line: &str) -> &str {
    line.split(':').nth(1).unwrap_or_default()
}

fn devices(groups: &str) -> BTreeSet<String> {
    let own = groups.lines().find_map(|line| line.split_once(":devices:").map(|(_, path)| path));
    let list = own.map(|path| format!("/sys/fs/cgroup/devices{path}/devices.list"));
    let text = list.and_then(|list| fs::read_to_string(list).ok()).unwrap_or_default();
    text.lines().map(ToOwned::to_owned).collect()
}

/// Devices and set-id files in each file system in memory.
fn nodes(proc: &Path, mounts: &[Mounted]) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for mount in mounts.iter().filter(|mount| mount.kind == "tmpfs") {
        let top = proc.join("root").join(mount.at.trim_start_matches('/'));
        let Ok(meta) = fs::metadata(&top) else { continue };
        let mut waiting = vec![top];
        while let Some(dir) = waiting.pop() {
            for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
                let Ok(found) = entry.metadata() else { continue };
                if found.is_dir() && found.dev() == meta.dev() {
                    waiting.push(entry.path());
                }
                let set_id = found.is_file() && found.mode() & 0o6000 != 0;
                let device = device(&found);
                if set_id || device.is_some() {
                    let mode = found.mode();
                    all.insert(format!("{:?} {mode:o} {device:?}", entry.file_name()));
                }
            }
        }
    }
    all
}

/// Devices, rules, routes and settings of the network of a process, each a line as plans begin with; `None` if it
/// is gone.
pub(crate) fn network(pid: &str) -> Option<BTreeSet<String>> {
    const SCRIPT: &str = r#"ip -o link show | sed 's/^[0-9]*: \([^:@]*\).*/network device "\1"/'
        ip route show table all | sed 's/^/route: /'
        nft list ruleset | sed 's/^/firewall rules: /'
        sysctl -a -r '^net[.]ipv[46][.]conf[.]' 2>/dev/null | sed 's/^/sysctl /'"#;
    let space = format!("--net=/proc/{pid}/ns/net");
    let end = command("nsenter", &[&space, "sh", "-c", SCRIPT]).finish();
    let is_there = Path::new(&format!("/proc/{pid}/ns/net")).exists();
    assert!(end.status.success() || !is_there, "{end:?}");
    end.status.success().then(|| end.stdout.lines().map(ToOwned::to_owned).collect())
}

/// What of a network nobody gave.
pub(crate) fn more_network(
    now: &BTreeSet<String>,
    given: &BTreeSet<String>,
    plan: &Plan,
) -> Option<String> {
    let mut host = None;
    let listed = |line: &str| {
        let start = match line.split_once(' ') {
            Some(("sysctl", rest)) => &line[.."sysctl ".len() + rest.find(' ').unwrap()],
            Some(("network", _)) => line,
            Some((first, _)) => first,
            None => line,
        };
        plan.0.iter().any(|item| item.starts_with(start))
    };
    let news = now.difference(given).filter(|line| !listed(line));
    // What is as on this host is no change that a plan would list.
    let mut news =
        news.filter(|line| !host.get_or_insert_with(|| network("self").unwrap()).contains(*line));
    news.next().map(|line| format!("of the network: {line}"))
}
