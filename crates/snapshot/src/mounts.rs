//! Files and directories of the host that one container has, where others of its bundle have
//! none, or have others.

use std::fmt;
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use torpor_images::proto::{Fstype, MntEntry};
use torpor_images::{ImageDir, kind};
use torpor_sys::number::word;

use crate::error::{Context, Error, Result};

/// What options of a mount are called, the flags of mount(2) that they are about, and whether
/// these are set.
const OPTIONS: [(&str, u32, bool); 8] = [
    ("ro", READ_ONLY, true),
    ("rw", READ_ONLY, false),
    ("nosuid", NO_SET_ID, true),
    ("suid", NO_SET_ID, false),
    ("nodev", NO_DEVICES, true),
    ("dev", NO_DEVICES, false),
    ("noexec", NO_PROGRAMS, true),
    ("exec", NO_PROGRAMS, false),
];
/// All flags that options are about.
const NARROW: u32 = READ_ONLY | NO_SET_ID | NO_DEVICES | NO_PROGRAMS;
const READ_ONLY: u32 = word(libc::MS_RDONLY);
const NO_SET_ID: u32 = word(libc::MS_NOSUID);
const NO_DEVICES: u32 = word(libc::MS_NODEV);
const NO_PROGRAMS: u32 = word(libc::MS_NOEXEC);
const PRIVATE: u32 = word(libc::MS_PRIVATE);

/// A file or directory of the host that is mounted in a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bind {
    /// Where it is on the host.
    source: PathBuf,
    /// Where it is in the container.
    destination: PathBuf,
    /// How it is mounted, see [`OPTIONS`].
    options: Vec<String>,
}

impl FromStr for Bind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (mut source, mut destination, mut options) = (None, None, Vec::new());
        for part in text.split(',') {
            match part.split_once('=') {
                Some(("type", "bind")) => {}
                Some(("type", other)) => {
                    return Err(format!("{other:?} cannot be mounted, only type=bind"));
                }
                Some(("source" | "src", path)) => source = Some(path),
                Some(("destination" | "dst" | "target", path)) => destination = Some(path),
                Some(("options", words)) => options.extend(words.split(':').map(str::to_owned)),
                _ => {
                    return Err(format!(
                        "{part:?} is not type=, source=, destination= or options="
                    ));
                }
            }
        }
        let (Some(source), Some(destination)) = (source, destination) else {
            return Err("expected type=bind,source=PATH,destination=PATH".to_owned());
        };
        for option in &options {
            if !OPTIONS.iter().any(|(name, ..)| name == option) {
                let known = OPTIONS.map(|(name, ..)| name).join(", ");
                return Err(format!("there is no option {option:?}, only {known}"));
            }
        }
        Ok(Self { source: source.into(), destination: place(destination)?, options })
    }
}

/// A place in a container that is not its root.
fn place(path: &str) -> Result<PathBuf, String> {
    let parts: PathBuf = Path::new(path).components().collect();
    let mut names = parts.components();
    let plain = names.next() == Some(Component::RootDir)
        && names.clone().count() > 0
        && names.all(|name| matches!(name, Component::Normal(_)));
    if plain { Ok(parts) } else { Err(format!("{path:?} is no absolute path without ..")) }
}

impl fmt::Display for Bind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} at {:?}", self.source, self.destination)
    }
}

impl Bind {
    /// The same with the source as it is found from everywhere.
    ///
    /// # Errors
    /// If the source is not there, or not to be reached.
    pub fn found(&self) -> Result<Self> {
        let source = fs::canonicalize(&self.source)
            .context(|| format!("the source {} of --mount", self.source.display()))?;
        Ok(Self { source, ..self.clone() })
    }

    /// What stands for it in the configuration of a container.
    #[must_use]
    pub fn config(&self) -> Value {
        let fixed = ["bind", "rprivate"].into_iter();
        let options: Vec<&str> = fixed.chain(self.options.iter().map(String::as_str)).collect();
        json!({
            "type": "bind",
            "source": self.source,
            "destination": self.destination,
            "options": options,
        })
    }

