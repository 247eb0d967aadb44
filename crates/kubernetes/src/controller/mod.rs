//! The controller: gives checkpoints to the pods that continue them, and looks after the gate.

mod act;
mod certificate;
mod cost;
mod decide;
pub(crate) mod keys;
mod lease;
mod migrate;
mod nodes;
mod placement;
mod policy;
mod pull;
mod restores;
mod spread;
#[cfg(test)]
mod tests;
mod turns;
mod webhook;

use std::net::{SocketAddr, TcpListener};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::{Value, json};
use torpor_queue::http::{Request, Response};
use torpor_worker::tell;

use crate::agent::{bearer, serve_each, speak};
use crate::api::{Api, ApiArgs, GROUP};
use crate::bell::{IDLE, ring, wait};
use crate::error::{Context, Result};
use crate::machine::MACHINE_PATH;
use crate::metrics::{Counters, Histogram};
use crate::peer::address;
use crate::pod::GATED;
use crate::time;
use certificate::Certificate;
use decide::{Action, Limits, World, decide};
use keys::{Keys, Refusal, Want};
use lease::Lease;
use nodes::Nodes;
#[cfg(test)]
pub(crate) use webhook::MAKERS;
use webhook::Permits;

/// The port of controllers.
const PORT: u16 = 9443;
/// How long one that does not lead waits.
const WAIT: Duration = Duration::from_secs(2);
/// How often it is looked after the certificate: somebody may make the configuration of the webhooks anew.
const CERTIFICATE: Duration = Duration::from_secs(60);
/// How many are served at a time: the API server, and agents.
const MOST: usize = 1024;
/// How many pods a node restores at a time, if nothing else is said.
pub(crate) const RESTORES_PER_NODE: u16 = 4;
/// How often keys are looked for that nobody needs.
const SWEEP: Duration = Duration::from_secs(3600);

/// The counters of a controller.
const COUNTERS: [(&str, &str); 7] = [
    ("pods_continued_total", "Pods that were given the checkpoint of the pod before them."),
    ("pods_warm_total", "Pods that were given a snapshot."),
    ("pods_queued_total", "Pods that had to wait until nodes had restored others."),
    ("pods_cold_total", "Pods that have waited for a checkpoint and start cold."),
    ("pods_moved_total", "Pods that were moved."),
    ("moves_failed_total", "Pods that could not be moved."),
    ("keys_refused_total", "What agents were refused: keys of images, logins."),
];

/// How long the API server waits for a webhook, but for what the network takes.
const REVIEWS: (&str, &str) =
    ("review_duration_seconds", "How long reviews of pods and jobs took, from request to answer.");

/// The controller of a cluster.
#[derive(Debug, Clone, Args)]
pub struct ControllerArgs {
    /// Where the API server calls the webhooks
    #[arg(
        long,
        value_name = "ADDRESS[:PORT]",
        default_value = "0.0.0.0:9443",
        value_parser = |text: &str| address(text, PORT),
    )]
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
    /// How many pods a node restores at a time; others wait behind the gate until it is their turn
    #[arg(
        long,
        value_name = "NUMBER",
        default_value_t = RESTORES_PER_NODE,
        value_parser = clap::value_parser!(u16).range(1..),
    )]
    pub restores_per_node: u16,
    /// The API server
    #[command(flatten)]
    pub api: ApiArgs,
}

/// Runs the controller; it does not end.
///
/// # Errors
/// If there is no API server to ask, its certificate cannot be had, or the address is in use.
pub fn run(args: &ControllerArgs) -> Result<()> {
    let api = Api::open(&args.api)?;
    let certificate = Arc::new(Mutex::new(Certificate::load(&api, &args.namespace, false)?));
    let counters = Arc::new(Counters::new(COUNTERS));
    let listener = TcpListener::bind(args.listen).context(|| args.listen.to_string())?;
    {
        let certificate = Arc::clone(&certificate);
        let desk = Arc::new(Desk::new(api.clone(), &args.namespace, Arc::clone(&counters)));
        thread::spawn(move || serve(&listener, &desk, &certificate));
    }
    let (bell, rung) = channel();
    for path in [pods(), objects("podcheckpoints"), objects("podmigrations")] {
        ring(api.clone(), path, bell.clone());
    }
    let mut controller = Controller {
        api,
        namespace: args.namespace.clone(),
        limits: Limits {
            gate: args.gate_timeout.into(),
            unclaimed: args.ttl.into(),
            used: 600,
            restores: args.restores_per_node.into(),
        },
        certificate,
        counters,
        checked: None,
        swept: None,
        nodes: Nodes::default(),
    };
    let mut lease = Lease::new(&args.namespace, args.name.clone());
    loop {
        if !lease.hold(&controller.api, Instant::now()) {
            if let Err(error) = controller.follow() {
                tell!("{error}");
            }
            thread::sleep(WAIT);
            continue;
        }
        let leads = |api: &Api| lease.hold(api, Instant::now());
        if let Err(error) = controller.turn_while(leads) {
            tell!("{error}");
            thread::sleep(Duration::from_millis(200));
        }
        wait(&rung, IDLE);
    }
}

fn pods() -> String {
    format!("/api/v1/pods?labelSelector={GATED}%3Dtrue")
}

fn objects(kind: &str) -> String {
    format!("{GROUP}/{kind}")
}

struct Controller {
    api: Api,
    namespace: String,
    limits: Limits,
    certificate: Arc<Mutex<Certificate>>,
    counters: Arc<Counters<7>>,
    /// When it was looked after the certificate.
    checked: Option<Instant>,
    /// When it was looked after the keys.
    swept: Option<Instant>,
    /// What the nodes are that take pods, when pods are placed.
    nodes: Nodes,
}

