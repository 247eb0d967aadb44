//! A CRI endpoint that only pretends: it keeps account of sandboxes and containers, and misbehaves as
//! it is told.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use prost::Message;
use torpor_benchmark::cri::v1::*;

use super::images::{Pulls, pull};

/// What a call comes to instead of its answer.
#[derive(Debug, Clone, PartialEq)]
pub enum Mischief {
    /// There is none, for ever.
    Hang,
    /// The code of gRPC and a text.
    Fail(u32, String),
    /// The connection ends, and with it every later one.
    Crash,
    /// It is no message.
    Garbage,
}

#[derive(Debug, Default)]
pub struct State {
    /// Sandboxes with their labels.
    pub sandboxes: BTreeMap<String, HashMap<String, String>>,
    /// Containers with their sandbox, and whether they have ended.
    pub containers: BTreeMap<String, (String, bool)>,
    /// Labels of all containers that ever were.
    labels: BTreeMap<String, HashMap<String, String>>,
    pub images: Vec<String>,
    /// How often each call was made.
    pub calls: BTreeMap<String, u32>,
    pub mischief: BTreeMap<String, Mischief>,
    /// The number of the call, of all, that is carried out and never answered.
    pub held: Option<u32>,
    /// Sandboxes that are to be asked for at the same time, and as many again; whoever asks waits for the others.
    pub together: usize,
    /// How long each image takes that a run begins with.
    pub slow: Duration,
    /// Whether what is started ends at once.
    pub ends_early: bool,
    /// How it asks registries.
    pub pulls: Pulls,
    /// The digests of all that it has pulled.
    pub pulled: Vec<String>,
    /// The parents of control groups that sandboxes were to have.
    pub parents: Vec<String>,
    /// Sandboxes that are being asked for.
    asked: usize,
    /// All that ever were.
    arrived: usize,
    /// The most of them at a time.
    pub most_asked: usize,
    /// Names of sandboxes that were used.
    names: Vec<String>,
    logs: BTreeMap<String, PathBuf>,
    crashed: bool,
}

/// A sandbox, a container and an image that somebody else has made.
const FOREIGN: [&str; 3] = ["foreign-sandbox", "foreign-container", "127.0.0.1:5000/torpor/base:1"];

/// Images of others whose names are much like ours.
const ALIKE: [&str; 3] = [
    "registry.example/torpor-benchmark/tools:1.4",
    "registry.example/torpor-benchmark/base:1",
    "127.0.0.1:5000/mirror/torpor-benchmark/pulled:1",
];

/// A server in a thread of its own.
pub struct Fake {
    pub state: Arc<Mutex<State>>,
    pub socket: PathBuf,
}

type Answer = Result<Vec<u8>, Mischief>;

