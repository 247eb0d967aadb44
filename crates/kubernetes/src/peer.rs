//! Who the other end is: agents show the tokens of their pods, and the API server says which node a
//! token is bound to.

use std::net::{AddrParseError, IpAddr, SocketAddr};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};

use crate::api::Api;
use crate::checkpoint::{claimed_by, is_shared};
use crate::error::Result;
use crate::pod::{RESTORE_FROM, annotation, is_name, text};

/// The account of the agents.
pub(crate) const ACCOUNT: &str = "system:serviceaccount:torpor-system:torpor-agent";
/// What a token is for that an agent shows to the agents of other nodes, and to nobody else: one that it was shown to
/// cannot pass for it elsewhere.
pub(crate) const FOR_AGENTS: &str = "torpor.dev/agents";
/// The same for controllers.
pub(crate) const FOR_CONTROLLERS: &str = "torpor.dev/controllers";
/// The annotation of a node with the certificate of its agent (DER, in base64). The controllers alone write it.
pub(crate) const AGENT: &str = "torpor.dev/agent";
/// Where the API server says which node a token is of.
const NODE: &str = "authentication.kubernetes.io/node-name";

/// An address with a port, or with the one that is usual: of an address alone it cannot be told whether it is one of
/// IPv6, which has colons, too.
///
/// # Errors
/// If it is neither.
pub(crate) fn address(text: &str, port: u16) -> std::result::Result<SocketAddr, AddrParseError> {
    let alone = |_| text.parse().map(|ip: IpAddr| SocketAddr::new(ip, port));
    text.parse().or_else(alone)
}

/// Asks the API server whose `token` is, which has to be for `audience`.
///
/// # Errors
/// If the API server cannot be reached, or does not let this agent ask.
pub(crate) fn review(api: &Api, token: &str, audience: &str) -> Result<Value> {
    let review = json!({
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenReview",
        "spec": { "token": token, "audiences": [audience] },
    });
    let mut said = api.create("/apis/authentication.k8s.io/v1/tokenreviews", &review)?;
    // Whoever answers without looks at no audience.
    let all = said["status"]["audiences"].as_array();
    if !all.is_some_and(|all| all.iter().any(|one| one == audience)) {
        said["status"]["authenticated"] = json!(false);
    }
    Ok(said)
}

/// The node that the reviewed token of an agent is bound to.
///
/// # Errors
/// If the token is of no agent, or bound to no node.
pub(crate) fn node_of(review: &Value) -> std::result::Result<&str, String> {
    let status = &review["status"];
    if status["authenticated"] != true || text(status, "/user/username") != ACCOUNT {
        return Err("the token is of no agent".into());
    }
    match status["user"]["extra"][NODE][0].as_str() {
        Some(node) if !node.is_empty() => Ok(node),
        _ => Err("the token of the agent is bound to no node".into()),
    }
}

/// The certificate of the agent of a node, if the node's object names one.
///
/// # Errors
/// If the API server does not answer.
pub(crate) fn certificate(api: &Api, node: &str) -> Result<Option<Vec<u8>>> {
    if !is_name(node) {
        return Ok(None);
    }
    let known = api.get(&format!("/api/v1/nodes/{node}"))?.unwrap_or_default();
    Ok(annotation(&known, AGENT).and_then(|text| BASE64_STANDARD.decode(text).ok()))
}

/// The pod `name` in the namespace of `checkpoint`; nothing if there is none.
///
/// # Errors
/// If the API server does not answer.
pub(crate) fn reader(api: &Api, checkpoint: &Value, name: &str) -> Result<Value> {
    let namespace = text(checkpoint, "/metadata/namespace");
    if !is_name(namespace) || !is_name(name) {
        return Ok(Value::Null);
    }
    let pod = api.get(&format!("/api/v1/namespaces/{namespace}/pods/{name}"))?;
    Ok(pod.unwrap_or_default())
}

