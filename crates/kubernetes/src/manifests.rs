//! What is applied to a cluster.

use std::io::{self, Write};

use clap::Args;

use crate::error::{Context, Error, Result};

/// All objects but the definitions of ours.
const INSTALL: &str = include_str!("../manifests/install.yaml");
/// The definitions of our objects.
const DEFINITIONS: &str = include_str!("../manifests/definitions.yaml");
/// What stands for the image.
const IMAGE: &str = "IMAGE";

/// What is printed.
#[derive(Debug, Clone, Args)]
pub struct ManifestsArgs {
    /// The image of the agent and the controller
    #[arg(long, value_name = "IMAGE", default_value = "torpor:latest")]
    pub image: String,
}

/// Everything, as one file.
///
/// # Errors
/// If the image is no name of one.
pub fn manifests(args: &ManifestsArgs) -> Result<String> {
    let good = |c: char| c.is_ascii_alphanumeric() || "._-/:@".contains(c);
    if args.image.is_empty() || !args.image.chars().all(good) {
        return Err(Error::new(format!("{:?} is no name of an image", args.image)));
    }
    Ok(format!("{DEFINITIONS}---\n{}", INSTALL.replace(IMAGE, &args.image)))
}

/// Prints it.
///
/// # Errors
/// If the image is no name of one, or nobody reads.
pub fn print(args: &ManifestsArgs) -> Result<()> {
    io::stdout().write_all(manifests(args)?.as_bytes()).context(|| "print")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::{RESTORE_FROM, RUNTIME_CLASS};

    #[test]
    fn the_image_is_put_in() {
        let all = manifests(&ManifestsArgs { image: "example.org/torpor:1".into() }).unwrap();
        assert_eq!(all.matches("image: example.org/torpor:1\n").count(), 2);
        assert!(!all.contains(IMAGE));
        assert!(manifests(&ManifestsArgs { image: "x\nkind: Pod".into() }).is_err());
    }

    #[test]
    fn names_are_those_of_the_program() {
        for name in [RUNTIME_CLASS, RESTORE_FROM, crate::peer::ACCOUNT] {
            assert!(INSTALL.contains(name), "{name}");
        }
    }

    #[test]
    fn the_chart_installs_the_same() {
        let chart = concat!(env!("CARGO_MANIFEST_DIR"), "/chart");
        let read = |name: &str| std::fs::read_to_string(format!("{chart}/{name}")).unwrap();
        let expected = INSTALL.replace(IMAGE, "{{ .Values.image }}");
        assert_eq!(read("templates/install.yaml"), expected);
        assert_eq!(read("crds/definitions.yaml"), DEFINITIONS);
    }
}
