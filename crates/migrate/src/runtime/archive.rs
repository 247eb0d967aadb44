//! What Podman exports of a container, made into what the Podman of another host imports.
//!
//! The images come in rounds, so the archive of the source has none; here it gets a link to where they are. What it says
//! about the host that it comes from becomes what is true here.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde_json::Value;
use tar::{Archive, Builder, EntryType, Header};

use super::bundle::{self, Terms, is_taken};
use super::podman::Ways;
use crate::error::{Context, Error, Result};
use crate::record::new_id;

/// The configuration of the container as Podman has it, and as its runtime has it.
const DOCUMENTS: [&str; 2] = ["config.dump", "spec.dump"];
/// What else comes along: addresses, /dev/shm, what has changed in the root file system.
const FILES: [&str; 4] =
    ["network.status", "devshm-checkpoint.tar", "rootfs-diff.tar", "deleted.files"];
/// What is looked at in the configuration that Podman has.
const LOOKED_AT: [&str; 4] = ["id", "runtime", "cgroupManager", "cgroupParent"];
/// What does not come along of it: programs and paths of the other host.
const STRANGE: [&str; 4] = ["conmonPidFile", "pid_file", "exitCommand", "rootfs"];
/// Where Podman looks for images.
const IMAGES: &str = "checkpoint";
/// Documents are no longer.
const MAX_DOCUMENT: u64 = 16 << 20;

/// What is made of an archive.
#[derive(Debug)]
pub(super) struct Adaptation<'a> {
    /// The id of the container that was announced.
    pub id: &'a str,
    /// Where its images are here.
    pub images: &'a Path,
    /// How Podman here does things.
    pub ways: &'a Ways,
    /// What the container may bring.
    pub terms: Terms,
}

impl Adaptation<'_> {
    /// Reads the archive of the source at `from`, and writes that for this host to `to`.
    ///
    /// # Errors
    /// If it is no archive of that container, or brings what it may not; the disk's.
    pub(super) fn write(&self, from: &Path, to: &Path) -> Result<()> {
        let name = || from.display().to_string();
        let mut archive = Archive::new(File::open(from).context(name)?);
        let made = File::create(to).context(|| to.display().to_string())?;
        let mut adapted = Builder::new(made);
        let mut documents = 0;
        for entry in archive.entries().context(name)? {
            let mut entry = entry.context(name)?;
            let Some(what) = entry.path().ok().and_then(|path| path.to_str().map(str::to_owned))
            else {
                continue;
            };
            if entry.header().entry_type() != EntryType::Regular {
                continue;
            }
            if DOCUMENTS.contains(&what.as_str()) {
                documents += 1;
                let text = self.document(&what, &mut entry)?;
                append(&mut adapted, &what, text.len() as u64, text.as_bytes()).context(name)?;
            } else if FILES.contains(&what.as_str()) || is_volume(&what) {
                let len = entry.size();
                append(&mut adapted, &what, len, entry).context(name)?;
            }
        }
        if documents != DOCUMENTS.len() {
            return Err(wrong(format!("it has {documents} of {DOCUMENTS:?}")));
        }
        let mut link = Header::new_gnu();
        link.set_entry_type(EntryType::Symlink);
        link.set_size(0);
        link.set_mode(0o777);
        adapted.append_link(&mut link, IMAGES, self.images).context(name)?;
        adapted.finish().context(name)
    }

    fn document(&self, what: &str, entry: &mut impl Read) -> Result<String> {
        let mut text = String::new();
        entry
            .take(MAX_DOCUMENT + 1)
            .read_to_string(&mut text)
            .map_err(|error| wrong(format!("{what}: {error}")))?;
        if text.len() as u64 > MAX_DOCUMENT {
            return Err(wrong(format!("{what} has more than {MAX_DOCUMENT} bytes")));
        }
        let mut document: Value =
            serde_json::from_str(&text).map_err(|error| wrong(format!("{what}: {error}")))?;
        if what == DOCUMENTS[0] {
            self.adapt(&mut document)?;
        } else {
            bundle::judge(&document, self.id, self.terms)?;
        }
        Ok(document.to_string())
    }

    /// Programs and paths of the other host are not those of this one.
    fn adapt(&self, config: &mut Value) -> Result<()> {
        let known = [LOOKED_AT, STRANGE].concat();
        torpor_policy::check_keys(config, &known).map_err(wrong)?;
        if config["id"] != self.id {
            return Err(wrong(format!("it is of container {}", config["id"])));
        }
        if config["runtime"].as_str().is_none_or(|runtime| !runtime.ends_with("runc")) {
            return Err(wrong(format!("its runtime is {}", config["runtime"])));
        }
        config["runtime"] = "runc".into();
        let mut strange = STRANGE.to_vec();
        if config["cgroupManager"] != self.ways.cgroups.as_str() {
            config["cgroupManager"] = self.ways.cgroups.as_str().into();
            strange.push("cgroupParent");
        }
        for name in strange {
            config.as_object_mut().and_then(|config| config.remove(name));
        }
        let parent = config["cgroupParent"].as_str().unwrap_or_default().to_owned();
        if parent.starts_with('/') && is_taken(&format!("{parent}/libpod-{}", self.id)) {
            let other = new_id()?;
            config["cgroupParent"] = format!("{parent}-{}", &other[..8]).into();
        }
        Ok(())
    }
}

