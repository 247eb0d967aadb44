//! MariaDB at its defaults, which include io_uring: asleep three times with pages that are still to
//! be written, and whole each time.

use std::process::Command;

use torpor_runtimes_tests::command::{Run, command};
use torpor_runtimes_tests::criu::Job;
use torpor_runtimes_tests::process;
use torpor_runtimes_tests::scratch::Scratch;
use torpor_runtimes_tests::wait::until_true;

/// Rows that are added before each sleep.
const ROWS: u32 = 20_000;

#[test]
fn at_its_defaults() {
    let found = command("which", &["mariadbd", "mariadb"]).finish();
    if std::env::var_os("TORPOR_LONG").is_none() || !found.status.success() {
        println!("mariadb::at_its_defaults is skipped: it wants TORPOR_LONG=1 and MariaDB");
        return;
    }
    let scratch = Scratch::new("mariadb");
    let data = format!("--datadir={}", scratch.dir("data").display());
    let socket = format!("--socket={}", scratch.join("s").display());
    let server = ["mariadbd", "--no-defaults", "--user=root", &data, &socket];
    command("mariadbd", &[&server[1..], &["--bootstrap"]].concat()).succeed();
    let more = ["--skip-grant-tables", "--skip-networking"];
    let mut job = Job::start(&scratch, None, &[&server[..], &more].concat());
    let query = |text: &str| -> Command {
        command("mariadb", &["--no-defaults", &socket, "--batch", "-N", "-e", text])
    };
    until_true("the server answers", || query("SELECT 1").finish().status.success());
    assert!(process::has_ring(job.pid()), "it does not use io_uring");
    query("CREATE DATABASE t; CREATE TABLE t.a(i INT PRIMARY KEY, s TEXT) ENGINE=InnoDB").succeed();
    for time in 0..3 {
        let from = time * ROWS;
        let insert = format!(
            "USE t; INSERT INTO a SELECT seq + {from}, REPEAT(MD5(seq), 20) FROM seq_1_to_{ROWS}"
        );
        query(&insert).succeed();
        job.dump(&["--file-locks"]);
        job.restore(&["--file-locks"]);
        let check = "UPDATE t.a SET s = CONCAT(s, 'x') WHERE i % 7 = 0; FLUSH TABLES; \
                     SELECT COUNT(*) FROM t.a; CHECK TABLE t.a";
        let answer = query(check).succeed();
        let count = (from + ROWS).to_string();
        assert!(answer.starts_with(&count) && answer.ends_with("OK"), "{answer}");
        assert!(process::has_ring(job.pid()));
    }
    assert!(process::alive(job.pid()));
}
