//! Between source and agent: a proxy that reads the frames of the conversation, and at a point of the work cuts the link
//! or has one of the two killed: at a message, in the middle of one or of pages, or while the two work and are silent.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Output};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use torpor_tests::kill::leave_at;
use torpor_tests::random::Random;

use super::{Host, descendant};

/// Bytes of what a connection begins with, and of the head of a frame (docs/migration.md).
const PREAMBLE: usize = 12;
const HEADER: usize = 8;

/// What is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    CutLink,
    /// From then on it takes nothing, and neither end hears that.
    HangLink,
    KillSource,
    KillAgent,
    /// The source says something more, after the message.
    Add(&'static str),
}

/// At which point of the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Point {
    /// A message, counted over both directions of the conversation, and whether it has been passed on.
    Message { at: usize, passed: bool },
    /// A message of the conversation that has these words in it, before it is passed on.
    Said(&'static str),
    /// When so many bytes have been passed on, over all connections and in both directions.
    Byte(u64),
    /// A system call (twice: when it begins, and when it ends) of the worker that the one who is harmed has, or
    /// gets, once this message has been passed on.
    Call { message: usize, at: u64 },
    /// When the connections of the short round have brought all that they bring.
    Short,
}

/// What is done, and when.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    pub fault: Fault,
    pub point: Point,
}

impl Plan {
    /// Whether it is time before this message.
    fn is_at(&self, text: &str) -> bool {
        matches!(self.point, Point::Said(words) if text.contains(words))
    }
}

/// How much there was in a migration, and whether what was planned has been done.
#[derive(Debug, Clone, Copy, Default)]
pub struct Seen {
    pub messages: usize,
    pub bytes: u64,
    pub struck: bool,
}

impl Seen {
    /// A byte of such a migration.
    pub fn byte(&self, random: &Random) -> Point {
        Point::Byte(random.below(self.bytes))
    }

    /// A system call of a worker in such a migration: how many there are depends on what it does, so that few are
    /// drawn as often as many.
    pub fn call(&self, random: &Random) -> Point {
        let few = 1 << random.below(12);
        Point::Call { message: random.place(self.messages), at: few + random.below(few) }
    }
}

/// Between source and agent.
pub struct Proxy {
    pub path: PathBuf,
    there: PathBuf,
    messages: AtomicUsize,
    bytes: AtomicU64,
    struck: AtomicBool,
    /// Whether the migration has ended: what others ask afterwards is no part of it.
    over: AtomicBool,
    plan: Option<Plan>,
    /// Set when it is time; whoever waits for it does it and clears it.
    pub due: AtomicBool,
    /// The system call of a worker at which it is time, once that is watched.
    call: Mutex<Option<u64>>,
    open: Mutex<Vec<UnixStream>>,
    /// The round whose connections end after so many bytes of pages; with a plan, that happens then.
    short: Option<(u32, u64)>,
    /// How many connections have joined that round.
    pub joined: AtomicUsize,
    /// A file without which no pages pass.
    gate: Mutex<Option<PathBuf>>,
    /// How long pages take that are read at once: 64 KiB at most.
    pace: Mutex<Duration>,
}

impl Proxy {
    pub fn start(path: PathBuf, there: PathBuf, plan: Option<Plan>) -> Arc<Self> {
        Self::start_with(path, there, plan, None)
    }

    pub fn start_with(
        path: PathBuf,
        there: PathBuf,
        plan: Option<Plan>,
        short: Option<(u32, u64)>,
    ) -> Arc<Self> {
        let listener = UnixListener::bind(&path).unwrap();
        let proxy = Arc::new(Self {
            path,
            there,
            messages: AtomicUsize::new(0),
            bytes: AtomicU64::new(0),
            struck: AtomicBool::new(false),
            over: AtomicBool::new(false),
            plan,
            due: AtomicBool::new(false),
            call: Mutex::new(None),
            open: Mutex::default(),
            short,
            joined: AtomicUsize::new(0),
            gate: Mutex::default(),
            pace: Mutex::default(),
        });
        let accepting = Arc::clone(&proxy);
        thread::spawn(move || {
            for near in listener.incoming() {
                let proxy = Arc::clone(&accepting);
                thread::spawn(move || proxy.serve(near.unwrap()));
            }
        });
        proxy
    }

    /// From now on nothing passes on connections for pages until there is this file.
    pub fn hold_pages_until(&self, there: PathBuf) {
        *self.gate.lock().unwrap() = Some(there);
    }