impl Fake {
    pub fn start(dir: &Path) -> Self {
        let socket = dir.join("cri.sock");
        let mut state = State::default();
        let [sandbox, container, image] = FOREIGN.map(str::to_owned);
        state.sandboxes.insert(sandbox.clone(), HashMap::from([("app".into(), "web".into())]));
        state.containers.insert(container, (sandbox, false));
        state.images.push(image);
        state.images.extend(ALIKE.map(str::to_owned));
        let state = Arc::new(Mutex::new(state));
        let (listening, shared) =
            (std::os::unix::net::UnixListener::bind(&socket).unwrap(), state.clone());
        listening.set_nonblocking(true).unwrap();
        std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = tokio::net::UnixListener::from_std(listening).unwrap();
                loop {
                    let (stream, _) = listener.accept().await.unwrap();
                    let state = shared.clone();
                    if !state.lock().unwrap().crashed {
                        tokio::spawn(connection(stream, state));
                    }
                }
            });
        });
        Self { state, socket }
    }

    /// The configuration of an endpoint.
    pub fn endpoint(&self) -> String {
        let socket = self.socket.display();
        format!("endpoints:\n- name: fake\n  socket: {socket}\n  handlers: [{{name: x}}]\n")
    }

    pub fn mischief(&self, call: &str, mischief: Mischief) {
        self.state.lock().unwrap().mischief.insert(call.into(), mischief);
    }

    /// It does no mischief any more, and answers again if it had crashed.
    pub fn recover(&self) {
        let state = &mut *self.state.lock().unwrap();
        state.mischief.clear();
        state.crashed = false;
    }

    /// How many sandboxes, containers and images there are besides somebody else's, which must still be there as
    /// they were.
    pub fn left(&self) -> (usize, usize, usize) {
        let state = self.state.lock().unwrap();
        let [sandbox, container, image] = FOREIGN;
        let is_there = state.sandboxes.contains_key(sandbox)
            && state.containers.get(container).is_some_and(|(_, ended)| !ended)
            && [&ALIKE[..], &[image]]
                .concat()
                .iter()
                .all(|one| state.images.iter().any(|i| i == one));
        assert!(is_there, "what belongs to others is not as it was: {state:?}");
        let images = state.images.len() - 1 - ALIKE.len();
        (state.sandboxes.len() - 1, state.containers.len() - 1, images)
    }

    /// How many calls there were.
    pub fn all_calls(&self) -> u32 {
        self.state.lock().unwrap().calls.values().sum()
    }

    pub fn calls(&self, call: &str) -> u32 {
        self.state.lock().unwrap().calls.get(call).copied().unwrap_or(0)
    }
}

async fn connection(stream: tokio::net::UnixStream, state: Arc<Mutex<State>>) {
    let Ok(mut connection) = h2::server::handshake(stream).await else {
        return;
    };
    while let Some(Ok((request, respond))) = connection.accept().await {
        let state2 = state.clone();
        tokio::spawn(answer(request, respond, state2));
        if state.lock().unwrap().crashed {
            return;
        }
    }
}

/// Until as many sandboxes are being asked for as are to be at the same time, and a little longer: there may be more.
async fn others(state: &Mutex<State>) {
    let number = {
        let state = &mut *state.lock().unwrap();
        state.asked += 1;
        state.most_asked = state.most_asked.max(state.asked);
        state.arrived += 1;
        state.arrived
    };
    let (mut together, mut waited) = (state.lock().unwrap().together, 0);
    while together > 0 && waited < 20 {
        tokio::time::sleep(Duration::from_millis(5)).await;
        let state = state.lock().unwrap();
        together = state.together;
        // Those of its group are there.
        waited += usize::from(state.arrived >= number.div_ceil(together.max(1)) * together);
    }
}

