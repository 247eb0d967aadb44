//! Compressed images against plain ones: time and size.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::Result;

use crate::bench::{Bench, Goal, Times, Way, median, ratio, run, stats};
use crate::memory::peak;
use crate::process::{Running, until};
use crate::redis::Redis;

/// The ways to compress, with how much longer than a plain dump they may take.
const WAYS: [(&str, Option<f64>); 2] = [("lz4", Some(1.3)), ("zstd", None)];

fn way(how: &str) -> Way {
    Way { dump: vec!["--compress".to_owned(), how.to_owned()], restore: vec![] }
}

pub fn measure(bench: &mut Bench) -> Result<()> {
    let mib = bench.mib;
    let mut plain = Times::default();
    let mut packed = WAYS.map(|_| Times::default());
    for _ in 0..bench.rounds {
        bench.round("halves", mib, &Way::default(), &mut plain)?;
        for ((how, _), times) in WAYS.iter().zip(&mut packed) {
            bench.round("halves", mib, &way(how), times)?;
        }
    }
    for ((how, most), times) in WAYS.iter().zip(&packed) {
        let dump = median(&times.dump) / median(&plain.dump);
        bench.add(format!("dump of {mib} MiB, {how}"), dump, "× plain", most.map(Goal::AtMost));
        let restore = median(&times.restore) / median(&plain.restore);
        bench.add(format!("restore of {mib} MiB, {how}"), restore, "× plain", None);
        bench.add(format!("size of the images, {how}"), ratio(plain.size, times.size), ": 1", None);
    }
    peak(bench, &way("lz4"), "lz4 ")?;
    program(bench, "Redis", "redis-server", redis)?;
    program(bench, "a JVM", "javac", java)
}

/// A real program, dumped as it is and compressed, if it is there.
fn program(
    bench: &mut Bench,
    name: &str,
    tool: &str,
    start: fn(&Path) -> Result<Running>,
) -> Result<()> {
    if !is_installed(tool) {
        eprintln!("{name} is not measured: it is not installed");
        return Ok(());
    }
    let running = start(&bench.dir)?;
    let mut plain = vec![];
    let mut packed = WAYS.map(|_| (vec![], 0.0));
    for _ in 0..bench.rounds {
        plain.push(dump(bench, &running, &[])?.0);
        for ((how, _), (times, ratio)) in WAYS.iter().zip(&mut packed) {
            let (time, found) = dump(bench, &running, &["--compress", how])?;
            times.push(time);
            *ratio = found;
        }
    }
    for ((how, _), (times, ratio)) in WAYS.iter().zip(&packed) {
        let longer = median(times) / median(&plain);
        bench.add(format!("dump of {name}, {how}"), longer, "× plain", None);
        bench.add(format!("memory of {name}, {how}"), *ratio, ": 1", None);
    }
    Ok(())
}

/// Seconds of a dump that the program survives, and how much smaller its memory became.
fn dump(bench: &Bench, running: &Running, options: &[&str]) -> Result<(f64, f64)> {
    fs::create_dir(bench.images())?;
    bench.warm_up()?;
    let pid = running.pid().to_string();
    let words = ["dump", "--leave-running", "-t", &pid];
    let start = Instant::now();
    run(bench.command(&words).args(options))?;
    let time = start.elapsed().as_secs_f64();
    let stats = stats(&bench.images())?;
    fs::remove_dir_all(bench.images())?;
    let (from, to) = (stats.torpor_compress_from_bytes(), stats.torpor_compress_to_bytes());
    Ok((time, ratio(from, to)))
}

fn is_installed(program: &str) -> bool {
    let paths = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&paths).any(|dir| dir.join(program).exists())
}

/// Redis with a quarter of a million users, as a web application might keep them.
fn redis(dir: &Path) -> Result<Running> {
    const FILL: &str = "for i = 1, 250000 do redis.call('HSET', 'user:' .. i, 'name', 'user ' .. \
        redis.sha1hex(i):sub(1, 8), 'mail', redis.sha1hex(i):sub(1, 12) .. '@example.org', 'session', \
        redis.sha1hex(i .. 's'), 'visits', math.random(10000), 'language', 'en') end";
    let redis = Redis::start(dir)?;
    redis.eval(FILL)?;
    Ok(redis.server)
}

/// A JVM with a quarter of a million records in its heap.
fn java(dir: &Path) -> Result<Running> {
    const SOURCE: &str = "import java.util.*; public class Heap { \
        record User(String name, String mail, UUID session, long visits, List<String> tags) {} \
        public static void main(String[] args) throws Exception { \
        var random = new Random(1); var users = new HashMap<Integer, User>(); \
        for (int i = 0; i < 250000; i++) users.put(i, new User(\"user \" + i, i + \"@example.org\", \
        new UUID(random.nextLong(), random.nextLong()), random.nextInt(10000), \
        new ArrayList<>(List.of(\"en\", \"tag \" + random.nextInt(100))))); \
        new java.io.File(args[0]).createNewFile(); Thread.sleep(Long.MAX_VALUE); \
        System.out.println(users); } }";
    let (source, ready) = (dir.join("Heap.java"), dir.join("jvm-ready"));
    fs::write(&source, SOURCE)?;
    let mut command = Command::new("setsid");
    command.args(["java", "-Xmx512m"]).arg(&source).arg(&ready);
    let running = Running::start(&mut command)?;
    until("the JVM", || ready.exists())?;
    Ok(running)
}
