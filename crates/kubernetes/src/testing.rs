//! An API server for tests: objects in memory, versions, and tokens that are bound to nodes.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use rcgen::KeyPair;
use serde_json::{Value, json};
use tempfile::TempDir;
use torpor_queue::http::{Request, Response};

use crate::agent::{server, speak};
use crate::api::{Api, ApiArgs, HOOKS};
use crate::peer::{ACCOUNT, FOR_AGENTS, FOR_CONTROLLERS};
use crate::pod::text;
use crate::time;

/// What else answers at the same address.
type Other = Arc<dyn Fn(&Request) -> Option<Response> + Send + Sync>;

thread_local! {
    /// The directories of a test's servers, which go with its thread: other threads hold the servers for ever.
    static PLACES: RefCell<Vec<TempDir>> = const { RefCell::new(Vec::new()) };
}

/// Objects by their paths, and the last version of any.
type Objects = (BTreeMap<String, Value>, u64);

/// The server. It ends with the process.
pub(crate) struct Server {
    objects: Mutex<Objects>,
    other: Mutex<Option<Other>>,
    address: String,
    place: PathBuf,
}

impl Server {
    /// Starts one.
    pub(crate) fn start() -> Arc<Self> {
        let key = KeyPair::generate().unwrap();
        let params = rcgen::CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        let certificate = params.self_signed(&key).unwrap();
        let tls = server(vec![certificate.der().clone()], &key).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().to_owned();
        PLACES.with_borrow_mut(|places| places.push(dir));
        let this = Arc::new(Self {
            objects: Mutex::default(),
            other: Mutex::default(),
            address: format!("https://{}", listener.local_addr().unwrap()),
            place,
        });
        fs::write(this.place.join("ca.crt"), certificate.pem()).unwrap();
        let bundle = BASE64_STANDARD.encode(certificate.pem());
        this.put("/api/v1/namespaces/kube-system", json!({ "metadata": { "uid": "this" } }));
        this.put(HOOKS, json!({ "webhooks": [{ "clientConfig": { "caBundle": bundle } }] }));
        let shared = Arc::clone(&this);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (shared, tls) = (Arc::clone(&shared), Arc::clone(&tls));
                thread::spawn(move || {
                    // A client that is gone is none of the test's business.
                    let _ = speak(stream, &tls, |request| shared.answer(&request));
                });
            }
        });
        this
    }

    /// Lets something else answer first.
    pub(crate) fn also(
        &self,
        other: impl Fn(&Request) -> Option<Response> + Send + Sync + 'static,
    ) {
        *self.other.lock().unwrap() = Some(Arc::new(other));
    }

    /// Where it is.
    pub(crate) fn address(&self) -> String {
        self.address.clone()
    }

    /// A client with a token; that of an agent is `agent:NODE`, those that it shows to other agents and to controllers
    /// are `peer:NODE` and `desk:NODE`.
    pub(crate) fn api(&self, token: &str) -> Api {
        let file = self.place.join(token);
        fs::write(&file, token).unwrap();
        let server = Some(self.address());
        let ca_file = self.place.join("ca.crt");
        Api::open(&ApiArgs { server, token_file: file, ca_file }).unwrap()
    }

    fn objects(&self) -> MutexGuard<'_, Objects> {
        self.objects.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts an object there.
    pub(crate) fn put(&self, path: &str, object: Value) {
        put(&mut self.objects(), path, object);
    }

    /// Changes the object that is there, before anybody else does.
    pub(crate) fn change(&self, path: &str, change: impl FnOnce(&mut Value)) {
        let mut objects = self.objects();
        let mut object = objects.0[path].clone();
        change(&mut object);
        put(&mut objects, path, object);
    }

    /// The object that is there.
    pub(crate) fn get(&self, path: &str) -> Option<Value> {
        self.objects().0.get(path).cloned()
    }

    fn answer(&self, request: &Request) -> Response {
        // It may ask this server in its turn.
        let other = self.other.lock().unwrap().clone();
        if let Some(other) = other
            && let Some(response) = other(request)
        {
            return response;
        }
        let body: Value = serde_json::from_slice(&request.body).unwrap_or_default();
        let path = request.path.as_str();
        match request.method.as_str() {
            "POST" if path.ends_with("/tokenreviews") => Response::json(&reviewed(&body)),
            "POST" => self.make(path, body),
            "PUT" => self.replace(path, body),
            "PATCH" => self.patch(path, &body),
            "DELETE" => match self.objects().0.remove(path) {
                Some(object) => Response::json(&object),
                None => Response::problem(404, "gone"),
            },
            _ => match self.get(path) {
                Some(object) => Response::json(&object),
                None if is_list(path) => Response::json(&json!({ "items": self.list(path) })),
                None => Response::problem(404, "no such object"),
            },
        }
    }

    fn make(&self, path: &str, mut object: Value) -> Response {
        let mut objects = self.objects();
        if let Some(start) = object["metadata"]["generateName"].as_str() {
            let name = format!("{start}{}", objects.1);
            object["metadata"]["name"] = json!(name);
        }
        let place = format!("{path}/{}", text(&object, "/metadata/name"));
        if objects.0.contains_key(&place) {
            return Response::problem(409, "it is there");
        }
        object["metadata"]["uid"] = json!(format!("uid-{place}"));
        object["metadata"]["creationTimestamp"] = json!(time::format(time::now()));
        Response::json(put(&mut objects, &place, object))
    }

    /// Nobody else writes between the look at the version and the change: else what they wrote would be lost.
    fn replace(&self, path: &str, object: Value) -> Response {
        let place = path.strip_suffix("/status").unwrap_or(path);
        let mut objects = self.objects();
        let known = objects.0.get(place).cloned();
        let Some(mut known) = known else { return Response::problem(404, "gone") };
        if known["metadata"]["resourceVersion"] != object["metadata"]["resourceVersion"] {
            return Response::problem(409, "somebody was first");
        }
        match path.ends_with("/status") {
            true => known["status"] = object["status"].clone(),
            false => known = object,
        }
        Response::json(put(&mut objects, place, known))
    }

    /// Carries out what Torpor sends of RFC 6902: all of it, or nothing.
    fn patch(&self, path: &str, patch: &Value) -> Response {
        let mut objects = self.objects();
        let known = objects.0.get(path).cloned();
        let Some(mut object) = known else { return Response::problem(404, "gone") };
        for step in patch.as_array().into_iter().flatten() {
            let (place, value) = (text(step, "/path"), &step["value"]);
            if step["op"] == "test" {
                if object.pointer(place) != Some(value) {
                    return Response::problem(422, "it is another one");
                }
                continue;
            }
            let (parent, name) = place.rsplit_once('/').unwrap_or_default();
            let name = name.replace("~1", "/").replace("~0", "~");
            match object.pointer_mut(parent).and_then(Value::as_object_mut) {
                Some(parent) => drop(parent.insert(name, value.clone())),
                None => return Response::problem(422, "there is no such place"),
            }
        }
        Response::json(put(&mut objects, path, object))
    }

    /// The objects of a kind, in one namespace or in all.
    fn list(&self, path: &str) -> Vec<Value> {
        let objects = self.objects();
        let (group, kind) = path.rsplit_once('/').unwrap();
        let everywhere = !group.contains("/namespaces/");
        let below = |place: &str| {
            let parts = place.strip_prefix(group).unwrap_or_default().split('/');
            match parts.collect::<Vec<_>>().as_slice() {
                ["", "namespaces", _, of, _] => everywhere && *of == kind,
                ["", of, _] => *of == kind,
                _ => false,
            }
        };
        objects.0.iter().filter(|(place, _)| below(place)).map(|(_, o)| o.clone()).collect()
    }
}

