//! The keys of images. Each namespace has a key, in a Secret of the controllers' own namespace. Each
//! image has one of its own, whose open half goes to the agent that writes the image, and whose secret
//! half is wrapped by the namespace's key and kept in the checkpoint's status. It is unwrapped for one
//! agent alone: that of the node where the pod is that continues from the image. Whoever removes the Secret
//! of a namespace makes its images useless.

use aws_lc_rs::aead::{AES_256_GCM, Aad, NONCE_LEN, Nonce, RandomizedNonceKey};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};
use torpor_queue::http::Response;
use torpor_seal::keys::AgeIdentity;
use torpor_seal::secret::random;
use zeroize::Zeroizing;

use super::pull;
use crate::api::Api;
use crate::checkpoint::{self, is_in_progress, path};
use crate::error::{Context, Error, Result};
use crate::peer;
use crate::pod::{is_name, is_ours, text};

/// The bytes of a key.
const LEN: usize = 32;
/// The label of the Secrets with keys.
const LABEL: &str = "torpor.dev/key";

/// How often an update is tried that others come in between of.
pub(super) const ATTEMPTS: u32 = 5;

/// What an agent asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Want {
    /// The recipient that a new image is sealed for.
    Seal,
    /// The key that opens an image.
    Open,
    /// Who the pod that continues is to the registry that the image is in.
    Pull,
}

impl Want {
    /// What the path of a request asks for: of which checkpoint, by namespace and name.
    #[must_use]
    pub(crate) fn of(path: &str) -> Option<(Self, &str, &str)> {
        let rest = path.strip_prefix("/v1/")?;
        match rest.split('/').collect::<Vec<_>>().as_slice() {
            ["keys", "seal", namespace, name] => Some((Self::Seal, *namespace, *name)),
            ["keys", "open", namespace, name] => Some((Self::Open, *namespace, *name)),
            ["logins", namespace, name] => Some((Self::Pull, *namespace, *name)),
            _ => None,
        }
    }
}

/// Why an agent gets no key.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// It must not have it.
    Forbidden(String),
    /// It cannot be told.
    Failed(Error),
}

impl Refusal {
    /// It as an answer.
    #[must_use]
    pub(crate) fn response(&self) -> Response {
        match self {
            Self::Forbidden(why) => Response::problem(403, why),
            Self::Failed(error) => Response::problem(500, &error.to_string()),
        }
    }
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

pub(super) fn forbidden<T>(why: impl Into<String>) -> std::result::Result<T, Refusal> {
    Err(Refusal::Forbidden(why.into()))
}

/// The keys of a cluster.
#[derive(Debug)]
pub(crate) struct Keys<'a> {
    /// The API server.
    pub api: &'a Api,
    /// Where the Secrets are.
    pub namespace: &'a str,
}

