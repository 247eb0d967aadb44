//! MariaDB, with clients of sysbench whose connections stay.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;
use torpor_runtimes_tests::mounts::QUIET;

use super::answers::Answers;
use super::counted::{Counted, length};
use super::service::Load;
use super::world::{Net, SERVICE, World};
use crate::process::{Running, until};

/// Rows of each of its two tables, for each MiB that was asked for: a tenth of that. Its files are in memory, and go in the
/// pause.
const ROWS: u64 = 200;

/// Takes the benchmark's own mount away, whose content changes as well.
const LEAVE: &str = "cd /; \
    findmnt --noheadings --types tmpfs --output TARGET --target \"$OLDPWD\" | xargs --no-run-if-empty umount --lazy";
/// Starts it. Its files are in memory, which moves along: on a disk that both hosts see, they would stay locked by the
/// server here.
const SERVER: &str = "mkdir --parents $0 && mount -t tmpfs tmpfs $0 && mariadbd \"$@\" --bootstrap </dev/null && \
    exec mariadbd \"$@\" --skip-grant-tables --bind-address=0.0.0.0 --port=3306";

/// The load of sysbench, which counts transactions by the length of a file.
const SCRIPT: &str = r#"require("oltp_read_write")
local transaction, count = event, nil
function event()
    transaction()
    count = count or assert(io.open(os.getenv("COUNT"), "a"))
    count:write(".")
    count:flush()
end
"#;

/// What a destination is told that takes in what has mounts of its own.
pub const ALLOWED: [&str; 4] = [
    "--restore-option=--policy-rule",
    "--restore-option=foreign.mounts.sources=\"all\"",
    "--restore-option=--policy-rule",
    "--restore-option=foreign.mounts.file-systems=\"all\"",
];

/// Starts it with the tables that it is to have, and clients that use them.
pub fn start(dir: &Path, world: &World, mib: u64) -> Result<(Net, Box<dyn Load>)> {
    let place = tempfile::tempdir()?;
    let data = &place.path().to_str().context("a path")?.to_owned();
    let (in_data, socket) = (format!("--datadir={data}"), format!("--socket={data}/socket"));
    let options = ["--innodb-log-file-size=8M", &in_data, &socket];
    let server = format!("{LEAVE}; {QUIET}; {SERVER}");
    let start = ["unshare", "--mount", "sh", "-c", &server, data, "--no-defaults", "--user=root"];
    let service = world.service(dir, &[&start[..], &options].concat())?;
    let clients = Clients {
        net: world.client.entry(),
        dir: dir.to_owned(),
        _place: place,
        rows: (mib * ROWS).to_string(),
    };
    until("MariaDB", || clients.query("CREATE DATABASE sbtest").is_ok())?;
    Ok((service, Box::new(Sysbench::start(clients)?)))
}

/// Clients, and the tables that they use.
struct Clients {
    /// Their network, for nsenter(1).
    net: String,
    dir: PathBuf,
    /// Where the server has its files: while it is there they are.
    _place: TempDir,
    rows: String,
}

impl Clients {
    fn log(&self) -> PathBuf {
        self.dir.join("sysbench.log")
    }

    fn client(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.args([&self.net, program]).stdin(Stdio::null());
        command
    }

    fn command(&self, action: &str) -> Command {
        let mut command = self.client("sysbench");
        command.arg(self.dir.join("load.lua")).env("COUNT", self.dir.join("count"));
        command.args([&format!("--mysql-host={SERVICE}"), "--mysql-user=root", "--threads=4"]);
        command.args(["--tables=2", &format!("--table-size={}", self.rows), "--time=0"]);
        command.args(["--events=0", "--report-interval=1", action]);
        command
    }

    /// What the server answers.
    fn query(&self, text: &str) -> Result<String> {
        let mut client = self.client("mariadb");
        client.args(["--no-defaults", &format!("--host={SERVICE}"), "--batch", "-N", "-e", text]);
        let output = client.output()?;
        ensure!(output.status.success(), "{text}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(String::from_utf8(output.stdout)?)
    }
}

/// Clients at work.
struct Sysbench {
    clients: Clients,
    program: Running,
    counted: Counted,
}

impl Sysbench {
    fn start(clients: Clients) -> Result<Self> {
        fs::write(clients.dir.join("load.lua"), SCRIPT)?;
        let output = clients.command("prepare").output()?;
        ensure!(output.status.success(), "sysbench prepare: {output:?}");
        let log = File::create(clients.log())?;
        let program = Running::telling(&mut clients.command("run"), log)?;
        let counted = Counted::start(clients.dir.join("count"), length)?;
        Ok(Self { clients, program, counted })
    }
}

impl Load for Sysbench {
    fn answers(&self) -> &Answers {
        self.counted.answers()
    }

    /// None of the clients has lost its connection, and the tables are whole.
    fn finish(self: Box<Self>) -> Result<()> {
        let counts = Box::new(self.counted).finish();
        drop(self.program);
        let said = fs::read_to_string(self.clients.log())?;
        counts.with_context(|| said.clone())?;
        let mut reports = said.lines().filter(|line| line.contains("reconn/s:"));
        ensure!(reports.all(|line| line.ends_with("reconn/s: 0.00")), "sysbench: {said}");
        let check = self.clients.query("CHECK TABLE sbtest.sbtest1, sbtest.sbtest2")?;
        ensure!(check.matches("\tOK").count() == 2, "{check}");
        Ok(())
    }
}