    /// It as Podman's `--volume` has it.
    ///
    /// # Errors
    /// If a path has a colon, which parts them there.
    pub fn volume(&self) -> Result<String> {
        let (source, destination) = (self.source.display(), self.destination.display());
        let text = format!("{source}:{destination}");
        if text.matches(':').count() != 1 {
            return Err(Error::new(format!("Podman mounts no path with a colon: {text}")));
        }
        match self.options.is_empty() {
            true => Ok(text),
            false => Ok(format!("{text}:{}", self.options.join(","))),
        }
    }

    /// Whether a mount of a configuration is at the same place.
    #[must_use]
    pub fn replaces(&self, mount: &Value) -> bool {
        let there = mount["destination"].as_str().and_then(|path| place(path).ok());
        there.is_some_and(|there| there == self.destination)
    }

    /// Whether another one is at the same place.
    #[must_use]
    pub fn is_at(&self, other: &Self) -> bool {
        self.destination == other.destination
    }

    /// What `--mount` takes for it.
    #[must_use]
    pub fn option(&self) -> String {
        let (source, destination) = (self.source.display(), self.destination.display());
        let options = match self.options.is_empty() {
            true => String::new(),
            false => format!(",options={}", self.options.join(":")),
        };
        format!("type=bind,source={source},destination={destination}{options}")
    }

    fn flags(&self) -> u32 {
        flags_of(self.options.iter().map(String::as_str))
    }

    fn at(&self) -> std::path::Display<'_> {
        self.destination.display()
    }
}

/// The flags that options say, among those that they are about.
fn flags_of<'o>(options: impl Iterator<Item = &'o str>) -> u32 {
    let known = options.filter_map(|option| OPTIONS.iter().find(|(name, ..)| *name == option));
    known.fold(0, |all, (_, flag, set)| if *set { all | flag } else { all & !flag })
}

/// Has a restored container have these mounts: where its images have one of the host there they
/// are given another source, and its flags; elsewhere it is added to them.
///
/// # Errors
/// If there is a place where the images can have none; images that cannot be read or written.
pub fn set(images: &Path, binds: &[Bind]) -> Result<()> {
    if binds.is_empty() {
        return Ok(());
    }
    let dir = ImageDir::open(images)?;
    let mut spaces: Vec<(u64, Vec<MntEntry>)> = Vec::new();
    for id in dir.ids(kind::MNTS)? {
        spaces.push((id, dir.read_all(kind::MNTS, id)?));
    }
    for bind in binds {
        let key = bind.destination.to_str();
        let all = spaces.iter_mut().flat_map(|(_, mounts)| mounts);
        let mut there: Vec<_> = all.filter(|mount| is_at(mount, key)).collect();
        for mount in &mut there {
            mount.flags = mount.flags & !NARROW | bind.flags();
        }
        if there.is_empty() {
            match &mut spaces[..] {
                [(_, mounts)] => add(mounts, bind)?,
                _ => {
                    return Err(new_place(bind, "its processes have several mount namespaces"));
                }
            }
        }
    }
    for (id, mounts) in &spaces {
        dir.write_all(kind::MNTS, *id, mounts)?;
    }
    Ok(())
}

/// File systems that the kernel makes anew for each container, or that show its own state.
const OWN: [&str; 7] = ["proc", "sysfs", "tmpfs", "devpts", "mqueue", "cgroup", "cgroup2"];

/// The words of a mount's options.
fn words(mount: &Value) -> impl Iterator<Item = &str> {
    mount["options"].as_array().into_iter().flatten().filter_map(Value::as_str)
}

/// Whether a mount of a configuration shows a file or directory of the host.
pub(crate) fn is_bind(mount: &Value) -> bool {
    mount["type"] == "bind" || words(mount).any(|word| word == "bind" || word == "rbind")
}

