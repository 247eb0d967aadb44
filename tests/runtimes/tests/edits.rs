//! Images that were edited at random, and what a restore makes of them: either it refuses and leaves
//! nothing, or the kernel shows nothing that `torpor image plan` does not list and nobody gave.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use torpor_runtimes_tests::command::{Run, command};
use torpor_runtimes_tests::process;
use torpor_runtimes_tests::runc::{Container, cgroup_left};
use torpor_runtimes_tests::scratch::Scratch;

use crate::counting::goes_on;
use crate::images::{FOREIGN, PROGRAM, bundle_of, content};
use crate::shown::{Plan, Shown, more_network, network};

/// Images that hold what tasks have written, and statistics: they decide nothing.
const LEFT_ALONE: [&str; 5] = ["pagemap", "pages", "sk-queues", "stats", "tmpfs-dev"];
/// How many edits one round makes at most.
const AT_ONCE: usize = 3;

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

/// All values below, by their places.
fn values<'v>(value: &'v Value, at: &str, all: &mut Vec<(String, &'v Value)>) {
    match value {
        Value::Array(list) => {
            list.iter().enumerate().for_each(|(i, v)| values(v, &format!("{at}/{i}"), all));
        }
        Value::Object(map) => map.iter().for_each(|(k, v)| values(v, &format!("{at}/{k}"), all)),
        Value::Null => {}
        value => all.push((at.to_owned(), value)),
    }
}

/// Images as entries, which can be edited, and what may be put into them.
struct Edits<'a> {
    torpor: &'a str,
    /// File names and entries, by kind.
    images: Vec<Vec<(String, Value)>>,
    /// Values of all entries, and some that mean something to the kernel.
    numbers: Vec<u64>,
    texts: Vec<String>,
}

impl<'a> Edits<'a> {
    fn of(torpor: &'a str, images: &Path, secret: &Path) -> Self {
        let names = fs::read_dir(images).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<String> = names.map(|name| name.into_string().unwrap()).collect();
        names.sort();
        let kind = |name: &str| {
            let stem = name.split('.').next().unwrap_or_default();
            stem.trim_end_matches(|c: char| c == '-' || c.is_ascii_digit()).to_owned()
        };
        names.retain(|name| name.ends_with(".img") && !LEFT_ALONE.contains(&&*kind(name)));
        let mut all = vec![];
        for name in names {
            let text =
                command(torpor, &["image", "decode", "-i"]).arg(images.join(&name)).succeed();
            all.push((name, serde_json::from_str::<Value>(&text).unwrap()));
        }
        let mut found = vec![];
        all.iter().for_each(|(_, image)| values(&image["entries"], "", &mut found));
        let mut numbers: Vec<u64> = found.iter().filter_map(|(_, value)| value.as_u64()).collect();
        numbers.extend([0, 1, 2, 1 << 17, 1 << 28, 1 << 30, u32::MAX.into(), u64::MAX]);
        let mut texts: Vec<String> =
            found.iter().filter_map(|(_, value)| Some(value.as_str()?.to_owned())).collect();
        texts.extend(
            ["/", "../..", "/ro/kept", "/vol/link", "/tun", "tmpfs", "proc"].map(Into::into),
        );
        texts.push(secret.to_str().unwrap().to_owned());
        numbers.sort_unstable();
        numbers.dedup();
        texts.sort_unstable();
        texts.dedup();
        all.sort_by_key(|(name, _)| kind(name));
        let images = all.chunk_by(|(a, _), (b, _)| kind(a) == kind(b)).map(<[_]>::to_vec).collect();
        Edits { torpor, images, numbers, texts }
    }

    /// Puts something else in the place of one value. Some entries are doubled or left out.
    fn edit(&self, image: &mut Value, chance: &mut Chance) -> String {
        let entries = image["entries"].as_array_mut().unwrap();
        if !entries.is_empty() && chance.below(8) == 0 {
            let at = chance.below(entries.len());
            let entry = entries.remove(at);
            if chance.below(2) == 0 {
                entries.extend([entry.clone(), entry]);
                return format!("entry {at} twice");
            }
            return format!("no entry {at}");
        }
        let mut all = vec![];
        values(&image["entries"], "/entries", &mut all);
        if all.is_empty() {
            return "nothing".to_owned();
        }
        let (at, value) = chance.one(&all).clone();
        let new = match value {
            Value::Number(number) => {
                let number = number.as_u64().unwrap_or(0);
                match chance.below(4) {
                    0 => json!(number ^ 1 << chance.below(31)),
                    1 => json!(number.wrapping_add(1)),
                    _ => json!(chance.one(&self.numbers)),
                }
            }
            Value::Bool(was) => json!(!was),
            _ => json!(chance.one(&self.texts)),
        };
        let said = format!("{at}: {value} is {new}");
        *image.pointer_mut(&at).unwrap() = new;
        said
    }

