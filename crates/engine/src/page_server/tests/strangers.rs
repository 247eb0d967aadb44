//! Clients that nobody has invited.

use std::io::ErrorKind;
use std::net::Shutdown;
use std::time::Duration;

use super::super::connection::Connection;
use super::super::server::serve_within;
use super::super::tls;
use super::*;

/// Serves at a port of this host, and hands the port to `client`.
fn serve_at_port(
    dir: &Path,
    tls: Option<Tls>,
    client: impl FnOnce(u16) -> Result<()>,
) -> (Result<()>, Result<()>) {
    serve_patiently(dir, tls, Duration::from_mins(1), client)
}

fn serve_patiently(
    dir: &Path,
    tls: Option<Tls>,
    patience: Duration,
    client: impl FnOnce(u16) -> Result<()>,
) -> (Result<()>, Result<()>) {
    let server = PageServer { tls, ..PageServer::default() };
    let listener = Listener::new(&server).unwrap();
    let port = listener.port().unwrap();
    std::thread::scope(|scope| {
        let served = scope.spawn(|| {
            let opts = Options { images_dir: dir.to_owned(), ..Options::default() };
            serve_within(&opts, listener, patience)
        });
        (client(port), served.join().unwrap())
    })
}

#[test]
fn only_this_host_reaches_a_server_without_an_address() {
    let server = PageServer::default();
    let listener = Listener::new(&server).unwrap();
    let port = listener.port().unwrap();
    // Another address of this host stands for one of a network.
    let refused = TcpStream::connect(("127.0.0.2", port)).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
    TcpStream::connect(("127.0.0.1", port)).unwrap();
}

#[test]
fn files_that_are_there_stay_as_they_are() {
    for name in ["pagemap-7.img", "pages-1.img", "pages-2.img", "pagemap-shmem-7.img"] {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join(name);
        std::fs::write(&file, "precious").unwrap();
        let (asked, served) = session(dir.path(), [None, None], send_two);
        let served = served.unwrap_err().to_string();
        assert!(served.contains(name) && served.contains("File exists"), "{served}");
        let asked = asked.unwrap_err().to_string();
        assert!(asked.contains("the page server failed"), "{asked}");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "precious");
        // What was made beside it is gone again.
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}

/// Names that are taken by something else than a file are taken, too; nothing is made behind a link.
#[test]
fn names_that_are_taken_stay_as_they_are() {
    type Take = fn(&Path, &Path);
    let ways: [(&str, Take); 4] = [
        ("a link to nothing", |name, to| std::os::unix::fs::symlink(to, name).unwrap()),
        ("a link to a file", |name, to| {
            std::fs::write(to, "precious").unwrap();
            std::os::unix::fs::symlink(to, name).unwrap();
        }),
        ("another name of a file", |name, to| {
            std::fs::write(to, "precious").unwrap();
            std::fs::hard_link(to, name).unwrap();
        }),
        ("a directory", |name, _| std::fs::create_dir(name).unwrap()),
    ];
    for (what, take) in ways {
        for name in ["pagemap-7.img", "pages-2.img"] {
            let (dir, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
            let (file, to) = (dir.path().join(name), outside.path().join("file"));
            take(&file, &to);
            let before = std::fs::symlink_metadata(&file).unwrap().file_type();
            let (_, served) = session(dir.path(), [None, None], send_two);
            let served = served.unwrap_err().to_string();
            assert!(served.contains(name), "{what}: {served}");
            assert_eq!(std::fs::symlink_metadata(&file).unwrap().file_type(), before, "{what}");
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "{what}");
            let content = std::fs::read_to_string(&to).ok();
            assert_eq!(content.as_deref(), what.ends_with("file").then_some("precious"), "{what}");
        }
    }
}

/// A client that fails, or says that its dump has, takes nothing with it that was there before.
#[test]
fn a_client_that_fails_removes_only_what_it_has_sent() {
    for abandons in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let others = ["pagemap-8.img", "pages-9.img", "inventory.img"];
        others.iter().for_each(|name| std::fs::write(dir.path().join(name), "precious").unwrap());
        let (_, served) = session(dir.path(), [None, None], |to| {
            let mut connection = Connection::connect(to)?;
            Command::bare(Op::Open, Some(TASK)).send(&mut connection).unwrap();
            if abandons {
                Command::bare(Op::Abandon, None).send(&mut connection).unwrap();
            }
            connection.flush().unwrap();
            Ok(())
        });
        served.unwrap_err();
        let left = std::fs::read_dir(dir.path()).unwrap().count();
        assert_eq!(left, others.len(), "abandons: {abandons}");
        for name in others {
            assert_eq!(std::fs::read_to_string(dir.path().join(name)).unwrap(), "precious");
        }
    }
}