async fn answer(
    request: http::Request<h2::RecvStream>,
    mut respond: h2::server::SendResponse<Bytes>,
    state: Arc<Mutex<State>>,
) {
    let call = request.uri().path().rsplit('/').next().unwrap().to_owned();
    let mut body = request.into_body();
    let mut message = Vec::new();
    while let Some(Ok(chunk)) = body.data().await {
        let _ = body.flow_control().release_capacity(chunk.len());
        message.extend_from_slice(&chunk);
    }
    let is_sandbox = call == "RunPodSandbox";
    if is_sandbox {
        others(&state).await;
    }
    let mut pulled = Ok(Vec::new());
    if call == "PullImage" {
        let image = PullImageRequest::decode(&message[5..]).unwrap().image.unwrap().image;
        let (slow, how) = {
            let state = state.lock().unwrap();
            (state.slow, state.pulls)
        };
        tokio::time::sleep(if image.contains("/pulled:") { Duration::ZERO } else { slow }).await;
        pulled = tokio::task::spawn_blocking(move || pull(&image, how)).await.unwrap();
    }
    let answer = {
        let state = &mut *state.lock().unwrap();
        state.asked -= usize::from(is_sandbox);
        let answer = match pulled {
            Ok(digests) => {
                state.pulled.extend(digests);
                dispatch(&call, message.get(5..).unwrap_or_default(), state)
            }
            Err(text) => Err(Mischief::Fail(2, text)),
        };
        let held = state.held == Some(state.calls.values().sum());
        if held { Err(Mischief::Hang) } else { answer }
    };
    if answer == Err(Mischief::Hang) {
        tokio::time::sleep(Duration::from_secs(3600)).await;
    }
    if answer == Err(Mischief::Crash) {
        return;
    }
    let head = http::Response::builder().header("content-type", "application/grpc");
    let Ok(mut stream) = respond.send_response(head.body(()).unwrap(), false) else {
        return;
    };
    let (code, text) = match answer {
        Ok(message) => {
            let mut frame = BytesMut::new();
            frame.put_u8(0);
            frame.put_u32(u32::try_from(message.len()).unwrap());
            frame.extend_from_slice(&message);
            let _ = stream.send_data(frame.freeze(), false);
            (0, String::new())
        }
        Err(Mischief::Garbage) => {
            let _ = stream.send_data(Bytes::from_static(&[0, 0, 0, 0, 3, 0xff, 0xff, 0xff]), false);
            (0, String::new())
        }
        Err(Mischief::Fail(code, text)) => (code, text),
        Err(_) => unreachable!(),
    };
    let mut trailers = http::HeaderMap::new();
    trailers.insert("grpc-status", code.to_string().parse().unwrap());
    trailers.insert("grpc-message", text.parse().unwrap());
    let _ = stream.send_trailers(trailers);
}

fn dispatch(call: &str, message: &[u8], state: &mut State) -> Answer {
    *state.calls.entry(call.to_owned()).or_insert(0) += 1;
    if let Some(mischief) = state.mischief.get(call) {
        state.crashed = *mischief == Mischief::Crash;
        return Err(mischief.clone());
    }
    // A message without fields takes no bytes.
    let nothing = Vec::new();
    let not_found = || Mischief::Fail(5, "not found".into());
    match call {
        "Version" => Ok(VersionResponse {
            runtime_name: "fake".into(),
            runtime_version: "v1.2.3".into(),
            runtime_api_version: "v1".into(),
            ..VersionResponse::default()
        }
        .encode_to_vec()),
        "RunPodSandbox" => run_sandbox(state, message),
        "CreateContainer" => create(state, message),
        "StartContainer" => {
            let id = StartContainerRequest::decode(message).unwrap().container_id;
            let log = state.logs.get(&id).ok_or_else(not_found)?;
            fs::write(log, "2026-01-01T00:00:00.5Z stdout F up\n").unwrap();
            if let Some((_, has_ended)) = state.containers.get_mut(&id) {
                *has_ended = state.ends_early;
            }
            Ok(nothing)
        }
        "ContainerStatus" => {
            let id = ContainerStatusRequest::decode(message).unwrap().container_id;
            let (_, has_ended) = state.containers.get(&id).ok_or_else(not_found)?;
            let mut status = ContainerStatus::default();
            status.set_state(if *has_ended {
                ContainerState::ContainerExited
            } else {
                ContainerState::ContainerRunning
            });
            let status = Some(status);
            Ok(ContainerStatusResponse { status, ..ContainerStatusResponse::default() }
                .encode_to_vec())
        }
        "ExecSync" => Ok(ExecSyncResponse::default().encode_to_vec()),
        "StopContainer" => {
            let id = StopContainerRequest::decode(message).unwrap().container_id;
            state.containers.get_mut(&id).ok_or_else(not_found)?.1 = true;
            Ok(nothing)
        }
        "RemoveContainer" => {
            let id = RemoveContainerRequest::decode(message).unwrap().container_id;
            state.containers.remove(&id);
            Ok(nothing)
        }
        "StopPodSandbox" => Ok(nothing),
        "RemovePodSandbox" => {
            let id = RemovePodSandboxRequest::decode(message).unwrap().pod_sandbox_id;
            state.sandboxes.remove(&id);
            state.containers.retain(|_, (sandbox, _)| *sandbox != id);
            Ok(nothing)
        }
        "ListPodSandbox" => {
            let filter = ListPodSandboxRequest::decode(message).unwrap().filter;
            let wanted = filter.unwrap_or_default().label_selector;
            let has = |(_, labels): &(&String, &HashMap<_, _>)| is_labelled(Some(labels), &wanted);
            let ids = state.sandboxes.iter().filter(has).map(|(id, _)| id.clone());
            let items = ids.map(|id| PodSandbox { id, ..PodSandbox::default() }).collect();
            Ok(ListPodSandboxResponse { items }.encode_to_vec())
        }
        "ListContainers" => {
            let filter = ListContainersRequest::decode(message).unwrap().filter;
            let wanted = filter.unwrap_or_default().label_selector;
            let has = |id: &&String| is_labelled(state.labels.get(*id), &wanted);
            let ids = state.containers.keys().filter(has).cloned();
            let containers = ids.map(|id| Container { id, ..Container::default() }).collect();
            Ok(ListContainersResponse { containers }.encode_to_vec())
        }
        "PullImage" => {
            let name = PullImageRequest::decode(message).unwrap().image.unwrap().image;
            state.images.push(name.clone());
            Ok(PullImageResponse { image_ref: name }.encode_to_vec())
        }
        "RemoveImage" => {
            let name = RemoveImageRequest::decode(message).unwrap().image.unwrap().image;
            state.images.retain(|image| *image != name);
            Ok(nothing)
        }
        "ListImages" => {
            let images = vec![Image { repo_tags: state.images.clone(), ..Image::default() }];
            Ok(ListImagesResponse { images }.encode_to_vec())
        }
        _ => Err(Mischief::Fail(12, format!("method {call} not implemented"))),
    }
}

