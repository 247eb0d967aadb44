//! What nodes are to what goes on there. Agents tell it, their nodes are labelled so, and a pod that continues is
//! given an affinity to those that fit.

use std::collections::{BTreeSet, HashSet};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use rustls::pki_types::CertificateDer;
use rustls::server::ParsedCertificate;
use serde_json::{Value, json};
use torpor_worker::tell;

use super::keys::{Refusal, forbidden};
use super::placement::may_go;
use super::webhook::put;
use crate::api::Api;
use crate::disruption::is_cordoned;
use crate::error::{Error, Result};
use crate::machine::{MACHINE, Machine};
use crate::peer::{self, AGENT};
use crate::pod::{annotation, is_name, text};

/// No certificate of an agent is longer, in base64.
const MAX_CERTIFICATE: usize = 4096;
/// A checkpoint goes to no more nodes than these before a pod is there.
const FEW: usize = 3;
/// The nodes.
const NODES: &str = "/api/v1/nodes";

/// Labels the node that `token` is bound to: its agent says what it is, and which certificate it shows to others.
///
/// # Errors
/// If the token is of no agent, or it says nothing of the kind; if the API server does not answer.
pub(super) fn label(api: &Api, token: &str, said: &[u8]) -> std::result::Result<Value, Refusal> {
    let review = peer::review(api, token, peer::FOR_CONTROLLERS)?;
    let node = match peer::node_of(&review) {
        Ok(node) if is_name(node) => node,
        Ok(node) => return forbidden(format!("{node:?} is no name of a node")),
        Err(why) => return forbidden(why),
    };
    let said: Value = serde_json::from_slice(said).unwrap_or_default();
    let Some(machine) = Machine::read(&said) else { return forbidden("this is no machine") };
    let certificate = text(&said, "/certificate");
    // Agents of before have none.
    if !certificate.is_empty() && !is_certificate(certificate) {
        return forbidden("this is no certificate");
    }
    let place = format!("{NODES}/{node}");
    let Some(mut known) = api.get(&place)? else { return forbidden("there is no such node") };
    let (name, what) = (machine.label(), json!(machine).to_string());
    let uid = &known["metadata"]["uid"];
    let mut patch = vec![json!({ "op": "test", "path": "/metadata/uid", "value": uid })];
    if known["metadata"]["labels"][MACHINE] != name {
        patch.push(put(&known, "labels", MACHINE, json!(name)));
    }
    for (note, value) in [(MACHINE, what.as_str()), (AGENT, certificate)] {
        if !value.is_empty() && annotation(&known, note) != Some(value) {
            patch.push(put(&known, "annotations", note, json!(value)));
            known["metadata"]["annotations"][note] = json!(value);
        }
    }
    if patch.len() > 1 {
        api.patch(&place, &json!(patch))?;
    }
    Ok(json!({ "machine": name }))
}

/// Whether a text is a certificate in base64.
fn is_certificate(text: &str) -> bool {
    let der = BASE64_STANDARD.decode(text).map(CertificateDer::from);
    text.len() <= MAX_CERTIFICATE && der.is_ok_and(|der| ParsedCertificate::try_from(&der).is_ok())
}

/// Some of the nodes. Where they cannot be listed, none.
fn listed(api: &Api, query: &str) -> Result<Vec<Value>> {
    match api.list(&format!("{NODES}?{query}")) {
        Err(error @ Error::Refused { status: 429 | 500.., .. }) => Err(error),
        Err(error) => {
            tell!("nodes: {error}");
            Ok(Vec::new())
        }
        all => all,
    }
}

/// The names of the nodes that take no more pods.
///
/// # Errors
/// If the API server has too much to do for a moment.
pub(super) fn drained(api: &Api) -> Result<Vec<String>> {
    let all = listed(api, "fieldSelector=spec.unschedulable%3Dtrue")?;
    let cordoned = all.iter().filter(|node| is_cordoned(node));
    Ok(cordoned.map(|node| text(node, "/metadata/name").to_owned()).collect())
}

/// The nodes that take pods, with what they are.
#[derive(Debug, Default)]
pub(super) struct Nodes(Vec<(Value, Machine)>);

impl Nodes {
    #[cfg(test)]
    pub(super) fn of(all: Vec<(Value, Machine)>) -> Self {
        Self(all)
    }