#[test]
fn files_that_come_as_they_are_stored_replace_none() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("pages-1.img");
    std::fs::write(&file, "precious").unwrap();
    let (_, served) = session(dir.path(), [None, None], |to| {
        let object = Object { kind: kind::PAGES, id: 1 };
        let mut connection = Connection::connect(to)?;
        let store = Command { pages: 4, ..Command::bare(Op::Store, Some(object)) };
        store.send(&mut connection).unwrap();
        let _ = connection.write_all(b"evil").and_then(|()| connection.flush());
        let mut end = vec![];
        let _ = connection.read_to_end(&mut end);
        Ok(())
    });
    assert!(served.unwrap_err().to_string().contains("File exists"));
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "precious");
    // A dump is told so, however much it has still to send.
    let (asked, _) = session(dir.path(), [None, None], |to| {
        let mut sender = Sender::connect_to_torpor(to, "what is sealed")?;
        let object = Object { kind: kind::PAGES, id: 1 };
        (0..64).try_for_each(|part| sender.store(object, part << 20, &[0; 1 << 20]))
    });
    let asked = asked.unwrap_err().to_string();
    assert!(asked.contains("the page server failed"), "{asked}");
}

/// Clients that connect to a port, and say nothing, nonsense, or less than they should.
fn strangers(port: u16) -> Vec<TcpStream> {
    let mut all: Vec<TcpStream> =
        (0..5).map(|_| TcpStream::connect(("127.0.0.1", port)).unwrap()).collect();
    all[1].write_all(&[0xff; 100]).unwrap();
    // The beginning of a command, of a greeting by TLS, and a whole command but for its end.
    all[2].write_all(&[1]).unwrap();
    all[3].write_all(&[0x16, 3, 1, 0x40, 0]).unwrap();
    let mut open = vec![];
    Command::bare(Op::Open, Some(TASK)).send(&mut open).unwrap();
    all[4].write_all(&open[..open.len() - 1]).unwrap();
    // As much as the number of those that may be connected at once.
    all.extend((0..64).map(|_| TcpStream::connect(("127.0.0.1", port)).unwrap()));
    all
}

/// They keep nobody from being served.
#[test]
fn strangers_do_not_keep_others_waiting() {
    let authority = Authority::new();
    let server = authority.certify("localhost", 2);
    let client = authority.certify("client", 1);
    for tls in [None, Some((client, server))] {
        let dir = tempfile::tempdir().unwrap();
        let (ours, theirs) = tls.unzip();
        let (asked, served) = serve_at_port(dir.path(), theirs, |port| {
            let _strangers = strangers(port);
            let to = PageServer {
                port,
                address: Some("localhost".into()),
                tls: ours.clone(),
                ..PageServer::default()
            };
            send_two(&to)
        });
        asked.unwrap();
        served.unwrap();
        expect_two(dir.path());
    }
}

/// Nor a restore from a lazy dump, whose tasks stand still until it has come.
#[test]
fn strangers_do_not_keep_a_lazy_dump_waiting() {
    let authority = Authority::new();
    let server = authority.certify("localhost", 2);
    let client = authority.certify("client", 1);
    for tls in [None, Some((client, server))] {
        let (ours, theirs) = tls.unzip();
        let opts = lazy(PageServer { tls: theirs, ..PageServer::default() });
        let lender = Lender::prepare(&opts).unwrap().unwrap();
        lender.listen().unwrap();
        let (port, lent) = (lender.port().unwrap(), stock());
        std::thread::scope(|scope| {
            let asked = scope.spawn(move || {
                let _strangers = strangers(port);
                let address = Some("localhost".into());
                let to = PageServer { port, address, tls: ours, ..PageServer::default() };
                borrow(&to, "seven", None)
            });
            let loan = Loan { lent: &lent, id: "seven", seal: None, compress: None };
            lender.serve(loan).unwrap().answer(true);
            asked.join().unwrap().unwrap();
        });
    }
}

/// A stranger who says no more than that all pages have come does not have a lazy dump end its tasks, which wait for their restore.
#[test]
fn nobody_has_all_pages_who_has_asked_for_none() {
    let (said, served) = lend(&[Command::bare(Op::Close, None)]);
    assert!(said.is_empty());
    let served = served.unwrap_err().to_string();
    assert!(served.ends_with("that it has all pages, and has asked for none"), "{served}");
}