/// Puts an object there, in a version of its own.
fn put<'o>(objects: &'o mut Objects, path: &str, mut object: Value) -> &'o Value {
    objects.1 += 1;
    object["metadata"]["resourceVersion"] = json!(objects.1.to_string());
    let place = objects.0.entry(path.to_owned()).or_default();
    *place = object;
    place
}

/// Whether a path is that of a list, and not of an object.
fn is_list(path: &str) -> bool {
    let kinds = [
        "pods",
        "podcheckpoints",
        "podsnapshotpolicies",
        "podmigrations",
        "secrets",
        "events",
        "nodes",
    ];
    kinds.iter().any(|kind| path.ends_with(&format!("/{kind}")))
}

fn reviewed(review: &Value) -> Value {
    let audience = text(review, "/spec/audiences/0");
    let kind = match audience {
        FOR_AGENTS => "peer:",
        FOR_CONTROLLERS => "desk:",
        _ => "agent:",
    };
    let node = text(review, "/spec/token").strip_prefix(kind);
    let extra = json!({ "authentication.kubernetes.io/node-name": [node] });
    let user = json!({ "username": ACCOUNT, "extra": extra });
    let status = json!({ "authenticated": node.is_some(), "user": user, "audiences": [audience] });
    json!({ "status": status })
}

/// As that of Kubernetes: whoever has not seen what another one has changed changes nothing.
#[test]
fn no_change_is_lost() {
    const EACH: u64 = 2000;
    let (server, place) = (Server::start(), "/api/v1/nodes/node1");
    server.put(place, json!({ "status": { "count": 0 } }));
    let add = || {
        let mut object = server.get(place).unwrap();
        let count = object["status"]["count"].as_u64().unwrap();
        object["status"]["count"] = json!(count + 1);
        server.replace(&format!("{place}/status"), object).status == 200
    };
    let adds = || (0..EACH).for_each(|_| while !add() {});
    thread::scope(|scope| (0..2).for_each(|_| drop(scope.spawn(adds))));
    assert_eq!(server.get(place).unwrap()["status"]["count"], 2 * EACH);
}
