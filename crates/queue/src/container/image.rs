//! Where the files of a container come from: a bundle, or an image in Podman's store.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::none;
use crate::spec::{ContainerSource, Spec};

/// Configurations are no longer, in bytes.
const MAX_CONFIG: u64 = 1 << 20;

/// Transports by which Podman takes an image in that lies in files.
const TRANSPORTS: [&str; 4] = ["oci:", "oci-archive:", "docker-archive:", "dir:"];

/// What a container is made of. It is looked up once for each job, and is the same for all of its runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Origin {
    /// Directories that lie below the job's own files, the uppermost first.
    pub layers: Vec<PathBuf>,
    /// How it starts.
    pub config: Start,
}

/// How a container starts, as its origin says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Start {
    /// The `config.json` of a bundle.
    Bundle(Value),
    /// The part `Config` of an image.
    Image(Value),
}

impl Origin {
    /// Looks it up.
    ///
    /// # Errors
    /// If there is no such bundle or image here.
    pub(super) fn of(container: &ContainerSource) -> io::Result<Self> {
        match container {
            ContainerSource::Bundle(dir) => Self::of_bundle(dir),
            ContainerSource::Image(name) => Self::of_image(name),
        }
    }

    /// What it runs for a job.
    pub(super) fn command(&self, spec: &Spec) -> Vec<String> {
        let words = |value: &Value| {
            let words = value.as_array().into_iter().flatten();
            words.filter_map(Value::as_str).map(str::to_owned).collect::<Vec<_>>()
        };
        let (entry, own) = match &self.config {
            Start::Bundle(config) => (Vec::new(), words(&config["process"]["args"])),
            Start::Image(image) => (words(&image["Entrypoint"]), words(&image["Cmd"])),
        };
        let given = spec.command.clone();
        [entry, if given.is_empty() { own } else { given }].concat()
    }

    fn of_bundle(dir: &Path) -> io::Result<Self> {
        let path = dir.join("config.json");
        let wrong = |why: String| none(format!("{}: {why}", path.display()));
        let length = path.metadata().map_err(|e| wrong(e.to_string()))?.len();
        if length > MAX_CONFIG {
            return Err(wrong(format!("it has {length} bytes, more than {MAX_CONFIG}")));
        }
        let text = std::fs::read(&path).map_err(|e| wrong(e.to_string()))?;
        let config: Value = serde_json::from_slice(&text).map_err(|e| wrong(e.to_string()))?;
        let root = config["root"]["path"].as_str().ok_or_else(|| wrong("no root.path".into()))?;
        let root = dir.join(root);
        let root = root.canonicalize().map_err(|e| wrong(format!("{}: {e}", root.display())))?;
        Ok(Self { layers: vec![root], config: Start::Bundle(config) })
    }

    fn of_image(name: &str) -> io::Result<Self> {
        let id = if TRANSPORTS.iter().any(|transport| name.starts_with(transport)) {
            podman(&["pull", "--quiet", name])?
        } else {
            name.to_owned()
        };
        let text = podman(&["image", "inspect", "--", id.trim()])?;
        let found: Value = serde_json::from_str(&text)?;
        let image = &found[0];
        let driver = image["GraphDriver"]["Name"].as_str().unwrap_or_default();
        if driver != "overlay" {
            let text = format!("Podman keeps images by {driver:?}: only overlay is supported");
            return Err(none(format!("{text}; unpack the image and use --bundle")));
        }
        let data = &image["GraphDriver"]["Data"];
        let upper = data["UpperDir"].as_str().into_iter();
        let lower = data["LowerDir"].as_str().into_iter().flat_map(|dirs| dirs.split(':'));
        let layers = upper.chain(lower).map(PathBuf::from).collect();
        Ok(Self { layers, config: Start::Image(image["Config"].clone()) })
    }
}

/// What Podman prints. One that has no such image fails.
fn podman(words: &[&str]) -> io::Result<String> {
    let output = Command::new("podman").args(words).stdin(Stdio::null()).output();
    let output = output.map_err(|e| io::Error::new(e.kind(), format!("run podman: {e}")))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(none(format!("podman {}: {}", words[0], said.trim())))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_bundle_names_its_root() {
        let dir = tempfile::tempdir().unwrap();
        let bundle = ContainerSource::Bundle(dir.path().to_owned());
        assert!(Origin::of(&bundle).unwrap_err().to_string().contains("config.json"));
        std::fs::write(dir.path().join("config.json"), "{}").unwrap();
        assert!(Origin::of(&bundle).unwrap_err().to_string().contains("no root.path"));
        std::fs::write(dir.path().join("config.json"), r#"{"root":{"path":"files"}}"#).unwrap();
        assert!(Origin::of(&bundle).unwrap_err().to_string().contains("files"));
        std::fs::create_dir(dir.path().join("files")).unwrap();
        let root = dir.path().join("files").canonicalize().unwrap();
        assert_eq!(Origin::of(&bundle).unwrap().layers, [root]);
    }

    #[test]
    fn a_command_takes_the_place_of_what_an_image_or_a_bundle_runs() {
        let image = |config| Start::Image(config);
        let bundle = |args| Start::Bundle(json!({ "process": { "args": args } }));
        for (config, given, wanted) in [
            (image(json!({ "Entrypoint": ["a"], "Cmd": ["b"] })), &[][..], &["a", "b"][..]),
            (image(json!({ "Entrypoint": ["a"], "Cmd": ["b"] })), &["c"], &["a", "c"]),
            (image(json!({ "Cmd": ["b"] })), &["c"], &["c"]),
            (image(json!({ "Entrypoint": null })), &[], &[]),
            (bundle(json!(["b"])), &[], &["b"]),
            (bundle(json!(["b"])), &["c"], &["c"]),
            (bundle(json!([])), &[], &[]),
        ] {
            let command = given.iter().map(|&word| word.to_owned()).collect();
            let origin = Origin { layers: Vec::new(), config };
            let spec = Spec { command, ..Spec::default() };
            assert_eq!(origin.command(&spec), wanted, "{origin:?} {given:?}");
        }
    }
}