impl Keys<'_> {
    /// Answers an agent that shows `token`, about a checkpoint, and the pod that continues from it.
    ///
    /// # Errors
    /// If the token is of no agent, or of another node's; if the API server does not answer.
    pub(crate) fn answer(
        &self,
        want: Want,
        token: &str,
        namespace: &str,
        name: &str,
        pod: &str,
    ) -> std::result::Result<Value, Refusal> {
        if !is_name(namespace) || !is_name(name) {
            return forbidden("this is no name of a checkpoint");
        }
        let review = peer::review(self.api, token, peer::FOR_CONTROLLERS)?;
        let node = match peer::node_of(&review) {
            Ok(node) => node.to_owned(),
            Err(why) => return forbidden(why),
        };
        for attempt in 1.. {
            let Some(object) = self.api.get(&path(namespace, name))? else { break };
            let answer = match want {
                Want::Seal => self.seal(&object, &node),
                Want::Open => self.open(&object, &review, pod),
                Want::Pull => self
                    .reader(&object, &review, pod)
                    .map(|pod| pull::logins(self.api, &object, &pod)),
            };
            match answer {
                // Somebody else has written to it meanwhile.
                Err(Refusal::Failed(error)) if error.is_conflict() && attempt < ATTEMPTS => {}
                answer => return answer,
            }
        }
        forbidden("there is no such checkpoint")
    }

    /// Makes the key of an image that the agent of `node` is about to write.
    fn seal(&self, object: &Value, node: &str) -> std::result::Result<Value, Refusal> {
        if text(object, "/status/nodeName") != node {
            return forbidden(format!("the checkpoint is not made on the node {node:?}"));
        }
        // An agent that was killed before it has used its key asks for another one.
        if !is_in_progress(object) {
            return forbidden("the checkpoint is written already");
        }
        if let Some(why) = self.is_no_source(object, node)? {
            return forbidden(why);
        }
        let (identity, secret) = AgeIdentity::generate().context(|| "the key of an image")?;
        let mut sealed = object.clone();
        let wrapped = wrap(&self.of_namespace(object)?, &binding(object), secret.as_bytes())?;
        sealed["status"]["wrappedKey"] = json!(wrapped);
        let place = path(text(object, "/metadata/namespace"), text(object, "/metadata/name"));
        self.api.replace(&format!("{place}/status"), &sealed)?;
        Ok(json!({ "recipient": identity.recipient().to_string() }))
    }

    /// Why what a checkpoint says of its source is not true of a pod on `node`, if so: a node makes checkpoints of its
    /// own pods alone.
    fn is_no_source(&self, object: &Value, node: &str) -> Result<Option<String>> {
        let name = text(object, "/spec/sourcePod/name");
        let pod = peer::reader(self.api, object, name)?;
        if !is_ours(&pod) || text(&pod, "/spec/nodeName") != node {
            return Ok(Some(format!("there is no pod {name} to be saved on the node {node:?}")));
        }
        let truth = checkpoint::begun(&pod, node);
        let fields = ["sourcePodUID", "ownerUID", "index", "templateHash"];
        let wrong = fields.into_iter().find(|field| truth[field] != object["status"][field]);
        Ok(wrong.map(|field| {
            format!("the checkpoint is not of the pod {name}: its {field} is another")
        }))
    }

    /// The pod that continues from a checkpoint on the node of the agent that `review` is of.
    fn reader(
        &self,
        object: &Value,
        review: &Value,
        pod: &str,
    ) -> std::result::Result<Value, Refusal> {
        let pod = peer::reader(self.api, object, pod)?;
        let objection = peer::objection(review, object, &pod);
        match objection.or_else(|| checkpoint::objection(&pod, object)) {
            Some(why) => forbidden(why),
            None => Ok(pod),
        }
    }

    /// Unwraps the key of an image for the agent that `review` is of.
    fn open(
        &self,
        object: &Value,
        review: &Value,
        pod: &str,
    ) -> std::result::Result<Value, Refusal> {
        self.reader(object, review, pod)?;
        let wrapped = text(object, "/status/wrappedKey");
        match unwrap(&self.of_namespace(object)?, &binding(object), wrapped) {
            Some(secret) => Ok(json!({ "identity": secret.as_str() })),
            None => forbidden("the key does not belong to what the checkpoint says that it is"),
        }
    }

    /// The key of the namespace of a checkpoint, made if there is none.
    fn of_namespace(&self, object: &Value) -> Result<Zeroizing<Vec<u8>>> {
        let namespace = text(object, "/metadata/namespace");
        let list = format!("/api/v1/namespaces/{}/secrets", self.namespace);
        let name = format!("torpor-key-{namespace}");
        // Another controller may make it at the same time: then theirs is taken.
        for _ in 0..3 {
            if let Some(secret) = self.api.get(&format!("{list}/{name}"))? {
                return read(&secret);
            }
            let key = Zeroizing::new(random::<LEN>().context(|| "a key")?);
            let secret = json!({
                "apiVersion": "v1", "kind": "Secret", "type": "Opaque",
                "metadata": {
                    "name": name, "namespace": self.namespace, "labels": { LABEL: "true" },
                },
                "data": { "key": BASE64_STANDARD.encode(key.as_slice()) },
            });
            match self.api.create(&list, &secret) {
                Err(error) if error.is_conflict() => {}
                made => return made.and_then(|_| read(&secret)),
            }
        }
        Err(Error::new(format!("the key of the namespace {namespace} comes and goes")))
    }

    /// Removes the keys of namespaces that are gone.
    ///
    /// # Errors
    /// If the API server refuses it.
    pub(crate) fn sweep(&self) -> Result<()> {
        let list = format!("/api/v1/namespaces/{}/secrets", self.namespace);
        let keys = self.api.list(&format!("{list}?labelSelector={LABEL}%3Dtrue"))?;
        for key in keys {
            let name = text(&key, "/metadata/name").to_owned();
            let Some(namespace) = name.strip_prefix("torpor-key-") else { continue };
            if self.api.get(&format!("/api/v1/namespaces/{namespace}"))?.is_none() {
                self.api.delete(&format!("{list}/{name}"))?;
            }
        }
        Ok(())
    }
}

fn read(secret: &Value) -> Result<Zeroizing<Vec<u8>>> {
    let what = || "the key of a namespace";
    let bytes = BASE64_STANDARD.decode(text(secret, "/data/key")).context(what)?;
    match bytes.len() {
        LEN => Ok(Zeroizing::new(bytes)),
        _ => Err(Error::new("the key of a namespace has another length")),
    }
}