/// Whether all labels are there that are asked for.
fn is_labelled(labels: Option<&HashMap<String, String>>, wanted: &HashMap<String, String>) -> bool {
    wanted.iter().all(|(key, value)| labels.is_some_and(|labels| labels.get(key) == Some(value)))
}

fn run_sandbox(state: &mut State, message: &[u8]) -> Answer {
    let config = RunPodSandboxRequest::decode(message).unwrap().config.unwrap();
    let parent = config.linux.unwrap_or_default().cgroup_parent;
    state.parents.push(parent.clone());
    if !parent.is_empty() && !parent.ends_with(".slice") {
        // As CRI-O says it, where systemd has the control groups.
        let text =
            "cri-o configured with systemd cgroup manager, but did not receive slice as parent: ";
        return Err(Mischief::Fail(2, format!("{text}{parent}")));
    }
    let name = config.metadata.unwrap().name;
    if state.names.contains(&name) {
        return Err(Mischief::Fail(2, format!("name {name} is reserved")));
    }
    let id = format!("sandbox{}", state.names.len());
    state.names.push(name);
    state.sandboxes.insert(id.clone(), config.labels);
    Ok(RunPodSandboxResponse { pod_sandbox_id: id }.encode_to_vec())
}

fn create(state: &mut State, message: &[u8]) -> Answer {
    let request = CreateContainerRequest::decode(message).unwrap();
    if !state.sandboxes.contains_key(&request.pod_sandbox_id) {
        return Err(Mischief::Fail(5, "no such sandbox".into()));
    }
    let id = format!("container{}", state.calls["CreateContainer"]);
    let config = request.config.unwrap();
    let log = Path::new(&request.sandbox_config.unwrap().log_directory).join(config.log_path);
    state.labels.insert(id.clone(), config.labels);
    state.logs.insert(id.clone(), log);
    state.containers.insert(id.clone(), (request.pod_sandbox_id, false));
    Ok(CreateContainerResponse { container_id: id }.encode_to_vec())
}
