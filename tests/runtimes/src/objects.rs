//! An object store: a server that speaks the protocol of S3, which `scripts/object-store.sh`
//! installs.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::port;
use crate::wait::until_true;

/// A server with one bucket, `bucket`, as long as this value lives.
#[derive(Debug)]
pub struct ObjectStore {
    child: Child,
    host: String,
}

impl ObjectStore {
    /// Starts one. It takes time to install: there is none, which is said, where there is no time
    /// for that and it is not there.
    ///
    /// # Panics
    /// If it is there and does not start.
    #[must_use]
    pub fn start(test: &str) -> Option<Self> {
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
        let port = port::free();
        let mut command = Command::new(program);
        command.args(["-H", "127.0.0.1", "-p", &port.to_string()]);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let store = Self { child: command.spawn().unwrap(), host: format!("127.0.0.1:{port}") };
        until_true("the object store listens", || TcpStream::connect(&store.host).is_ok());
        let mut stream = TcpStream::connect(&store.host).unwrap();
        let head = "PUT /bucket HTTP/1.0\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\
                    Authorization: AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request\r\n\r\n";
        stream.write_all(head.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.contains(" 200 "), "{answer}");
        Some(store)
    }

    /// Where it listens.
    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }

    /// What a program has to have in its environment to find it.
    #[must_use]
    pub fn environment(&self) -> [(&'static str, String); 3] {
        [
            ("AWS_ENDPOINT_URL", format!("http://{}", self.host)),
            ("AWS_ACCESS_KEY_ID", "key".to_owned()),
            ("AWS_SECRET_ACCESS_KEY", "secret".to_owned()),
        ]
    }
}

impl Drop for ObjectStore {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
