//! What agents tell of checkpoints that are restored on their nodes, written down if the pod that continues is there.

use serde_json::{Value, json};

use super::keys::{ATTEMPTS, Refusal, forbidden};
use crate::api::Api;
use crate::checkpoint::{claimed_by, memory_comes_to, path};
use crate::peer;
use crate::pod::{is_name, text};
use crate::restoring::{RESTORES, Report};

/// The checkpoint that a path is about: namespace and name.
#[must_use]
pub(super) fn of(path: &str) -> Option<(&str, &str)> {
    path.strip_prefix(RESTORES)?.split_once('/')
}

/// Writes down what the agent that shows `token` says of a checkpoint, which `pod` on its node continues from.
///
/// # Errors
/// If the token is of no agent, or of another node's; if it cannot be true; if the API server does not answer.
pub(super) fn note(
    api: &Api,
    token: &str,
    (namespace, name): (&str, &str),
    pod: &str,
    said: &[u8],
) -> std::result::Result<Value, Refusal> {
    if !is_name(namespace) || !is_name(name) {
        return forbidden("this is no name of a checkpoint");
    }
    let Ok(report) = serde_json::from_slice::<Report>(said) else {
        return forbidden("this is nothing to say of a checkpoint");
    };
    let review = peer::review(api, token, peer::FOR_CONTROLLERS)?;
    let node = match peer::node_of(&review) {
        Ok(node) => node,
        Err(why) => return forbidden(why),
    };
    for attempt in 1.. {
        let Some(mut object) = api.get(&path(namespace, name))? else { break };
        let mut reader = peer::reader(api, &object, pod)?;
        if is_gone(&reader, &report, &object, node) {
            // It was told late: what the pod had begun with must not be given to the next one.
            reader = json!({ "metadata": { "uid": claimed_by(&object) } });
        } else if let Some(why) = peer::objection(&review, &object, &reader) {
            return forbidden(why);
        }
        match report.apply(&mut object, node, &reader) {
            Err(why) => return forbidden(why),
            Ok(false) => return Ok(json!({})),
            Ok(true) => {}
        }
        match api.replace(&format!("{}/status", path(namespace, name)), &object) {
            // Somebody else has written to it meanwhile.
            Err(error) if error.is_conflict() && attempt < ATTEMPTS => {}
            Err(error) => return Err(error.into()),
            Ok(_) => return Ok(json!({})),
        }
    }
    forbidden("there is no such checkpoint")
}

