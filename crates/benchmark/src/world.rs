//! A containerd that is started for a run: its configuration, and that of its network.

use std::fs;
use std::path::{Path, PathBuf};

use crate::config::{Config, Endpoint, Handler};
use crate::endpoint::{EndpointError, socket_of};
use crate::image::{BASE, TAG};
use crate::keeper::World;
use crate::machine::{self, HOST};
use crate::suite::seal::OPTIONS;

/// Why a runtime has no network besides the host's, if so.
pub(crate) fn no_network(ours: bool) -> Option<String> {
    match (ours, plugins()) {
        (true, None) => Some(
            "no CNI plugins are installed (Debian: apt-get install containernetworking-plugins)"
                .into(),
        ),
        _ => None,
    }
}

/// Where the CNI plugins are: on this machine, or on the node whose pod this is.
pub(crate) fn plugins() -> Option<PathBuf> {
    [Path::new("/"), Path::new(HOST)].into_iter().find_map(plugins_below)
}

fn plugins_below(root: &Path) -> Option<PathBuf> {
    let dirs = ["opt/cni/bin", "usr/lib/cni", "usr/libexec/cni"].map(|dir| root.join(dir));
    dirs.into_iter().find(|dir| dir.join("bridge").exists())
}

/// Writes the configuration of a containerd and of its network.
pub(crate) fn world(
    endpoint: &Endpoint,
    containerd: &Path,
    dir: &Path,
) -> Result<World, EndpointError> {
    let failed = |e| EndpointError::Io(dir.display().to_string(), e);
    fs::create_dir_all(dir.join("cni")).map_err(failed)?;
    let network = serde_json::json!({
        "cniVersion": "0.4.0",
        "name": "torpor-benchmark",
        "plugins": [{
            "type": "bridge",
            "bridge": "bench0",
            "isGateway": true,
            "ipam": {
                "type": "host-local",
                "ranges": [[{ "subnet": "10.111.0.0/16" }]],
                "dataDir": dir.join("addresses"),
            },
        }],
    });
    fs::write(dir.join(OPTIONS), "").map_err(failed)?;
    let list = dir.join("cni/bench.conflist");
    fs::write(list, network.to_string()).map_err(failed)?;
    let config = dir.join("config.toml");
    fs::write(&config, toml(endpoint, dir)).map_err(failed)?;
    // containerd looks for the program that makes checkpoints on its PATH.
    let path = [dir.join("bin")].into_iter().chain(directories(endpoint, containerd));
    let path = std::env::join_paths(path)
        .map_err(|e| failed(std::io::Error::other(e)))?
        .to_string_lossy()
        .into_owned();
    Ok(World {
        containerd: containerd.to_owned(),
        config,
        path,
        hide_unified: machine::cgroup() == "hybrid",
    })
}

/// Where a containerd that is started looks for programs. Its own shim lies beside it; that of another containerd
/// may lie beside a handler's.
fn directories(endpoint: &Endpoint, containerd: &Path) -> Vec<PathBuf> {
    let mut path: Vec<PathBuf> = containerd.parent().map(Path::to_owned).into_iter().collect();
    path.extend(endpoint.handlers.iter().flat_map(|handler| handler.path.clone()));
    path.extend(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()));
    path.extend(["/usr/sbin", "/usr/bin", "/sbin", "/bin"].map(PathBuf::from));
    path
}

/// A program that a configuration names and this machine does not have.
pub(crate) fn missing(config: &Config) -> Option<PathBuf> {
    let criu = config.criu.iter().map(|file| (file, Vec::new()));
    let of_endpoints = config.endpoints.iter().flat_map(|endpoint| {
        let containerd = endpoint.containerd.as_deref().unwrap_or(Path::new(""));
        let programs = endpoint.handlers.iter().filter_map(|handler| handler.binary.as_ref());
        let programs = endpoint.containerd.iter().chain(programs);
        programs.map(move |file| (file, directories(endpoint, containerd)))
    });
    let is_there = |file: &Path, directories: &[PathBuf]| match file.components().count() {
        1 => directories.iter().any(|dir| dir.join(file).is_file()),
        _ => file.is_file(),
    };
    let found = criu.chain(of_endpoints).find(|(file, dirs)| !is_there(file, dirs));
    found.map(|(file, _)| file.clone())
}

/// The shim of a handler of a containerd that is started: `io.containerd.runc.v2` is `containerd-shim-runc-v2`.
pub(crate) fn shim(endpoint: &Endpoint, containerd: &Path, handler: &Handler) -> Option<PathBuf> {
    let mut words = handler.kind.rsplitn(3, '.');
    let (version, name) = (words.next()?, words.next()?);
    let name = format!("containerd-shim-{name}-{version}");
    let all = directories(endpoint, containerd).into_iter().map(|dir| dir.join(&name));
    all.into_iter().find(|file| file.is_file())
}

/// A string in TOML.
fn quoted(text: impl std::fmt::Display) -> String {
    serde_json::Value::String(text.to_string()).to_string()
}

/// The configuration of containerd, in the version that both 1.6 and 2 read. Without its experiment no
/// containerd of 2.2.7 or later restores anything; those that do not know it leave it alone.
fn toml(endpoint: &Endpoint, dir: &Path) -> String {
    let path = |name: &str| quoted(dir.join(name).display());
    let cri = "plugins.\"io.containerd.grpc.v1.cri\"";
    let mut text = format!(
        "version = 2\nroot = {}\nstate = {}\n[grpc]\naddress = {}\n[{cri}]\nsandbox_image = {}\n\
         restrict_oom_score_adj = true\ntolerate_missing_hugetlb_controller = true\n\
         enable_experimental_restore_via_create = true\n\
         [{cri}.cni]\nbin_dir = {}\nconf_dir = {}\n[{cri}.containerd]\nsnapshotter = {}\n\
         default_runtime_name = {}\n",
        path("root"),
        path("state"),
        quoted(socket_of(dir)),
        quoted(format!("127.0.0.1:{}/{BASE}:{TAG}", crate::keeper::PORT)),
        quoted(plugins().unwrap_or("/opt/cni/bin".into()).display()),
        path("cni"),
        quoted(&endpoint.snapshotter),
        quoted(endpoint.handlers.first().map_or("none", Handler::handler)),
    );
    for handler in &endpoint.handlers {
        let table = format!("{cri}.containerd.runtimes.{}", quoted(handler.handler()));
        text.push_str(&format!("[{table}]\nruntime_type = {}\n", quoted(&handler.kind)));
        let mut options = String::new();
        if let (Some(binary), "io.containerd.runc.v2") = (&handler.binary, handler.kind.as_str()) {
            options.push_str(&format!("BinaryName = {}\n", quoted(binary.display())));
        }
        if let Some(config) = &handler.config {
            let kind = quoted(format!("{}.options", handler.kind));
            let config = quoted(config.display());
            options.push_str(&format!("TypeUrl = {kind}\nConfigPath = {config}\n"));
        }
        text.push_str(&format!("[{table}.options]\n{options}"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plugins_are_those_that_make_a_bridge() {
        let root = tempfile::tempdir().unwrap();
        let node = root.path().join("usr/lib/cni");
        fs::create_dir_all(&node).unwrap();
        fs::create_dir_all(root.path().join("opt/cni/bin")).unwrap();
        assert_eq!(plugins_below(root.path()), None);
        fs::write(node.join("bridge"), "").unwrap();
        assert_eq!(plugins_below(root.path()), Some(node));
    }
}
