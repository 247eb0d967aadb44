//! The programs that measure inside of a container. Each prints its values as one line of JSON, which
//! is the last line that it prints.

mod beat;
mod disk;
mod network;

use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use clap::Subcommand;
use serde_json::{Value, json};

pub(crate) use self::beat::Beat;
use self::beat::heartbeat;
use self::disk::{disk, weigh};
use self::network::{connect, loopback, serve};
use crate::overhead::own as used;

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
    /// Reads as fast as it can, past the page cache, from a time on; then it stays.
    Weigh {
        /// The file, which is written first.
        #[arg(long)]
        file: PathBuf,
        /// Its size in MiB.
        #[arg(long)]
        size: usize,
        /// The file of the program that reads at the same time: neither begins before the other is ready.
        #[arg(long)]
        beside: PathBuf,
        /// For how long it reads, in ms.
        #[arg(long)]
        time: u64,
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

/// Runs a program.
///
/// # Errors
/// If the kernel refuses what it does.
pub(crate) fn run(workload: Workload) -> io::Result<()> {
    let values = match workload {
        Workload::Calls { times } => calls(times)?,
        Workload::Fault { size } => fault(size),
        Workload::Disk { size, file } => disk(size, &file)?,
        Workload::Loopback { size } => loopback(size)?,
        Workload::Serve => serve()?,
        Workload::Connect { address, size } => connect(&address, size)?,
        Workload::Burn { time } => burn(Duration::from_millis(time)),
        Workload::Work { time } => work(Duration::from_millis(time)),
        Workload::Hog { limit } => hog(limit)?,
        Workload::Fork { limit } => fork(limit)?,
        Workload::Weigh { file, size, beside, time } => {
            weigh(&file, size, &beside, Duration::from_millis(time))?
        }
        Workload::Heartbeat { size, file } => heartbeat(size, &file)?,
    };
    say(&values)
}

fn say(values: &Value) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{values}")?;
    out.flush()
}

/// A piece of memory or of a file.
const BLOCK: usize = 1 << 20;

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
    let opens = (times / 10).max(1);
    let begun = Instant::now();
    for _ in 0..opens {
        drop(File::open("/etc/passwd")?);
    }
    let open = nanoseconds(begun, opens);
    let switch = switches((times / 50).max(1))?;
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