    /// From now on connections for pages are slow.
    pub fn slow_down(&self, pace: Duration) {
        *self.pace.lock().unwrap() = pace;
    }

    /// What there was so far.
    pub fn seen(&self) -> Seen {
        Seen {
            messages: self.messages.load(Ordering::SeqCst),
            bytes: self.bytes.load(Ordering::SeqCst),
            struck: self.struck.load(Ordering::SeqCst),
        }
    }

    fn serve(self: Arc<Self>, near: UnixStream) {
        let Ok(far) = UnixStream::connect(&self.there) else { return };
        for end in [&near, &far] {
            self.open.lock().unwrap().push(end.try_clone().unwrap());
        }
        let back = (far.try_clone().unwrap(), near.try_clone().unwrap());
        let other = Arc::clone(&self);
        // The first frame of a conversation that moves something says so.
        let is_conversation = Arc::new(Mutex::new(None));
        let known = Arc::clone(&is_conversation);
        thread::spawn(move || other.forward(back.0, back.1, &known, false));
        self.forward(near, far, &is_conversation, true);
    }

    /// Passes frames on, until there are none.
    fn forward(
        &self,
        mut from: UnixStream,
        mut to: UnixStream,
        is_conversation: &Mutex<Option<bool>>,
        asks: bool,
    ) {
        let mut preamble = [0; PREAMBLE];
        let begun = from.read_exact(&mut preamble).and_then(|()| self.pass(&mut to, &preamble));
        while begun.is_ok() {
            let Ok(frame) = read_frame(&mut from) else { break };
            let text = String::from_utf8_lossy(&frame[HEADER..]).into_owned();
            if asks {
                is_conversation.lock().unwrap().get_or_insert(text.contains("\"begin\""));
            }
            let counted = *is_conversation.lock().unwrap() == Some(true) && frame[0] == 1;
            let number = counted.then(|| self.messages.fetch_add(1, Ordering::SeqCst));
            self.strike_at(number, false);
            if counted && self.plan.is_some_and(|plan| plan.is_at(&text)) {
                self.strike();
            }
            if self.pass(&mut to, &frame).is_err() {
                break;
            }
            self.strike_at(number, true);
            if let Some(Plan { fault: Fault::Add(more), .. }) =
                self.plan.filter(|plan| counted && plan.is_at(&text))
            {
                let len = u32::try_from(more.len()).unwrap().to_le_bytes();
                to.write_all(&[&[1, 0, 0, 0][..], &len, more.as_bytes()].concat()).unwrap();
            }
            if text.contains("\"joined\"") || text.contains("\"join\"") {
                // What follows are pages.
                let is_short =
                    |&(round, _): &(u32, u64)| text.contains(&format!("\"round\":{round}"));
                let most = self.short.filter(is_short).map_or(u64::MAX, |(_, most)| most);
                self.joined.fetch_add(usize::from(most < u64::MAX), Ordering::SeqCst);
                let is_all = self.pass_pages(&mut from, &mut to, most).unwrap_or(false);
                if is_all && self.plan.is_some_and(|plan| plan.point == Point::Short) {
                    self.strike();
                }
                break;
            }
        }
        let _ = (to.shutdown(std::net::Shutdown::Both), from.shutdown(std::net::Shutdown::Both));
    }

    /// Passes bytes on. At the one that is planned it happens, when those before it are on their way.
    fn pass(&self, to: &mut UnixStream, bytes: &[u8]) -> io::Result<()> {
        if self.over.load(Ordering::SeqCst) {
            return to.write_all(bytes);
        }
        let before = self.bytes.fetch_add(bytes.len() as u64, Ordering::SeqCst);
        let Some(Plan { point: Point::Byte(at), .. }) = self.plan else {
            return to.write_all(bytes);
        };
        let here = at.checked_sub(before).and_then(|here| usize::try_from(here).ok());
        let Some(here) = here.filter(|&here| here < bytes.len()) else {
            return to.write_all(bytes);
        };
        to.write_all(&bytes[..here])?;
        self.strike();
        to.write_all(&bytes[here..])
    }

