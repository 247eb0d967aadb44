//! The programs that measure inside of a container. Each prints its values as one line of JSON, which
//! is the last line that it prints.

use std::fs::{File, OpenOptions};
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use clap::Subcommand;
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};

/// What is measured, or done, inside of a container.
#[derive(Debug, Subcommand)]
pub enum Workload {
    /// System calls, switches between threads, and starting programs.
    Calls {
        /// How often the fastest of them is repeated.
        #[arg(long)]
        times: u32,
    },
    /// The first write to fresh memory.
    Fault {
        /// How much, in MiB.
        #[arg(long)]
        size: usize,
    },
    /// Reading and writing a file.
    Disk {
        /// Its size in MiB.
        #[arg(long)]
        size: usize,
        /// The file; it is removed in the end.
        #[arg(long)]
        file: PathBuf,
    },
    /// TCP over loopback.
    Loopback {
        /// How much is sent, in MiB.
        #[arg(long)]
        size: usize,
    },
    /// The one end of a connection: answers for ever.
    Serve,
    /// The other end.
    Connect {
        /// The address of the first.
        address: String,
        /// How much is sent, in MiB.
        #[arg(long)]
        size: usize,
    },
    /// Computes, and says how much CPU time each 100 ms have brought.
    Burn {
        /// For how long, in ms.
        #[arg(long)]
        time: u64,
    },
    /// Computes a fixed amount.
    Work {
        /// The CPU time it takes, in ms.
        #[arg(long)]
        time: u64,
    },
    /// Takes memory, and says the time at each MiB.
    Hog {
        /// Where it ends if nobody ends it, in MiB.
        #[arg(long)]
        limit: usize,
    },
    /// Starts processes until it may not start more.
    Fork {
        /// Where it ends by itself.
        #[arg(long)]
        limit: u32,
    },
    /// Holds memory, and writes each ms into a file how often it did so and how long it was silent.
    Heartbeat {
        /// How much memory, in MiB.
        #[arg(long)]
        size: usize,
        /// The file.
        #[arg(long)]
        file: PathBuf,
    },
}

/// The port of a program that serves.
const PORT: u16 = 7000;

/// Runs a program.
///
/// # Errors
/// If the kernel refuses what it does.
pub fn run(workload: Workload) -> io::Result<()> {
    let values = match workload {
        Workload::Calls { times } => calls(times)?,
        Workload::Fault { size } => fault(size),
        Workload::Disk { size, file } => disk(size, &file)?,
        Workload::Loopback { size } => loopback(size)?,
        Workload::Serve => serve(&TcpListener::bind(("0.0.0.0", PORT))?)?,
        Workload::Connect { address, size } => connect((address.as_str(), PORT), size)?,
        Workload::Burn { time } => burn(Duration::from_millis(time)),
        Workload::Work { time } => work(Duration::from_millis(time)),
        Workload::Hog { limit } => hog(limit)?,
        Workload::Fork { limit } => fork(limit)?,
        Workload::Heartbeat { size, file } => heartbeat(size, &file)?,
    };
    say(&values)
}

fn say(values: &Value) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{values}")?;
    out.flush()
}

/// Seconds of the epoch: the one clock that means the same inside of gVisor and outside.
fn epoch() -> f64 {
    SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs_f64()
}

fn nanoseconds(begun: Instant, times: u32) -> f64 {
    begun.elapsed().as_secs_f64() * 1e9 / f64::from(times)
}

fn calls(times: u32) -> io::Result<Value> {
    let begun = Instant::now();
    for _ in 0..times {
        std::hint::black_box(rustix::process::getppid());
    }
    let getppid = nanoseconds(begun, times);
    let opens = times / 10;
    let begun = Instant::now();
    for _ in 0..opens {
        drop(File::open("/etc/passwd")?);
    }
    let open = nanoseconds(begun, opens);
    let switch = switches(times / 50)?;
    let spawns = (times / 5000).max(1);
    let begun = Instant::now();
    for _ in 0..spawns {
        Command::new("/bin/true").status()?;
    }
    let spawn = nanoseconds(begun, spawns) / 1000.0;
    Ok(json!({
        "syscall.getppid": getppid,
        "syscall.open": open,
        "switch.pipe": switch,
        "process.spawn": spawn,
    }))
}

