//! Images that were edited at random, and what a restore makes of them: either it refuses and leaves
//! nothing, or the kernel shows nothing that `torpor image plan` does not list and nobody gave.

use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};
use torpor_runtimes_tests::command::{Run, command};
use torpor_runtimes_tests::process;
use torpor_runtimes_tests::runc::{Bundle, Container, cgroup_left};
use torpor_runtimes_tests::scratch::Scratch;

use crate::counting::{COUNT, goes_on};
use crate::images::{FOREIGN, bundle};

/// Images whose entries decide what is made.
const EDITED: [&str; 12] = [
    "cgroup",
    "core",
    "fdinfo",
    "files",
    "fs",
    "ghost-file",
    "inventory",
    "mountpoints",
    "netdev",
    "netns",
    "pstree",
    "remap-fpath",
];

/// Numbers that come out the same for a seed (xorshift).
struct Chance(u64);

impl Chance {
    fn of(seed: u64) -> Self {
        Chance(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % end as u64).unwrap()
    }

    fn one<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len())]
    }
}

/// All places below which there is a number or a text.
fn places(value: &Value, at: &str, all: &mut Vec<String>) {
    match value {
        Value::Array(list) => {
            list.iter().enumerate().for_each(|(i, v)| places(v, &format!("{at}/{i}"), all));
        }
        Value::Object(map) => map.iter().for_each(|(k, v)| places(v, &format!("{at}/{k}"), all)),
        Value::Number(_) | Value::String(_) | Value::Bool(_) => all.push(at.to_owned()),
        Value::Null => {}
    }
}

/// Puts something else in the place of one value: a value of the same image, a number near it, or one
/// that means something to the kernel. Some entries are doubled or left out.
fn edit(image: &mut Value, chance: &mut Chance) {
    let entries = image["entries"].as_array_mut().unwrap();
    if !entries.is_empty() && chance.below(6) == 0 {
        let entry = chance.below(entries.len());
        let entry = entries.remove(entry);
        if chance.below(2) == 0 {
            entries.extend([entry.clone(), entry]);
        }
        return;
    }
    let mut all = vec![];
    places(&image["entries"], "/entries", &mut all);
    let (Some(at), Some(other)) = (
        (!all.is_empty()).then(|| chance.one(&all).clone()),
        (!all.is_empty()).then(|| chance.one(&all).clone()),
    ) else {
        return;
    };
    let other = image.pointer(&other).cloned().unwrap();
    let place = image.pointer_mut(&at).unwrap();
    let new = match &*place {
        Value::Number(number) => match chance.below(4) {
            0 => json!(0),
            1 => json!(number.as_u64().unwrap_or(0) ^ 1 << chance.below(31)),
            2 => json!(number.as_u64().unwrap_or(0) + 1),
            _ if other.is_number() => other,
            _ => json!(1),
        },
        Value::String(_) if other.is_string() && chance.below(2) == 0 => other,
        Value::String(_) => json!(*chance.one(&["/", "/ro/kept", "../..", "tmpfs", "/vol/link"])),
        Value::Bool(was) => json!(!was),
        other => other.clone(),
    };
    *place = new;
}

/// Edits one image of a directory, if it can be written that way.
fn edit_one(torpor: &Path, images: &Path, chance: &mut Chance) -> String {
    let kind = *chance.one(&EDITED);
    let mut names: Vec<PathBuf> =
        fs::read_dir(images).unwrap().map(|entry| entry.unwrap().path()).collect();
    names.retain(|path| path.file_name().unwrap().to_str().unwrap().starts_with(kind));
    names.sort();
    if names.is_empty() {
        return String::new();
    }
    let path = chance.one(&names);
    let torpor = torpor.to_str().unwrap();
    let text = command(torpor, &["image", "decode", "-i"]).arg(path).succeed();
    let Ok(mut image) = serde_json::from_str(&text) else { return String::new() };
    edit(&mut image, chance);
    let file = images.with_extension("json");
    fs::write(&file, image.to_string()).unwrap();
    // What cannot be written is no image.
    command(torpor, &["image", "encode", "-i"]).arg(&file).arg("-o").arg(path).finish();
    path.display().to_string()
}

