//! Real applications on the host, each with clients that keep it busy and check what it answers.

use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;

use torpor_runtimes_tests::command::{Run, command};
use torpor_runtimes_tests::criu::Job;
use torpor_runtimes_tests::load::{self, Load, Step};
use torpor_runtimes_tests::network::Network;
use torpor_runtimes_tests::process;
use torpor_runtimes_tests::redis::Redis;
use torpor_runtimes_tests::rootfs::program;
use torpor_runtimes_tests::runc::next_line;
use torpor_runtimes_tests::scratch::Scratch;
use torpor_runtimes_tests::wait::{until, until_true};

const ADDRESS: &str = "127.0.0.1:7000";
const WORKLOAD: &str = env!("CARGO_BIN_EXE_torpor-test-workload");

/// Makes clients in a network namespace as soon as the server there accepts them.
fn clients(
    network: &Network,
    count: usize,
    connect: impl Fn(usize) -> io::Result<Step> + Send + Sync,
) -> Load {
    let client = |number| until("the server answers", || connect(number).ok());
    Load::start(network.inside(|| (0..count).map(client).collect()))
}

/// Runs a counter server of `programs/`, sends it to sleep under load, and wakes it, twice.
fn counter_server(name: &str, words: &[&str]) {
    sleeping_server(&Scratch::new(name), words, load::counter, || {});
}

/// Runs a server, sends it to sleep under the load of clients, and wakes it, twice. Before and after each
/// time `check` looks at its network from inside.
fn sleeping_server(
    scratch: &Scratch,
    words: &[&str],
    connect: fn(&str) -> io::Result<Step>,
    check: fn(),
) {
    let network = Network::new(scratch.name());
    let mut job = Job::start(scratch, Some(&network), words);
    let load = clients(&network, 4, |_| connect(ADDRESS));
    network.inside(check);
    for _ in 0..2 {
        load.advance(50);
        job.dump(&["--tcp-established"]);
        job.restore(&["--tcp-established"]);
        network.inside(check);
    }
    load.advance(50);
    // The listener is awake too.
    clients(&network, 2, |_| connect(ADDRESS)).advance(10);
    let output = fs::read_to_string(scratch.join("output.log")).unwrap();
    assert!(!output.contains("broken") && process::alive(job.pid()), "{output}");
}

#[test]
fn python_with_threads() {
    counter_server("python", &["python3", program("server.py").to_str().unwrap(), "7000"]);
}

#[test]
fn node() {
    counter_server("node", &["node", program("server.js").to_str().unwrap(), "7000"]);
}

/// Its listener is one of Multipath TCP, as that of each server that a current toolchain builds.
#[test]
fn go_http() {
    let scratch = Scratch::new("go");
    let binary = scratch.join("server");
    let source = program("server.go");
    let words = ["build", "-o", binary.to_str().unwrap(), source.to_str().unwrap()];
    let mut build = std::process::Command::new("go");
    build.args(words).env("CGO_ENABLED", "0").env("GOTOOLCHAIN", "local");
    let built =
        build.status().expect("go_http takes Go 1.24 or newer, which Debian 12 does not have");
    assert!(built.success(), "{built}");
    sleeping_server(&scratch, &[binary.to_str().unwrap(), "7000"], http_sums, is_multipath);
}

/// What listens here is a socket of Multipath TCP, not one of TCP alone.
fn is_multipath() {
    let shown = command("ss", &["--mptcp", "--listening", "--numeric", "--no-header"]).succeed();
    assert!(shown.contains(":7000 "), "{shown}");
}

/// A client of `programs/server.go`.
fn http_sums(address: &str) -> io::Result<Step> {
    let mut stream = BufReader::new(TcpStream::connect(address)?);
    let (mut number, mut sum, mut counted) = (0_u64, 0_u64, 0_u64);
    Ok(Box::new(move || {
        number += 1;
        sum += number;
        let request = format!("GET /{number} HTTP/1.1\r\nHost: test\r\n\r\n");
        stream.get_mut().write_all(request.as_bytes())?;
        let mut body = vec![0; header(&mut stream)?];
        stream.read_exact(&mut body)?;
        let answer = String::from_utf8_lossy(&body);
        let words: Vec<u64> = answer.split_whitespace().filter_map(|w| w.parse().ok()).collect();
        match words[..] {
            [theirs, now] if theirs == sum && now >= counted => counted = now,
            _ => return Err(load::wrong(&format!("sum {sum}, counted {counted}: {answer:?}"))),
        }
        Ok(())
    }))
}

#[test]
fn java() {
    let source = program("Server.java");
    counter_server("java", &["java", "-Xmx128m", source.to_str().unwrap(), "7000"]);
}

/// Rounds of a heap that the program and its garbage collector work on, and that it checks.
#[test]
fn java_in_rounds() {
    let scratch = Scratch::new("java-rounds");
    let network = Network::new(scratch.name());
    let source = program("Server.java");
    let words = ["java", "-Xmx128m", source.to_str().unwrap(), "7000"];
    let mut job = Job::start(&scratch, Some(&network), &words);
    let load = clients(&network, 4, |_| load::counter(ADDRESS));
    for _ in 0..10 {
        load.advance(20);
        job.pre_dump(&[]);
    }
    job.dump(&["--tcp-established"]);
    job.restore(&["--tcp-established"]);
    load.advance(50);
    let output = fs::read_to_string(scratch.join("output.log")).unwrap();
    assert!(!output.contains("broken") && process::alive(job.pid()), "{output}");
}

