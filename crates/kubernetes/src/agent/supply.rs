//! Who brings the memory that comes while its pod runs ([`super::late`]): from the agent of the node that has made the
//! checkpoint, which gives it to the node of the pod alone, or from the store. That of a snapshot comes once for all pods here that begin
//! with it meanwhile.

use std::io::ErrorKind::{InvalidInput, WouldBlock};
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{Shutdown, shutdown};
use serde_json::Value;
use torpor_queue::http::{Body, Request, Response};
use torpor_snapshot::feed;
use torpor_worker::tell;

use super::fetch::neither;
use super::late::{Late, LateFile, LateImages, comes_late, has_begun};
use super::node::Node;
use super::parts::StoredPages;
use super::peer::{Caller, PeerLine};
use crate::checkpoint::path;
use crate::error::{Error, Result};
use crate::event::{self, Kind};
use crate::pod::{restores_from, text};

/// How often a node is asked again that does not answer.
const STEP: Duration = Duration::from_millis(200);
/// How often it is looked whether all is here, while nobody asks for anything.
const GLANCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };

impl Node {
    /// Brings what is still to come of a checkpoint that is here, in threads of its own; from the store first, if that had what has come.
    pub(super) fn supply(
        self: &Arc<Self>,
        late: Late,
        namespace: &str,
        name: &str,
        is_of_store: bool,
    ) {
        let (node, namespace, name) = (Arc::clone(self), namespace.to_owned(), name.to_owned());
        thread::spawn(move || {
            let supply = Supply {
                node: &node,
                namespace: &namespace,
                name: &name,
                late: &late,
                line: Mutex::default(),
                stored: Mutex::default(),
                is_of_store: AtomicBool::new(is_of_store),
                is_over: AtomicBool::new(false),
                is_lost: AtomicBool::new(false),
            };
            if let Err(error) = supply.all() {
                tell!("{namespace}/{name}: what was to come of its memory: {error}");
                supply.give_up(&error);
            }
            // What became of it is told. Nobody may listen any more.
            let _ = node.bell.send(());
        });
    }

    /// Goes on with what an agent before this one has begun to bring.
    pub(super) fn resume(self: &Arc<Self>) {
        for (namespace, name) in self.store.all() {
            let Some(dir) = self.store.find(&namespace, &name) else { continue };
            match Late::open(&dir) {
                Ok(None) => {}
                Ok(Some(late)) => self.supply(late, &namespace, &name, false),
                Err(error) => tell!("{namespace}/{name}: {error}"),
            }
        }
    }

    /// The pods on this node that begin, or have begun, with a snapshot.
    ///
    /// # Errors
    /// If the API server does not answer.
    pub(super) fn readers(&self, namespace: &str, name: &str) -> Result<Vec<Value>> {
        let mut pods = self.api.list(&self.pods_here())?;
        pods.retain(|pod| {
            text(pod, "/spec/nodeName") == self.name && restores_from(pod, namespace, name)
        });
        Ok(pods)
    }

    /// Hands out a part of a file of pages of a checkpoint that is here.
    pub(super) fn hand_out_pages(
        &self,
        (namespace, name): (&str, &str),
        (container, id): (&str, u32),
        request: &Request,
    ) -> Response {
        // There is no round 0: what is asked for by something that is no number is not found.
        let round = request.number("round").map(|round| u32::try_from(round).unwrap_or(0));
        let number = |word: &str| request.number(word).unwrap_or_default();
        let part = number("from")..number("from").saturating_add(number("len"));
        let dir = self.store.find(namespace, name).filter(|dir| !comes_late(dir));
        let images = LateImages { container: container.to_owned(), round };
        let file = LateFile { images, id, len: 0 };
        match dir.map(|dir| file.read(&dir, &part)) {
            None => Response::problem(404, "the checkpoint is not here"),
            Some(Err(error)) => Response::problem(404, &error.to_string()),
            Some(Ok(data)) => Response::new("application/octet-stream", Body::Whole(data)),
        }
    }
}

/// Connections to the node that has a checkpoint, for the pod that has claimed it.
struct PodLine {
    peer: PeerLine,
    pod: String,
}

/// Asks what is `kept`, which is made if it is not there, and forgotten if it fails.
fn ask_kept<T, R>(
    kept: &Mutex<Option<Arc<T>>>,
    make: impl FnOnce() -> Result<T>,
    ask: impl FnOnce(&T) -> Result<R>,
) -> Result<R> {
    let known = kept.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let one = match known {
        Some(one) => one,
        None => Arc::new(make()?),
    };
    let answer = ask(&one);
    *kept.lock().unwrap_or_else(PoisonError::into_inner) = answer.is_ok().then_some(one);
    answer
}

