//! What a snapshot is made from.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use crate::bundle::Bundle;
use crate::description::Origin;
use crate::error::{Error, Result};

/// What a snapshot is made from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// The bundle of a container for runc.
    Runc(PathBuf),
    /// An image of Podman.
    Podman(String),
    /// A container of runc that runs, and goes on running.
    Running(String),
}

impl FromStr for Source {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            // It is noted for starts from other directories.
            Some(("runc", path)) if !path.is_empty() => {
                std::path::absolute(path).map(Self::Runc).map_err(|error| error.to_string())
            }
            Some(("podman", image)) if !image.is_empty() => Ok(Self::Podman(image.to_owned())),
            Some(("running", id)) if !id.is_empty() => Ok(Self::Running(id.to_owned())),
            _ => Err("expected runc:BUNDLE, podman:IMAGE or running:CONTAINER".to_owned()),
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Runc(path) => write!(f, "runc:{}", path.display()),
            Self::Podman(image) => write!(f, "podman:{image}"),
            Self::Running(id) => write!(f, "running:{id}"),
        }
    }
}

/// What a container is of, on this machine.
#[derive(Debug)]
pub enum Base {
    /// A bundle, by runc.
    Bundle(Bundle),
    /// An image, by Podman.
    Image(Image),
}

/// An image of Podman, and what a container of it runs.
#[derive(Debug, Clone)]
pub struct Image {
    /// Its name.
    pub name: String,
    /// What the container runs instead of what the image says.
    pub command: Vec<String>,
}

impl Base {
    /// The one that is named by `origin`.
    ///
    /// # Errors
    /// If it is none of this machine's.
    pub fn of(origin: &Origin) -> Result<Self> {
        match origin.from.parse().map_err(Error::new)? {
            Source::Podman(name) => {
                Ok(Self::Image(Image { name, command: origin.command.clone() }))
            }
            _ => Bundle::of(origin).map(Self::Bundle),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_relative_bundle_is_one_place() {
        let here = std::env::current_dir().unwrap();
        let shown = |text: &str| text.parse::<Source>().unwrap().to_string();
        assert_eq!(shown("runc:./shop"), format!("runc:{}/shop", here.display()));
        assert_eq!(shown("runc:shop"), shown("runc:./shop"));
        for other in ["runc:/srv/shop", "podman:./shop", "running:shop"] {
            assert_eq!(shown(other), other);
        }
    }
}
