//! Whether a snapshot fits this machine and the container that is asked for.

use torpor_blobs::oci::Manifest;

use crate::bundle::Bundle;
use crate::description::{Description, Machine};
use crate::error::{Error, Result};
use crate::podman::Podman;
use crate::source::Base;

/// Fails, saying why, unless the snapshot fits.
///
/// # Errors
/// If the snapshot is of another architecture, a later kernel, another configuration or other files; if `base` cannot be
/// read.
pub fn check(snapshot: &Description, manifest: &Manifest, base: &Base) -> Result<()> {
    machine(snapshot)?;
    match base {
        Base::Bundle(bundle) => self::bundle(snapshot, bundle),
        Base::Image(image) => Podman::new()?.fits(manifest, image),
    }
}

/// Whether the processor has what the tasks found is told by the engine, before it makes anything.
fn machine(snapshot: &Description) -> Result<()> {
    let here = Machine::here();
    if snapshot.machine.architecture != here.architecture {
        return Err(Error::new(format!(
            "the snapshot is for another processor: {}, and not {}",
            snapshot.machine.architecture, here.architecture
        )));
    }
    if let (Some(theirs), Some(ours)) = (release(&snapshot.machine.kernel), release(&here.kernel))
        && ours < theirs
    {
        return Err(Error::new(format!(
            "the snapshot is for a later kernel: {}, and not {}",
            snapshot.machine.kernel, here.kernel
        )));
    }
    Ok(())
}

fn bundle(snapshot: &Description, bundle: &Bundle) -> Result<()> {
    if snapshot.configuration_digest != bundle.configuration_digest()? {
        return Err(Error::new(format!(
            "the snapshot is of another configuration than {}",
            bundle.dir.join("config.json").display()
        ))
        .hint("torpor snapshot create makes one of the configuration as it is now"));
    }
    if snapshot.files_digest != bundle.files_digest()? {
        return Err(Error::new(format!(
            "the snapshot is of another image: the files in {} have changed",
            bundle.root.display()
        ))
        .hint("torpor snapshot create makes one of the files as they are now"));
    }
    Ok(())
}

/// The first two numbers of a release.
fn release(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_compared_by_their_numbers() {
        assert_eq!(release("6.1.0-18-amd64"), Some((6, 1)));
        assert_eq!(release("6.18.44-fc"), Some((6, 18)));
        assert_eq!(release("strange"), None);
    }
}
