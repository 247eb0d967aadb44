//! What Podman exports of a container, made into what the Podman of another host imports.
//!
//! The images come in rounds, so the archive of the source has none; here it gets a link to where they are. What it says
//! about the host that it comes from becomes what is true here.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use serde_json::Value;
use tar::{Builder, EntryType, Header};
use torpor_store::each_entry;

use super::changes::{Changes, removed};
use super::dump;
use super::podman::{Description, Ways};
use crate::error::{Context, Error, Result};

/// The configuration of the container as Podman has it, and as its runtime has it.
const DOCUMENTS: [&str; 2] = ["config.dump", "spec.dump"];
/// The addresses of the container.
const ADDRESSES: &str = "network.status";
/// What has changed in the root file system, and what of the image is gone there.
const CHANGES: &str = "rootfs-diff.tar";
pub(super) const REMOVED: &str = "deleted.files";
/// The content of `/dev/shm`.
const SHARED_MEMORY: &str = "devshm-checkpoint.tar";
/// Where Podman looks for images.
const IMAGES: &str = "checkpoint";
/// Documents are no longer.
const MAX_DOCUMENT: u64 = 16 << 20;

/// What is made of an archive.
#[derive(Debug)]
pub(super) struct Adaptation<'a> {
    /// The id of the container that was announced.
    pub id: &'a str,
    /// What was said of it then, and judged.
    pub said: &'a Description,
    /// Where its images are here.
    pub images: &'a Path,
    /// How Podman here does things.
    pub ways: &'a Ways,
    /// The root file system of its image.
    pub root: &'a Path,
}

impl Adaptation<'_> {
    /// Reads the archive of the source at `from`, and writes that for this host to `to`. Podman acts on what is in it
    /// before anybody else is asked: all of it is judged here.
    ///
    /// # Errors
    /// If it is no archive of that container, or brings what was not announced or could be written outside of the
    /// container; the disk's.
    pub(super) fn write(&self, from: &Path, to: &Path) -> Result<()> {
        let name = || from.display().to_string();
        let archive = File::open(from).context(name)?;
        let made = File::create(to).context(|| to.display().to_string())?;
        let (mut adapted, spare) = (Builder::new(made), to.with_extension("part"));
        let mut root = Changes::new(CHANGES, Some(self.root));
        let (mut names, mut seen) = (Vec::new(), BTreeSet::new());
        let failed = |source| Error::Io { what: name(), source };
        each_entry(archive, failed, |entry| {
            let is_file = entry.header().entry_type() == EntryType::Regular;
            let path = entry.path().ok().and_then(|path| path.to_str().map(str::to_owned));
            let Some(what) = path.filter(|what| is_file && self.comes(what)) else {
                return Ok(());
            };
            // Podman would have the last one, and others were judged before it.
            if !seen.insert(what.clone()) {
                return Err(wrong(format!("{what} is in it twice")));
            }
            if let Some(text) = self.document(&what, entry)? {
                append(&mut adapted, &what, text.len() as u64, text.as_bytes()).context(name)?;
            } else if what == REMOVED {
                names = removed(&text_of(&what, entry)?)?;
            } else if what == CHANGES {
                repack(&mut root, entry, &spare)?;
                add(&mut adapted, &what, &spare)?;
            } else {
                repack(&mut Changes::new(&what, None), entry, &spare)?;
                add(&mut adapted, &what, &spare)?;
            }
            Ok(())
        })?;
        let documents = DOCUMENTS.iter().filter(|name| seen.contains(**name)).count();
        if documents != DOCUMENTS.len() {
            return Err(wrong(format!("it has {documents} of {DOCUMENTS:?}")));
        }
        // Podman removes files when all is unpacked.
        root.judge_removed(&names)?;
        let text = Value::from(names).to_string();
        append(&mut adapted, REMOVED, text.len() as u64, text.as_bytes()).context(name)?;
        let mut link = Header::new_gnu();
        link.set_entry_type(EntryType::Symlink);
        link.set_size(0);
        link.set_mode(0o777);
        adapted.append_link(&mut link, IMAGES, self.images).context(name)?;
        adapted.finish().context(name)
    }

    /// Whether a file of this name comes along: Podman has written others for itself.
    fn comes(&self, what: &str) -> bool {
        [ADDRESSES, REMOVED, CHANGES, SHARED_MEMORY].contains(&what)
            || DOCUMENTS.contains(&what)
            || self.is_volume(what)
    }

    /// A document of this name as it is for this host; `None` if it is none that comes along.
    fn document(&self, what: &str, entry: &mut impl Read) -> Result<Option<String>> {
        if what != ADDRESSES && !DOCUMENTS.contains(&what) {
            return Ok(None);
        }
        let text = text_of(what, entry)?;
        let mut document: Value =
            serde_json::from_str(&text).map_err(|error| wrong(format!("{what}: {error}")))?;
        match what {
            "config.dump" => dump::adapt(&mut document, self.id, self.said, self.ways)?,
            ADDRESSES => dump::addresses(&document, &self.said.networks)?,
            _ => self.said.is_spec(&mut document)?,
        }
        Ok(Some(document.to_string()))
    }

    /// Whether it is the content of a volume that was described.
    fn is_volume(&self, what: &str) -> bool {
        let name = what.strip_prefix("volumes/").and_then(|name| name.strip_suffix(".tar"));
        name.is_some_and(|name| self.said.volumes.iter().any(|known| known == name))
    }
}