/// Who brings the memory of a checkpoint.
struct Supply<'n> {
    node: &'n Node,
    namespace: &'n str,
    name: &'n str,
    late: &'n Late,
    /// The connections to the node that has it, as long as they are good.
    line: Mutex<Option<Arc<PodLine>>>,
    /// The checkpoint in the store, as long as that answers.
    stored: Mutex<Option<Arc<StoredPages>>>,
    /// Whether the store is asked before the node, which has not answered.
    is_of_store: AtomicBool,
    /// Whether all is here, or will not come.
    is_over: AtomicBool,
    /// Whether it will not come.
    is_lost: AtomicBool,
}

impl Supply<'_> {
    /// Brings everything, and meanwhile what the engine asks for.
    fn all(&self) -> Result<()> {
        thread::scope(|scope| {
            for (images, door) in &self.late.doors {
                let answer = move |stream| {
                    // It ends with whoever asks.
                    scope.spawn(move || self.answer(images, stream));
                };
                scope.spawn(move || attend(door, &self.is_over, answer));
            }
            let mut files = self.late.files.iter();
            let all = files
                .try_for_each(|file| file.want(&file.whole(), &|of, part| self.bring(of, part)));
            let ended = all.and_then(|()| self.end());
            self.is_lost.store(ended.is_err(), Ordering::Relaxed);
            self.is_over.store(true, Ordering::Relaxed);
            ended
        })
    }

    /// All is here.
    fn end(&self) -> Result<()> {
        match self.node.store.find(self.namespace, self.name) {
            Some(dir) => self.late.end(&dir),
            None => Ok(()),
        }
    }

    /// Answers one who asks.
    fn answer(&self, images: &LateImages, mut stream: UnixStream) -> io::Result<()> {
        while self.asks(&stream) {
            let feed::Request { file, offset, len, .. } = feed::Request::read(&mut stream)?;
            let part = offset..offset.saturating_add(len);
            let wanted = match self.late.file(images, file) {
                _ if self.is_lost() => Err(Error::new("the memory does not come any more")),
                Some(pages) => pages.want(&part, &|of, part| self.bring(of, part)),
                None => {
                    let container = &images.container;
                    Err(Error::new(format!("{container} has no file {file} of pages")))
                }
            };
            if let Err(error) = &wanted {
                tell!("{}/{}: {error}", self.namespace, self.name);
            }
            stream.write_all(&[u8::from(wanted.is_err())])?;
        }
        Ok(())
    }

    /// Waits until somebody asks, or has ended. If the rest does not come, those who do not ask are not waited for.
    fn asks(&self, stream: &UnixStream) -> bool {
        loop {
            match poll(&mut [PollFd::new(stream, PollFlags::IN)], Some(&GLANCE)) {
                Ok(0) if self.is_lost() => return false,
                Ok(0) | Err(Errno::INTR) => {}
                _ => return true,
            }
        }
    }

    fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Relaxed)
    }

    /// A part of a file, from whoever has it, who may be away for a moment.
    fn bring(&self, of: &LateFile, part: &Range<u64>) -> Result<Vec<u8>> {
        let until = Instant::now() + self.node.silence();
        loop {
            match self.bring_once(of, part) {
                // It was removed there.
                Err(error @ Error::Refused { status: 404, .. }) => return Err(error),
                Err(error) if self.is_gone() => return Err(error),
                Err(_) if Instant::now() < until && !self.is_lost() => sleep(STEP),
                brought => return brought,
            }
        }
    }

    /// A part of a file from the node that has it; if that does not give it, from the store, which is asked first then.
    fn bring_once(&self, of: &LateFile, part: &Range<u64>) -> Result<Vec<u8>> {
        let of_node = || self.node.of_peer(|caller| self.ask(caller, of, part));
        let of_store = || ask_kept(&self.stored, || self.open(), |stored| stored.read(of, part));
        if self.is_of_store.load(Ordering::Relaxed) {
            return of_store().or_else(|other| of_node().map_err(|error| neither(&error, &other)));
        }
        match of_node() {
            Err(error) if self.is_stored() => {
                let brought = of_store().map_err(|other| neither(&error, &other));
                self.is_of_store.store(brought.is_ok(), Ordering::Relaxed);
                brought
            }
            brought => brought,
        }
    }

    /// Whether somebody has removed the checkpoint.
    fn is_gone(&self) -> bool {
        self.node.api.get(&path(self.namespace, self.name)).is_ok_and(|object| object.is_none())
    }

    /// Whether the checkpoint is in the store, as far as anybody says.
    fn is_stored(&self) -> bool {
        self.object().is_ok_and(|object| self.node.depot_of(&object).is_some())
    }

    /// The checkpoint in the store.
    fn open(&self) -> Result<StoredPages> {
        let object = self.object()?;
        let depot = self.node.depot_of(&object);
        let depot = depot.ok_or_else(|| Error::new("it is not in the store"))?;
        self.node.of_store(depot, &object, &self.pod(&object)?, StoredPages::of)
    }

    fn ask(&self, caller: &Caller<'_>, of: &LateFile, part: &Range<u64>) -> Result<Vec<u8>> {
        // It may have another address by now, or another certificate, and so may this one; or another pod has claimed it.
        ask_kept(&self.line, || self.connect(caller), |line| self.ask_over(line, of, part))
    }

    fn ask_over(&self, line: &PodLine, of: &LateFile, part: &Range<u64>) -> Result<Vec<u8>> {
        let (namespace, name, pod) = (self.namespace, self.name, &line.pod);
        let LateFile { images: LateImages { container, round }, id, .. } = of;
        let len = part.end - part.start;
        let round = round.map_or_else(String::new, |round| format!("&round={round}"));
        let path = format!(
            "pages/{namespace}/{name}/{container}/{id}?pod={pod}&from={}&len={len}{round}",
            part.start
        );
        line.peer.bytes(&path, len)
    }

    fn connect(&self, caller: &Caller<'_>) -> Result<PodLine> {
        let object = self.object()?;
        let peer = PeerLine::to(caller, &object, self.node.silence())?;
        Ok(PodLine { peer, pod: self.pod(&object)? })
    }

    fn object(&self) -> Result<Value> {
        let object = self.node.api.get(&path(self.namespace, self.name))?;
        object.ok_or_else(|| Error::new(format!("no checkpoint {}", self.name)))
    }

    /// The pod that the memory is for by now: the one that it began to come for may have gone before it had begun, and another
    /// one has claimed the checkpoint since. Of a snapshot any that begins with it here; none if there is none yet.
    fn pod(&self, object: &Value) -> Result<String> {
        let pod = match text(object, "/status/claimedBy/name") {
            "" if self.is_for_all() => {
                let readers = self.node.readers(self.namespace, self.name)?;
                readers.first().map_or("", |pod| text(pod, "/metadata/name")).to_owned()
            }
            "" => self.late.pod.clone(),
            pod => pod.to_owned(),
        };
        Ok(pod)
    }

    /// Whether any number of pods may begin with it.
    fn is_for_all(&self) -> bool {
        self.late.pod.is_empty()
    }

    /// The rest does not come. If no container has begun yet, it is as if nothing had come; else the engine ends their tasks,
    /// which is told of the pod. A snapshot stays until it comes anew: pods may be about to begin with it.
    fn give_up(&self, error: &Error) {
        let Some(dir) = self.node.store.find(self.namespace, self.name) else { return };
        if !self.is_for_all() && !has_begun(&dir, None) {
            if let Err(error) = self.node.store.remove(self.namespace, self.name) {
                tell!("{}/{}: {error}", self.namespace, self.name);
            }
            return;
        }
        self.late.leave(&dir);
        let text = format!("the rest of its memory has not come, and its tasks are ended: {error}");
        for pod in self.losers(&dir).unwrap_or_default() {
            event::tell(&self.node.api, Kind::ColdPod, &pod, "MemoryLost", &text);
        }
    }

    /// The pods that have begun with the checkpoint in `dir`, as far as they are there.
    fn losers(&self, dir: &Path) -> Result<Vec<Value>> {
        if self.is_for_all() {
            let mut readers = self.node.readers(self.namespace, self.name)?;
            readers.retain(|pod| has_begun(dir, Some(text(pod, "/metadata/uid"))));
            return Ok(readers);
        }
        let pod = self.pod(&self.object().unwrap_or_default())?;
        let place = format!("/api/v1/namespaces/{}/pods/{pod}", self.namespace);
        Ok(self.node.api.get(&place)?.into_iter().collect())
    }
}

