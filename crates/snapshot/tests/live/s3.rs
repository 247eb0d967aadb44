//! Snapshots in an object store: a server that `scripts/object-store.sh` installs.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;

use crate::place::{Place, shown, until};

/// A server with one bucket, as long as this value lives.
struct ObjectStore {
    child: Child,
    host: String,
}

/// The server, which takes time to install: only where there is time, or it is there.
fn program(test: &str) -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let program = root.join("target/object-store/bin/moto_server");
    if std::env::var_os("TORPOR_LONG").is_some() {
        let installed = Command::new(root.join("scripts/object-store.sh")).status().unwrap();
        assert!(installed.success());
    }
    if !program.exists() {
        println!("left out: {test} (scripts/object-store.sh installs what it needs)");
        return None;
    }
    Some(program)
}

impl ObjectStore {
    fn start(program: &Path) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let host = format!("127.0.0.1:{port}");
        let mut command = Command::new(program);
        command.args(["-H", "127.0.0.1", "-p", &port.to_string()]);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let store = Self { child: command.spawn().unwrap(), host };
        until("the object store listens", || TcpStream::connect(&store.host).is_ok());
        let mut stream = TcpStream::connect(&store.host).unwrap();
        let head = "PUT /bucket HTTP/1.0\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\
                    Authorization: AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request\r\n\r\n";
        stream.write_all(head.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.contains(" 200 "), "{answer}");
        store
    }

    /// A command, with the keys of the store.
    fn torpor(&self, place: &Place, words: &[&str]) -> Output {
        let mut command = place.torpor(words);
        command.env("AWS_ENDPOINT_URL", format!("http://{}", self.host));
        command.env("AWS_ACCESS_KEY_ID", "key").env("AWS_SECRET_ACCESS_KEY", "secret");
        command.output().unwrap()
    }
}

impl Drop for ObjectStore {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_container_starts_from_an_object_store() {
    let Some(program) = program("a_container_starts_from_an_object_store") else { return };
    let place = Place::new("s3", 20_000);
    let store = ObjectStore::start(&program);
    let (reference, root) = ("s3://bucket/team/app:v1", place.path("runc").display().to_string());
    let bundle = format!("runc:{}", place.path("bundle").display());
    let create = [
        "create",
        reference,
        "--from",
        &bundle,
        "--ready",
        "exec:/app ask page 3",
        "--json",
        "--runc-root",
        &root,
    ];
    let output = store.torpor(&place, &create);
    assert!(output.status.success(), "{}", shown(&output));
    let made: Value = serde_json::from_slice(&output.stdout).unwrap();
    // More than is sent at once.
    assert!(made["size"].as_u64().unwrap() > 16 << 20, "{made}");
    let id = place.id("one");
    let run = ["run", reference, "--id", &id, "--json", "--runc-root", &root];
    let output = store.torpor(&place, &run);
    let said: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(said["started_from"], "snapshot", "{}", shown(&output));
    place.exec("one", &["/app", "ask", "sum"]);
    assert!(store.torpor(&place, &["verify", reference]).status.success());
    let list = store.torpor(&place, &["list", "s3://bucket/team/app"]);
    assert!(shown(&list).contains("s3://bucket/team/app:v1"), "{}", shown(&list));
    assert!(store.torpor(&place, &["rm", reference]).status.success());
    let gc = store.torpor(&place, &["gc", "s3://bucket/team/app"]);
    assert!(gc.status.success() && shown(&gc).contains("MB are free again"), "{}", shown(&gc));
    let gone = store.torpor(&place, &["inspect", reference]);
    assert!(shown(&gone).contains("there is no such snapshot"), "{}", shown(&gone));
}
