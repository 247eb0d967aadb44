//! Checkpoints that come to this node before a pod that continues from them: the controllers say which. They come one after
//! the other, since nobody waits for them yet.

use std::sync::Arc;

use serde_json::Value;
use torpor_worker::tell;

use super::late::to_come;
use super::node::Node;
use crate::api::GROUP;
use crate::checkpoint::{EXPECTED, claimed_by, is_expected_on, is_shared, is_used, path};
use crate::error::Result;
use crate::peer;
use crate::pod::text;

/// So many times as large as a checkpoint has to be what is free on the disk.
const ROOM: u64 = 4;

/// The list of the checkpoints that some nodes are to have before their pods.
pub(super) fn list() -> String {
    format!("{GROUP}/podcheckpoints?labelSelector={}%3Dtrue", EXPECTED.replace('/', "%2F"))
}

impl Node {
    /// Fetches the checkpoints that are expected here and are not. What does not come is tried again when this is called
    /// again; a pod that comes does not depend on it.
    ///
    /// # Errors
    /// If the API server does not answer, or no controller knows this agent and none answers.
    pub(super) fn foresee(self: &Arc<Self>) -> Result<()> {
        for object in self.api.list(&list())?.iter().filter(|one| self.lacks(one)) {
            let (namespace, name) =
                (text(object, "/metadata/namespace"), text(object, "/metadata/name"));
            // The one before it may have taken a while.
            let Some(object) = self.api.get(&path(namespace, name))? else { continue };
            if self.lacks(&object) && self.is_early(&object)? {
                self.be_introduced()?;
                if let Err(error) = self.bring_early(&object) {
                    tell!("{namespace}/{name}, which a pod may need here: {error}");
                }
            }
        }
        Ok(())
    }

    /// Whether a checkpoint is expected here, and is not here, and has room.
    fn lacks(&self, object: &Value) -> bool {
        let size = object["status"]["sizeBytes"].as_u64().unwrap_or(0);
        is_expected_on(object, &self.name)
            && !is_used(object)
            && !self.holds(object)
            && size.saturating_mul(ROOM) <= self.room()
    }

    /// How many bytes are free on the disk that nothing here is to take: memory of checkpoints that are here already may still be
    /// on its way.
    fn room(&self) -> u64 {
        let all = self.store.all().into_iter();
        let here = all.filter_map(|(namespace, name)| self.store.find(&namespace, &name));
        let coming = here.map(|dir| to_come(&dir)).fold(0, u64::saturating_add);
        self.store.free().saturating_sub(coming)
    }

    /// Whether the pod that a checkpoint is for has no node yet. The agent of the one that it has fetches it for itself.
    fn is_early(&self, object: &Value) -> Result<bool> {
        if is_shared(object) {
            return Ok(true);
        }
        let pod = peer::reader(&self.api, object, text(object, "/status/claimedBy/name"))?;
        let uid = pod["metadata"]["uid"].as_str();
        Ok(uid.is_some() && uid == claimed_by(object) && text(&pod, "/spec/nodeName").is_empty())
    }
}
