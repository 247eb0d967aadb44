//! Pages that are brought in because a program touches them, and all of them over a connection;
//! against what the kernel needs of either, and against a copy in memory.

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, anyhow};

use crate::bench::{Bench, Goal, median, run};
use crate::lazy::daemon;
use crate::process::Running;
use crate::subject::Subject;
use crate::touches::Touches;

/// Bytes that are moved at once.
const CHUNK: usize = 256 << 10;
/// So that only what is touched is brought in, page by page.
const RECORD: &str = "--record-working-set=600";

pub fn measure(bench: &mut Bench) -> Result<()> {
    one_by_one(bench)?;
    moved(bench)
}

/// Faults of threads at random, each served with the one page.
fn one_by_one(bench: &mut Bench) -> Result<()> {
    let (mut served, mut by_one, mut by_two) = (vec![], vec![], vec![]);
    for _ in 0..bench.rounds {
        by_one.push(alone(bench, "served", bench.mib / 4)?);
        by_two.push(alone(bench, "served-by-two", bench.mib / 4)?);
        let subject = Subject::start(&bench.dir, "toucher", bench.mib / 4)?;
        fs::create_dir(bench.images())?;
        run(&mut bench.command(&["dump", "-t", &subject.pid().to_string()]))?;
        subject.gone()?;
        let daemon = daemon(bench, &[RECORD])?;
        run(&mut bench.command(&["restore", "-d", "--lazy-pages"]))?;
        served.push(touch(bench)?);
        subject.end()?;
        daemon.end()?;
        fs::remove_dir_all(bench.images())?;
    }
    let goal = Some(Goal::AtLeast(100_000.0));
    bench.add("faults that the pager serves, a page for each", median(&served), "/ s", goal);
    bench.add("faults that UFFDIO_COPY alone serves", median(&by_one), "/ s", None);
    bench.add("faults that it serves in two threads", median(&by_two), "/ s", None);
    Ok(())
}

/// Restores that fetch their memory over loopback.
fn moved(bench: &mut Bench) -> Result<()> {
    let (mut touched, mut bulk, mut floor, mut line) = (vec![], vec![], vec![], vec![]);
    for _ in 0..bench.rounds {
        let memcpy = memcpy();
        floor.push(alone(bench, "copied", bench.mib)? / memcpy);
        line.push(loopback(bench.mib)? / memcpy);
        touched.push(fetched(bench, "toucher", touch)?.0);
        let seconds = fetched(bench, "small-pages", |_| Ok(()))?.1;
        #[allow(clippy::cast_precision_loss)] // far fewer than 2^52
        bulk.push((bench.mib << 8) as f64 / seconds / memcpy);
    }
    let what = format!("lazy restore of {} MiB over loopback", bench.mib);
    let touches = format!("{what}: pages that threads touch at random");
    bench.add(touches, median(&touched), "/ s", None);
    bench.add(what, median(&bulk), "× memcpy", Some(Goal::AtLeast(0.5)));
    bench.add("UFFDIO_COPY alone, 256 KiB at once", median(&floor), "× memcpy", None);
    bench.add("TCP over loopback alone, 256 KiB at once", median(&line), "× memcpy", None);
    Ok(())
}

/// Pages a second that a connection takes, from memory to memory.
pub fn loopback(mib: u64) -> Result<f64> {
    let chunks = usize::try_from((mib << 20) / CHUNK as u64)?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut to = TcpStream::connect(listener.local_addr()?)?;
    let mut from = listener.accept()?.0;
    let start = Instant::now();
    let received = std::thread::spawn(move || {
        let mut chunk = vec![0; CHUNK];
        (0..chunks).try_for_each(|_| from.read_exact(&mut chunk))
    });
    let chunk = vec![1; CHUNK];
    (0..chunks).try_for_each(|_| to.write_all(&chunk))?;
    received.join().map_err(|_| anyhow!("the receiver has panicked"))??;
    #[allow(clippy::cast_precision_loss)] // far fewer than 2^52
    let pages = (mib << 8) as f64;
    Ok(pages / start.elapsed().as_secs_f64())
}

/// Moves a process to another pid namespace, which is as good as another host. What is done when
/// it runs, and the seconds from the begin of the restore until all its memory is there.
fn fetched<T>(
    bench: &Bench,
    kind: &str,
    then: impl FnOnce(&Bench) -> Result<T>,
) -> Result<(T, f64)> {
    let subject = Subject::start(&bench.dir, kind, bench.mib)?;
    fs::create_dir(bench.images())?;
    bench.warm_up()?;
    let pid = subject.pid().to_string();
    let words = ["dump", "--lazy-pages", "--address", "127.0.0.1", "--port", "0", "-t", &pid];
    let (dump, said) = Running::heard(&mut bench.command(&words))?;
    let port = said.strip_prefix("PORT: ").context("the dump names no port")?;
    let from = ["--page-server", "--address", "127.0.0.1", "--port", port];
    let daemon = daemon(bench, &from)?;
    let mut restore = Command::new("unshare");
    restore.args(["--pid", "--fork", "--mount-proc", "--kill-child"]).arg(bench.torpor());
    restore.args(["restore", "--lazy-pages", "-D"]).arg(bench.images());
    let start = Instant::now();
    let _restored = Running::start(&mut restore)?;
    let done = then(bench)?;
    daemon.end()?;
    let seconds = start.elapsed().as_secs_f64();
    dump.end()?;
    subject.gone()?;
    fs::remove_dir_all(bench.images())?;
    Ok((done, seconds))
}

/// Pages a second of a program that brings them in itself.
fn alone(bench: &Bench, kind: &str, mib: u64) -> Result<f64> {
    let subject = Subject::start(&bench.dir, kind, mib)?;
    bench.warm_up()?;
    let rate = touch(bench)?;
    subject.end()?;
    Ok(rate)
}

/// Lets the program begin; pages a second that its threads were through with.
fn touch(bench: &Bench) -> Result<f64> {
    let touches = Touches::of(&bench.dir)?;
    touches.begin()?;
    touches.rate()
}

/// Pages a second that are copied from memory to memory, all of it in use.
fn memcpy() -> f64 {
    const SIZE: usize = 256 << 20;
    let (from, mut to) = (vec![1_u8; SIZE], vec![2_u8; SIZE]);
    let start = Instant::now();
    to.copy_from_slice(&from);
    std::hint::black_box(&to);
    #[allow(clippy::cast_precision_loss)] // far fewer than 2^52
    let pages = (SIZE >> 12) as f64;
    pages / start.elapsed().as_secs_f64()
}