    /// Those that are known. Where they cannot be listed, none are.
    ///
    /// # Errors
    /// If the API server has too much to do for a moment.
    pub(super) fn known(api: &Api) -> Result<Self> {
        let open = "fieldSelector=spec.unschedulable%3Dfalse";
        let known = format!("{open}&labelSelector={}", MACHINE.replace('/', "%2F"));
        let all = listed(api, &known)?;
        let known = |node: Value| {
            let machine = serde_json::from_str(annotation(&node, MACHINE)?).ok()?;
            let machine = Machine::read(&machine)?;
            let (metadata, spec) = (&node["metadata"], &node["spec"]);
            let labels = &metadata["labels"];
            let kept = json!({
                "metadata": { "name": metadata["name"], "labels": labels },
                "spec": { "taints": spec["taints"] },
            });
            (labels[MACHINE] == machine.label()).then_some((kept, machine))
        };
        Ok(Self(all.into_iter().filter_map(known).collect()))
    }

    /// Whether no node is known: there is none yet that its agent has told of, or they cannot be listed.
    #[must_use]
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The labels of the nodes on which what ran on `machine` (as an object) goes on in a pod of a specification.
    /// `None` if that cannot be told, none if there is no such node.
    #[must_use]
    pub(super) fn that_fit(&self, machine: &Value, spec: &Value) -> Option<BTreeSet<String>> {
        let machine = Machine::read(machine).filter(|_| !self.is_empty())?;
        Some(self.fitting(&machine, spec).map(|(_, there)| there.label()).collect())
    }

    /// The names of the nodes on which what ran on `machine` (as an object) goes on in a pod of a specification. `None` if that
    /// cannot be told.
    #[must_use]
    pub(super) fn names_that_fit(&self, machine: &Value, spec: &Value) -> Option<HashSet<&str>> {
        let machine = Machine::read(machine).filter(|_| !self.is_empty())?;
        let fitting = self.fitting(&machine, spec);
        Some(fitting.map(|(node, _)| text(node, "/metadata/name")).collect())
    }

    /// The names of the nodes on which a checkpoint goes on in a pod of a specification, beside the one that has it. None if
    /// they are more than a few: most of them would fetch it for nothing.
    #[must_use]
    pub(super) fn few_that_fit(&self, checkpoint: &Value, spec: &Value) -> Vec<String> {
        let Some(machine) = Machine::read(&checkpoint["status"]["machine"]) else {
            return Vec::new();
        };
        let has_it = text(checkpoint, "/status/nodeName");
        let names = self.fitting(&machine, spec).map(|(node, _)| text(node, "/metadata/name"));
        let others: Vec<&str> = names.filter(|name| *name != has_it).take(FEW + 1).collect();
        match others.len() {
            0..=FEW => others.into_iter().map(str::to_owned).collect(),
            _ => Vec::new(),
        }
    }

    /// The nodes on which what ran on `machine` goes on in a pod of a specification.
    fn fitting(&self, machine: &Machine, spec: &Value) -> impl Iterator<Item = &(Value, Machine)> {
        let fits =
            move |(node, there): &&(Value, Machine)| machine.goes_on(there) && may_go(spec, node);
        self.0.iter().filter(fits)
    }
}

/// What a node was, as its own annotation says.
#[must_use]
pub(super) fn machine_of(api: &Api, node: &str) -> Value {
    let known = api.get(&format!("{NODES}/{node}")).ok().flatten().unwrap_or_default();
    let text = annotation(&known, MACHINE).unwrap_or_default();
    serde_json::from_str(text).unwrap_or_default()
}

/// Puts a pod on nodes with one of these labels alone, beside what it wants itself.
pub(super) fn keep_to(spec: &mut Value, labels: &BTreeSet<String>) {
    require(
        spec,
        "matchExpressions",
        &json!({ "key": MACHINE, "operator": "In", "values": labels }),
    );
}

/// Keeps a pod away from a node, beside what it wants itself.
pub(super) fn keep_away(spec: &mut Value, node: &str) {
    let away = json!({ "key": "metadata.name", "operator": "NotIn", "values": [node] });
    require(spec, "matchFields", &away);
}