/// Writes the archive that an entry is into the file `spare`.
fn repack(tree: &mut Changes<'_>, entry: impl Read, spare: &Path) -> Result<()> {
    tree.copy(entry, File::create(spare).context(|| spare.display().to_string())?)
}

/// Adds the file `spare` under another name, and removes it.
fn add(to: &mut Builder<File>, what: &str, spare: &Path) -> Result<()> {
    let shown = || spare.display().to_string();
    let file = File::open(spare).context(shown)?;
    let len = file.metadata().context(shown)?.len();
    append(to, what, len, file).context(shown)?;
    fs::remove_file(spare).context(shown)
}

fn text_of(what: &str, entry: &mut impl Read) -> Result<String> {
    let mut text = String::new();
    entry
        .take(MAX_DOCUMENT + 1)
        .read_to_string(&mut text)
        .map_err(|error| wrong(format!("{what}: {error}")))?;
    if text.len() as u64 > MAX_DOCUMENT {
        return Err(wrong(format!("{what} has more than {MAX_DOCUMENT} bytes")));
    }
    Ok(text)
}

/// What is wrong with an archive.
pub(super) fn wrong(why: String) -> Error {
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

    use ::tar::Archive;

    use super::super::changes::tests::archive as tar;
    use super::*;

    const ID: &str = "a1b2";

    fn described() -> Description {
        let description = json!({
            "name": "web", "image": "localhost/web:1", "image_id": "c3d4",
            "networks": ["shop"], "volumes": ["data"], "spec": {
                "ociVersion": "1", "root": { "path": "/there/merged" },
                "process": {
                    "user": { "uid": 7, "gid": 8, "additionalGids": [8, 9] },
                    "selinuxLabel": "container_t",
                },
                "linux": { "cgroupsPath": "/libpod_parent/libpod-a1b2" },
            },
        });
        serde_json::from_value(description).unwrap()
    }

    /// What becomes of an archive of these files: their texts, or where they lead.
    fn adapted(files: &[(&str, Vec<u8>)]) -> Result<BTreeMap<String, String>> {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        let root = dir.path().join("root");
        fs::create_dir_all(root.join("bin")).unwrap();
        std::os::unix::fs::symlink("/run", root.join("link")).unwrap();
        let mut source = Builder::new(File::create(&from).unwrap());
        for (name, text) in files {
            append(&mut source, name, text.len() as u64, text.as_slice()).unwrap();
        }
        source.finish().unwrap();
        let ways = Ways { conmon: "/usr/bin/conmon".into(), cgroups: "cgroupfs".to_owned() };
        let (images, said) = (Path::new("/work/2"), described());
        let adaptation = Adaptation { id: ID, said: &said, images, ways: &ways, root: &root };
        adaptation.write(&from, &to)?;
        let mut found = BTreeMap::new();
        for entry in Archive::new(File::open(&to).unwrap()).entries().unwrap() {
            let mut entry = entry.unwrap();
            let mut text = Vec::new();
            entry.read_to_end(&mut text).unwrap();
            let text = match entry.link_name().unwrap() {
                Some(to) => to.display().to_string(),
                None => String::from_utf8_lossy(&text).into_owned(),
            };
            found.insert(entry.path().unwrap().display().to_string(), text);
        }
        Ok(found)
    }

    fn changed(name: &'static str, change: impl FnOnce(&mut Value)) -> (&'static str, Vec<u8>) {
        let mut config = json!({
            "id": ID, "name": "web", "runtime": "runc", "cgroupParent": "/libpod_parent",
            "cgroupManager": "cgroupfs", "exitCommand": ["/bin/evil"], "conmonPidFile": "/etc/passwd",
            "rootfsImageName": "localhost/web:1", "rootfsImageID": "c3d4", "storageOpts": null,
            "mounts": ["/etc"], "spec": { "hooks": { "prestart": [{ "path": "/bin/evil" }] } },
            "isService": false, "idMappingsOptions": { "HostUIDMapping": true, "UIDMap": null,
                "AutoUserNsOpts": { "Size": 0, "PasswdFile": "" } },
            "newNetworks": { "shop": { "interface_name": "eth0" } },
            "namedVolumes": [{ "volumeName": "data", "dest": "/data",
                "options": ["rw", "rprivate", "nosuid", "nodev", "rbind"] }],
        });
        if name != "config.dump" {
            // Its Podman had another path to the same directory.
            config = described().spec;
            config["root"]["path"] = json!("/there/../there/merged");
        }
        change(&mut config);
        (name, config.to_string().into_bytes())
    }

    fn documents() -> [(&'static str, Vec<u8>); 2] {
        DOCUMENTS.map(|name| changed(name, |_| {}))
    }

    /// Why documents with this change are refused.
    fn refused(name: &'static str, change: impl FnOnce(&mut Value)) -> String {
        let change = changed(name, change);
        let others = documents().into_iter().filter(|(other, _)| *other != name);
        adapted(&others.chain([change]).collect::<Vec<_>>()).unwrap_err().to_string()
    }

    /// Why an archive with this file is refused.
    fn refused_with(name: &'static str, text: &[u8]) -> String {
        let files = [&documents()[..], &[(name, text.to_vec())]].concat();
        adapted(&files).unwrap_err().to_string()
    }

    #[test]
    fn what_is_of_the_other_host_does_not_come() {
        let status = r#"{"shop":{"interfaces":{"eth0":{"mac_address":"e6:5e:1e:1e:ac:0e"}}}}"#;
        let files = [
            &documents()[..],
            &[
                ("network.status", status.as_bytes().to_vec()),
                ("deleted.files", br#"["/bin/yes"]"#.to_vec()),
                ("rootfs-diff.tar", tar(&["bin/new"])),
                ("devshm-checkpoint.tar", tar(&["./", "./kept"])),
                ("checkpoint/pages-1.img", b"old".to_vec()),
                ("artifacts/x", b"other".to_vec()),
                ("volumes/data.tar", tar(&["./", "sub/", "sub/file"])),
                ("volumes/other.tar", tar(&["./"])),
                ("volumes/a/b.tar", tar(&["./"])),
            ],
        ];
        let found = adapted(&files.concat()).unwrap();
        let names: Vec<&str> = found.keys().map(String::as_str).collect();
        let expected = [
            "checkpoint",
            "config.dump",
            "deleted.files",
            "devshm-checkpoint.tar",
            "network.status",
            "rootfs-diff.tar",
            "spec.dump",
            "volumes/data.tar",
        ];
        assert_eq!(names, expected);
        assert_eq!(
            (&found["checkpoint"][..], &found["deleted.files"][..]),
            ("/work/2", r#"["/bin/yes"]"#)
        );
        assert!(found["rootfs-diff.tar"].starts_with("bin/new\0"));
        let config: Value = serde_json::from_str(&found["config.dump"]).unwrap();
        for strange in ["exitCommand", "conmonPidFile", "mounts", "spec"] {
            assert!(config[strange].is_null(), "{config}");
        }
        assert!(config["name"] == "web" && config["cgroupParent"] == "/libpod_parent", "{config}");
        let spec: Value = serde_json::from_str(&found["spec.dump"]).unwrap();
        assert_eq!(spec, described().spec);
    }

    #[test]
    fn cgroups_are_made_as_they_are_here() {
        let by_systemd = changed("config.dump", |config| {
            config["cgroupManager"] = json!("systemd");
            config["cgroupParent"] = json!("machine.slice");
        });
        let found = adapted(&[by_systemd, changed("spec.dump", |_| {})]).unwrap();
        let config: Value = serde_json::from_str(&found["config.dump"]).unwrap();
        assert!(config["cgroupManager"] == "cgroupfs" && config["cgroupParent"].is_null());
        for parent in ["/system.slice", "/libpod_parent/../system.slice"] {
            let said = refused("config.dump", |config| config["cgroupParent"] = json!(parent));
            assert!(said.contains("cgroupParent"), "{said}");
        }
        assert!(refused("config.dump", |it| it["cgroupsMode"] = json!("split")).contains("split"));
    }

    /// Podman puts them in the place of what the specification says, when it starts the container anew.
    #[test]
    fn users_and_labels_are_those_that_were_judged() {
        let adapt = |user: &str, groups: Value, label: &str| {
            let config = changed("config.dump", |config| {
                config["user"] = json!(user);
                config["groups"] = groups;
                config["ProcessLabel"] = json!(label);
            });
            let found = adapted(&[config, changed("spec.dump", |_| {})]).unwrap();
            let config: Value = serde_json::from_str(&found["config.dump"]).unwrap();
            ["user", "groups", "ProcessLabel"].map(|key| config[key].clone())
        };
        let judged = [json!("7:8"), json!(["8", "9"]), json!("container_t")];
        assert_eq!(adapt("root", json!(["disk"]), "spc_t"), judged);
        // Without them the specification counts.
        assert_eq!(adapt("", json!(null), ""), [json!(""), json!(null), json!("")]);
    }

    /// Whoever reads it has that in memory as a whole.
    #[test]
    fn nothing_that_describes_a_file_fills_the_memory() {
        for kind in [EntryType::GNULongName, EntryType::XHeader] {
            let data = vec![b'x'; 5 << 20];
            let mut long = Header::new_gnu();
            long.set_entry_type(kind);
            long.set_size(data.len() as u64);
            long.set_cksum();
            let mut hostile = Builder::new(Vec::new());
            hostile.append(&long, data.as_slice()).unwrap();
            let said = refused_with("rootfs-diff.tar", &hostile.into_inner().unwrap());
            assert!(said.contains("an entry is described by more than"), "{kind:?}: {said}");
        }
    }

    #[test]
    fn archives_of_something_else_are_refused() {
        let [whole, _] = documents();
        assert!(adapted(&[whole]).unwrap_err().to_string().contains("it has 1 of"));
        let config = |key: &str, value: Value| refused("config.dump", |it| it[key] = value);
        assert!(config("id", json!("c3")).contains("c3"));
        assert!(config("runtime", json!("crun")).contains("crun"));
        assert!(config("ExitCommand", json!(["/bin/evil"])).contains("ExitCommand"));
        let hooks = json!({ "prestart": [{ "path": "/bin/evil" }] });
        for key in ["hooks", "Hooks"] {
            let said = refused("spec.dump", |spec| spec[key] = hooks.clone());
            assert!(said.contains("not what was described"), "{said}");
        }
        let said = refused("spec.dump", |spec| spec["mounts"] = json!([{ "source": "/etc" }]));
        assert!(said.contains("mounts is not what was described"), "{said}");
    }

    /// Podman removes them, whatever leads there.
    #[test]
    fn files_of_this_host_are_not_removed() {
        for name in ["../../../../../../etc", "/../etc", "/", "/link/lock"] {
            let said = refused_with("deleted.files", json!([name]).to_string().as_bytes());
            assert!(said.contains(&format!("{:?}", name.trim_start_matches('/'))), "{said}");
            assert!(said.contains("deleted.files: "), "{said}");
        }
        assert!(refused_with("rootfs-diff.tar", &tar(&["link/lock"])).contains("link/lock"));
        // The first one would make a directory of the link, and is not unpacked.
        let twice = [&["link/"][..], &["link/lock"]].map(|names| ("rootfs-diff.tar", tar(names)));
        let error = adapted(&[&documents()[..], &twice].concat()).unwrap_err().to_string();
        assert!(error.contains("rootfs-diff.tar is in it twice"), "{error}");
        assert!(
            refused_with("volumes/data.tar", &tar(&["link/lock"])).contains("volumes/data.tar")
        );
        assert!(refused_with("devshm-checkpoint.tar", &tar(&["a/b"])).contains("devshm"));
        assert!(refused_with("rootfs-diff.tar", &[7; 1024]).contains("rootfs-diff.tar"));
    }

    /// Podman mounts what they say, and unpacks there.
    #[test]
    fn volumes_are_made_of_nothing_of_this_host() {
        let with = |key: &str, value: Value| {
            refused("config.dump", |config| config["namedVolumes"][0][key] = value)
        };
        let bind = ["volume-opt=type=bind", "volume-opt=device=/etc", "volume-opt=o=bind"];
        for option in [&bind[..], &["O", "upperdir=/etc"], &["rshared"]].concat() {
            let said = with("options", json!(["rw", option]));
            assert!(said.contains("volume data has the option") && said.contains(option), "{said}");
        }
        assert!(with("driver", json!("local")).contains("driver"));
        assert!(with("volumeName", json!("other")).contains("other"));
        assert!(with("Options", json!(["volume-opt=type=bind"])).contains("Options"));
        let two = json!([{ "volumeName": "data" }, { "volumeName": "../x" }]);
        let said = refused("config.dump", |config| config["namedVolumes"] = two);
        assert!(said.contains("../x"), "{said}");
    }

    /// `podman auto-update` does what they say.
    #[test]
    fn no_image_of_the_other_host_is_fetched_later() {
        let changed = changed("config.dump", |config| {
            config["RawImageName"] = json!("registry.example/evil");
            config["labels"] = json!({
                "io.containers.autoupdate": "registry", "PODMAN_SYSTEMD_UNIT": "ssh.service", "a": "b",
            });
        });
        let found = adapted(&[changed, documents()[1].clone()]).unwrap();
        let config: Value = serde_json::from_str(&found["config.dump"]).unwrap();
        let expected = (&json!("localhost/web:1"), &json!({ "a": "b" }));
        assert_eq!((&config["RawImageName"], &config["labels"]), expected);
    }

    /// Podman gives, mounts or fetches what they name.
    #[test]
    fn nothing_comes_that_was_not_described() {
        for (key, value) in [
            ("secrets", json!([{ "name": "password" }])),
            ("secret_env", json!({ "PASSWORD": { "name": "password" } })),
            ("overlayVolumes", json!([{ "dest": "/d", "source": "/etc" }])),
            ("ctrImageVolumes", json!([{ "source": "other", "dest": "/d" }])),
            ("netNsCtr", json!("c3")),
            ("userNsCtr", json!("c3")),
            ("pod", json!("p3")),
            ("Dependencies", json!(["c3"])),
            ("chroot_directories", json!(["/etc"])),
            ("HostUsers", json!(["admin"])),
            ("rootfs_overlay", json!(true)),
            ("storageOpts", json!({ "size": "1" })),
            ("sdnotifySocket", json!("/run/systemd/notify")),
            ("mountAllDevices", json!(true)),
            ("cdiDevices", json!(["vendor.com/gpu=all"])),
            ("preserveFds", json!(1)),
            ("invented", json!("later")),
            ("rootfsImageName", json!("registry.example/evil:1")),
            ("rootfsImageID", json!("e5f6")),
            ("name", json!("other")),
            ("MountLabel", json!("a\",lowerdir=/etc")),
            ("newPortMappings", json!([{ "host_port": 22, "container_port": 22 }])),
        ] {
            let said = refused("config.dump", |config| config[key] = value);
            let what = if key == "newPortMappings" { "it publishes ports" } else { key };
            assert!(said.contains(what), "{key}: {said}");
        }
        let said = refused("config.dump", |config| config["newNetworks"]["host"] = json!({}));
        assert!(said.contains("host"), "{said}");
        let said = refused("config.dump", |config| {
            config["idMappingsOptions"]["AutoUserNsOpts"]["PasswdFile"] = json!("/etc/shadow");
        });
        assert!(said.contains("PasswdFile"), "{said}");
        for status in [r#"{"host":{}}"#, r#"{"shop":{"interfaces":{"../x":{}}}}"#, "[]"] {
            assert!(refused_with("network.status", status.as_bytes()).contains("archive of"));
        }
    }
}
