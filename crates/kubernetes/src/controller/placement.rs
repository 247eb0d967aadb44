//! Whether a pod may be put on a node, as far as both say: node selector, required node affinity, taints. What else the
//! scheduler looks at (room, volumes, other pods) is another thing each moment.

use serde_json::Value;

use crate::pod::text;

/// Whether a pod of this specification may be put on `node`.
#[must_use]
pub(super) fn may_go(spec: &Value, node: &Value) -> bool {
    is_selected(spec, node) && is_wanted(spec, node) && is_tolerated(spec, node)
}

fn is_selected(spec: &Value, node: &Value) -> bool {
    let mut wanted = spec["nodeSelector"].as_object().into_iter().flatten();
    wanted.all(|(name, value)| node["metadata"]["labels"][name] == *value)
}

fn is_wanted(spec: &Value, node: &Value) -> bool {
    let required =
        &spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
    let Some(terms) = required["nodeSelectorTerms"].as_array() else { return true };
    let label = |one: &Value| node["metadata"]["labels"][text(one, "/key")].as_str();
    let field = |one: &Value| match text(one, "/key") {
        "metadata.name" => node["metadata"]["name"].as_str(),
        _ => None,
    };
    terms.iter().any(|term| {
        let list = |name: &str| term[name].as_array().into_iter().flatten();
        let (mut labels, mut fields) = (list("matchExpressions"), list("matchFields"));
        // A term without any selects nothing.
        let some = list("matchExpressions").chain(list("matchFields")).next().is_some();
        some && labels.all(|one| holds(one, label(one))) && fields.all(|one| holds(one, field(one)))
    })
}

/// Whether a requirement holds for what a node, or a pod, has there.
#[must_use]
pub(super) fn holds(requirement: &Value, value: Option<&str>) -> bool {
    let mut values = requirement["values"].as_array().into_iter().flatten();
    let is_in = value.is_some_and(|value| values.any(|one| one == value));
    let number = |text: Option<&str>| text?.parse::<i64>().ok();
    let limit = number(requirement["values"][0].as_str());
    let order = number(value).zip(limit).map(|(value, limit)| value.cmp(&limit));
    match text(requirement, "/operator") {
        "In" => is_in,
        "NotIn" => !is_in,
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => order.is_some_and(std::cmp::Ordering::is_gt),
        "Lt" => order.is_some_and(std::cmp::Ordering::is_lt),
        _ => false,
    }
}

fn is_tolerated(spec: &Value, node: &Value) -> bool {
    let tolerates = |one: &Value, taint: &Value| {
        let [effect, key, value] = ["/effect", "/key", "/value"].map(|place| text(one, place));
        let any = text(one, "/operator") == "Exists";
        (effect.is_empty() || effect == text(taint, "/effect"))
            && (key == text(taint, "/key") || (key.is_empty() && any))
            && (any || value == text(taint, "/value"))
    };
    let taints = node["spec"]["taints"].as_array().into_iter().flatten();
    let mut hard = taints.filter(|taint| text(taint, "/effect") != "PreferNoSchedule");
    hard.all(|taint| {
        let mut all = spec["tolerations"].as_array().into_iter().flatten();
        all.any(|one| tolerates(one, taint))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn node() -> Value {
        json!({
            "metadata": { "name": "n", "labels": { "zone": "a", "cores": "8" } },
            "spec": { "taints": [
                { "key": "kind", "value": "batch", "effect": "NoSchedule" },
                { "key": "slow", "effect": "PreferNoSchedule" },
            ] },
        })
    }

    /// A specification that tolerates the node.
    fn spec() -> Value {
        json!({ "tolerations": [{ "key": "kind", "value": "batch", "effect": "NoSchedule" }] })
    }

    #[test]
    fn taints() {
        for (toleration, expected) in [
            (json!({ "operator": "Exists" }), true),
            (json!({ "key": "kind", "operator": "Exists" }), true),
            (json!({ "key": "kind", "operator": "Equal", "value": "batch" }), true),
            (json!({ "key": "kind", "value": "batch", "effect": "NoExecute" }), false),
            (json!({ "key": "kind", "value": "other" }), false),
            (json!({ "key": "other", "operator": "Exists" }), false),
            (json!({}), false),
        ] {
            let spec = json!({ "tolerations": [toleration] });
            assert_eq!(may_go(&spec, &node()), expected, "{toleration}");
        }
        assert!(!may_go(&json!({}), &node()) && may_go(&json!({}), &json!({})));
    }

    #[test]
    fn selectors() {
        for (selector, expected) in [
            (json!({ "zone": "a" }), true),
            (json!({ "zone": "a", "cores": "9" }), false),
            (json!({ "disk": "fast" }), false),
            (json!({}), true),
        ] {
            let mut spec = spec();
            spec["nodeSelector"] = selector;
            assert_eq!(may_go(&spec, &node()), expected, "{spec}");
        }
    }

    #[test]
    fn affinities() {
        let one = |key: &str, operator: &str, values: &[&str]| json!([{ "key": key, "operator": operator, "values": values }]);
        let labels = |list: Value| json!([{ "matchExpressions": list }]);
        let fields = |list: Value| json!([{ "matchFields": list }]);
        for (terms, expected) in [
            (labels(one("zone", "In", &["b", "a"])), true),
            (labels(one("zone", "In", &["b"])), false),
            (labels(one("zone", "NotIn", &["b"])), true),
            (labels(one("disk", "NotIn", &["b"])), true),
            (labels(one("zone", "Exists", &[])), true),
            (labels(one("disk", "Exists", &[])), false),
            (labels(one("disk", "DoesNotExist", &[])), true),
            (labels(one("cores", "Gt", &["7"])), true),
            (labels(one("cores", "Gt", &["8"])), false),
            (labels(one("cores", "Lt", &["9"])), true),
            (labels(one("zone", "Lt", &["9"])), false),
            (labels(one("zone", "Likes", &["a"])), false),
            (fields(one("metadata.name", "In", &["n"])), true),
            (fields(one("metadata.name", "NotIn", &["n"])), false),
            (fields(one("spec.other", "In", &["n"])), false),
            (json!([{}]), false),
            (json!([]), false),
            (json!([{}, { "matchExpressions": one("zone", "Exists", &[]) }]), true),
            (
                json!([{
                    "matchExpressions": one("zone", "Exists", &[]),
                    "matchFields": one("metadata.name", "In", &["m"]),
                }]),
                false,
            ),
        ] {
            let mut spec = spec();
            spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"] =
                json!({ "nodeSelectorTerms": terms });
            assert_eq!(may_go(&spec, &node()), expected, "{spec}");
        }
    }
}
