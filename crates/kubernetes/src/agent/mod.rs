//! The agent of a node: decides which pods are saved and which containers restored, keeps
//! checkpoints, and hands them to the agents of other nodes. It touches no process: that is done
//! by the wrapper, which runs beside it as part of the container runtime.

mod depot;
mod drain;
mod eviction;
mod expected;
mod fetch;
mod identity;
mod keys;
mod late;
mod node;
mod parts;
mod peer;
mod probes;
mod restore;
mod rounds;
mod save;
mod store;
mod supply;
#[cfg(test)]
mod tests;
mod tls;
mod upkeep;
mod volumes;

use std::collections::HashSet;
use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use clap::Args;
use torpor_sys::heap;
use torpor_worker::tell;

use crate::api::{Api, ApiArgs, GROUP};
use crate::bell::{IDLE, ring, wait};
use crate::checkpoint::{NODE_LABEL, is_ordered};
use crate::error::{Context, Result};
use crate::message::{Answer, Ask, BEAT, SOCKET, beat, receive, send};
use crate::peer::address;
use identity::Identity;
use node::Node;
pub use peer::bearer;
pub(crate) use peer::serve_each;
pub use tls::{server, speak};

/// Where the DaemonSet has the tokens that an agent shows to other agents, and to the controllers.
pub(crate) const FOR_AGENTS_FILE: &str = "/var/run/secrets/torpor.dev/agents";
pub(crate) const FOR_CONTROLLERS_FILE: &str = "/var/run/secrets/torpor.dev/controllers";
/// The port of agents.
const PORT: u16 = 7690;
/// How often it is looked which pods have come, if nothing is heard.
const EXPECT: Duration = Duration::from_secs(60);
/// How often it is told what this node is.
const INTRODUCE: Duration = Duration::from_secs(600);
/// No more is asked at a time.
const MOST: usize = 512;
/// How long the other end may take to say something.
const PATIENCE: Duration = Duration::from_secs(10);

/// The agent of a node.
#[derive(Debug, Clone, Args)]
pub struct AgentArgs {
    /// The name of the node
    #[arg(long, value_name = "NAME")]
    pub node: String,
    /// The socket for the wrapper
    #[arg(long, value_name = "FILE", default_value = SOCKET)]
    pub socket: PathBuf,
    /// Where checkpoints are kept
    #[arg(long, value_name = "DIR", default_value = "/var/lib/torpor/kubernetes")]
    pub state: PathBuf,
    /// Where the agents of other nodes ask for checkpoints: the address of this node, and a port (default: 7690)
    #[arg(long, value_name = "ADDRESS[:PORT]", value_parser = |text: &str| address(text, PORT))]
    pub listen: SocketAddr,
    /// Where the controllers give out keys
    #[arg(long, value_name = "URL", default_value = "https://torpor-webhook.torpor-system.svc")]
    pub controller: String,
    /// Where the kubelet of this node is asked for checkpoints
    #[arg(long, value_name = "URL", default_value = "https://127.0.0.1:10250")]
    pub kubelet: String,
    /// Where checkpoints are stored so that they do not die with their node: dir:PATH, s3://BUCKET/PREFIX or
    /// HOST/NAME (empty: nowhere)
    #[arg(long, value_name = "PLACE", default_value = "", hide_default_value = true)]
    pub store: String,
    /// The file with the token that is shown to the agents of other nodes
    #[arg(long, value_name = "FILE", default_value = FOR_AGENTS_FILE)]
    pub agents_token_file: PathBuf,
    /// The file with the token that is shown to the controllers
    #[arg(long, value_name = "FILE", default_value = FOR_CONTROLLERS_FILE)]
    pub controllers_token_file: PathBuf,
    /// The API server
    #[command(flatten)]
    pub api: ApiArgs,
}

