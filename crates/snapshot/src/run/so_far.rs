//! What one call has started before it ends.

use crate::error::Error;
use crate::interrupt;
use crate::podman::Podman;
use crate::runc::Runc;

/// The containers that one call has started so far.
pub(super) struct SoFar<'a> {
    runc: &'a Runc,
    /// Their names, and whether they are Podman's.
    containers: Vec<(&'a str, bool)>,
}

impl<'a> SoFar<'a> {
    pub(super) fn new(runc: &'a Runc) -> Self {
        Self { runc, containers: Vec::new() }
    }

    pub(super) fn add(&mut self, id: &'a str, by_podman: bool) {
        self.containers.push((id, by_podman));
    }

    /// Removes them, if `error` is that somebody has asked for the end: who has asked for a hundred has no use for forty.
    pub(super) fn removed(&self, error: Error) -> Error {
        if interrupt::check().is_ok() {
            return error;
        }
        for (id, by_podman) in &self.containers {
            match (by_podman, Podman::new()) {
                (true, Ok(podman)) => podman.delete(id),
                _ => self.runc.delete(id),
            }
        }
        error
    }
}
