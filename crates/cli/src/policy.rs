//! The restore policy: where it is, and what calling runtimes say of a container.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use torpor_images::ImageDir;
use torpor_policy::{Policy, Spec};

use crate::failure::Failure;
use crate::options::{self, Settings};

/// The policy of this machine.
pub const FILE: &str = "/etc/torpor/policy.toml";
/// The key that shows which images were made on this machine.
pub(crate) const HOST_KEY: &str = "/var/lib/torpor/host.key";
/// The configuration of a container in its bundle.
const SPEC: &str = "config.json";
/// No file of either kind is larger, in bytes.
const MAX_SIZE: u64 = 16 << 20;

/// Whether this machine has made images, and nobody has changed them since. Those of which it cannot be said are others'.
pub(crate) fn made_here(images: &ImageDir) -> bool {
    let mut settings = Settings::default();
    let made_here = options::apply_defaults(&mut settings).is_ok()
        && torpor_engine::made_here(&settings.engine, images).unwrap_or(false);
    if !made_here {
        tracing::debug!("{} has no mark of this machine", images.path().display());
    }
    made_here
}

/// Reads the policy that `settings` name: the file of `--policy`, or that of this machine
/// if there is one, and then each `--policy-rule`.
///
/// # Errors
/// A file that cannot be read, a line that makes no sense.
pub fn load(settings: &mut Settings) -> Result<(), Failure> {
    let path = settings.policy.clone().unwrap_or_else(|| PathBuf::from(FILE));
    let failed = |e| Failure::io(format_args!("policy {}", path.display()), &e);
    let mut policy = match read(&path) {
        Ok(bytes) => {
            let wrong = |reason: String| {
                Failure::invalid(format!("policy {}, {reason}", path.display()))
                    .hint("docs/policy.md has all rules")
            };
            let text = String::from_utf8(bytes).map_err(|e| wrong(e.to_string()))?;
            Policy::parse(&text).map_err(|e| wrong(e.to_string()))?
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound && settings.policy.is_none() => {
            Policy::default()
        }
        Err(e) => return Err(failed(e)),
    };
    for rule in &settings.policy_rules {
        let wrong = |e: torpor_policy::Mistake| {
            Failure::invalid(format!("--policy-rule {rule}: {}", e.reason))
        };
        if !rule.contains('=') {
            return Err(Failure::invalid(format!("--policy-rule {rule}: it is no KEY=VALUE"))
                .hint("docs/policy.md has all rules"));
        }
        policy.amend(rule).map_err(wrong)?;
    }
    settings.engine.trust.policy = Arc::new(policy);
    Ok(())
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(MAX_SIZE + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_SIZE {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, "it is too large"));
    }
    Ok(bytes)
}

/// Reads the configuration of a container from its bundle. Runtimes (runc, crun) start
/// this program in that directory, as they are required to read it from there themselves.
/// `None` if there is none.
///
/// # Errors
/// One that cannot be read, or that a runtime could read otherwise: then nobody knows what it wants.
pub fn spec(bundle: &Path) -> Result<Option<Arc<Spec>>, Failure> {
    let path = bundle.join(SPEC);
    let bytes = match read(&path) {
        Ok(bytes) => bytes,
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied) => {
            return Ok(None);
        }
        Err(e) => return Err(Failure::io(format_args!("configuration {}", path.display()), &e)),
    };
    match Spec::parse(&bytes) {
        Ok(Some(mut spec)) => {
            spec.drop_namespaces_of_host(is_own_namespace);
            spec.in_bundle(&std::path::absolute(bundle).unwrap_or_else(|_| bundle.to_owned()));
            tracing::debug!("the container is configured by {}", path.display());
            Ok(Some(Arc::new(spec)))
        }
        // Other programs have files of this name, too.
        Ok(None) => {
            tracing::debug!("{} is of no container", path.display());
            Ok(None)
        }
        Err(reason) => {
            let text = format!("configuration {}: {reason}", path.display());
            Err(Failure::invalid(text)
                .hint("spell its keys and values as the OCI runtime specification does"))
        }
    }
}

/// Whether a path leads to a namespace that this program lives in.
fn is_own_namespace(path: &str) -> bool {
    let inode = |path: &Path| std::fs::metadata(path).map(|found| (found.dev(), found.ino())).ok();
    let Some(wanted) = inode(Path::new(path)) else { return false };
    let own = std::fs::read_dir("/proc/self/ns").into_iter().flatten().flatten();
    own.into_iter().any(|entry| inode(&entry.path()) == Some(wanted))
}