/// Where a container of this configuration can write to what is not its own: mounts of the host that are not
/// read-only.
#[must_use]
pub fn writable(config: &Value) -> Vec<&str> {
    let all = config["mounts"].as_array().into_iter().flatten();
    let found = all.filter(|mount| {
        let is_own = mount["type"].as_str().is_some_and(|kind| OWN.contains(&kind));
        let is_fixed =
            flags_of(words(mount)) & READ_ONLY != 0 || words(mount).any(|word| word == "rro");
        (is_bind(mount) || !is_own) && !is_fixed
    });
    found.filter_map(|mount| mount["destination"].as_str()).collect()
}

/// What a container of this configuration has of the host: where it is in the container, and where on the host.
#[must_use]
pub fn of_host(config: &Value) -> Vec<(&str, &str)> {
    let all = config["mounts"].as_array().into_iter().flatten();
    let binds = all.filter(|mount| is_bind(mount));
    binds
        .filter_map(|mount| Some((mount["destination"].as_str()?, mount["source"].as_str()?)))
        .collect()
}

/// The mount of the host that a path in a container of this configuration is in, if it is in one: where that is in the
/// container, and where on the host.
#[must_use]
pub(crate) fn of_host_at<'c>(config: &'c Value, path: &Path) -> Option<(&'c str, &'c str)> {
    let all = config["mounts"].as_array().into_iter().flatten();
    let known = all.filter_map(|mount| Some((mount, mount["destination"].as_str()?)));
    let around = known.filter(|(_, at)| path.starts_with(at));
    let nearest = around.max_by_key(|(_, at)| Path::new(at).components().count());
    let (mount, at) = nearest.filter(|(mount, _)| is_bind(mount))?;
    Some((at, mount["source"].as_str()?))
}

/// Whether a mount of the images is given by the runtime under this name.
fn is_at(mount: &MntEntry, key: Option<&str>) -> bool {
    let known = mount.ext_key.as_deref().map(|key| key.trim_end_matches('/'));
    known.is_some() && known == key
}

/// A mount at a place where the container had none.
fn add(mounts: &mut Vec<MntEntry>, bind: &Bind) -> Result<()> {
    let at = |mount: &MntEntry| PathBuf::from(String::from_utf8_lossy(&mount.mountpoint).as_ref());
    if let Some(below) = mounts.iter().find(|mount| at(mount).starts_with(&bind.destination)) {
        let why = format!("the snapshot has a mount at {}", at(below).display());
        return Err(new_place(bind, &why));
    }
    let on = mounts.iter().filter(|mount| bind.destination.starts_with(at(mount)));
    let on = on.max_by_key(|mount| at(mount).components().count());
    let on = on.ok_or_else(|| Error::new("the snapshot has no root"))?;
    // What is of the host gets its mount points from the runtime; the rest is as it was.
    if on.ext_key.is_none() && at(on) != Path::new("/") {
        let why = format!("the file system at {} comes from the snapshot", at(on).display());
        return Err(new_place(bind, &why));
    }
    let unused = |taken: &dyn Fn(&MntEntry) -> u32| {
        mounts.iter().map(taken).max().unwrap_or(0).wrapping_add(1)
    };
    let key = bind.destination.to_string_lossy().into_owned();
    let entry = MntEntry {
        fstype: i32::from(Fstype::Auto).cast_unsigned(),
        fsname: Some("none".to_owned()),
        mnt_id: unused(&|mount| mount.mnt_id),
        root_dev: unused(&|mount| mount.root_dev),
        parent_mnt_id: on.mnt_id,
        flags: bind.flags() | PRIVATE,
        sb_flags: Some(0),
        root: b"/".to_vec(),
        mountpoint: key.clone().into_bytes(),
        shared_id: Some(0),
        master_id: Some(0),
        ext_key: Some(key),
        ..MntEntry::default()
    };
    mounts.push(entry);
    Ok(())
}

