//! A Redis server with data and under write load, in a network namespace of its own.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

/// Bytes of a value.
const VALUE: u64 = 1000;
/// Keys that are set by one script: longer ones would hold up the server.
const AT_ONCE: u64 = 50_000;
/// How long the server may take to do what it is asked.
const PATIENCE: Duration = Duration::from_secs(60);

/// The server; it ends when it is dropped.
pub struct Redis {
    server: Child,
    keys: u64,
}

impl Redis {
    /// Starts a server in `dir`, with about so much data.
    pub fn start(dir: &Path, mib: u64) -> Result<Self> {
        let script = "ip link set lo up && exec redis-server --save '' --dir .";
        let server = Command::new("setsid")
            .args(["unshare", "--net", "sh", "-c", script])
            .current_dir(dir)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let redis = Redis { server, keys: (mib << 20) / VALUE * 3 / 4 };
        redis.until(|| redis.ask(&["ping"]).is_ok_and(|pong| pong == "PONG\n"))?;
        for first in (0..redis.keys).step_by(usize::try_from(AT_ONCE)?) {
            let last = redis.keys.min(first + AT_ONCE) - 1;
            let set = format!(
                "for i={first},{last} do redis.call('set', string.format('key:%012d', i), \
                 string.rep('x', {VALUE})) end"
            );
            redis.ask(&["eval", &set, "0"])?;
        }
        Ok(redis)
    }

    pub fn pid(&self) -> u32 {
        self.server.id()
    }

    /// A command that sees the server's network.
    pub fn beside(&self, program: &Path) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/proc/{}/ns/net", self.pid())).arg(program);
        command
    }

    /// Clients that set keys at random until they are dropped.
    pub fn load(&self) -> Result<Load> {
        let mut command = self.beside(Path::new("redis-benchmark"));
        let (keys, value) = (self.keys.to_string(), VALUE.to_string());
        command.args(["-q", "-t", "set", "-r", &keys, "-d", &value, "-n", "1000000000"]);
        let load = Load(command.stdin(Stdio::null()).stdout(Stdio::null()).spawn()?);
        let first = self.commands()?;
        self.until(|| self.commands().is_ok_and(|now| now > first + 1000))?;
        Ok(load)
    }

    /// Commands that it has carried out so far.
    pub fn commands(&self) -> Result<u64> {
        self.info("stats", "total_commands_processed:")
    }

    /// Has it save its data by itself, and waits until that is done.
    pub fn save(&self) -> Result<()> {
        self.ask(&["bgsave"])?;
        self.until(|| self.info("persistence", "rdb_bgsave_in_progress:").is_ok_and(|n| n == 0))
    }

    fn info(&self, section: &str, key: &str) -> Result<u64> {
        let text = self.ask(&["info", section])?;
        let value = text.lines().find_map(|line| line.strip_prefix(key));
        Ok(value.with_context(|| format!("no {key}"))?.trim().parse()?)
    }

    fn ask(&self, words: &[&str]) -> Result<String> {
        let out = self.beside(Path::new("redis-cli")).args(words).output()?;
        ensure!(out.status.success(), "redis-cli: {}", String::from_utf8_lossy(&out.stdout));
        Ok(String::from_utf8(out.stdout)?)
    }

    fn until(&self, done: impl Fn() -> bool) -> Result<()> {
        let limit = Instant::now() + PATIENCE;
        while !done() {
            ensure!(Instant::now() < limit, "Redis does not do what it is asked");
            sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

/// Clients at work.
pub struct Load(Child);

impl Drop for Load {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