/// Whether it is the content of a volume.
fn is_volume(what: &str) -> bool {
    let name = what.strip_prefix("volumes/").and_then(|name| name.strip_suffix(".tar"));
    name.is_some_and(|name| !name.is_empty() && !name.starts_with('.') && !name.contains('/'))
}

fn wrong(why: String) -> Error {
    Error::Protocol(format!("archive of a container: {why}"))
}

fn append(to: &mut Builder<File>, what: &str, len: u64, data: impl Read) -> std::io::Result<()> {
    let mut header = Header::new_gnu();
    header.set_entry_type(EntryType::Regular);
    header.set_mode(0o600);
    header.set_size(len);
    to.append_data(&mut header, what, data)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use serde_json::json;
    use std::collections::BTreeMap;

    use super::*;

    const ID: &str = "a1b2";

    /// What becomes of an archive of these files: their texts, or where they lead.
    fn adapted(files: &[(&str, String)]) -> Result<BTreeMap<String, String>> {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        let mut source = Builder::new(File::create(&from).unwrap());
        for (name, text) in files {
            append(&mut source, name, text.len() as u64, text.as_bytes()).unwrap();
        }
        source.finish().unwrap();
        let ways = Ways { conmon: "/usr/bin/conmon".into(), cgroups: "cgroupfs".to_owned() };
        let terms = Terms { hooks: false, rootfs: false };
        let images = Path::new("/work/2");
        Adaptation { id: ID, images, ways: &ways, terms }.write(&from, &to)?;
        let mut found = BTreeMap::new();
        for entry in Archive::new(File::open(&to).unwrap()).entries().unwrap() {
            let mut entry = entry.unwrap();
            let mut text = String::new();
            entry.read_to_string(&mut text).unwrap();
            if let Some(to) = entry.link_name().unwrap() {
                text = to.display().to_string();
            }
            found.insert(entry.path().unwrap().display().to_string(), text);
        }
        Ok(found)
    }

    fn config(change: impl FnOnce(&mut Value)) -> String {
        let mut config = json!({
            "id": ID, "name": "web", "runtime": "runc", "cgroupParent": "/libpod_parent",
            "cgroupManager": "cgroupfs", "exitCommand": ["/bin/evil"], "conmonPidFile": "/etc/passwd",
        });
        change(&mut config);
        config.to_string()
    }

    #[test]
    fn what_is_of_the_other_host_does_not_come() {
        let spec = r#"{"ociVersion":"1"}"#.to_owned();
        let files = [
            ("config.dump", config(|_| {})),
            ("spec.dump", spec.clone()),
            ("rootfs-diff.tar", "diff".to_owned()),
            ("checkpoint/pages-1.img", "old".to_owned()),
            ("artifacts/x", "other".to_owned()),
            ("volumes/data.tar", "volume".to_owned()),
            ("volumes/a/b.tar", "other".to_owned()),
        ];
        let found = adapted(&files).unwrap();
        let names: Vec<&str> = found.keys().map(String::as_str).collect();
        let expected =
            ["checkpoint", "config.dump", "rootfs-diff.tar", "spec.dump", "volumes/data.tar"];
        assert_eq!(names, expected);
        assert_eq!((&found["checkpoint"][..], &found["rootfs-diff.tar"][..]), ("/work/2", "diff"));
        let config: Value = serde_json::from_str(&found["config.dump"]).unwrap();
        assert!(config["exitCommand"].is_null() && config["conmonPidFile"].is_null(), "{config}");
        assert!(config["name"] == "web" && config["cgroupParent"] == "/libpod_parent", "{config}");
    }

    #[test]
    fn cgroups_are_made_as_they_are_here() {
        let by_systemd = config(|config| {
            config["cgroupManager"] = json!("systemd");
            config["cgroupParent"] = json!("machine.slice");
        });
        let spec = ("spec.dump", "{}".to_owned());
        let found = adapted(&[("config.dump", by_systemd), spec]).unwrap();
        let config: Value = serde_json::from_str(&found["config.dump"]).unwrap();
        assert!(config["cgroupManager"] == "cgroupfs" && config["cgroupParent"].is_null());
    }

    #[test]
    fn archives_of_something_else_are_refused() {
        let spec = |text: &str| ("spec.dump", text.to_owned());
        let whole = ("config.dump", config(|_| {}));
        let refused = |files: &[(&str, String)]| adapted(files).unwrap_err().to_string();
        assert!(refused(std::slice::from_ref(&whole)).contains("it has 1 of"));
        let other = ("config.dump", config(|config| config["id"] = json!("c3")));
        assert!(refused(&[other, spec("{}")]).contains("c3"));
        let crun = ("config.dump", config(|config| config["runtime"] = json!("crun")));
        assert!(refused(&[crun, spec("{}")]).contains("crun"));
        let hooks = spec(r#"{"hooks":{"prestart":[{"path":"/bin/evil"}]}}"#);
        assert!(refused(&[whole.clone(), hooks]).contains("hooks"));
        let hooks = spec(r#"{"Hooks":{"prestart":[{"path":"/bin/evil"}]}}"#);
        assert!(refused(&[whole, hooks]).contains("Hooks"));
        let program =
            ("config.dump", config(|config| config["ExitCommand"] = json!(["/bin/evil"])));
        assert!(refused(&[program, spec("{}")]).contains("ExitCommand"));
    }
}