/// Whether the pod that has begun on `node`, as it had promised, is gone by now, or another one of its name is there: what
/// became of it is true all the same. No pod has to be there any more where the memory of a snapshot comes no more.
fn is_gone(pod: &Value, report: &Report, object: &Value, node: &str) -> bool {
    if *report == (Report::Memory { comes: false }) && memory_comes_to(object, node) {
        return true;
    }
    matches!(report, Report::Began { .. } | Report::Memory { .. })
        && object["status"]["restoringOn"] == node
        && claimed_by(object).is_some_and(|uid| text(pod, "/metadata/uid") != uid)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::{self, begun, is_spent, memory_comes, ready};
    use crate::pod::{RESTORE_FROM, condition};
    use crate::testing::Server;

    const POD: &str = "/api/v1/namespaces/a/pods/web-0";
    const PROMISE: Report = Report::Promises { lazy: false };

    /// A checkpoint of a pod of node1 that another one of node2 has claimed.
    fn scene() -> std::sync::Arc<Server> {
        let server = Server::start();
        let mut pod = json!({
            "metadata": { "namespace": "a", "name": "web-0", "uid": "old" },
            "spec": { "nodeName": "node1", "containers": [{ "name": "c", "image": "i" }] },
        });
        let mut object = checkpoint::new(&pod, "c", 30);
        object["status"] = begun(&pod, "node1");
        object["status"]["claimedBy"] = json!({ "name": "web-0", "uid": "new" });
        server.put(&path("a", "c"), object);
        pod["metadata"]["uid"] = json!("new");
        pod["metadata"]["annotations"] = json!({ RESTORE_FROM: "c" });
        pod["spec"]["nodeName"] = json!("node2");
        server.put(POD, pod);
        server
    }

    fn told(server: &Server, token: &str, pod: &str, report: &Report) -> Result<(), String> {
        let said = serde_json::to_vec(report).unwrap();
        let noted = note(&server.api("controller"), token, ("a", "c"), pod, &said);
        noted.map(drop).map_err(|refusal| format!("{refusal:?}"))
    }

    fn status(server: &Server) -> Value {
        server.get(&path("a", "c")).unwrap()
    }

    fn began() -> Report {
        Report::began("c", true, "")
    }

    #[test]
    fn the_node_of_the_pod_that_continues_is_believed() {
        let server = scene();
        let tells = |report: &Report| told(&server, "desk:node2", "web-0", report);
        tells(&Report::Waits).unwrap();
        assert!(condition(&status(&server), checkpoint::TARGET_READY).is_some());
        let early = tells(&PROMISE).unwrap_err();
        assert!(early.contains("taken back"), "{early}");
        let mut complete = status(&server);
        checkpoint::set(&mut complete, ready(true, "CheckpointCompleted", ""));
        server.put(&path("a", "c"), complete);
        tells(&PROMISE).unwrap();
        assert_eq!(status(&server)["status"]["restoringOn"], "node2");
        tells(&began()).unwrap();
        assert!(is_spent(&status(&server), "new", "c"));
        let before = status(&server);
        tells(&began()).unwrap();
        assert_eq!(status(&server), before, "it is told again after a silence");
    }

    #[test]
    fn a_pod_that_is_gone_when_it_is_told_has_begun_all_the_same() {
        let server = scene();
        let mut promised = status(&server);
        promised["status"]["restoringOn"] = json!("node2");
        server.put(&path("a", "c"), promised);
        // The next one has its name.
        let mut next = server.get(POD).unwrap();
        next["metadata"]["uid"] = json!("next");
        server.put(POD, next);
        told(&server, "desk:node3", "web-0", &began()).unwrap_err();
        told(&server, "desk:node2", "web-0", &Report::Waits).unwrap_err();
        assert!(!is_spent(&status(&server), "new", "c"));
        told(&server, "desk:node2", "web-0", &began()).unwrap();
        assert!(is_spent(&status(&server), "new", "c"));
    }

    #[test]
    fn a_checkpoint_says_whether_memory_of_it_comes() {
        let server = scene();
        let mut complete = status(&server);
        checkpoint::set(&mut complete, ready(true, "CheckpointCompleted", ""));
        server.put(&path("a", "c"), complete);
        let tells = |report: &Report| told(&server, "desk:node2", "web-0", report);
        let says = |comes: bool| Report::Memory { comes };
        tells(&says(true)).unwrap_err();
        tells(&Report::Promises { lazy: true }).unwrap();
        assert!(memory_comes(&status(&server)));
        told(&server, "desk:node3", "web-0", &says(false)).unwrap_err();
        tells(&says(false)).unwrap();
        assert!(!memory_comes(&status(&server)));
        // Its agent was removed, and has come back when the pod was gone.
        tells(&says(true)).unwrap();
        let mut next = server.get(POD).unwrap();
        next["metadata"]["uid"] = json!("next");
        server.put(POD, next);
        tells(&says(false)).unwrap();
        assert!(!memory_comes(&status(&server)));
    }

    #[test]
    fn a_snapshot_says_which_nodes_its_memory_comes_to() {
        let server = scene();
        let mut complete = status(&server);
        complete["spec"]["sharing"] = json!("Shared");
        complete["status"]["claimedBy"] = Value::Null;
        checkpoint::set(&mut complete, ready(true, "CheckpointCompleted", ""));
        server.put(&path("a", "c"), complete.clone());
        let tells = |pod: &str, report: &Report| told(&server, "desk:node2", pod, report);
        let says = |comes: bool| Report::Memory { comes };
        tells("web-0", &PROMISE).unwrap();
        assert_eq!(status(&server)["status"], complete["status"], "it does not");
        tells("", &says(true)).unwrap_err();
        tells("web-0", &Report::Promises { lazy: true }).unwrap();
        assert_eq!(status(&server)["status"]["memoryComesTo"], json!(["node2"]));
        // Another pod of the node begins later, when all is there.
        tells("web-0", &PROMISE).unwrap();
        assert!(memory_comes(&status(&server)));
        for (token, pod) in [("desk:node3", "web-0"), ("desk:node3", ""), ("peer:node2", "")] {
            told(&server, token, pod, &says(false)).unwrap_err();
        }
        server.api("controller").delete(POD).unwrap();
        tells("", &says(false)).unwrap();
        assert_eq!(status(&server)["status"]["memoryComesTo"], json!([]));
        assert!(!memory_comes(&status(&server)));
        tells("", &says(false)).unwrap_err();
    }

    #[test]
    fn agents_that_know_of_no_memory_on_demand_promise_as_before() {
        let said = br#"{"says":"promises"}"#;
        assert_eq!(serde_json::from_slice::<Report>(said).unwrap(), PROMISE);
    }

    #[test]
    fn every_other_node_is_refused() {
        let server = scene();
        let before = status(&server);
        for report in [Report::Waits, PROMISE, Report::Memory { comes: true }, began()] {
            // Its source's, a third one's, one that was shown to another agent, and somebody else's.
            for token in ["desk:node1", "desk:node3", "peer:node2", "agent:node2", "alice", ""] {
                told(&server, token, "web-0", &report).unwrap_err();
            }
            told(&server, "desk:node2", "web-1", &report).unwrap_err();
        }
        let api = server.api("controller");
        note(&api, "desk:node2", ("a", "c"), "web-0", b"{}").unwrap_err();
        note(&api, "desk:node2", ("a", "../c"), "web-0", b"{}").unwrap_err();
        assert_eq!(status(&server), before);
    }
}
