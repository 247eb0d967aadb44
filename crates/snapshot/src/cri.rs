//! What the runtimes of Kubernetes, containerd and CRI-O, look for in an image of a checkpoint.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use torpor_images::proto::FileEntry;
use torpor_images::{ImageDir, kind};

use crate::error::{Context, Error, Result};

/// The annotations by which containerd and CRI-O know a checkpoint.
const NAMES: [&str; 2] =
    ["org.criu.checkpoint.container.name", "io.kubernetes.cri-o.annotations.checkpoint.name"];
/// The annotation of the container's configuration in which CRI-O has those of its pod, as JSON.
const OF_POD: &str = "io.kubernetes.cri-o.Annotations";
/// What the kubelet hides of the kernel (`defaultMaskedPaths` of 1.34), and Podman 4 does not.
pub const HIDDEN: [&str; 2] = ["/proc/interrupts", "/sys/devices/virtual/powercap"];
/// `CONTAINER_RUNNING` in the CRI.
const RUNNING: u32 = 1;

/// Adds the annotations by which an image is known as the checkpoint of the container `name`.
pub fn annotate(annotations: &mut BTreeMap<String, String>, name: &str) {
    annotations.extend(NAMES.map(|key| (key.to_owned(), name.to_owned())));
}

/// Completes what Podman has exported of the container `name`: names the image that it was made of
/// by `reference` (`NAME@DIGEST`, which can be pulled), and adds what the CRI says of a container that
/// runs.
///
/// # Errors
/// If Podman's files are not those of a container.
pub fn complete(
    files: &mut Vec<(&'static str, Vec<u8>)>,
    name: &str,
    reference: &str,
) -> Result<()> {
    let mut image = String::new();
    change(files, "config.dump", |config| {
        image = config["rootfsImageName"].as_str().unwrap_or_default().to_owned();
        config["rootfsImage"] = json!(image);
        // What containerd pulls. CRI-O 1.36 takes nothing there but the 64 digits of an image's ID, or nothing at all, and
        // containerd takes neither.
        config["rootfsImageRef"] = json!(reference);
    })?;
    change(files, "spec.dump", |spec| {
        if spec["annotations"].is_null() {
            spec["annotations"] = json!({});
        }
        spec["annotations"][OF_POD] = json!("{}");
    })?;
    let status = json!({
        "metadata": { "name": name },
        "state": RUNNING,
        "image": { "image": image, "user_specified_image": image },
        "image_ref": reference,
        "labels": {},
        "annotations": {},
    });
    files.push(("status.dump", serde_json::to_vec(&status).context(|| "status.dump")?));
    Ok(())
}

/// Forgets which rights the root directory of the container has: Podman makes it with 0555, containerd
/// and CRI-O as the layers of the image have it, and a restore compares them.
///
/// # Errors
/// If the images cannot be read or written.
pub(crate) fn any_root(images: &ImageDir) -> Result<()> {
    let mut files: Vec<FileEntry> = images.read_all(kind::FILES, 0)?;
    for root in files.iter_mut().filter_map(|file| file.reg.as_mut()).filter(|reg| reg.name == b"/")
    {
        root.mode = None;
    }
    Ok(images.write_all(kind::FILES, 0, &files)?)
}

/// Changes a document among `files`.
fn change(
    files: &mut [(&'static str, Vec<u8>)],
    name: &'static str,
    change: impl FnOnce(&mut Value),
) -> Result<()> {
    let found = files.iter_mut().find(|(found, _)| *found == name);
    let (_, content) = found.ok_or_else(|| Error::new(format!("Podman exports no {name}")))?;
    let mut document: Value = serde_json::from_slice(content).context(|| name)?;
    let annotated = document.get("annotations").is_none_or(|all| all.is_object() || all.is_null());
    if !document.is_object() || !annotated {
        return Err(Error::new(format!("{name} is not the configuration of a container")));
    }
    change(&mut document);
    *content = serde_json::to_vec(&document).context(|| name)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn what_is_no_configuration_is_refused() {
        let files = |config: &str, spec: &str| {
            vec![("config.dump", config.into()), ("spec.dump", spec.as_bytes().to_vec())]
        };
        for (config, spec) in
            [("[]", "{}"), ("{}", "7"), ("{", "{}"), ("{}", "{\"annotations\":1}")]
        {
            let error = complete(&mut files(config, spec), "a", "b").unwrap_err().to_string();
            assert!(error.contains(".dump"), "{error}");
        }
        assert!(complete(&mut vec![], "a", "b").unwrap_err().to_string().contains("config.dump"));
    }
}
