//! Clients as those of YCSB: they read and write records of 1 KB, some much more often than others, and verify every
//! answer.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};

use super::answers::Answers;
use super::world::{Net, SERVICE};
use super::zipf::{Random, Zipf};

/// Bytes of a record.
pub const RECORD: usize = 1000;
const PORT: u16 = 6379;
const CLIENTS: usize = 4;
/// Records that are written before an answer is waited for, while there is no load yet.
const AT_ONCE: usize = 100;
/// No answer for so long is an error.
const PATIENCE: Duration = Duration::from_secs(60);

/// The clients.
pub struct Load {
    threads: Vec<JoinHandle<Result<()>>>,
    shared: Arc<Shared>,
}

struct Shared {
    stop: AtomicBool,
    /// Clients that have written all their records.
    filled: AtomicU32,
    answers: Answers,
}

impl Load {
    /// Starts clients in `net`, which write all `records` once; `reads` of a hundred requests then are reads. Returns
    /// when the load has begun.
    pub fn start(net: &Net, records: u64, reads: u64) -> Result<Self> {
        let (stop, filled) = (AtomicBool::new(false), AtomicU32::new(0));
        let shared = Arc::new(Shared { stop, filled, answers: Answers::new() });
        let each = records / CLIENTS as u64;
        let zipf = Arc::new(Zipf::new(each));
        let mut load = Self { threads: Vec::new(), shared };
        for number in 0..CLIENTS as u64 {
            // A thread's connections are made in the network that its parent is in.
            let stream = thread::scope(|scope| {
                let connect = || -> Result<TcpStream> {
                    net.enter()?;
                    Ok(TcpStream::connect((SERVICE, PORT))?)
                };
                scope.spawn(connect).join().map_err(|_| anyhow!("a client panicked"))?
            })?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            let (shared, zipf) = (Arc::clone(&load.shared), Arc::clone(&zipf));
            let first = number * each;
            let versions = vec![0; usize::try_from(each)?];
            let mut client = Client { stream: BufReader::new(stream), first, versions };
            load.threads.push(thread::spawn(move || client.work(&shared, &zipf, reads)));
        }
        while load.shared.filled.load(Ordering::Relaxed) < u32::try_from(CLIENTS)? {
            ensure!(load.threads.iter().all(|thread| !thread.is_finished()), load.finish_early());
            thread::sleep(Duration::from_millis(10));
        }
        Ok(load)
    }

    /// What has ended clients that were to go on.
    fn finish_early(&mut self) -> String {
        self.shared.stop.store(true, Ordering::Relaxed);
        let outcomes = self.threads.drain(..).map(JoinHandle::join);
        let errors = outcomes.filter_map(|outcome| outcome.ok()?.err());
        errors.map(|error| format!("{error:#}")).collect::<Vec<_>>().join("; ")
    }
}

impl super::service::Load for Load {
    fn answers(&self) -> &Answers {
        &self.shared.answers
    }

    /// Ends the clients, which read all their records once more.
    ///
    /// # Errors
    /// If any of them has had a wrong answer, or none.
    fn finish(mut self: Box<Self>) -> Result<()> {
        let errors = self.finish_early();
        ensure!(errors.is_empty(), "clients: {errors}");
        Ok(())
    }
}

/// A client, with records of its own.
struct Client {
    stream: BufReader<TcpStream>,
    /// Its first record.
    first: u64,
    /// How often each of its records was written.
    versions: Vec<u32>,
}

impl Client {
    fn work(&mut self, shared: &Shared, zipf: &Zipf, reads: u64) -> Result<()> {
        self.all(Self::write)?;
        shared.filled.fetch_add(1, Ordering::Relaxed);
        let mut random = Random::new(self.first + 1);
        while !shared.stop.load(Ordering::Relaxed) {
            let record = usize::try_from(zipf.next(&mut random))?;
            if random.below(100) < reads {
                self.ask_read(record)?;
                self.hear_read(record)?;
            } else {
                self.versions[record] += 1;
                self.ask_write(record)?;
                self.hear_written()?;
            }
            shared.answers.add(1)?;
        }
        self.all(Self::read)
    }

    /// Does something to all records.
    fn all(
        &mut self,
        mut work: impl FnMut(&mut Self, std::ops::Range<usize>) -> Result<()>,
    ) -> Result<()> {
        let len = self.versions.len();
        (0..len).step_by(AT_ONCE).try_for_each(|at| work(self, at..len.min(at + AT_ONCE)))
    }

    fn write(&mut self, mut records: std::ops::Range<usize>) -> Result<()> {
        records.clone().try_for_each(|record| self.ask_write(record))?;
        records.try_for_each(|_| self.hear_written())
    }

    fn read(&mut self, mut records: std::ops::Range<usize>) -> Result<()> {
        records.clone().try_for_each(|record| self.ask_read(record))?;
        records.try_for_each(|record| self.hear_read(record))
    }

    fn ask_write(&mut self, record: usize) -> Result<()> {
        let key = self.key(record);
        let head = format!("*3\r\n$3\r\nSET\r\n$16\r\n{key}\r\n${RECORD}\r\n");
        let mut request = head.into_bytes();
        request.extend(self.value(record));
        request.extend(b"\r\n");
        Ok(self.stream.get_mut().write_all(&request)?)
    }

    fn ask_read(&mut self, record: usize) -> Result<()> {
        let request = format!("*2\r\n$3\r\nGET\r\n$16\r\n{}\r\n", self.key(record));
        Ok(self.stream.get_mut().write_all(request.as_bytes())?)
    }

    fn hear_written(&mut self) -> Result<()> {
        self.hear_line("+OK\r\n")
    }

    fn hear_read(&mut self, record: usize) -> Result<()> {
        self.hear_line(&format!("${RECORD}\r\n"))?;
        let mut answer = [0; RECORD + 2];
        self.stream.read_exact(&mut answer).context("a read")?;
        if answer[..RECORD] != self.value(record) {
            bail!("record {record} of {} is not what was written", self.first);
        }
        Ok(())
    }

    fn hear_line(&mut self, expected: &str) -> Result<()> {
        let mut line = String::new();
        (&mut self.stream).take(200).read_line(&mut line).context("an answer")?;
        ensure!(line == expected, "{line:?} where {expected:?} was expected");
        Ok(())
    }

    fn key(&self, record: usize) -> String {
        format!("user{:012}", self.first + record as u64)
    }

    /// What a record holds: bytes that do not compress, other ones in each version.
    fn value(&self, record: usize) -> [u8; RECORD] {
        let seed = (self.first + record as u64) << 32 | u64::from(self.versions[record]);
        let mut random = Random::new(seed);
        let mut value = [0; RECORD];
        value.chunks_mut(8).for_each(|piece| piece.copy_from_slice(&random.next().to_le_bytes()));
        value
    }
}