/// Runs the agent; it does not end.
///
/// # Errors
/// If there is no API server to ask, the directory of state cannot be made, or an address is in use.
pub fn run(args: &AgentArgs) -> Result<()> {
    let api = Api::open(&args.api)?;
    fs::create_dir_all(&args.state).context(|| args.state.display().to_string())?;
    let identity = Identity::open(&args.state.join("agent.pem"), args.listen.ip())?;
    let node = Arc::new(Node::new(args, api, identity)?);
    // Whoever asks for memory waits.
    node.resume();
    let shown = || args.socket.display().to_string();
    if let Some(dir) = args.socket.parent() {
        fs::create_dir_all(dir).context(shown)?;
    }
    // It takes the place of the one that an agent before this one has left behind, so that there always is one.
    let new = args.socket.with_extension("new");
    match fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error).context(shown),
        _ => {}
    }
    let listener = UnixListener::bind(&new).context(shown)?;
    fs::set_permissions(&new, fs::Permissions::from_mode(0o600)).context(shown)?;
    fs::rename(&new, &args.socket).context(shown)?;
    let peers = TcpListener::bind(args.listen).context(|| args.listen.to_string())?;
    {
        let node = Arc::clone(&node);
        thread::spawn(move || peer::serve(&peers, &node));
    }
    {
        let node = Arc::clone(&node);
        thread::spawn(move || {
            loop {
                if let Err(error) = node.sweep() {
                    tell!("sweep: {error}");
                }
                // There is a thread for each call, and each has had memory of its own.
                heap::trim();
                node.rest();
            }
        });
    }
    introduce(&node);
    show_life(args.socket.clone());
    follow(&node);
    expect(&node);
    foresee(&node);
    let busy = Arc::new(AtomicUsize::new(0));
    for stream in listener.incoming() {
        let stream = stream.context(shown)?;
        if busy.load(Ordering::Relaxed) >= MOST {
            // A caller that gets no answer goes on without.
            continue;
        }
        let (node, busy) = (Arc::clone(&node), Arc::clone(&busy));
        busy.fetch_add(1, Ordering::Relaxed);
        thread::spawn(move || {
            if let Err(error) = answer(&node, stream) {
                tell!("the wrapper: {error}");
            }
            busy.fetch_sub(1, Ordering::Relaxed);
        });
    }
    Ok(())
}

/// Shows those who ask that there is an agent, or was a moment ago.
fn show_life(socket: PathBuf) {
    thread::spawn(move || {
        loop {
            thread::sleep(BEAT);
            if let Err(error) = beat(&socket) {
                tell!("{error}");
            }
        }
    });
}

/// Tells the controllers what this node and its agent are, again and again: somebody may make its object anew, and the
/// certificate becomes old.
fn introduce(node: &Arc<Node>) {
    let node = Arc::clone(node);
    thread::spawn(move || {
        loop {
            let told = node.introduce();
            thread::sleep(if told.is_ok() { INTRODUCE } else { PATIENCE });
            if let Err(error) = told {
                tell!("what this node is: {error}");
            }
        }
    });
}

/// Carries out what is ordered of pods on this node: each order in a thread of its own.
fn follow(node: &Arc<Node>) {
    let node = Arc::clone(node);
    let list = format!("{GROUP}/podcheckpoints?labelSelector={NODE_LABEL}%3D{}", node.name);
    let (bell, rung) = channel();
    ring(node.api.clone(), list.clone(), bell);
    thread::spawn(move || {
        loop {
            wait(&rung, IDLE);
            match node.api.list(&list) {
                Err(error) => tell!("orders: {error}"),
                Ok(all) => {
                    for order in all.into_iter().filter(is_ordered) {
                        let node = Arc::clone(&node);
                        thread::spawn(move || {
                            if let Err(error) = node.carry_out(&order) {
                                tell!("an order: {error}");
                            }
                        });
                    }
                }
            }
        }
    });
}

/// Begins to fetch the checkpoints of pods as soon as they are bound to this node.
fn expect(node: &Arc<Node>) {
    let node = Arc::clone(node);
    let (bell, rung) = channel();
    ring(node.api.clone(), node.pods_here(), bell);
    thread::spawn(move || {
        let mut seen = HashSet::new();
        loop {
            wait(&rung, EXPECT);
            if let Err(error) = node.prefetch(&mut seen) {
                tell!("pods to come: {error}");
            }
        }
    });
}

/// Fetches what is expected here before the pods have a node that continue from it.
fn foresee(node: &Arc<Node>) {
    let node = Arc::clone(node);
    let (bell, rung) = channel();
    ring(node.api.clone(), expected::list(), bell);
    thread::spawn(move || {
        loop {
            wait(&rung, EXPECT);
            if let Err(error) = node.foresee() {
                tell!("checkpoints to come: {error}");
            }
        }
    });
}

fn answer(node: &Arc<Node>, mut stream: UnixStream) -> Result<()> {
    stream.set_read_timeout(Some(PATIENCE)).context(|| "the socket")?;
    let ask: Ask = receive(&stream)?;
    let answer = node.answer(&ask).unwrap_or_else(|error| {
        tell!("{ask:?}: {error}");
        Answer::Plain
    });
    send(&mut stream, &answer)
}
