//! PostgreSQL: processes with buffers that they share, many times from one snapshot.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::Command;

use serde_json::{Value, json};

use crate::fixture::{Fixture, shown, until};
use crate::running::create_of;
use crate::template::many;
use crate::tree::{Process, family};

/// Where its programs are, by the release.
const PROGRAMS: &str = "/usr/lib/postgresql";
/// As many rows as make about 40 MB in its buffers.
const ROWS: u32 = 300_000;

/// Makes the files of a database, and becomes the server.
const START: &str = "initdb --pgdata /data/base --auth trust --username postgres --no-sync \
    --locale C >/dev/null && exec postgres -D /data/base -c shared_buffers=256MB -c fsync=off \
    -c dynamic_shared_memory_type=mmap -c unix_socket_directories=/tmp -c autovacuum=off";

/// The directory of its programs, if it is here.
fn programs() -> Option<String> {
    let releases = fs::read_dir(PROGRAMS).ok()?.flatten();
    releases.map(|release| release.path().join("bin").display().to_string()).max()
}

/// The same with so few buffers that it writes to its files all the time, and a program that has it do so.
const BUSY: &str = "initdb --pgdata /data/base --auth trust --username postgres --no-sync \
    --locale C >/dev/null && { { until pgbench -q -i -s 4 -h /tmp -U postgres postgres 2>/tmp/init; \
    do :; done; exec pgbench -c 3 -T 86400 -n -h /tmp -U postgres postgres; } & } && \
    exec postgres -D /data/base -c shared_buffers=2MB -c fsync=off -c max_wal_size=32MB \
    -c dynamic_shared_memory_type=mmap -c unix_socket_directories=/tmp";
/// Whether all that it has ever added up is in the one table as in the others.
const ADDS_UP: &str = "select (select sum(abalance) from pgbench_accounts) = all (array[ \
    (select sum(tbalance) from pgbench_tellers), (select sum(bbalance) from pgbench_branches), \
    (select sum(delta) from pgbench_history)])";

/// A fixture whose application is PostgreSQL.
fn postgres(programs: &str, start: &str) -> Fixture {
    let fixture = Fixture::new("postgres", 0);
    let root = fixture.path("bundle/rootfs");
    for part in ["usr", "var/lib", "data"] {
        fs::create_dir_all(root.join(part)).unwrap();
    }
    for part in ["lib", "lib64"] {
        symlink(format!("usr/{part}"), root.join(part)).unwrap();
    }
    for part in ["tmp", "data"] {
        fs::set_permissions(root.join(part), fs::Permissions::from_mode(0o1777)).unwrap();
    }
    fixture.configure(|config| {
        let process = &mut config["process"];
        process["args"] = json!(["/bin/sh", "-c", start]);
        process["env"] = json!([format!("PATH={programs}:/usr/bin:/bin")]);
        // It does not run as root.
        process["user"] = json!({ "uid": 65534, "gid": 65534 });
        // Without what others have mounted below, as Podman does.
        for path in ["/usr", "/etc", "/var/lib"] {
            config["mounts"].as_array_mut().unwrap().push(json!({
                "destination": path, "source": path, "type": "bind", "options": ["bind", "ro"],
            }));
        }
    });
    fixture
}