/// A byte to another thread and back, in ns.
fn switches(times: u32) -> io::Result<f64> {
    let (mut here, there) = io::pipe()?;
    let (back, mut over): (PipeReader, PipeWriter) = io::pipe()?;
    let echo = std::thread::spawn(move || -> io::Result<()> {
        let (mut back, mut there) = (back, there);
        let mut byte = [0];
        while back.read(&mut byte)? == 1 {
            there.write_all(&byte)?;
        }
        Ok(())
    });
    let begun = Instant::now();
    let mut byte = [0];
    for _ in 0..times {
        over.write_all(&byte)?;
        here.read_exact(&mut byte)?;
    }
    let time = nanoseconds(begun, times);
    drop(over);
    let _ = echo.join();
    Ok(time)
}

#[allow(clippy::cast_precision_loss, reason = "a number of pages")]
fn fault(size: usize) -> Value {
    let mut memory = vec![0_u8; size << 20];
    let begun = Instant::now();
    let mut pages = 0;
    for page in memory.chunks_mut(4096) {
        page[0] = 1;
        pages += 1;
    }
    let time = begun.elapsed().as_secs_f64() * 1e9 / f64::from(pages);
    std::hint::black_box(&memory);
    json!({ "memory.fault": time })
}

const BLOCK: usize = 1 << 20;
const PIECE: usize = 16 << 10;

#[allow(clippy::cast_precision_loss, reason = "a number of MiB")]
fn disk(size: usize, path: &PathBuf) -> io::Result<Value> {
    let mut random = fastrand::Rng::with_seed(1);
    let mut block = vec![0; BLOCK];
    random.fill(&mut block);
    let rate = |begun: Instant| size as f64 / begun.elapsed().as_secs_f64();
    let write = |file: &mut File| -> io::Result<f64> {
        let begun = Instant::now();
        for _ in 0..size {
            file.write_all(&block)?;
        }
        file.sync_all()?;
        Ok(rate(begun))
    };
    let mut file = OpenOptions::new().read(true).write(true).create_new(true).open(path)?;
    std::fs::remove_file(path)?;
    let first = write(&mut file)?;
    io::Seek::rewind(&mut file)?;
    let again = write(&mut file)?;
    io::Seek::rewind(&mut file)?;
    let begun = Instant::now();
    let mut buffer = vec![0; BLOCK];
    for _ in 0..size {
        file.read_exact(&mut buffer)?;
    }
    let read = rate(begun);
    let pieces = u64::try_from(size * BLOCK / PIECE).unwrap_or(1);
    let mut place = || random.u64(..pieces) * (PIECE as u64);
    let reads = 5000;
    let begun = Instant::now();
    for _ in 0..reads {
        file.read_exact_at(&mut buffer[..PIECE], place())?;
    }
    let random_read = nanoseconds(begun, reads) / 1000.0;
    let writes = 1000;
    let begun = Instant::now();
    for number in 1..=writes {
        file.write_all_at(&block[..PIECE], place())?;
        if number % 100 == 0 {
            file.sync_data()?;
        }
    }
    let random_write = nanoseconds(begun, writes) / 1000.0;
    Ok(json!({
        "disk.sequential-write": first,
        "disk.sequential-rewrite": again,
        "disk.sequential-read": read,
        "disk.random-read": random_read,
        "disk.random-write": random_write,
    }))
}

fn loopback(size: usize) -> io::Result<Value> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    std::thread::spawn(move || serve(&listener));
    connect(address, size)
}

/// The first byte of a connection says what it is for.
const BULK: u8 = b'b';
const ECHO: u8 = b'e';

fn serve(listener: &TcpListener) -> io::Result<Value> {
    loop {
        let (stream, _) = listener.accept()?;
        // A client that goes away is no reason to end.
        let _ = converse(stream);
    }
}

fn converse(mut stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut kind = [0];
    stream.read_exact(&mut kind)?;
    if kind[0] == BULK {
        let mut buffer = vec![0; BLOCK];
        while stream.read(&mut buffer)? > 0 {}
        return stream.write_all(&kind);
    }
    while stream.read(&mut kind)? == 1 {
        stream.write_all(&kind)?;
    }
    Ok(())
}