    /// Edits images in a directory; says what. What cannot be written is no image, and is left out.
    fn make(&self, images: &Path, chance: &mut Chance) -> String {
        let mut said = vec![];
        let mut edited: BTreeMap<&str, Value> = BTreeMap::new();
        for _ in 0..=chance.below(AT_ONCE) {
            let kind = chance.one(&self.images);
            let (name, image) = chance.one(kind);
            let mut image = edited.get(&**name).unwrap_or(image).clone();
            let what = self.edit(&mut image, chance);
            let text = images.with_extension("json");
            fs::write(&text, image.to_string()).unwrap();
            let made = images.with_extension("made");
            let mut encode = command(self.torpor, &["image", "encode", "-i"]);
            if encode.arg(&text).arg("-o").arg(&made).finish().status.success() {
                fs::rename(&made, images.join(name)).unwrap();
                edited.insert(name, image);
                said.push(format!("{name}: {what}"));
            }
        }
        said.join("; ")
    }
}

/// The plan of the images in a directory.
fn plan(scratch: &Scratch, torpor: &str) -> Plan {
    let mut call = scratch.command(torpor);
    call.args(["image", "plan"]).arg(scratch.join("images"));
    let text = call.args(["--json", "--bundle"]).arg(scratch.join("bundle")).succeed();
    let plan: Value = serde_json::from_str(&text).unwrap();
    let items = plan["items"].as_array().unwrap();
    Plan(items.iter().map(|item| item["text"].as_str().unwrap().to_owned()).collect())
}

/// How many processes of a container show themselves (none, if its edited images have it end at once), and what they and its
/// network show that the plan does not.
fn more(root: i32, given: &(Shown, BTreeSet<String>), plan: &Plan) -> (usize, Vec<String>) {
    let tree = process::tree(root);
    let shown: Vec<Shown> = tree.keys().filter_map(|pid| Shown::of(&pid.to_string())).collect();
    let more = shown.iter().filter_map(|shown| shown.more_than(&given.0, plan));
    let network = network(&root.to_string());
    let network = network.and_then(|now| more_network(&now, &given.1, plan));
    (shown.len(), more.chain(network).collect())
}

/// Edits of the images of a container without privileges, each restored by runc. `EDIT_SEED` is the
/// number of the first.
#[test]
fn what_is_made_is_what_the_plan_lists() {
    let rounds = if std::env::var_os("TORPOR_LONG").is_some() { 1000 } else { 10 };
    let scratch = Scratch::new("edits");
    scratch.configure(FOREIGN);
    let torpor = fs::read_link(scratch.criu()).unwrap();
    let torpor = torpor.to_str().unwrap();
    let bundle = bundle_of(&scratch, &format!("nc -l -p 8080 & {PROGRAM}"));
    let secret = scratch.dir("secret").join("file");
    fs::write(&secret, "secret").unwrap();
    let mut container = Container::start(&scratch, &bundle);
    goes_on(&bundle.file("count"));
    let root = container.pid().to_string();
    let given = (Shown::of(&root).unwrap(), network(&root).unwrap());
    container.checkpoint(&[]);
    let counted = fs::read(bundle.file("count")).unwrap();
    let (images, whole) = (scratch.join("images"), scratch.join("whole"));
    let edits = Edits::of(torpor, &images, &secret);
    fs::rename(&images, &whole).unwrap();
    let kept = || ["ro", "secret"].map(|dir| content(&scratch.join(dir)));
    let was = kept();
    let first = std::env::var("EDIT_SEED").map_or(0, |seed| seed.parse().unwrap());
    let (mut restored, mut compared) = (0, 0);
    for seed in first..first + rounds {
        command("cp", &["-a"]).arg(&whole).arg(&images).succeed();
        let edited = edits.make(&images, &mut Chance::of(seed));
        let end = container.restore_call(&[]).args(["--detach", container.id()]).finish();
        if end.status.success() {
            restored += 1;
            let root = container.pid();
            let (seen, more) = more(root, &given, &plan(&scratch, torpor));
            compared += usize::from(seen > 0);
            assert!(more.is_empty(), "EDIT_SEED={seed}, {edited}: {more:#?}");
            let pids = process::tree(root);
            container.runc("delete").args(["--force", container.id()]).succeed();
            process::wait_gone(pids.keys());
        }
        assert!(!cgroup_left(container.id()), "EDIT_SEED={seed}, {edited}: a cgroup is left");
        assert_eq!(kept(), was, "EDIT_SEED={seed}, {edited}");
        fs::remove_dir_all(&images).unwrap();
    }
    eprintln!("{restored} of {rounds} were restored, {compared} of them compared");
    assert!(compared > 0, "nothing was compared");
    fs::rename(&whole, &images).unwrap();
    fs::write(bundle.file("count"), &counted).unwrap();
    container.restore(&[]);
    let (root, whole) = (container.pid(), plan(&scratch, torpor));
    let (seen, found) = more(root, &given, &whole);
    assert!(seen > 1 && found.is_empty(), "the images as they were, {seen} processes: {found:#?}");
    // What is shown and not listed is found.
    for kind in ["mount at", "opens", "user id", "group id"] {
        let less = whole.0.iter().filter(|item| !item.starts_with(kind)).cloned().collect();
        assert!(!more(root, &given, &Plan(less)).1.is_empty(), "a plan without {kind:?}");
    }
    goes_on(&bundle.file("count"));
}
