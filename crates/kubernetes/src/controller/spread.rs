//! Snapshots that come to the nodes where their pods may go before these do.

use serde_json::Value;

use super::decide::Action;
use crate::checkpoint::{EXPECTED, is_ready, is_sealed, is_shared};

/// Looks for snapshots of which nobody has said yet whether nodes are to have them.
#[must_use]
pub(super) fn decide(checkpoints: &[Value]) -> Vec<Action> {
    let is_new = |one: &&Value| {
        is_shared(one)
            && is_ready(one)
            && is_sealed(one)
            && one["metadata"]["labels"][EXPECTED].is_null()
    };
    let new = checkpoints.iter().filter(is_new);
    new.map(|one| Action::Spread { checkpoint: one.clone() }).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::checkpoint::{new, ready, set};

    #[test]
    fn it_is_looked_once_where_a_snapshot_may_be_wanted() {
        let pod = json!({ "metadata": { "namespace": "a", "name": "p", "uid": "u" } });
        let mut snapshot = new(&pod, "s", 30);
        snapshot["spec"]["sharing"] = json!("Shared");
        snapshot["status"]["wrappedKey"] = json!("k");
        let decided = |one: &Value| decide(std::slice::from_ref(one));
        assert_eq!(decided(&snapshot), [], "it is not complete");
        set(&mut snapshot, ready(true, "CheckpointCompleted", ""));
        assert_eq!(decided(&snapshot), [Action::Spread { checkpoint: snapshot.clone() }]);
        let mut open = snapshot.clone();
        open["status"]["wrappedKey"] = json!("");
        let mut exclusive = snapshot.clone();
        exclusive["spec"]["sharing"] = json!("Exclusive");
        let mut done = snapshot;
        done["metadata"]["labels"] = json!({ EXPECTED: "false" });
        for one in [open, exclusive, done] {
            assert_eq!(decided(&one), []);
        }
    }
}