/// Lets in whoever comes to a door until all is over, those who are there by then as well. Nobody comes after them.
fn attend(door: &UnixListener, is_over: &AtomicBool, let_in: impl Fn(UnixStream)) {
    while !is_over.load(Ordering::Relaxed) {
        let fds = &mut [PollFd::new(door, PollFlags::IN)];
        if poll(fds, Some(&GLANCE)).is_ok_and(|ready| ready > 0) {
            open_to(door, &let_in);
        }
    }
    // Those who are there stay there.
    let _ = shutdown(door, Shutdown::Both);
    open_to(door, &let_in);
}

/// Lets in all who are at a door.
fn open_to(door: &UnixListener, let_in: impl Fn(UnixStream)) {
    loop {
        match door.accept() {
            Ok((stream, _)) => let_in(stream),
            // There is nobody, or it is shut.
            Err(error) if matches!(error.kind(), WouldBlock | InvalidInput) => return,
            // There are too many open files just now.
            Err(_) => sleep(STEP),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::io::ErrorKind::ConnectionRefused;

    use super::*;

    #[test]
    fn who_is_at_the_door_when_all_is_over_is_let_in_and_nobody_else() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("door");
        let door = UnixListener::bind(&path).unwrap();
        door.set_nonblocking(true).unwrap();
        let guests = [(); 2].map(|()| UnixStream::connect(&path).unwrap());
        let count = Cell::new(0);
        attend(&door, &AtomicBool::new(true), |_| count.set(count.get() + 1));
        assert_eq!(count.get(), guests.len());
        assert_eq!(UnixStream::connect(&path).unwrap_err().kind(), ConnectionRefused);
    }
}
