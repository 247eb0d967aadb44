//! Who a pod is to a registry: what the Secrets say that its images are pulled with. Those of its ServiceAccount are
//! among the pod's own since it was made (the admission plugin ServiceAccount puts them there).
//!
//! The controllers may read no Secret of a namespace that has not let them.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};
use torpor_blobs::http::Login;
use torpor_blobs::reference::Reference;

use crate::api::Api;
use crate::error::{Context, Error, Result};
use crate::pod::{is_name, text};

/// The type of such a Secret.
const TYPE: &str = "kubernetes.io/dockerconfigjson";
/// No more of them are looked at.
const MOST: usize = 16;

/// What the pull Secrets of `pod` have for the registry that a checkpoint is stored in: `logins`, of which the first
/// fits best, and `problems` with Secrets, as sentences.
#[must_use]
pub(super) fn logins(api: &Api, object: &Value, pod: &Value) -> Value {
    let (mut logins, mut problems) = (Vec::new(), Vec::new());
    let stored = text(object, "/status/checkpointLocation/ociImage/reference").parse();
    if let Ok(Reference::Registry { host, repository, .. }) = stored {
        let namespace = text(pod, "/metadata/namespace");
        let all = pod["spec"]["imagePullSecrets"].as_array().into_iter().flatten();
        for name in all.map(|one| text(one, "/name")).filter(|name| is_name(name)).take(MOST) {
            let secret = api.get(&format!("/api/v1/namespaces/{namespace}/secrets/{name}"));
            match secret.and_then(|secret| read(&secret.unwrap_or_default())) {
                Ok(config) => logins.extend(matching(&config, &host, &repository)),
                Err(error) => problems.push(format!("the Secret {name}: {error}")),
            }
        }
    }
    let logins: Vec<&str> = logins.iter().map(Login::auth).collect();
    json!({ "logins": logins, "problems": problems })
}

/// The configuration in a Secret.
fn read(secret: &Value) -> Result<Value> {
    match text(secret, "/type") {
        TYPE => {}
        "" => return Err(Error::new("it is not there")),
        other => return Err(Error::new(format!("it is of the type {other}, and not {TYPE}"))),
    }
    let data = text(secret, "/data/.dockerconfigjson");
    let bytes = BASE64_STANDARD.decode(data).context(|| "its data")?;
    serde_json::from_slice(&bytes).context(|| "its data")
}

/// The logins of a configuration that are for a repository: of the longest path first, and of a host that is named
/// before one that has a `*`.
fn matching(config: &Value, host: &str, repository: &str) -> Vec<Login> {
    let all = config["auths"].as_object().into_iter().flatten();
    let mut found: Vec<_> = all
        .filter_map(|(place, auth)| Some((weight(place, host, repository)?, login(auth)?)))
        .collect();
    found.sort_by_key(|(weight, _)| std::cmp::Reverse(*weight));
    found.into_iter().map(|(_, login)| login).collect()
}

fn login(auth: &Value) -> Option<Login> {
    if let Some(login) = auth["auth"].as_str().and_then(Login::of_auth) {
        return Some(login);
    }
    Some(Login::new(auth["username"].as_str()?, auth["password"].as_str()?))
}

/// How well a place in a configuration, `[https://]HOST[:PORT][/PATH]` with `*` in its host, fits a repository.
fn weight(place: &str, host: &str, repository: &str) -> Option<(usize, bool)> {
    let place = place.split_once("://").map_or(place, |(_, rest)| rest).trim_end_matches('/');
    let (pattern, path) = place.split_once('/').unwrap_or((place, ""));
    // What Docker has once written behind the host says nothing of the repository.
    let path = match path.split_once('/').unwrap_or((path, "")) {
        ("v1" | "v2", rest) => rest,
        _ => path,
    };
    let below = repository.strip_prefix(path)?;
    let is_below = path.is_empty() || below.is_empty() || below.starts_with('/');
    let (labels, wanted): (Vec<_>, Vec<_>) =
        (pattern.split('.').collect(), host.split('.').collect());
    let is_host = labels.len() == wanted.len()
        && labels.iter().zip(&wanted).all(|(pattern, label)| fits(pattern, label));
    (is_below && is_host).then_some((path.len(), !pattern.contains('*')))
}