/// Adds a requirement to a list of all terms that say where a pod may go: of terms one is enough.
fn require(spec: &mut Value, list: &str, requirement: &Value) {
    let required =
        &mut spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
    let Some(terms) = required["nodeSelectorTerms"].as_array_mut() else {
        required["nodeSelectorTerms"] = json!([{ list: [requirement] }]);
        return;
    };
    for term in terms {
        let has = |list: &str| term[list].as_array().is_some_and(|all| !all.is_empty());
        // One without any selects no node, and is to go on doing so.
        if !has("matchExpressions") && !has("matchFields") {
            continue;
        }
        match term[list].as_array_mut() {
            Some(all) => all.push(requirement.clone()),
            None => term[list] = json!([requirement]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::tests::machine;
    use crate::testing::Server;

    #[test]
    fn an_agent_says_what_its_own_node_is() {
        let server = Server::start();
        let api = server.api("controller");
        let place = |node: &str| format!("{NODES}/{node}");
        for node in ["node1", "node2"] {
            let labels = json!({ "kubernetes.io/hostname": node });
            server.put(&place(node), json!({ "metadata": { "uid": node, "labels": labels } }));
        }
        let what = machine("6.12", &["sse2"]);
        let said = json!(what).to_string();
        label(&api, "desk:node1", said.as_bytes()).unwrap();
        let node = server.get(&place("node1")).unwrap();
        assert_eq!(node["metadata"]["labels"][MACHINE], what.label());
        assert_eq!(node["metadata"]["labels"]["kubernetes.io/hostname"], "node1");
        assert_eq!(machine_of(&api, "node1"), json!(what));
        assert_eq!(peer::certificate(&api, "node1").unwrap(), None, "its agent has said none");
        // Nothing is written that is there.
        label(&api, "desk:node1", said.as_bytes()).unwrap();
        assert_eq!(server.get(&place("node1")).unwrap(), node);
        let mut odd = json!(what);
        odd["certificate"] = json!("bm9uZQ==");
        let odd = odd.to_string();
        for (token, said) in [
            ("alice", said.as_str()),
            ("", &said),
            ("desk:node3", &said),
            ("desk:../node2", &said),
            ("desk:node2", "{}"),
            ("desk:node2", &odd),
            ("desk:node2", "nothing"),
        ] {
            assert!(label(&api, token, said.as_bytes()).is_err(), "{token} {said}");
        }
        assert_eq!(machine_of(&api, "node2"), Value::Null);
        let known = Nodes::known(&api).unwrap();
        let fit = |spec: Value| known.that_fit(&json!(what), &spec);
        assert_eq!(fit(json!({})), Some([what.label()].into()));
        let elsewhere = json!({ "nodeSelector": { "kubernetes.io/hostname": "node2" } });
        assert_eq!(fit(elsewhere), Some([].into()));
        assert_eq!(Nodes::default().that_fit(&json!(what), &json!({})), None);
    }

    #[test]
    fn a_checkpoint_goes_ahead_to_a_few_nodes_or_to_none() {
        let [here, less] = [machine("6.12", &["sse2"]), machine("6.1", &["sse2"])];
        let node = |name: &str| json!({ "metadata": { "name": name, "labels": { "zone": name } } });
        let checkpoint = json!({ "status": { "nodeName": "n0", "machine": here } });
        let few = |names: &[&str], spec: Value| {
            let mut all: Vec<(Value, Machine)> =
                names.iter().map(|name| (node(name), here.clone())).collect();
            all.push((node("older"), less.clone()));
            Nodes(all).few_that_fit(&checkpoint, &spec)
        };
        assert_eq!(few(&["n0", "n1", "n2", "n3"], json!({})), ["n1", "n2", "n3"]);
        assert!(few(&["n0", "n1", "n2", "n3", "n4"], json!({})).is_empty(), "they are many");
        let zone = json!({ "nodeSelector": { "zone": "n4" } });
        assert_eq!(few(&["n0", "n1", "n2", "n3", "n4"], zone), ["n4"], "that may be its own");
        assert!(few(&["n0"], json!({})).is_empty(), "it is there");
        let unknown = json!({ "status": { "nodeName": "n0" } });
        assert!(Nodes(vec![(node("n1"), here)]).few_that_fit(&unknown, &json!({})).is_empty());
    }

    #[test]
    fn what_a_pod_wants_itself_stays() {
        let mut spec = json!({ "nodeName": "x" });
        let labels = ["b", "a"].map(str::to_owned).into();
        keep_to(&mut spec, &labels);
        let required = "/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution";
        let one = json!({ "key": MACHINE, "operator": "In", "values": ["a", "b"] });
        let terms = json!({ "nodeSelectorTerms": [{ "matchExpressions": [one] }] });
        assert_eq!(spec.pointer(required), Some(&terms));
        let zone = json!({ "key": "zone", "operator": "Exists" });
        let name = json!({ "key": "metadata.name", "operator": "In", "values": ["n"] });
        let mut spec = json!({ "affinity": {
            "podAffinity": {},
            "nodeAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [],
                "requiredDuringSchedulingIgnoredDuringExecution": { "nodeSelectorTerms": [
                    { "matchExpressions": [zone] }, { "matchFields": [name] }, {},
                ] },
            },
        } });
        keep_to(&mut spec, &labels);
        let terms = json!([
            { "matchExpressions": [zone, one] },
            { "matchFields": [name], "matchExpressions": [one] },
            {},
        ]);
        assert_eq!(spec.pointer(required).unwrap()["nodeSelectorTerms"], terms);
        assert!(spec["affinity"]["podAffinity"].is_object());
    }
}