    /// Passes pages on, up to so many bytes; whether there were as many.
    fn pass_pages(
        &self,
        from: &mut UnixStream,
        to: &mut UnixStream,
        most: u64,
    ) -> io::Result<bool> {
        let (mut buffer, mut left) = (vec![0; 1 << 16], most);
        let (gate, pace) = (self.gate.lock().unwrap().clone(), *self.pace.lock().unwrap());
        while gate.as_ref().is_some_and(|file| !file.exists()) && !self.over.load(Ordering::SeqCst)
        {
            thread::sleep(Duration::from_millis(1));
        }
        while left > 0 {
            let room = usize::try_from(left).map_or(buffer.len(), |left| left.min(buffer.len()));
            let count = from.read(&mut buffer[..room])?;
            if count == 0 {
                return Ok(false);
            }
            thread::sleep(pace);
            self.pass(to, &buffer[..count])?;
            left -= count as u64;
        }
        Ok(true)
    }

    /// A message is about to be passed on, or has been.
    fn strike_at(&self, message: Option<usize>, is_passed: bool) {
        match self.plan.map(|plan| plan.point) {
            Some(Point::Message { at, passed }) if message == Some(at) && passed == is_passed => {
                self.strike();
            }
            Some(Point::Call { message: at, at: call }) if message == Some(at) && is_passed => {
                *self.call.lock().unwrap() = Some(call);
            }
            _ => {}
        }
    }

    /// Waits for the end of a migration to `there`, and does to it what is planned when it is time.
    pub fn disturb(&self, mut migration: Child, there: &mut Host) -> Output {
        loop {
            if self.due.load(Ordering::SeqCst) {
                self.harm(&mut migration, there);
                bring_back(there);
                self.due.store(false, Ordering::SeqCst);
            }
            self.watch_calls(&mut migration, there);
            if migration.try_wait().unwrap().is_some() && !self.due.load(Ordering::SeqCst) {
                self.over.store(true, Ordering::SeqCst);
                return migration.wait_with_output().unwrap();
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Counts the system calls of a worker, if that is planned and there is one by now.
    fn watch_calls(&self, migration: &mut Child, there: &mut Host) {
        let mut call = self.call.lock().unwrap();
        let (Some(plan), Some(at)) = (self.plan, *call) else { return };
        let whose = match plan.fault {
            Fault::KillAgent => there.agent.as_ref().map(Child::id),
            Fault::KillSource | Fault::CutLink | Fault::HangLink | Fault::Add(_) => {
                Some(migration.id())
            }
        };
        let worker = whose.and_then(|whose| descendant(whose, torpor_worker::COMMAND));
        if let Some(worker) = worker {
            *call = None;
            // One that ends before that is done no harm.
            let _ = leave_at(worker, at, || self.harm(migration, there));
            bring_back(there);
        }
    }

    /// Does what is planned. An agent that was killed is still to be started again.
    fn harm(&self, migration: &mut Child, there: &mut Host) {
        self.struck.store(true, Ordering::SeqCst);
        match self.plan.unwrap().fault {
            Fault::KillSource => {
                migration.kill().unwrap();
                self.cut();
            }
            Fault::KillAgent => there.stop_agent(),
            Fault::CutLink => self.cut(),
            Fault::HangLink | Fault::Add(_) => {}
        }
    }

    /// It is time: waits until it has been done.
    fn strike(&self) {
        if self.plan.is_some_and(|plan| matches!(plan.fault, Fault::Add(_))) {
            return;
        }
        if self.plan.is_some_and(|plan| plan.fault == Fault::HangLink) {
            self.struck.store(true, Ordering::SeqCst);
            while !self.over.load(Ordering::SeqCst) {
                thread::sleep(Duration::from_millis(1));
            }
            return;
        }
        if self.plan.is_some_and(|plan| plan.fault == Fault::CutLink) {
            self.struck.store(true, Ordering::SeqCst);
            self.cut();
            return;
        }
        self.due.store(true, Ordering::SeqCst);
        while self.due.load(Ordering::SeqCst) && !self.over.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// The link is gone for good; what hangs goes on.
    pub fn end(&self) {
        self.cut();
        self.over.store(true, Ordering::SeqCst);
    }

    pub fn cut(&self) {
        for stream in self.open.lock().unwrap().drain(..) {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }
}

/// Starts an agent again that was killed.
fn bring_back(there: &mut Host) {
    if there.agent.is_none() {
        there.start_agent();
    }
}

fn read_frame(from: &mut UnixStream) -> io::Result<Vec<u8>> {
    let mut frame = vec![0; HEADER];
    from.read_exact(&mut frame)?;
    let len = u32::from_le_bytes(frame[4..].try_into().unwrap()) as usize;
    frame.resize(HEADER + len, 0);
    from.read_exact(&mut frame[HEADER..])?;
    Ok(frame)
}