/// Whether a text is what a pattern says, in which `*` stands for anything.
fn fits(pattern: &str, text: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else { return pattern == text };
    let Some(mut left) = text.strip_prefix(first) else { return false };
    let mut parts: Vec<&str> = rest.split('*').collect();
    let last = parts.pop().unwrap_or_default();
    for part in parts {
        let Some((_, after)) = left.split_once(part) else { return false };
        left = after;
    }
    left.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Server;

    fn config(auths: Value) -> Value {
        json!({ "auths": auths })
    }

    fn secret(kind: &str, config: &Value) -> Value {
        let data = BASE64_STANDARD.encode(config.to_string());
        json!({ "type": kind, "data": { ".dockerconfigjson": data } })
    }

    fn pod(names: &[&str]) -> Value {
        let names: Vec<Value> = names.iter().map(|name| json!({ "name": name })).collect();
        json!({ "metadata": { "namespace": "a" }, "spec": { "imagePullSecrets": names } })
    }

    fn stored(reference: &str) -> Value {
        json!({ "status": { "checkpointLocation": { "ociImage": { "reference": reference } } } })
    }

    #[test]
    fn places_in_a_configuration() {
        let weight = |place: &str| weight(place, "r.example.org:5000", "team/app");
        for (place, expected) in [
            ("r.example.org:5000", Some((0, true))),
            ("https://r.example.org:5000/v2/", Some((0, true))),
            ("*.example.org:5000", Some((0, false))),
            ("r*.ex*le.org:*", Some((0, false))),
            ("r.example.org:5000/team", Some((4, true))),
            ("r.example.org:5000/v1/team/app/", Some((8, true))),
            ("r.example.org", None),
            ("r.example.org:5001", None),
            ("*.org:5000", None),
            ("x.r.example.org:5000", None),
            ("r.example.org:5000/tea", None),
            ("r.example.org:5000/team/app/x", None),
            ("", None),
        ] {
            assert_eq!(weight(place), expected, "{place}");
        }
        for (pattern, text, fit) in [
            ("a*a", "a", false),
            ("a*a", "aa", true),
            ("*b*c", "abcbc", true),
            ("*b*c", "acb", false),
            ("**", "", true),
        ] {
            assert_eq!(fits(pattern, text), fit, "{pattern} {text}");
        }
    }

    #[test]
    fn only_what_is_for_the_registry_is_given_out() {
        let server = Server::start();
        let auth = |user: &str| json!({ "auth": Login::new(user, "p").auth() });
        let all = config(json!({
            "other.example.org": auth("other"),
            "*.example.org": { "username": "any", "password": "p" },
            "r.example.org/team": auth("team"),
            "r.example.org": auth("host"),
            "r.example.org/team/app": { "username": "nobody" },
        }));
        let place = |name: &str| format!("/api/v1/namespaces/a/secrets/{name}");
        server.put(&place("all"), secret(TYPE, &all));
        server.put(&place("opaque"), secret("Opaque", &all));
        server.put("/api/v1/namespaces/b/secrets/foreign", secret(TYPE, &all));
        let api = server.api("controller");
        let of = |names: &[&str], reference: &str| logins(&api, &stored(reference), &pod(names));
        let said = of(&["all"], "r.example.org/team/app:c");
        let expected = ["team", "host", "any"].map(|user| Login::new(user, "p").auth().to_owned());
        assert_eq!(said, json!({ "logins": expected, "problems": [] }));
        assert_eq!(of(&[], "r.example.org/team/app:c")["logins"], json!([]));
        // What is stored elsewhere takes no login.
        for place in ["dir:/r.example.org:c", "s3://r.example.org/x:c", ""] {
            assert_eq!(of(&["all"], place), json!({ "logins": [], "problems": [] }), "{place}");
        }
        let said = of(&["opaque", "foreign", "../../b/secrets/foreign"], "r.example.org/team:c");
        assert_eq!(said["logins"], json!([]));
        let problems = said["problems"].to_string();
        assert!(problems.contains("the Secret opaque: it is of the type Opaque"), "{problems}");
        assert!(problems.contains("the Secret foreign: it is not there"), "{problems}");
        assert_eq!(said["problems"].as_array().unwrap().len(), 2);
    }

    #[test]
    fn what_a_secret_holds_is_not_told() {
        let mut broken = secret(TYPE, &json!({}));
        for data in ["c2VjcmV0", "!secret", ""] {
            broken["data"][".dockerconfigjson"] = json!(data);
            let said = read(&broken).unwrap_err().to_string();
            assert!(said.contains("its data") && !said.contains("secret"), "{said}");
        }
    }
}