/// What the kernel shows of one process of a container.
#[derive(Debug)]
struct Shown {
    namespaces: Vec<(&'static str, PathBuf)>,
    rights: u64,
    groups: String,
    mounts: String,
}

impl Shown {
    /// `None` if it is gone.
    fn of(pid: &str) -> Option<Self> {
        const KINDS: [&str; 7] = ["cgroup", "ipc", "mnt", "net", "pid", "user", "uts"];
        let read = |name: &str| fs::read_to_string(format!("/proc/{pid}/{name}")).ok();
        let space = |kind| Some((kind, fs::read_link(format!("/proc/{pid}/ns/{kind}")).ok()?));
        let status = read("status")?;
        let sets = status.lines().filter(|line| line.starts_with("Cap"));
        let sets = sets.map(|line| u64::from_str_radix(line[7..].trim(), 16).unwrap());
        Some(Shown {
            namespaces: KINDS.into_iter().map(space).collect::<Option<_>>()?,
            rights: sets.fold(0, |all, set| all | set),
            groups: read("cgroup")?,
            mounts: read("mountinfo")?,
        })
    }

    /// What of it nobody gave: `given` is what the container was before.
    fn more_than(&self, given: &Shown, plan: &BTreeSet<String>) -> Option<String> {
        let host = Shown::of("self")?;
        for ((kind, space), (_, hosts)) in self.namespaces.iter().zip(&host.namespaces) {
            let was = given.namespaces.iter().any(|(k, space)| k == kind && space == hosts);
            if space == hosts && !was {
                return Some(format!("the host's {kind} namespace"));
            }
        }
        if self.rights & !given.rights != 0 {
            return Some(format!("capabilities {:x}", self.rights & !given.rights));
        }
        let lacks = |line: &&str| {
            let below = |own: &str| *line == own || line.starts_with(&format!("{own}/"));
            !given.groups.lines().any(below)
        };
        if let Some(group) = self.groups.lines().find(lacks) {
            return Some(format!("the group {group}"));
        }
        for mount in self.mounts.lines() {
            let words: Vec<&str> = mount.split_whitespace().collect();
            let (root, at, options) = (words[3], words[4], words[5]);
            let listed = format!("mount at {at:?}: ");
            if !plan.iter().any(|item| item.starts_with(&listed)) {
                return Some(format!("a mount that the plan does not list: {mount}"));
            }
            if root.ends_with("/ro") && !options.split(',').any(|option| option == "ro") {
                return Some(format!("a volume that is writable: {mount}"));
            }
        }
        None
    }
}

/// All items of the plan, as texts.
fn plan(scratch: &Scratch, torpor: &Path, bundle: &Path) -> BTreeSet<String> {
    let mut call = scratch.command(torpor.to_str().unwrap());
    call.args(["image", "plan"]).arg(scratch.join("images"));
    let text = call.args(["--json", "--bundle"]).arg(bundle).succeed();
    let plan: Value = serde_json::from_str(&text).unwrap();
    let items = plan["items"].as_array().unwrap();
    items.iter().map(|item| item["text"].as_str().unwrap().to_owned()).collect()
}

/// Edits of the images of a container without privileges, each restored by runc.
#[test]
fn what_is_made_is_what_the_plan_lists() {
    let rounds = if std::env::var_os("TORPOR_LONG").is_some() { 1000 } else { 12 };
    let scratch = Scratch::new("edits");
    scratch.configure(FOREIGN);
    let torpor = fs::read_link(scratch.criu()).unwrap();
    let bundle = bundle(&scratch);
    let mut container = Container::start(&scratch, &bundle);
    goes_on(&bundle.file("count"));
    let given = Shown::of(&container.pid().to_string()).unwrap();
    container.checkpoint(&[]);
    let counted = fs::read(bundle.file("count")).unwrap();
    let (images, whole) = (scratch.join("images"), scratch.join("whole"));
    fs::rename(&images, &whole).unwrap();
    let mut restored = 0;
    for seed in 0..rounds {
        command("cp", &["-a"]).arg(&whole).arg(&images).succeed();
        let edited = edit_one(&torpor, &images, &mut Chance::of(seed));
        let end = container.restore_call(&[]).args(["--detach", container.id()]).finish();
        if end.status.success() {
            restored += 1;
            let listed = plan(&scratch, &torpor, &scratch.join("bundle"));
            let pids = process::tree(container.pid());
            for shown in pids.keys().filter_map(|pid| Shown::of(&pid.to_string())) {
                let more = shown.more_than(&given, &listed);
                assert_eq!(more, None, "seed {seed}, {edited}: {shown:?}");
            }
            container.runc("delete").args(["--force", container.id()]).succeed();
            process::wait_gone(pids.keys());
        }
        assert!(!cgroup_left(container.id()), "seed {seed}, {edited}: a cgroup is left");
        assert_eq!(fs::read_to_string(scratch.join("ro/kept")).unwrap(), "kept", "seed {seed}");
        fs::remove_dir_all(&images).unwrap();
    }
    eprintln!("{restored} of {rounds} were restored");
    fs::rename(&whole, &images).unwrap();
    fs::write(bundle.file("count"), &counted).unwrap();
    container.restore(&[]);
    goes_on(&bundle.file("count"));
}

/// While a container is restored, somebody who may write to its volume puts links to a file of the
/// host in the place of whatever appears there.
#[test]
fn a_ghost_that_is_exchanged() {
    let scratch = Scratch::new("edits-race");
    scratch.configure(FOREIGN);
    let bundle = bundle(&scratch);
    let mut container = Container::start(&scratch, &bundle);
    goes_on(&bundle.file("count"));
    container.checkpoint(&[]);
    let counted = fs::read(bundle.file("count")).unwrap();
    let (secret, ghost) = (scratch.join("secret"), scratch.join("vol/ghost"));
    fs::write(&secret, "secret").unwrap();
    fs::set_permissions(&secret, Permissions::from_mode(0o600)).unwrap();
    let over = AtomicBool::new(false);
    let exchange = || {
        let aside = scratch.join("aside");
        while !over.load(Ordering::Relaxed) {
            if fs::rename(&ghost, &aside).is_ok() {
                // It may be gone again by then.
                let _ = symlink(&secret, &ghost);
                let _ = fs::remove_file(&aside);
            }
        }
        let _ = fs::remove_file(&ghost);
    };
    std::thread::scope(|scope| {
        scope.spawn(exchange);
        for _ in 0..5 {
            let end = container.restore_call(&[]).args(["--detach", container.id()]).finish();
            if end.status.success() {
                let pids = process::tree(container.pid());
                container.runc("delete").args(["--force", container.id()]).succeed();
                process::wait_gone(pids.keys());
            }
        }
        over.store(true, Ordering::Relaxed);
    });
    let meta = fs::metadata(&secret).unwrap();
    assert_eq!((meta.mode() & 0o7777, meta.uid()), (0o600, 0));
    assert_eq!(fs::read_to_string(&secret).unwrap(), "secret");
    assert!(!cgroup_left(container.id()), "a cgroup is left");
    let _ = fs::remove_file(&ghost);
    fs::write(bundle.file("count"), &counted).unwrap();
    container.restore(&[]);
    goes_on(&bundle.file("count"));
}

/// The images are this host's, of a container that was given more than the one that is restored.
#[test]
fn own_images_get_what_the_bundle_gives() {
    let scratch = Scratch::new("edits-own");
    scratch.configure(&format!("host-key {}\n", scratch.join("host.key").display()));
    let bundle = Bundle::new(&scratch, &[], &["sh", "-c", COUNT]).configure(|config| {
        for set in ["bounding", "permitted", "effective"] {
            let set = config["process"]["capabilities"][set].as_array_mut().unwrap();
            set.push(json!("CAP_SYS_ADMIN"));
        }
    });
    let mut container = Container::start(&scratch, &bundle);
    goes_on(&bundle.file("count"));
    container.checkpoint(&[]);
    let torpor = fs::read_link(scratch.criu()).unwrap();
    let audit = |file: &Path| {
        let mut call = command(torpor.to_str().unwrap(), &["image", "audit", "--json"]);
        let key = scratch.join("host.key");
        call.arg(file).arg("--host-key").arg(key).finish().stdout
    };
    let said: Value = serde_json::from_str(&audit(&scratch.join("images"))).unwrap();
    assert_eq!(said["made_here"], json!(true), "{said}");

    let file = scratch.join("bundle/config.json");
    let wide = fs::read_to_string(&file).unwrap();
    let mut narrow: Value = serde_json::from_str(&wide).unwrap();
    for set in ["bounding", "permitted", "effective"] {
        narrow["process"]["capabilities"][set].as_array_mut().unwrap().pop();
    }
    fs::write(&file, narrow.to_string()).unwrap();
    container.restore_call(&[]).args(["--detach", container.id()]).fail();
    let log = fs::read_to_string(scratch.join("work/restore.log")).unwrap();
    assert!(log.contains("CAP_SYS_ADMIN (own.capabilities.allow)"), "{log}");
    assert!(!cgroup_left(container.id()), "a cgroup is left");

    // A page that was changed makes them somebody's.
    let pages = scratch.join("images/pages-1.img");
    let whole = fs::read(&pages).unwrap();
    let mut changed = whole.clone();
    changed[4096 + 5] ^= 1;
    fs::write(&pages, changed).unwrap();
    let said: Value = serde_json::from_str(&audit(&scratch.join("images"))).unwrap();
    assert_eq!(said["made_here"], json!(false), "{said}");

    fs::write(&pages, whole).unwrap();
    fs::write(&file, wide).unwrap();
    container.restore(&[]);
    goes_on(&bundle.file("count"));
}
