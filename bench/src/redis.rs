//! A Redis server with data and under write load, in a network namespace of its own.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use crate::process::{Running, until};

/// Bytes of a value.
const VALUE: u64 = 1000;
/// Keys that are set by one script: longer ones would hold up the server.
const AT_ONCE: u64 = 50_000;

/// The server; it ends when it is dropped.
pub struct Redis {
    pub server: Running,
    dir: PathBuf,
    /// Its network namespace, which is there also while it is asleep.
    net: File,
    keys: u64,
}

impl Redis {
    /// Starts an empty server in `dir`.
    pub fn start(dir: &Path) -> Result<Self> {
        // It would load what another one has saved.
        let script = "rm -f dump.rdb && ip link set lo up && exec redis-server --save '' --dir .";
        let mut command = Command::new("setsid");
        command.args(["unshare", "--net", "sh", "-c", script]).current_dir(dir);
        let server = Running::start(&mut command)?;
        let of = |pid: u32| format!("/proc/{pid}/ns/net");
        let (before, now) = (fs::read_link(of(std::process::id()))?, of(server.pid()));
        until("a network", || fs::read_link(&now).is_ok_and(|now| now != before))?;
        let net = File::open(now)?;
        let redis = Redis { server, dir: dir.to_owned(), net, keys: 0 };
        until("Redis", || redis.ask(&["ping"]).is_ok_and(|pong| pong == "PONG\n"))?;
        Ok(redis)
    }

    /// Starts a server in `dir`, with about so much data.
    pub fn with_data(dir: &Path, mib: u64) -> Result<Self> {
        let redis = Redis { keys: (mib << 20) / VALUE * 3 / 4, ..Self::start(dir)? };
        for first in (0..redis.keys).step_by(usize::try_from(AT_ONCE)?) {
            let last = redis.keys.min(first + AT_ONCE) - 1;
            let set = format!(
                "for i={first},{last} do redis.call('set', string.format('key:%012d', i), \
                 string.rep('x', {VALUE})) end"
            );
            redis.eval(&set)?;
        }
        Ok(redis)
    }

    /// Runs a script in the server.
    pub fn eval(&self, script: &str) -> Result<()> {
        self.ask(&["eval", script, "0"]).map(drop)
    }

    /// A command that sees the server's network.
    pub fn beside(&self, program: &Path) -> Command {
        let mut command = Command::new("nsenter");
        let (own, net) = (std::process::id(), self.net.as_raw_fd());
        command.arg(format!("--net=/proc/{own}/fd/{net}")).arg(program);
        command
    }

    /// Clients that set keys at random until they are dropped.
    pub fn load(&self) -> Result<Running> {
        let mut command = self.beside(Path::new("redis-benchmark"));
        let (keys, value) = (self.keys.to_string(), VALUE.to_string());
        command.args(["-q", "-t", "set", "-r", &keys, "-d", &value, "-n", "1000000000"]);
        let load = Running::start(&mut command)?;
        let first = self.commands()?;
        until("the load", || self.commands().is_ok_and(|now| now > first + 1000))?;
        Ok(load)
    }

    /// How many seconds a client needs to read so many keys, one after the other, that lie far
    /// from each other.
    pub fn read(&self, count: u64) -> Result<f64> {
        let step = (self.keys / count).max(1);
        let keys = (0..count).map(|i| format!("get key:{:012}\n", i * step % self.keys));
        let script = self.dir.join("reads");
        fs::write(&script, keys.collect::<String>())?;
        let mut client = self.beside(Path::new("redis-cli"));
        client.arg("-e").stdin(File::open(&script)?).stdout(Stdio::null());
        let start = Instant::now();
        ensure!(client.status()?.success(), "keys cannot be read");
        Ok(start.elapsed().as_secs_f64())
    }

    /// Commands that it has carried out so far.
    pub fn commands(&self) -> Result<u64> {
        self.info("stats", "total_commands_processed:")
    }

    /// Has it save its data by itself, and waits until that is done.
    pub fn save(&self) -> Result<()> {
        self.ask(&["bgsave"])?;
        until("BGSAVE", || {
            self.info("persistence", "rdb_bgsave_in_progress:").is_ok_and(|n| n == 0)
        })
    }

    fn info(&self, section: &str, key: &str) -> Result<u64> {
        let text = self.ask(&["info", section])?;
        let value = text.lines().find_map(|line| line.strip_prefix(key));
        Ok(value.with_context(|| format!("no {key}"))?.trim().parse()?)
    }

    fn ask(&self, words: &[&str]) -> Result<String> {
        // With -e what Redis answers with an error has failed.
        let out = self.beside(Path::new("redis-cli")).arg("-e").args(words).output()?;
        ensure!(out.status.success(), "redis-cli: {}", String::from_utf8_lossy(&out.stdout));
        Ok(String::from_utf8(out.stdout)?)
    }
}