#[test]
fn redis_under_load() {
    let scratch = Scratch::new("redis-host");
    let network = Network::new(scratch.name());
    let socket = scratch.join("redis.sock");
    let (socket, log) = (socket.to_str().unwrap(), scratch.join("unix.out"));
    // The client on the Unix socket sleeps with the server: a stream to a process that stays awake
    // could not be taken apart.
    let script = format!(
        "redis-server --port 7000 --save '' --unixsocket {socket} & \
         until redis-cli -s {socket} ping; do sleep 0.05; done; \
         {WORKLOAD} redis {socket} unix {} & wait",
        log.display()
    );
    let mut job = Job::start(&scratch, Some(&network), &["sh", "-c", &script]);
    let load = clients(&network, 4, |number| load::redis(ADDRESS, &format!("key:{number}")));
    let connect = || network.inside(|| Redis::connect(ADDRESS).unwrap());
    let mut client = connect();
    client.text(&["SET", "large", &"x".repeat(10 << 20)]);
    for _ in 0..2 {
        load.advance(50);
        next_line(&log);
        job.sleep_and_wake(&["--tcp-established"]);
    }
    load.advance(50);
    next_line(&log);
    assert_eq!(client.text(&["GET", "large"]), "x".repeat(10 << 20));
    assert_eq!(connect().text(&["PING"]), "PONG");
    assert!(!fs::read_to_string(&log).unwrap().contains("broken"));
}

/// Master and workers, connections that are kept alive, and a slow download in the middle.
#[test]
fn nginx() {
    let scratch = Scratch::new("nginx");
    let network = Network::new(scratch.name());
    let dir = scratch.path().display();
    fs::write(scratch.join("small"), "small file\n").unwrap();
    let large: Vec<u8> = (0..8_u32 << 20).map(|n| (n / 4 % 251).to_le_bytes()[0]).collect();
    fs::write(scratch.join("large"), &large).unwrap();
    let configuration = format!(
        "daemon off; pid {dir}/nginx.pid; error_log {dir}/error.log; worker_processes 2; user root;\n\
         events {{ worker_connections 64; }}\n\
         http {{\n\
           access_log {dir}/access.log; keepalive_requests 1000000; keepalive_timeout 1h; send_timeout 1h;\n\
           client_body_temp_path {dir}/body; proxy_temp_path {dir}/proxy; fastcgi_temp_path {dir}/fastcgi;\n\
           uwsgi_temp_path {dir}/uwsgi; scgi_temp_path {dir}/scgi;\n\
           server {{ listen {ADDRESS}; root {dir}; location /large {{ limit_rate 2m; }} }}\n\
         }}\n"
    );
    fs::write(scratch.join("nginx.conf"), configuration).unwrap();
    let file = scratch.join("nginx.conf");
    let mut job = Job::start(
        &scratch,
        Some(&network),
        &["nginx", "-e", "stderr", "-c", file.to_str().unwrap()],
    );
    let load = clients(&network, 4, |_| keep_alive("/small", "small file\n"));
    let mut download = network.inside(|| get(ADDRESS, "/large").unwrap());
    let mut received = vec![0; 1 << 20];
    download.read_exact(&mut received).unwrap();
    until_true("master and workers", || process::tree(job.pid()).len() == 3);

    load.advance(50);
    job.sleep_and_wake(&["--tcp-established"]);

    load.advance(50);
    download.read_to_end(&mut received).unwrap();
    assert!(received == large, "the download is broken");
    clients(&network, 2, |_| keep_alive("/small", "small file\n")).advance(10);
}

/// A client that asks for the same page again and again on one connection.
fn keep_alive(path: &str, expected: &str) -> io::Result<Step> {
    let (request, expected) =
        (format!("GET {path} HTTP/1.1\r\nHost: test\r\n\r\n"), expected.to_owned());
    let mut stream = BufReader::new(TcpStream::connect(ADDRESS)?);
    Ok(Box::new(move || {
        stream.get_mut().write_all(request.as_bytes())?;
        let length = header(&mut stream)?;
        let mut body = vec![0; length];
        stream.read_exact(&mut body)?;
        if body != expected.as_bytes() {
            return Err(load::wrong(&String::from_utf8_lossy(&body)));
        }
        Ok(())
    }))
}

/// Asks for a page on a connection that the server closes at the end.
fn get(address: &str, path: &str) -> io::Result<BufReader<TcpStream>> {
    let mut stream = BufReader::new(TcpStream::connect(address)?);
    let request = format!("GET {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n");
    stream.get_mut().write_all(request.as_bytes())?;
    header(&mut stream)?;
    Ok(stream)
}

/// Reads the header of an answer, and returns how long its body is.
fn header(stream: &mut BufReader<TcpStream>) -> io::Result<usize> {
    let mut length = None;
    let mut line = String::new();
    stream.read_line(&mut line)?;
    if !line.starts_with("HTTP/1.1 200") {
        return Err(load::wrong(&line));
    }
    while line != "\r\n" {
        line.clear();
        if stream.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if let Some(value) = line.strip_prefix("Content-Length: ") {
            length = value.trim().parse().ok();
        }
    }
    length.ok_or_else(|| load::wrong("no length"))
}