/// What a statement gives in a container, by a connection that is new.
#[track_caller]
fn query(programs: &str, said: &Value, statement: &str) -> String {
    let mut ask = Command::new("nsenter");
    ask.args(["--net", "--target", &said["pid"].to_string(), &format!("{programs}/psql")]);
    ask.args(["-h", "127.0.0.1", "-U", "postgres", "-tAc", statement]);
    let output = ask.output().unwrap();
    assert!(output.status.success(), "{statement}: {}", shown(&output));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// The kilobytes of a container, buffers apart, that only one of its processes has. What serves a connection
/// has memory for that, and is to have ended.
fn own_kilobytes(said: &Value) -> u64 {
    let serves = |process: &Process| process.command().contains("postgres: postgres postgres");
    until("who served the last connection has ended", || !family(said).iter().any(serves));
    let keys = ["Private_Dirty:", "Pss_Shmem:"];
    let each: Vec<_> = family(said).iter().map(|process| process.kilobytes_of(keys)).collect();
    let sum = |part: usize| each.iter().map(|of| of[part]).sum::<u64>();
    sum(0).saturating_sub(sum(1))
}

#[test]
fn postgres_is_born_with_its_buffers() {
    let Some(programs) = programs() else {
        eprintln!("left out: postgres_is_born_with_its_buffers (no PostgreSQL here)");
        return;
    };
    let count = if std::env::var_os("TORPOR_LONG").is_some() { 10 } else { 2 };
    let fixture = postgres(&programs, START);
    let reference = fixture.reference();
    let fill = format!(
        "psql -h /tmp -U postgres -c 'create table items as select number, md5(number::text) as \
         name from generate_series(1, {ROWS}) as number' -c 'select count(name) from items'"
    );
    let ready = ["--ready", "exec:pg_isready -q -h 127.0.0.1", "--warmup", &fill];
    let made = fixture.try_create(&reference, &ready);
    assert!(made.status.success(), "{}", shown(&made));
    let one = fixture.run(&reference, "one", "snapshot", &["--prefetch", "all"]);
    let sum = "select count(*), sum(hashtext(name)::bigint) from items";
    let right = query(&programs, &one, sum);
    assert!(right.starts_with(&format!("{ROWS}|")), "{right}");
    let alone = own_kilobytes(&one);

    let all = many(&fixture, "many", &["--count", &count.to_string()]);
    assert_eq!(all.len(), count);
    assert!(all.iter().all(|said| said["template"] == true), "{all:?}");
    for (number, said) in all.iter().enumerate() {
        assert_eq!(query(&programs, said, sum), right);
        // What one of them writes, to its buffers and its files, is nobody else's.
        let rename = format!("update items set name = 'own {number}' where number = 1");
        query(&programs, said, &rename);
    }
    for (number, said) in all.iter().enumerate() {
        let first = query(&programs, said, "select name from items where number = 1");
        assert_eq!(first, format!("own {number}"));
    }
    let own: Vec<u64> = all.iter().map(own_kilobytes).collect();
    println!("kB that only one process has: {alone} alone, {own:?} together");
    assert!(own.iter().all(|own| *own <= alone / 2), "{own:?}, {alone} alone");
}

/// Its files are of the same moment as its buffers, whatever it does at that moment.
#[test]
fn postgres_is_taken_at_work() {
    let Some(programs) = programs() else {
        eprintln!("left out: postgres_is_taken_at_work (no PostgreSQL here)");
        return;
    };
    let fixture = postgres(&programs, BUSY);
    let (first, second) = (fixture.reference(), fixture.reference() + ":second");
    let works = "psql -h /tmp -U postgres -c 'select 1 / min(1) from pgbench_history'";
    let made = fixture.try_create(&first, &["--ready", &format!("exec:{works}"), "--no-trial"]);
    assert!(made.status.success(), "{}", shown(&made));
    let busy = fixture.run(&first, "busy", "snapshot", &[]);
    let times = if std::env::var_os("TORPOR_LONG").is_some() { 5 } else { 1 };
    for _ in 0..times {
        create_of(&fixture, "busy", &second);
        let next = fixture.run(&second, "next", "snapshot", &[]);
        assert_eq!(query(&programs, &next, ADDS_UP), "t");
        query(&programs, &next, "checkpoint");
        query(&programs, &next, "create extension amcheck");
        let indexes = "select bool_and(bt_index_check(indexrelid, true) is not null) from pg_index \
            join pg_class on pg_class.oid = indexrelid where relname like 'pgbench%'";
        assert_eq!(query(&programs, &next, indexes), "t");
        let done = |said| query(&programs, said, "select count(*) from pgbench_history");
        for said in [&next, &busy] {
            let before = done(said);
            until("it goes on", || done(said) != before);
        }
        fixture.delete("next");
    }
}