#[allow(clippy::cast_precision_loss, reason = "a number of MiB")]
fn connect(address: impl std::net::ToSocketAddrs + Copy, size: usize) -> io::Result<Value> {
    let mut bulk = patiently(address)?;
    bulk.write_all(&[BULK])?;
    let block = vec![1; BLOCK];
    let begun = Instant::now();
    for _ in 0..size {
        bulk.write_all(&block)?;
    }
    bulk.shutdown(std::net::Shutdown::Write)?;
    // The other end answers when it has read everything.
    let mut byte = [0];
    bulk.read_exact(&mut byte)?;
    let throughput = size as f64 / begun.elapsed().as_secs_f64();
    let mut echo = patiently(address)?;
    echo.set_nodelay(true)?;
    echo.write_all(&[ECHO])?;
    let times = 2000;
    let begun = Instant::now();
    for _ in 0..times {
        echo.write_all(&byte)?;
        echo.read_exact(&mut byte)?;
    }
    let latency = nanoseconds(begun, times) / 1000.0;
    Ok(json!({ "throughput": throughput, "latency": latency }))
}

/// Connects, and waits a while for the other end to be there.
fn patiently(address: impl std::net::ToSocketAddrs + Copy) -> io::Result<TcpStream> {
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        match TcpStream::connect(address) {
            Ok(stream) => return Ok(stream),
            Err(error) if Instant::now() > until => return Err(error),
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}

/// The CPU time of this process.
fn used() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}

fn compute() {
    let mut value = 1_u64;
    for _ in 0..2000 {
        value = std::hint::black_box(value.wrapping_mul(6_364_136_223_846_793_005).rotate_left(7));
    }
}

fn burn(time: Duration) -> Value {
    let begun = Instant::now();
    let mut windows = Vec::new();
    let (mut window, mut before) = (Instant::now(), used());
    while begun.elapsed() < time {
        compute();
        if window.elapsed() >= Duration::from_millis(100) {
            let now = used();
            windows.push(json!([
                epoch(),
                (now - before).as_secs_f64() / window.elapsed().as_secs_f64()
            ]));
            (window, before) = (Instant::now(), now);
        }
    }
    json!({ "wall": begun.elapsed().as_secs_f64(), "cpu": used().as_secs_f64(), "windows": windows })
}

fn work(time: Duration) -> Value {
    let (begun, before) = (Instant::now(), used());
    while used() - before < time {
        compute();
    }
    json!({ "wall": begun.elapsed().as_secs_f64() })
}

fn hog(limit: usize) -> io::Result<Value> {
    let mut held = Vec::new();
    for number in 0..limit {
        say(&json!({ "mib": number, "time": epoch() }))?;
        let mut block = vec![0_u8; BLOCK];
        for page in block.chunks_mut(4096) {
            page[0] = 1;
        }
        held.push(block);
    }
    std::hint::black_box(&held);
    Ok(json!({ "survived": limit }))
}

fn fork(limit: u32) -> io::Result<Value> {
    let mut children: Vec<Child> = Vec::new();
    let mut refusal = String::new();
    for _ in 0..limit {
        match Command::new("/bin/sleep").arg("60").stdin(Stdio::null()).spawn() {
            Ok(child) => children.push(child),
            Err(error) => {
                refusal = error.to_string();
                break;
            }
        }
    }
    let started = children.len();
    for mut child in children {
        child.kill()?;
        child.wait()?;
    }
    Ok(json!({ "started": started, "refusal": refusal }))
}

/// What a heartbeat writes: how often, and the longest silence in ns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Beat {
    /// How many times it has written.
    pub count: u64,
    /// The longest silence.
    pub silence: Duration,
}

impl Beat {
    /// What a file says, if a heartbeat has written to it.
    #[must_use]
    pub fn read(bytes: &[u8]) -> Option<Self> {
        let word = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
        Some(Self { count: word(0)?, silence: Duration::from_nanos(word(8)?) })
    }

    fn bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.count.to_le_bytes());
        let silence = u64::try_from(self.silence.as_nanos()).unwrap_or(u64::MAX);
        bytes[8..].copy_from_slice(&silence.to_le_bytes());
        bytes
    }
}

fn heartbeat(size: usize, path: &PathBuf) -> io::Result<Value> {
    let mut memory = vec![0_u8; size << 20];
    fastrand::Rng::with_seed(1).fill(&mut memory);
    std::hint::black_box(&memory);
    let file = OpenOptions::new().write(true).create(true).truncate(true).open(path)?;
    let mut beat = Beat { count: 0, silence: Duration::ZERO };
    let mut last = SystemTime::now();
    loop {
        std::thread::sleep(Duration::from_millis(1));
        // The clock of the world: it goes on while this program is asleep in a file.
        let now = SystemTime::now();
        beat.silence = beat.silence.max(now.duration_since(last).unwrap_or_default());
        beat.count += 1;
        last = now;
        file.write_all_at(&beat.bytes(), 0)?;
    }
}
