//! The controller: gives checkpoints to the pods that continue them, and looks after the gate.

mod certificate;
mod decide;
mod lease;
mod webhook;

use std::net::{SocketAddr, TcpListener};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::{Value, json};
use torpor_queue::http::{Request, Response};

use crate::agent::speak;
use crate::api::{Api, ApiArgs, GROUP};
use crate::checkpoint::path;
use crate::error::{Context, Result};
use crate::pod::{GATE, GATED, RESTORE_FROM, controller_of, gates, text};
use crate::time;
use certificate::Certificate;
use decide::{Action, Limits, decide};
use lease::Lease;
use webhook::{Ask, pointer};

/// How long nothing may happen before it is looked after limits of time.
const IDLE: Duration = Duration::from_secs(5);
/// How long one who does not lead waits.
const WAIT: Duration = Duration::from_secs(2);
/// How often it is looked after the certificate.
const CERTIFICATE: Duration = Duration::from_secs(3600);

/// The controller of a cluster.
#[derive(Debug, Clone, Args)]
pub struct ControllerArgs {
    /// Where the API server calls the webhooks
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "0.0.0.0:9443")]
    pub listen: SocketAddr,
    /// The namespace of the controllers
    #[arg(long, value_name = "NAME", default_value = "torpor-system")]
    pub namespace: String,
    /// The name of this controller among them
    #[arg(long, value_name = "NAME", default_value = "controller")]
    pub name: String,
    /// How long a pod waits for its checkpoint
    #[arg(long, value_name = "SECONDS", default_value_t = 120)]
    pub gate_timeout: u32,
    /// How long a checkpoint that nobody claims is kept
    #[arg(long, value_name = "SECONDS", default_value_t = 86_400)]
    pub ttl: u32,
    /// The API server
    #[command(flatten)]
    pub api: ApiArgs,
}

/// Runs the controller; it does not end.
///
/// # Errors
/// If it cannot begin.
pub fn run(args: &ControllerArgs) -> Result<()> {
    let api = Api::open(&args.api)?;
    let certificate = Arc::new(Mutex::new(Certificate::load(&api, &args.namespace)?));
    let listener = TcpListener::bind(args.listen).context(|| args.listen.to_string())?;
    {
        let (api, certificate) = (api.clone(), Arc::clone(&certificate));
        thread::spawn(move || serve(&listener, &api, &certificate));
    }
    let (bell, rung) = channel();
    for path in [format!("/api/v1/pods?labelSelector={GATED}%3Dtrue"), checkpoints()] {
        ring(api.clone(), path, bell.clone());
    }
    let mut controller = Controller {
        api,
        namespace: args.namespace.clone(),
        limits: Limits { gate: args.gate_timeout.into(), unclaimed: args.ttl.into(), used: 600 },
        certificate,
        checked: None,
    };
    let mut lease = Lease::new(&args.namespace, args.name.clone());
    loop {
        if !lease.hold(&controller.api) {
            thread::sleep(WAIT);
            continue;
        }
        if let Err(error) = controller.turn() {
            eprintln!("{error}");
            thread::sleep(Duration::from_millis(200));
        }
        wait(&rung);
    }
}

fn checkpoints() -> String {
    format!("{GROUP}/podcheckpoints")
}

/// Rings whenever something changes.
fn ring(api: Api, path: String, bell: Sender<()>) {
    thread::spawn(move || {
        loop {
            let began = Instant::now();
            // The other end is there as long as the program is.
            let watched = api.watch(&path, || {
                let _ = bell.send(());
            });
            if let Err(error) = watched {
                eprintln!("{error}");
            }
            // One that ends at once is not to be begun at once.
            thread::sleep(Duration::from_secs(1).saturating_sub(began.elapsed()));
        }
    });
}

/// Waits until something has changed, or it is time to look.
fn wait(rung: &Receiver<()>) {
    match rung.recv_timeout(IDLE) {
        Ok(()) => while rung.try_recv().is_ok() {},
        Err(RecvTimeoutError::Timeout) => {}
        Err(RecvTimeoutError::Disconnected) => thread::sleep(IDLE),
    }
}

struct Controller {
    api: Api,
    namespace: String,
    limits: Limits,
    certificate: Arc<Mutex<Certificate>>,
    checked: Option<Instant>,
}

impl Controller {
    fn turn(&mut self) -> Result<()> {
        self.renew()?;
        let pods = self.api.list(&format!("/api/v1/pods?labelSelector={GATED}%3Dtrue"))?;
        let saved = self.api.list(&checkpoints())?;
        for action in decide(&pods, &saved, self.limits, time::now()) {
            match self.carry_out(&action) {
                // Somebody was first: what is true now is seen in the next turn.
                Err(error) if error.is_conflict() => {}
                Err(error) => eprintln!("{error}"),
                Ok(()) => {}
            }
        }
        Ok(())
    }

    fn renew(&mut self) -> Result<()> {
        if self.checked.is_some_and(|at| at.elapsed() < CERTIFICATE) {
            return Ok(());
        }
        let fresh = Certificate::load(&self.api, &self.namespace)?;
        fresh.announce(&self.api)?;
        *self.certificate.lock().unwrap_or_else(PoisonError::into_inner) = fresh;
        self.checked = Some(Instant::now());
        Ok(())
    }