impl Controller {
    /// Looks at everything, and does what is to be done as long as it leads: there may be much.
    fn turn_while(&mut self, mut leads: impl FnMut(&Api) -> bool) -> Result<()> {
        self.renew()?;
        let pods = self.api.list(&pods())?;
        let list = |kind: &str| self.api.list(&objects(kind));
        let (checkpoints, policies) = (list("podcheckpoints")?, list("podsnapshotpolicies")?);
        let migrations = list("podmigrations")?;
        let drained = match pods.iter().any(decide::asks_for_its_node) {
            true => nodes::drained(&self.api)?,
            false => Vec::new(),
        };
        let in_turns = turns::ask_for_nodes(&pods);
        if in_turns {
            self.nodes = Nodes::known(&self.api)?;
        }
        let world = World {
            pods: &pods,
            checkpoints: &checkpoints,
            policies: &policies,
            migrations: &migrations,
            drained: &drained,
            nodes: &self.nodes,
        };
        let mut actions = decide(world, self.limits, time::now());
        // Nobody waits for these.
        actions.extend(cost::decide(&pods, &checkpoints));
        actions.extend(spread::decide(&checkpoints));
        if !in_turns && actions.iter().any(Action::places) {
            self.nodes = Nodes::known(&self.api)?;
        }
        for action in actions {
            if !leads(&self.api) {
                break;
            }
            match self.carry_out(&action) {
                // Somebody was first: what is true now is seen in the next turn.
                Err(error) if error.is_conflict() => {}
                Err(error) => tell!("{error}"),
                Ok(()) => {}
            }
        }
        Ok(())
    }

    /// Looks after the certificate and the keys, as the one that leads.
    fn renew(&mut self) -> Result<()> {
        if is_due(self.checked, CERTIFICATE) {
            let fresh = Certificate::load(&self.api, &self.namespace, true)?;
            fresh.announce(&self.api)?;
            self.serve_with(fresh);
        }
        if is_due(self.swept, SWEEP) {
            Keys { api: &self.api, namespace: &self.namespace }.sweep()?;
            self.swept = Some(Instant::now());
        }
        Ok(())
    }

    /// Serves with the certificate that the one that leads has announced.
    fn follow(&mut self) -> Result<()> {
        if is_due(self.checked, CERTIFICATE) {
            let fresh = Certificate::load(&self.api, &self.namespace, false)?;
            if fresh.is_announced(&self.api)? {
                self.serve_with(fresh);
            }
        }
        Ok(())
    }

    fn serve_with(&mut self, certificate: Certificate) {
        *self.certificate.lock().unwrap_or_else(PoisonError::into_inner) = certificate;
        self.checked = Some(Instant::now());
    }
}

/// Whether something that was done then is to be done again.
fn is_due(done: Option<Instant>, again: Duration) -> bool {
    done.is_none_or(|at| at.elapsed() >= again)
}

/// What answers the API server, agents, and Prometheus.
struct Desk {
    api: Api,
    namespace: String,
    counters: Arc<Counters<7>>,
    reviews: Histogram,
}

fn serve(listener: &TcpListener, desk: &Arc<Desk>, certificate: &Arc<Mutex<Certificate>>) {
    let (desk, certificate) = (Arc::clone(desk), Arc::clone(certificate));
    serve_each(listener, MOST, move |stream| {
        let tls = certificate.lock().unwrap_or_else(PoisonError::into_inner).tls.clone();
        // Probes of the kubelet's connect and say nothing.
        let _ = speak(stream, &tls, |request| desk.answer(&request));
    });
}

impl Desk {
    fn new(api: Api, namespace: &str, counters: Arc<Counters<7>>) -> Self {
        let reviews = Histogram::new(REVIEWS.0, REVIEWS.1);
        Self { api, namespace: namespace.to_owned(), counters, reviews }
    }

    fn answer(&self, request: &Request) -> Response {
        match request.path.as_str() {
            "/healthz" => return Response::text("text/plain", "ok"),
            "/metrics" => {
                let text = self.counters.text() + &self.reviews.text();
                return Response::text("text/plain; version=0.0.4", text);
            }
            _ => {}
        }
        match for_agent(&self.api, &self.namespace, request) {
            Some(Ok(answer)) => return Response::json(&answer),
            Some(Err(refusal)) => {
                self.counters.add("keys_refused_total", 1);
                tell!("nothing for {}: {refusal:?}", request.path);
                return refusal.response();
            }
            None => {}
        }
        let began = Instant::now();
        match serde_json::from_slice::<Value>(&request.body) {
            Ok(asked) if request.method == "POST" => {
                let ask = Reviewer { api: self.api.clone() };
                let answer = Response::json(&webhook::review(&asked, &ask));
                self.reviews.add(began.elapsed());
                answer
            }
            _ => Response::problem(400, "this is no AdmissionReview"),
        }
    }
}

/// What an agent is told that has sent a request; nothing if agents send none like it.
pub(crate) fn for_agent(
    api: &Api,
    namespace: &str,
    request: &Request,
) -> Option<std::result::Result<Value, Refusal>> {
    let token = bearer(request).unwrap_or_default();
    let pod = request.query("pod").unwrap_or_default();
    let answer = || {
        if let Some((want, of, name)) = Want::of(&request.path) {
            return Some(Keys { api, namespace }.answer(want, token, of, name, pod));
        }
        if let Some(checkpoint) = restores::of(&request.path) {
            return Some(restores::note(api, token, checkpoint, pod, &request.body));
        }
        (request.path == MACHINE_PATH).then(|| nodes::label(api, token, &request.body))
    };
    match request.method.as_str() {
        "POST" => answer(),
        _ => None,
    }
}

/// Asks the API server who may what.
struct Reviewer {
    api: Api,
}

impl Permits for Reviewer {
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