/// A client that has asked for something and then says nothing, in the middle of it or after it, is let go,
/// although it stays connected: nothing that it has sent is left.
#[test]
fn a_client_that_falls_silent_is_let_go() {
    let run = Command { op: Op::AddPages, flags: 4, pages: 2, vaddr: 0x1000, object: None };
    for sends_pages in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let patience = Duration::from_millis(50);
        let (_, served) = serve_patiently(dir.path(), None, patience, |port| {
            let mut client = TcpStream::connect(("127.0.0.1", port)).unwrap();
            let mut said = vec![];
            Command::bare(Op::Open, Some(TASK)).send(&mut said).unwrap();
            if sends_pages {
                run.send(&mut said).unwrap();
                said.extend([7; 100]);
            }
            // At once: between two words it might be silent for too long on a busy machine.
            client.write_all(&said).unwrap();
            // Until the server closes the connection.
            let _ = client.read_to_end(&mut vec![]);
            Ok(())
        });
        let served = served.unwrap_err().to_string();
        assert!(served.ends_with("the other end is silent"), "{served}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "{sends_pages}");
    }
}

/// The tasks of a lazy dump stand still until somebody has had all pages, be that a stranger who asks for one and no more.
#[test]
fn a_stranger_of_a_lazy_dump_that_falls_silent_is_let_go() {
    let opts = lazy(PageServer::default());
    let lender = Lender::prepare(&opts).unwrap().unwrap();
    lender.listen().unwrap();
    let mut client = TcpStream::connect(("127.0.0.1", lender.port().unwrap())).unwrap();
    let mut said = vec![];
    let get = Command { op: Op::Get, flags: 0, pages: 1, vaddr: 0x5000, object: Some(TASK) };
    get.send(&mut said).unwrap();
    client.write_all(&said).unwrap();
    let lent = stock();
    let loan = Loan { lent: &lent, id: "seven", seal: None, compress: None };
    let given_up = lender.serve_within(loan, Duration::from_millis(50)).unwrap_err().to_string();
    assert!(given_up.ends_with("the other end is silent"), "{given_up}");
}

/// A page server that takes a connection and says nothing does not keep a dump waiting.
#[test]
fn a_silent_server_is_given_up() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let to = PageServer { socket: Some(Arc::new(ours.into())), ..PageServer::default() };
    let mut connection = Connection::connect(&to).unwrap();
    let given_up = connection.is_torpor_within(Duration::from_millis(20)).unwrap_err();
    assert!(given_up.to_string().contains("the other end is silent"), "{given_up}");
    drop(theirs);
}

/// Nor one that falls silent later, or takes no more pages: the tasks of the dump stand still.
#[test]
fn a_server_that_falls_silent_is_given_up() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let to = PageServer { socket: Some(Arc::new(ours.into())), ..PageServer::default() };
    let mut sender = Sender::connect_for(&to, Duration::from_millis(20)).unwrap();
    let silent = sender.open(TASK).unwrap_err().to_string();
    assert!(silent.ends_with("the other end is silent"), "{silent}");
    // More than what lies between them holds.
    let given_up = std::iter::repeat_with(|| sender.pages(&mut vec![7; CHUNK]));
    given_up.take(1000).find_map(Result::err).unwrap();
    drop(theirs);
}

/// A client that says nothing, and one that says a byte now and then, is let go when its time is over: the
/// other end stays open all the while.
#[test]
fn a_handshake_has_a_deadline() {
    let authority = Authority::new();
    let files = authority.certify("localhost", 2);
    for speaks in [false, true] {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        let socket = std::fs::File::from(OwnedFd::from(ours));
        let late = std::thread::scope(|scope| {
            let server =
                scope.spawn(|| tls::server(socket, &files, Duration::from_millis(100)).map(drop));
            // The beginning of a greeting, which never comes to its end.
            let bytes = [0x16, 3, 1, 0x40, 0].into_iter().chain(std::iter::repeat(0));
            let still_there = |error: &std::io::Error| error.kind() == ErrorKind::WouldBlock;
            for byte in bytes.take(if speaks { 5000 } else { 0 }) {
                if !theirs.read(&mut [0]).as_ref().is_err_and(still_there) {
                    break;
                }
                let _ = theirs.write_all(&[byte]);
            }
            // A server that waits for more than the deadline ends otherwise.
            if speaks {
                let _ = theirs.shutdown(Shutdown::Write);
            }
            server.join().unwrap().unwrap_err().to_string()
        });
        assert!(late.contains("TLS with the page client: timed out"), "{late}");
    }
}
