//! What the agent of the node where a checkpoint is restored has to say of it. It writes to no checkpoint itself: it tells
//! the controllers, who look whether the pod that continues is on its node.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::checkpoint::{self, AGAIN, is_ready, is_shared};
use crate::pod::{condition, text};

/// Where controllers are told, before namespace and name of the checkpoint.
pub(crate) const RESTORES: &str = "/v1/restores/";
/// How many restores a checkpoint remembers: as many as its definition lets it.
const MOST: usize = 256;
/// No reason is longer.
const LONGEST: usize = 1000;

/// What is told of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "says", rename_all = "kebab-case")]
pub(crate) enum Report {
    /// The pod waits for it: whoever moves may be saved.
    Waits,
    /// The pod begins here, so that its source must not go on.
    Promises {
        /// Whether its memory comes while it runs.
        #[serde(default)]
        lazy: bool,
    },
    /// Whether memory still comes here to the pod that runs, or to those that have begun with a snapshot.
    Memory {
        /// If not, it is here, or will not come.
        comes: bool,
    },
    /// A container of the pod has begun, and begins anew if it is started again.
    Began {
        /// Its name.
        container: String,
        /// Whether it was restored, and goes on.
        restored: bool,
        /// Why not.
        message: String,
        /// Whether it has not begun either: it must not start cold, and is tried again.
        #[serde(default)]
        again: bool,
    },
}

impl Report {
    /// That a container has begun: restored, or not, and why.
    #[must_use]
    pub(crate) fn began(container: &str, restored: bool, message: &str) -> Self {
        let (container, message) = (container.to_owned(), message.to_owned());
        Self::Began { container, restored, message, again: false }
    }

    /// That a container could not be restored, and why: it is tried again.
    #[must_use]
    pub(crate) fn failed(container: &str, message: &str) -> Self {
        let (container, message) = (container.to_owned(), message.to_owned());
        Self::Began { container, restored: false, message, again: true }
    }

    /// Writes it into the status of a checkpoint; whether that has changed it.
    ///
    /// # Errors
    /// If the checkpoint was taken back meanwhile, or its pod does not begin on this node.
    pub(crate) fn apply(
        &self,
        object: &mut Value,
        node: &str,
        pod: &Value,
    ) -> std::result::Result<bool, String> {
        let uid = text(pod, "/metadata/uid");
        match self {
            Self::Waits if condition(object, checkpoint::TARGET_READY).is_some() => Ok(false),
            Self::Waits => {
                checkpoint::set(object, checkpoint::target_ready());
                Ok(true)
            }
            Self::Promises { .. } if !is_ready(object) => {
                Err("the checkpoint was taken back".into())
            }
            // Any number of pods begin with it, and its source goes on.
            Self::Promises { lazy } if is_shared(object) => {
                Ok(*lazy && checkpoint::set_memory_comes_to(object, node, true))
            }
            Self::Promises { lazy } => {
                object["status"]["restoringOn"] = json!(node);
                checkpoint::set_memory_comes(object, *lazy);
                Ok(true)
            }
            Self::Memory { comes } if is_shared(object) => {
                Ok(checkpoint::set_memory_comes_to(object, node, *comes))
            }
            Self::Memory { .. } if object["status"]["restoringOn"] != node => {
                Err("its pod does not begin on this node".into())
            }
            Self::Memory { comes } => Ok(checkpoint::set_memory_comes(object, *comes)),
            Self::Began { container, restored, message, again } => {
                let status = &mut object["status"];
                let mut all = status["restoredContainers"].as_array().cloned().unwrap_or_default();
                let message: String = message.chars().take(LONGEST).collect();
                let mut one = json!({
                    "name": container, "podUID": uid, "restored": restored, "message": message,
                });
                if *again {
                    one[AGAIN] = json!(true);
                }
                if all.contains(&one) {
                    return Ok(false);
                }
                // One that must not start cold is tried again.
                all.retain(|other| {
                    other["name"] != one["name"] || other["podUID"] != one["podUID"]
                });
                all.push(one);
                let first = all.len().saturating_sub(MOST);
                status["restoredContainers"] = json!(all[first..]);
                Ok(true)
            }
        }
    }
}