/// Why whoever `review` is of must not have `checkpoint`, which is for `pod`, if so.
#[must_use]
pub(crate) fn objection(review: &Value, checkpoint: &Value, pod: &Value) -> Option<String> {
    let node = match node_of(review) {
        Ok(node) => node,
        Err(why) => return Some(why),
    };
    let uid = text(pod, "/metadata/uid");
    if uid.is_empty() || (!is_shared(checkpoint) && claimed_by(checkpoint) != Some(uid)) {
        return Some("the checkpoint is not claimed for the pod".into());
    }
    if text(pod, "/metadata/namespace") != text(checkpoint, "/metadata/namespace")
        || annotation(pod, RESTORE_FROM) != checkpoint["metadata"]["name"].as_str()
    {
        return Some("the pod does not continue from the checkpoint".into());
    }
    if text(pod, "/spec/nodeName") != node {
        return Some(format!("the pod of the checkpoint is not on the node {node:?}"));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Server;

    #[test]
    fn addresses_of_both_kinds_with_and_without_a_port() {
        let at = |text: &str| address(text, 1).map(|address| address.to_string()).ok();
        for (text, expected) in [
            ("10.0.0.1", Some("10.0.0.1:1")),
            ("10.0.0.1:2", Some("10.0.0.1:2")),
            ("fd00::7690", Some("[fd00::7690]:1")),
            ("[fd00::1]:2", Some("[fd00::1]:2")),
            ("node1", None),
        ] {
            assert_eq!(at(text).as_deref(), expected, "{text}");
        }
    }

    #[test]
    fn a_token_is_good_for_whom_it_was_made_alone() {
        let server = Server::start();
        let api = server.api("controller");
        let is_good = |token: &str, audience: &str| {
            node_of(&review(&api, token, audience).unwrap()).is_ok_and(|node| node == "node1")
        };
        assert!(is_good("desk:node1", FOR_CONTROLLERS) && is_good("peer:node1", FOR_AGENTS));
        // What one was shown it cannot show to others, and the API server's is for that alone.
        for token in ["peer:node1", "agent:node1", ""] {
            assert!(!is_good(token, FOR_CONTROLLERS), "{token}");
        }
        for token in ["desk:node1", "agent:node1", ""] {
            assert!(!is_good(token, FOR_AGENTS), "{token}");
        }
        server.also(|request| {
            let user = json!({ "username": ACCOUNT, "extra": { NODE: ["node1"] } });
            let status = json!({ "authenticated": true, "user": user });
            let reviewed = request.path.ends_with("/tokenreviews");
            reviewed.then(|| torpor_queue::http::Response::json(&json!({ "status": status })))
        });
        assert!(!is_good("desk:node1", FOR_CONTROLLERS), "it has not looked at the audience");
    }

    #[test]
    fn only_the_node_of_the_pod_gets_a_checkpoint() {
        let review = json!({ "status": {
            "authenticated": true,
            "user": { "username": ACCOUNT, "extra": { NODE: ["node2"] } },
        } });
        let checkpoint = json!({
            "metadata": { "namespace": "a", "name": "c" },
            "status": { "claimedBy": { "name": "p", "uid": "u" } },
        });
        let pod = json!({
            "metadata": { "namespace": "a", "uid": "u", "annotations": { RESTORE_FROM: "c" } },
            "spec": { "nodeName": "node2" },
        });
        assert_eq!(objection(&review, &checkpoint, &pod), None);
        let mut stolen = review.clone();
        stolen["status"]["user"]["extra"][NODE] = json!(["node3"]);
        assert!(objection(&stolen, &checkpoint, &pod).is_some());
        stolen["status"]["user"]["extra"] = Value::Null;
        assert!(objection(&stolen, &checkpoint, &pod).is_some());
        let mut other = review.clone();
        other["status"]["user"]["username"] = json!("system:serviceaccount:a:torpor-agent");
        assert!(objection(&other, &checkpoint, &pod).is_some());
        let mut forged = review.clone();
        forged["status"]["authenticated"] = json!(false);
        assert!(objection(&forged, &checkpoint, &pod).is_some());
        assert!(objection(&review, &json!({}), &pod).is_some());
        assert!(objection(&review, &checkpoint, &json!({})).is_some());
        // One that many may have: of its own namespace, and told so by the controller.
        let mut shared = checkpoint;
        shared["spec"] = json!({ "sharing": "Shared" });
        shared["status"] = json!({});
        assert_eq!(objection(&review, &shared, &pod), None);
        let mut foreign = pod.clone();
        foreign["metadata"]["namespace"] = json!("b");
        assert!(objection(&review, &shared, &foreign).is_some());
        let mut unasked = pod;
        unasked["metadata"]["annotations"] = Value::Null;
        assert!(objection(&review, &shared, &unasked).is_some());
    }
}