/// Fails unless a container of images that are sealed can have these mounts: one of the host has
/// to be there in `config`, mounted the same way.
///
/// # Errors
/// If `config` has no such mount there, or with other flags.
pub(crate) fn check_sealed(config: &Value, binds: &[Bind]) -> Result<()> {
    for bind in binds {
        let all = config["mounts"].as_array().into_iter().flatten();
        let mut there = all.filter(|mount| bind.replaces(mount));
        let there = there.any(|mount| is_bind(mount) && flags_of(words(mount)) == bind.flags());
        if !there {
            return Err(new_place(bind, "it is sealed, and has none there that is mounted so"));
        }
    }
    Ok(())
}

fn new_place(bind: &Bind, why: &str) -> Error {
    Error::new(format!("the snapshot cannot have a mount at {}: {why}", bind.at())).hint(format!(
        "create it from a bundle that has a mount there; --mount then gives {} another source",
        bind.at()
    ))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn what_is_not_the_containers_own_is_written_to() {
        let mount = |at: &str, kind: &str, options: &[&str]| json!({"destination": at, "type": kind, "options": options});
        let mounts = [
            mount("/proc", "proc", &[]),
            mount("/tmp", "tmpfs", &["nosuid"]),
            mount("/data", "bind", &["rbind"]),
            mount("/usr", "bind", &["rbind", "ro"]),
            mount("/etc", "none", &["bind", "rro"]),
            mount("/srv", "none", &["bind", "ro", "rw"]),
            mount("/share", "nfs", &[]),
        ];
        assert_eq!(writable(&json!({"mounts": mounts})), ["/data", "/srv", "/share"]);
        assert!(writable(&json!({})).is_empty());
    }

    #[test]
    fn paths_are_in_the_nearest_mount() {
        let mount = |at: &str, kind: &str, from: &str| json!({"destination": at, "type": kind, "source": from});
        let config = json!({"mounts": [
            mount("/data", "bind", "/srv/data"),
            mount("/data/tmp", "tmpfs", "tmpfs"),
            mount("/etc/shop.conf", "bind", "/srv/shop.conf"),
        ]});
        let of_host = [("/data", "/srv/data"), ("/etc/shop.conf", "/srv/shop.conf")];
        assert_eq!(self::of_host(&config), of_host);
        let found = |path: &str| of_host_at(&config, Path::new(path));
        assert_eq!([found("/data/a/b"), found("/etc/shop.conf")], of_host.map(Some));
        for path in ["/data/tmp/a", "/database", "/etc/other", "/"] {
            assert_eq!(found(path), None, "{path}");
        }
    }

    #[test]
    fn mounts_are_read() {
        let bind: Bind = "type=bind,source=a,destination=/b/,options=ro:noexec".parse().unwrap();
        assert_eq!(bind.destination, Path::new("/b"));
        assert_eq!(bind.flags(), 9);
        assert_eq!("src=a,dst=/b,options=ro:rw".parse::<Bind>().unwrap().flags(), 0);
        for (text, says) in [
            ("type=tmpfs,source=a,destination=/b", "only type=bind"),
            ("source=a", "expected"),
            ("source=a,destination=b", "no absolute path"),
            ("source=a,destination=/", "no absolute path"),
            ("source=a,destination=/b/../c", "no absolute path"),
            ("source=a,destination=/b,options=rbind", "no option \"rbind\""),
            ("source=a,destination=/b,readonly", "\"readonly\" is not"),
        ] {
            let error = text.parse::<Bind>().unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
    }

    #[test]
    fn a_configuration_may_write_a_place_in_other_ways() {
        let bind: Bind = "source=/a,destination=/b/c".parse().unwrap();
        assert!(bind.replaces(&json!({ "destination": "/b//c/" })));
        assert!(!bind.replaces(&json!({ "destination": "/b" })));
    }
}