/// What a wrapped key is bound to: it opens for no other checkpoint, and for none that says of itself
/// that it is of something else.
fn binding(object: &Value) -> Vec<u8> {
    let parts = [
        "torpor image key v1",
        text(object, "/metadata/namespace"),
        text(object, "/metadata/name"),
        text(object, "/metadata/uid"),
        text(object, "/status/sourcePodUID"),
        text(object, "/status/ownerUID"),
        text(object, "/status/index"),
        text(object, "/status/templateHash"),
    ];
    json!(parts).to_string().into_bytes()
}

fn wrap(key: &[u8], binding: &[u8], secret: &[u8]) -> Result<String> {
    let what = || "wrap the key of an image";
    let key = RandomizedNonceKey::new(&AES_256_GCM, key).context(what)?;
    let mut bytes = Zeroizing::new(secret.to_vec());
    let nonce = key.seal_in_place_append_tag(Aad::from(binding), &mut *bytes).context(what)?;
    Ok(BASE64_STANDARD.encode([nonce.as_ref().as_slice(), &bytes].concat()))
}

fn unwrap(key: &[u8], binding: &[u8], wrapped: &str) -> Option<Zeroizing<String>> {
    let bytes = BASE64_STANDARD.decode(wrapped).ok()?;
    let (nonce, sealed) = bytes.split_first_chunk::<NONCE_LEN>()?;
    let key = RandomizedNonceKey::new(&AES_256_GCM, key).ok()?;
    let mut sealed = Zeroizing::new(sealed.to_vec());
    let nonce = Nonce::assume_unique_for_key(*nonce);
    let secret = key.open_in_place(nonce, Aad::from(binding), &mut sealed).ok()?;
    std::str::from_utf8(secret).ok().map(|text| Zeroizing::new(text.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::{begun, ready};
    use crate::pod::RESTORE_FROM;
    use crate::testing::Server;
    use std::sync::Arc;

    const POD: &str = "/api/v1/namespaces/a/pods/web-0";

    /// A checkpoint that is made on node1 of a pod that is there, and the pod that will continue from it on node2.
    fn scene() -> (Arc<Server>, Value) {
        let server = Server::start();
        let pod = json!({
            "metadata": {
                "namespace": "a", "name": "web-0", "uid": "new",
                "annotations": { RESTORE_FROM: "c" },
                "ownerReferences": [{ "uid": "o", "controller": true }],
            },
            "spec": {
                "nodeName": "node2", "runtimeClassName": "torpor",
                "containers": [{ "name": "c", "image": "i" }],
            },
        });
        let mut old = pod.clone();
        old["metadata"]["uid"] = json!("old");
        old["spec"]["nodeName"] = json!("node1");
        let mut object = checkpoint::new(&old, "c", 30);
        object["metadata"]["uid"] = json!("uid-c");
        object["status"] = begun(&old, "node1");
        server.put(&path("a", "c"), object);
        server.put(POD, old);
        (server, pod)
    }

    fn asked(
        server: &Server,
        want: Want,
        token: &str,
        pod: &str,
    ) -> std::result::Result<Value, String> {
        let api = server.api("controller");
        let keys = Keys { api: &api, namespace: "torpor-system" };
        keys.answer(want, token, "a", "c", pod).map_err(|refusal| format!("{refusal:?}"))
    }

    /// Completes the checkpoint, for the pod, which has come.
    fn complete(server: &Server, pod: &Value) {
        server.put(POD, pod.clone());
        let mut object = server.get(&path("a", "c")).unwrap();
        checkpoint::set(&mut object, ready(true, "CheckpointCompleted", ""));
        object["status"]["claimedBy"] = json!({ "name": "web-0", "uid": "new" });
        server.put(&path("a", "c"), object);
    }

    #[test]
    fn the_node_of_the_claimed_pod_gets_the_key_of_the_image() {
        let (server, pod) = scene();
        let sealed = asked(&server, Want::Seal, "desk:node1", "").unwrap();
        complete(&server, &pod);
        let opened = asked(&server, Want::Open, "desk:node2", "web-0").unwrap();
        let identity = AgeIdentity::parse(text(&opened, "/identity")).unwrap();
        assert_eq!(identity.recipient().to_string(), text(&sealed, "/recipient"));
        let object = server.get(&path("a", "c")).unwrap();
        assert!(!object.to_string().contains(text(&opened, "/identity")));
    }

    #[test]
    fn others_may_write_to_a_checkpoint_while_it_gets_its_key() {
        let (server, _) = scene();
        let first = std::sync::atomic::AtomicBool::new(true);
        server.also(move |request| {
            let once =
                request.method == "PUT" && first.swap(false, std::sync::atomic::Ordering::Relaxed);
            once.then(|| Response::problem(409, "somebody was first"))
        });
        asked(&server, Want::Seal, "desk:node1", "").unwrap();
    }

    #[test]
    fn a_node_makes_checkpoints_of_its_own_pods_alone() {
        type Lie = fn(&mut Value, &mut Value);
        let lies: [(&str, Lie); 7] = [
            ("no pod web-0", |pod, _| pod["spec"]["nodeName"] = json!("node2")),
            ("no pod web-0", |pod, _| pod["spec"]["runtimeClassName"] = json!("runc")),
            ("no pod web-1", |_, c| c["spec"]["sourcePod"]["name"] = json!("web-1")),
            ("sourcePodUID", |_, c| c["status"]["sourcePodUID"] = json!("other")),
            ("ownerUID", |_, c| c["status"]["ownerUID"] = json!("other")),
            ("index", |_, c| c["status"]["index"] = json!("7")),
            ("templateHash", |_, c| c["status"]["templateHash"] = json!("other")),
        ];
        for (expected, lie) in lies {
            let (server, _) = scene();
            let mut pod = server.get(POD).unwrap();
            let mut object = server.get(&path("a", "c")).unwrap();
            lie(&mut pod, &mut object);
            server.put(POD, pod);
            server.put(&path("a", "c"), object);
            let refused = asked(&server, Want::Seal, "desk:node1", "").unwrap_err();
            assert!(refused.contains(expected), "{expected}: {refused}");
            let object = server.get(&path("a", "c")).unwrap();
            assert!(!checkpoint::is_sealed(&object), "{expected}");
        }
    }

    #[test]
    fn everybody_else_is_refused() {
        let (server, pod) = scene();
        for token in ["desk:node2", "alice", ""] {
            assert!(asked(&server, Want::Seal, token, "").is_err(), "{token}");
        }
        asked(&server, Want::Seal, "desk:node1", "").unwrap();
        let early = asked(&server, Want::Open, "desk:node2", "web-0").unwrap_err();
        assert!(early.contains("not claimed"), "{early}");
        complete(&server, &pod);
        let late = asked(&server, Want::Seal, "desk:node1", "").unwrap_err();
        assert!(late.contains("already"), "{late}");
        for want in [Want::Open, Want::Pull] {
            // The agent of another node, even of that which has made it; one with a token of somebody else's.
            for token in ["desk:node1", "desk:node3", "alice", ""] {
                assert!(asked(&server, want, token, "web-0").is_err(), "{token}");
            }
            // Another pod, of which nothing was claimed.
            assert!(asked(&server, want, "desk:node2", "web-1").is_err());
        }
        // The pod was changed since.
        let mut privileged = pod.clone();
        privileged["spec"]["containers"][0]["securityContext"] = json!({ "privileged": true });
        server.put(POD, privileged);
        let changed = asked(&server, Want::Open, "desk:node2", "web-0").unwrap_err();
        assert!(changed.contains("something else"), "{changed}");
        server.put(POD, pod);
        for want in [Want::Open, Want::Pull] {
            asked(&server, want, "desk:node2", "web-0").unwrap();
        }
    }

    #[test]
    fn what_a_checkpoint_says_of_itself_is_bound_to_its_key() {
        let (server, mut pod) = scene();
        asked(&server, Want::Seal, "desk:node1", "").unwrap();
        complete(&server, &pod);
        // Somebody has got at the status, and made the template what the pod is by now.
        pod["spec"]["containers"][0]["image"] = json!("evil");
        server.put(POD, pod.clone());
        let mut object = server.get(&path("a", "c")).unwrap();
        object["status"]["templateHash"] = json!(crate::pod::template_hash(&pod));
        server.put(&path("a", "c"), object);
        let forged = asked(&server, Want::Open, "desk:node2", "web-0").unwrap_err();
        assert!(forged.contains("does not belong"), "{forged}");
    }

    #[test]
    fn the_key_of_a_namespace_ends_with_it() {
        let (server, pod) = scene();
        asked(&server, Want::Seal, "desk:node1", "").unwrap();
        let secret = "/api/v1/namespaces/torpor-system/secrets/torpor-key-a";
        let api = server.api("controller");
        let keys = Keys { api: &api, namespace: "torpor-system" };
        server.put("/api/v1/namespaces/a", json!({ "metadata": { "name": "a" } }));
        keys.sweep().unwrap();
        assert!(server.get(secret).is_some());
        api.delete("/api/v1/namespaces/a").unwrap();
        keys.sweep().unwrap();
        assert!(server.get(secret).is_none());
        complete(&server, &pod);
        assert!(asked(&server, Want::Open, "desk:node2", "web-0").is_err(), "shredded");
    }
}
