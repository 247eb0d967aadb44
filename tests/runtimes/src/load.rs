//! Clients that keep a server busy and check each of its answers.

use std::io::{self, BufRead, BufReader, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::redis::{Redis, Reply};
use crate::wait::until_true;

/// One exchange with a server; an error is a wrong answer or a broken connection.
pub type Step = Box<dyn FnMut() -> io::Result<()> + Send>;

/// Clients at work, each on a thread of its own.
#[derive(Debug)]
pub struct Load {
    stop: Arc<AtomicBool>,
    rest: Arc<AtomicBool>,
    resting: Vec<Arc<AtomicBool>>,
    steps: Vec<Arc<AtomicU64>>,
    error: Arc<Mutex<Option<io::Error>>>,
}

impl Load {
    /// Starts the clients.
    pub fn start(clients: Vec<Step>) -> Self {
        let mut load = Self {
            stop: Arc::default(),
            rest: Arc::default(),
            resting: Vec::new(),
            steps: Vec::new(),
            error: Arc::default(),
        };
        for mut step in clients {
            let (steps, resting) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
            load.steps.push(steps.clone());
            load.resting.push(resting.clone());
            let (stop, rest, error) = (load.stop.clone(), load.rest.clone(), load.error.clone());
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let rests = rest.load(Ordering::Relaxed);
                    resting.store(rests, Ordering::Relaxed);
                    if rests {
                        std::thread::sleep(std::time::Duration::from_millis(1));
                        continue;
                    }
                    if let Err(failed) = step() {
                        // A client that was told to stop may lose its server at any time.
                        if !stop.load(Ordering::Relaxed) {
                            error.lock().unwrap().get_or_insert(failed);
                        }
                        return;
                    }
                    steps.fetch_add(1, Ordering::Relaxed);
                    // Busy, but with room for the other tests.
                    std::thread::sleep(std::time::Duration::from_millis(1));
                }
            });
        }
        load
    }

    /// Lets the clients rest, with all their answers had and their connections open, or go on.
    #[track_caller]
    pub fn rest(&self, rest: bool) {
        self.rest.store(rest, Ordering::Relaxed);
        until_true("all clients rest or go on", || {
            self.resting.iter().all(|resting| resting.load(Ordering::Relaxed) == rest)
        });
    }

    /// Waits until each client has had `more` further answers, all of them right.
    #[track_caller]
    pub fn advance(&self, more: u64) {
        let now = || self.steps.iter().map(|steps| steps.load(Ordering::Relaxed));
        let goals: Vec<u64> = now().map(|steps| steps + more).collect();
        until_true("all clients get further answers", || {
            if let Some(error) = self.error.lock().unwrap().as_ref() {
                panic!("a client failed: {error}");
            }
            now().zip(&goals).all(|(steps, goal)| steps >= *goal)
        });
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        // A thread may hang in a read from a server that is gone: it is left to itself.
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// A client that counts up a key of a Redis server, which nobody else may touch.
pub fn redis(address: &str, key: &str) -> io::Result<Step> {
    let mut client = Redis::connect(address)?;
    let (key, mut last) = (key.to_owned(), None);
    Ok(Box::new(move || {
        let Reply::Number(number) = client.command(&["INCR", &key])? else {
            return Err(wrong("no number"));
        };
        if last.replace(number).is_some_and(|last| number != last + 1) {
            return Err(wrong(&format!("{key}: {number} after another number")));
        }
        Ok(())
    }))
}

/// A client of the counter servers in `programs/`: it sends a line with a number, and the server
/// answers with the sum of the numbers on this connection and with what its background threads have
/// counted so far.
pub fn counter(address: &str) -> io::Result<Step> {
    let mut stream = BufReader::new(TcpStream::connect(address)?);
    let (mut number, mut sum, mut background) = (0_u64, 0_u64, 0_u64);
    Ok(Box::new(move || {
        number += 1;
        sum += number;
        stream.get_mut().write_all(format!("{number}\n").as_bytes())?;
        let mut line = String::new();
        if stream.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let answer: Option<(u64, u64)> = line
            .trim()
            .split_once(' ')
            .and_then(|(sum, background)| Some((sum.parse().ok()?, background.parse().ok()?)));
        match answer {
            Some((theirs, counted)) if theirs == sum && counted >= background => {
                background = counted
            }
            _ => return Err(wrong(&format!("sum {sum}, background {background}: {line:?}"))),
        }
        Ok(())
    }))
}

/// The error of a wrong answer.
pub fn wrong(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}
