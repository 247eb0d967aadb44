//! Between source and agent: a proxy that reads the frames of the conversation, and at one of them, or some time behind
//! it, cuts the link or has one of the two killed.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Output};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use super::Host;

/// Bytes of what a connection begins with, and of the head of a frame (docs/migration.md).
const PREAMBLE: usize = 12;
const HEADER: usize = 8;

/// What is done at a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    CutLink,
    KillSource,
    KillAgent,
}

/// At which message: counted over both directions of the conversation.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    pub fault: Fault,
    pub at: usize,
    /// Whether the message has been passed on when it happens.
    pub passed: bool,
    /// How much later it is, while everybody works on.
    pub later: Duration,
}

/// Between source and agent.
pub struct Proxy {
    pub path: PathBuf,
    there: PathBuf,
    /// How many messages there were.
    pub seen: AtomicUsize,
    plan: Option<Plan>,
    /// Set when it is time; whoever waits for it does it and clears it.
    pub due: AtomicBool,
    /// When it is time, if that does not wait for a message.
    moment: Mutex<Option<Instant>>,
    open: Mutex<Vec<UnixStream>>,
    /// The round whose connections end after so many bytes of pages; with a plan, that happens then.
    short: Option<(u32, u64)>,
    /// How many connections have joined that round.
    pub joined: AtomicUsize,
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
            seen: AtomicUsize::new(0),
            plan,
            due: AtomicBool::new(false),
            moment: Mutex::new(None),
            open: Mutex::default(),
            short,
            joined: AtomicUsize::new(0),
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
        let begun = from.read_exact(&mut preamble).and_then(|()| to.write_all(&preamble));
        while begun.is_ok() {
            let mut frame = vec![0; HEADER];
            if from.read_exact(&mut frame).is_err() {
                break;
            }
            let len = u32::from_le_bytes(frame[4..].try_into().unwrap()) as usize;
            frame.resize(HEADER + len, 0);
            if from.read_exact(&mut frame[HEADER..]).is_err() {
                break;
            }
            let text = String::from_utf8_lossy(&frame[HEADER..]).into_owned();
            if asks {
                is_conversation.lock().unwrap().get_or_insert(text.contains("\"begin\""));
            }
            let counted = *is_conversation.lock().unwrap() == Some(true) && frame[0] == 1;
            let number =
                if counted { self.seen.fetch_add(1, Ordering::SeqCst) } else { usize::MAX };
            let plan = self.plan.filter(|plan| plan.at == number);
            if plan.is_some_and(|plan| !plan.passed) {
                self.strike();
            }
            if to.write_all(&frame).is_err() {
                break;
            }
            if let Some(plan) = plan {
                if plan.later.is_zero() {
                    self.strike();
                } else {
                    *self.moment.lock().unwrap() = Some(Instant::now() + plan.later);
                }
            }
            if text.contains("\"joined\"") || text.contains("\"join\"") {
                // What follows are pages.
                let is_short =
                    |&(round, _): &(u32, u64)| text.contains(&format!("\"round\":{round}"));
                let most = self.short.filter(is_short).map_or(u64::MAX, |(_, most)| most);
                self.joined.fetch_add(usize::from(most < u64::MAX), Ordering::SeqCst);
                let passed = std::io::copy(&mut (&mut from).take(most), &mut to);
                if self.plan.is_some() && passed.is_ok_and(|passed| passed == most) {
                    self.strike();
                }
                break;
            }
        }
        let _ = (to.shutdown(std::net::Shutdown::Both), from.shutdown(std::net::Shutdown::Both));
    }

    /// Waits for the end of a migration to `there`, and does to it what is planned when it is time.
    pub fn disturb(&self, mut migration: Child, there: &mut Host) -> Output {
        loop {
            if self.is_due() {
                match self.plan.unwrap().fault {
                    Fault::KillSource => {
                        migration.kill().unwrap();
                        self.cut();
                    }
                    Fault::KillAgent => {
                        there.stop_agent();
                        there.start_agent();
                    }
                    Fault::CutLink => self.cut(),
                }
                self.due.store(false, Ordering::SeqCst);
            }
            if migration.try_wait().unwrap().is_some() && !self.due.load(Ordering::SeqCst) {
                return migration.wait_with_output().unwrap();
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Whether it is time, once: for a message that waits, or because the moment has come.
    fn is_due(&self) -> bool {
        let has_come = |moment: &mut Instant| *moment <= Instant::now();
        let come = self.moment.lock().unwrap().take_if(has_come).is_some();
        come || self.due.load(Ordering::SeqCst)
    }

    /// It is time: waits until it has been done.
    fn strike(&self) {
        if self.plan.is_some_and(|plan| plan.fault == Fault::CutLink) {
            self.cut();
            return;
        }
        self.due.store(true, Ordering::SeqCst);
        while self.due.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(1));
        }
    }

    pub fn cut(&self) {
        for stream in self.open.lock().unwrap().drain(..) {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }
}