    fn carry_out(&self, action: &Action) -> Result<()> {
        match action {
            Action::Claim { pod, checkpoint } => {
                let name = text(checkpoint, "/metadata/name");
                let mut claimed = checkpoint.clone();
                let claim = json!({
                    "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"],
                });
                if claimed["status"]["claimedBy"] != claim {
                    claimed["status"]["claimedBy"] = claim;
                    self.status(&claimed)?;
                }
                self.ungate(pod, Some(name))?;
                self.note(pod, "CheckpointClaimed", &format!("continues from {name}"));
            }
            Action::Ungate { pod, reason } => {
                self.ungate(pod, None)?;
                self.note(pod, "ColdStart", reason);
            }
            Action::Release { checkpoint } => {
                let mut free = checkpoint.clone();
                if let Some(status) = free["status"].as_object_mut() {
                    status.remove("claimedBy");
                }
                self.status(&free)?;
            }
            Action::Remove { checkpoint } => self.api.delete(&place(checkpoint))?,
        }
        Ok(())
    }

    fn status(&self, checkpoint: &Value) -> Result<()> {
        self.api.replace(&format!("{}/status", place(checkpoint)), checkpoint).map(drop)
    }

    /// Takes the gate away, and says what the pod continues from: in one step.
    fn ungate(&self, pod: &Value, from: Option<&str>) -> Result<()> {
        let left: Vec<Value> =
            gates(pod).filter(|name| *name != GATE).map(|name| json!({ "name": name })).collect();
        let mut patch = vec![
            // Nothing is done to a pod that is not the one that was seen.
            json!({ "op": "test", "path": "/metadata/uid", "value": pod["metadata"]["uid"] }),
            json!({ "op": "replace", "path": "/spec/schedulingGates", "value": left }),
        ];
        if let Some(name) = from {
            patch.push(match pod["metadata"]["annotations"].is_object() {
                true => json!({
                    "op": "add",
                    "path": pointer("/metadata/annotations", RESTORE_FROM),
                    "value": name,
                }),
                false => json!({
                    "op": "add", "path": "/metadata/annotations", "value": { RESTORE_FROM: name },
                }),
            });
        }
        let path = format!(
            "/api/v1/namespaces/{}/pods/{}",
            text(pod, "/metadata/namespace"),
            text(pod, "/metadata/name")
        );
        self.api.patch(&path, &Value::Array(patch)).map(drop)
    }

    /// Tells people. What cannot be told is done nevertheless.
    fn note(&self, pod: &Value, reason: &str, message: &str) {
        let namespace = text(pod, "/metadata/namespace");
        // What has nothing to continue is nobody's news.
        if reason == "ColdStart" && controller_of(pod).is_some() && message.starts_with("there is")
        {
            return;
        }
        let now = time::format(time::now());
        let event = json!({
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": { "generateName": "torpor-", "namespace": namespace },
            "involvedObject": {
                "apiVersion": "v1", "kind": "Pod", "namespace": namespace,
                "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"],
            },
            "type": "Normal", "reason": reason, "message": message,
            "source": { "component": "torpor-controller" },
            "firstTimestamp": now, "lastTimestamp": now, "count": 1,
        });
        if let Err(error) =
            self.api.create(&format!("/api/v1/namespaces/{namespace}/events"), &event)
        {
            eprintln!("{error}");
        }
    }
}

fn place(checkpoint: &Value) -> String {
    path(text(checkpoint, "/metadata/namespace"), text(checkpoint, "/metadata/name"))
}

/// Answers the API server.
fn serve(listener: &TcpListener, api: &Api, certificate: &Arc<Mutex<Certificate>>) {
    for stream in listener.incoming().flatten() {
        let api = api.clone();
        let tls = certificate.lock().unwrap_or_else(PoisonError::into_inner).tls.clone();
        thread::spawn(move || {
            // Probes of the kubelet's connect and say nothing.
            let _ = speak(stream, &tls, |request| answer(&request, &Reviewer { api }));
        });
    }
}

fn answer(request: &Request, ask: &dyn Ask) -> Response {
    if request.path == "/healthz" {
        return Response::text("text/plain", "ok");
    }
    match serde_json::from_slice::<Value>(&request.body) {
        Ok(asked) if request.method == "POST" => Response::json(&webhook::review(&asked, ask)),
        _ => Response::problem(400, "this is no AdmissionReview"),
    }
}

/// Asks the API server who may what.
struct Reviewer {
    api: Api,
}

impl Ask for Reviewer {
    fn may_restore(
        &self,
        user: &Value,
        namespace: &str,
        name: &str,
    ) -> std::result::Result<bool, String> {
        let review = json!({
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": user["username"], "uid": user["uid"], "groups": user["groups"],
                "extra": user["extra"],
                "resourceAttributes": {
                    "group": "torpor.dev", "version": "v1alpha1", "resource": "podcheckpoints",
                    "verb": "restore", "namespace": namespace, "name": name,
                },
            },
        });
        let path = "/apis/authorization.k8s.io/v1/subjectaccessreviews";
        let answer = self.api.create(path, &review).map_err(|error| error.to_string())?;
        Ok(answer["status"]["allowed"] == true)
    }
}
