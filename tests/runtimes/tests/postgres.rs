//! PostgreSQL in a container: several back ends, one inside a transaction, with System V shared
//! memory, checkpointed while `psql` clients are connected from outside.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};

use serde_json::json;
use torpor_runtimes_tests::command::{Run, command};
use torpor_runtimes_tests::network::Network;
use torpor_runtimes_tests::process;
use torpor_runtimes_tests::runc::{Bundle, Container};
use torpor_runtimes_tests::scratch::Scratch;
use torpor_runtimes_tests::wait::until_true;

/// A session of `psql` on one connection.
struct Session {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Session {
    fn open(scratch: &Scratch, network: &Network, name: &str) -> Self {
        let log = File::create(scratch.join(&format!("psql-{name}.log"))).unwrap();
        let mut command = command("psql", &["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1"]);
        command.args(["-h", "10.99.0.2", "-U", "postgres", "postgres"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log);
        let mut child = network.inside(|| command.spawn().unwrap());
        let (stdin, stdout) =
            (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, stdin, stdout }
    }

    /// Runs a statement, and returns the lines that it gives.
    #[track_caller]
    fn query(&mut self, statement: &str) -> Vec<String> {
        writeln!(self.stdin, "{statement};\n\\echo end").unwrap();
        let mut lines = Vec::new();
        loop {
            let mut line = String::new();
            assert_ne!(self.stdout.read_line(&mut line).unwrap(), 0, "psql ended: {statement}");
            match line.trim_end() {
                "end" => return lines,
                line => lines.push(line.to_owned()),
            }
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn inside_a_transaction() {
    let scratch = Scratch::new("postgres");
    let outside = Network::new(&format!("{}-out", scratch.name()));
    let inside = Network::new(&format!("{}-in", scratch.name()));
    outside.connect("10.99.0.1", &inside, "10.99.0.2");
    let bundle = Bundle::new(
        &scratch,
        &[],
        &["sh", "-c", "exec $BIN/postgres -D /data/db -c listen_addresses=10.99.0.2 -c shared_memory_type=sysv \
           -c dynamic_shared_memory_type=sysv -c unix_socket_directories=/data -c fsync=off \
           -c max_parallel_workers_per_gather=0 -c autovacuum_naptime=1d > /data/log 2>&1"],
    )
    .host_programs()
    .network(&inside)
    .configure(|config| config["process"]["env"].as_array_mut().unwrap().push(json!(format!("BIN={}", programs()))));
    let user = database(&bundle);
    let bundle = bundle
        .configure(|config| config["process"]["user"] = json!({"uid": user.0, "gid": user.1}));
    let mut container = Container::start(&scratch, &bundle);
    until_true("the server is ready", || {
        fs::read_to_string(bundle.file("data/log")).is_ok_and(|log| log.contains("ready to accept"))
    });

    let open = |name| Session::open(&scratch, &outside, name);
    let (mut first, mut second) = (open("first"), open("second"));
    first.query(
        "CREATE TABLE numbers AS SELECT n, md5(n::text) AS sum FROM generate_series(1, 50000) n",
    );
    first.query("CREATE INDEX ON numbers (n)");
    // One inside a transaction that has written and holds a lock, one that waits for this lock.
    first.query("BEGIN; UPDATE numbers SET sum = 'first' WHERE n = 7");
    second.query(
        "SET application_name = 'second'; PREPARE get AS SELECT sum FROM numbers WHERE n = $1",
    );
    second.query("CREATE TEMPORARY TABLE own AS SELECT 1 AS one");
    writeln!(second.stdin, "UPDATE numbers SET sum = sum || '-second' WHERE n = 7;\n\\echo end")
        .unwrap();
    let back_ends = "SELECT pid FROM pg_stat_activity WHERE client_port > 0 ORDER BY pid";
    until_true("the second waits", || {
        first.query("SELECT count(*) FROM pg_locks WHERE NOT granted") == ["1"]
    });
    let before = (first.query(back_ends), first.query("SELECT txid_current()"));

    // None comes or goes: no worker of the autovacuum is due.
    let processes = container.processes();
    container.checkpoint(&["--tcp-established"]);
    container.restore(&["--tcp-established"]);
    assert_eq!(container.processes(), processes);

    assert_eq!((first.query(back_ends), first.query("SELECT txid_current()")), before);
    assert_eq!(first.query("SELECT sum FROM numbers WHERE n = 7"), ["first"]);
    first.query("COMMIT");
    let mut line = String::new();
    second.stdout.read_line(&mut line).unwrap();
    assert_eq!(line, "end\n", "the second has got the lock");
    assert_eq!(second.query("EXECUTE get(7)"), ["first-second"]);
    assert_eq!(second.query("SELECT one FROM own"), ["1"]);
    let mut third = open("third");
    let all =
        third.query("SELECT count(*), count(*) FILTER (WHERE sum = md5(n::text)) FROM numbers");
    assert_eq!(all, ["50000|49999"]);
    assert!(process::alive(container.pid()));
}

/// The directory with the server's programs, of whatever version the distribution has.
fn programs() -> String {
    let found = command("sh", &["-c", "ls -d /usr/lib/postgresql/*/bin"]).succeed();
    found.lines().last().unwrap().to_owned()
}

/// Makes a database in the container's /data, and returns whose it is.
fn database(bundle: &Bundle) -> (u32, u32) {
    let id = |option| command("id", &[option, "postgres"]).succeed().parse::<u32>().unwrap();
    let user = (id("-u"), id("-g"));
    let data = bundle.file("data");
    fs::create_dir(&data).unwrap();
    std::os::unix::fs::chown(&data, Some(user.0), Some(user.1)).unwrap();
    let ids = ["--reuid=postgres", "--regid=postgres", "--clear-groups"];
    let database = data.join("db");
    command("setpriv", &ids)
        .arg(format!("{}/initdb", programs()))
        .args(["--auth=trust", "--no-sync", "-D"])
        .arg(&database)
        .current_dir(&data)
        .succeed();
    fs::write(database.join("pg_hba.conf"), "host all all 0.0.0.0/0 trust\n").unwrap();
    user
}
