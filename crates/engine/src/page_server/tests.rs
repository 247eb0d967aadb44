//! Both ends, over a pair of sockets.

mod images;
mod strangers;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DnType, IsCa, Issuer,
    KeyIdMethod, KeyPair, RevokedCertParams, SerialNumber, date_time_ymd,
};
use rustix::net::sockopt::set_socket_recv_buffer_size;
use rustix::net::{AddressFamily, SocketType};
use torpor_images::compress::Compression;
use torpor_images::packed::Packed;
use torpor_images::pagemap::{Pagemap, Run};
use torpor_images::{ImageDir, kind};
use torpor_seal::{Checkpoint, Header, MasterKey, Suite};

use super::protocol::{Command, Op};
use super::*;
use crate::error::Result;
use crate::memory::pages::{CHUNK, PageSpan, Source};
use crate::options::{Memory, Options, PageServer, Tls};

fn run(vaddr: u64, pages: u64, present: bool) -> Run {
    Run { vaddr, pages, present, ..Run::default() }
}

/// Lets a server write to `dir` while `client` talks to it.
fn session(
    dir: &Path,
    tls: [Option<Tls>; 2],
    client: impl FnOnce(&PageServer) -> Result<()>,
) -> (Result<()>, Result<()>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let [ours, theirs] = [ours, theirs].map(|end| Some(Arc::new(OwnedFd::from(end))));
    let [tls_here, tls_there] = tls;
    let server = PageServer { socket: theirs, tls: tls_there, ..PageServer::default() };
    let to = PageServer {
        socket: ours,
        tls: tls_here,
        address: Some("pages.example".into()),
        ..PageServer::default()
    };
    std::thread::scope(|scope| {
        let served = scope.spawn(move || {
            let opts = Options { images_dir: dir.to_owned(), ..Options::default() };
            serve(&opts, Listener::new(&server)?)
        });
        let asked = client(&to);
        drop(to);
        (asked, served.join().unwrap())
    })
}

const TASK: Object = Object { kind: kind::PAGEMAP, id: 7 };
const SHARED: Object = Object { kind: kind::SHMEM_PAGEMAP, id: 7 };

fn send_two(to: &PageServer) -> Result<()> {
    let mut sender = Sender::connect(to)?;
    assert!(!sender.open(TASK)?);
    sender.run(&run(0x1000, 2, true))?;
    sender.pages(&mut [b'a'; 8192])?;
    sender.run(&run(0x5000, 1, false))?;
    assert!(!sender.open(SHARED)?);
    sender.run(&run(0, 300, true))?;
    sender.pages(&mut vec![b'b'; 300 * 4096])?;
    sender.close().map(drop)
}

fn expect_two(dir: &Path) {
    let images = ImageDir::open(dir).unwrap();
    let task = Pagemap::read(&images, TASK.kind, TASK.id).unwrap();
    assert_eq!(task.runs, [run(0x1000, 2, true), run(0x5000, 1, false)]);
    let shared = Pagemap::read(&images, SHARED.kind, SHARED.id).unwrap();
    assert_eq!(shared.runs, [run(0, 300, true)]);
    let pages = |id: u32| std::fs::read(dir.join(kind::PAGES.file_name(id.into()))).unwrap();
    assert_eq!(pages(task.pages_id), [b'a'; 8192]);
    assert_eq!(pages(shared.pages_id), vec![b'b'; 300 * 4096]);
}

#[test]
fn what_is_sent_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let (asked, served) = session(dir.path(), [None, None], send_two);
    served.unwrap();
    asked.unwrap();
    expect_two(dir.path());
}

#[test]
fn what_did_not_come_to_its_end_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let (_, served) = session(dir.path(), [None, None], |to| {
        let mut sender = Sender::connect(to)?;
        sender.open(TASK)?;
        sender.run(&run(0x1000, 2, true))?;
        sender.pages(&mut [b'a'; 4096])
    });
    served.unwrap_err();
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_lazy_dump_refuses_clients_until_it_is_complete() {
    let here = PageServer { address: Some("localhost".into()), ..PageServer::default() };
    let opts = lazy(here);
    let lender = Lender::prepare(&opts).unwrap().unwrap();
    let port = lender.port().unwrap();
    let refused = TcpStream::connect(("localhost", port)).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
    lender.listen().unwrap();
    TcpStream::connect(("localhost", port)).unwrap();
    // The port is told to be taken before the tasks are touched.
    let there = PageServer { port, ..opts.memory.page_server.clone().unwrap() };
    let late = Options {
        memory: Memory { page_server: Some(there), ..opts.clone().memory },
        ..opts.clone()
    };
    let error = Lender::prepare(&late).unwrap_err().to_string();
    assert!(error.starts_with(&format!("listen at localhost port {port}: ")), "{error}");
}

/// Two ends of a connection over a network: their addresses differ.
fn network() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let flags = (AddressFamily::INET, SocketType::STREAM);
    let far = rustix::net::socket(flags.0, flags.1, None).unwrap();
    rustix::net::bind(&far, &SocketAddr::from(([127, 0, 0, 2], 0))).unwrap();
    rustix::net::connect(&far, &listener.local_addr().unwrap()).unwrap();
    let near = listener.accept().unwrap().0;
    // What lies between them holds little.
    set_socket_recv_buffer_size(&near, 64 * 1024).unwrap();
    (TcpStream::from(far), near)
}

fn end(socket: impl Into<OwnedFd>) -> PageServer {
    PageServer { socket: Some(Arc::new(socket.into())), ..PageServer::default() }
}

/// Memory that compresses well in its first half, and not at all in its second.
fn half_and_half() -> Vec<u8> {
    let mut memory: Vec<u8> = (0..CHUNK).map(|at| u8::try_from(at / 999 % 250).unwrap()).collect();
    let mut state = 1_u64;
    memory.extend((0..CHUNK).map(|_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        state.to_be_bytes()[0]
    }));
    memory
}

/// Over a network that is slower than both ends, pages are compressed on their way and stored as
/// if they had not been; a server that is not Torpor's gets them as they are.
#[test]
fn pages_that_wait_for_the_network_are_compressed() {
    let piece = half_and_half();
    let (far, near) = network();
    let slow = relay(near);
    let dir = tempfile::tempdir().unwrap();
    let there = end(slow);
    let pieces = 20;
    let packed = std::thread::scope(|scope| {
        let opts = Options { images_dir: dir.path().to_owned(), ..Options::default() };
        let served = scope.spawn(move || serve(&opts, Listener::new(&there)?));
        let mut sender = Sender::connect(&end(far)).unwrap();
        sender.open(TASK).unwrap();
        sender.run(&run(0x1000, pieces * (piece.len() / PAGE_LEN) as u64, true)).unwrap();
        for _ in 0..pieces {
            piece.clone().chunks_mut(CHUNK).for_each(|chunk| sender.pages(chunk).unwrap());
        }
        let packed = sender.close().unwrap();
        served.join().unwrap().unwrap();
        packed.expect("the network was slow")
    });
    assert!(packed.to < packed.from * 3 / 4, "{packed:?}");
    let stored = std::fs::read(dir.path().join("pages-1.img")).unwrap();
    assert!(stored == piece.repeat(usize::try_from(pieces).unwrap()));
}

/// Passes on what comes, slowly.
fn relay(mut from: TcpStream) -> UnixStream {
    let (mut to, end) = UnixStream::pair().unwrap();
    let (mut answers, mut back) = (to.try_clone().unwrap(), from.try_clone().unwrap());
    std::thread::spawn(move || {
        let mut buffer = vec![0; 128 * 1024];
        while let Ok(len @ 1..) = from.read(&mut buffer) {
            std::thread::sleep(std::time::Duration::from_millis(2));
            to.write_all(&buffer[..len]).unwrap();
        }
    });
    std::thread::spawn(move || std::io::copy(&mut answers, &mut back));
    end
}

const FILE: Object = Object { kind: kind::PAGES_PACKED, id: 3 };

#[test]
fn files_of_pages_are_stored_as_they_come() {
    let dir = tempfile::tempdir().unwrap();
    // More than are open at once, and each of them twice.
    let file = |id| Object { id, ..FILE };
    let (asked, served) = session(dir.path(), [None, None], |to| {
        let mut sender = Sender::connect_to_torpor(to, "")?;
        for (offset, byte) in [(5000, b'b'), (0, b'a')] {
            for id in 1..=100 {
                sender.store(file(id), offset, &[byte; 5000])?;
            }
        }
        sender.store(Object { kind: kind::PAGES, id: 3 }, 0, &[])?;
        sender.close().map(drop)
    });
    served.unwrap();
    asked.unwrap();
    for id in 1..=100 {
        let stored = std::fs::read(dir.path().join(FILE.kind.file_name(id))).unwrap();
        assert_eq!(stored, [[b'a'; 5000], [b'b'; 5000]].concat());
    }
    assert!(std::fs::read(dir.path().join("pages-3.img")).unwrap().is_empty());
    // The next dump asks which of them are there.
    let child = dir.path().join("child");
    std::fs::create_dir(&child).unwrap();
    ImageDir::open(&child).unwrap().set_parent(Path::new("..")).unwrap();
    let (asked, served) = session(&child, [None, None], |to| {
        let mut sender = Sender::connect_to_torpor(to, "")?;
        assert!(sender.has_in_parent(FILE)? && !sender.has_in_parent(file(101))?);
        sender.close().map(drop)
    });
    served.unwrap();
    asked.unwrap();
    // What does not come to its end is removed.
    let (_, served) = session(&child, [None, None], |to| {
        Sender::connect_to_torpor(to, "")?.store(FILE, 0, b"half")
    });
    served.unwrap_err();
    assert!(!child.join(FILE.kind.file_name(3)).exists());
}

/// A server's answer to raw commands.
fn refusal(commands: &[Command]) -> String {
    let dir = tempfile::tempdir().unwrap();
    let (_, served) = session(dir.path(), [None, None], |to| {
        let mut socket = UnixStream::from(to.socket.as_ref().unwrap().try_clone().unwrap());
        for command in commands {
            command.send(&mut socket).unwrap();
        }
        // The server's answers have to be taken for it to go on.
        socket.shutdown(std::net::Shutdown::Write).unwrap();
        socket.read_to_end(&mut Vec::new()).unwrap();
        Ok(())
    });
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    served.unwrap_err().to_string()
}

#[test]
fn a_client_that_breaks_the_protocol() {
    let open = Command::bare(Op::Open, Some(TASK));
    let hole = Command { op: Op::Hole, flags: 0, pages: 1, vaddr: 0x1000, object: None };
    assert_eq!(refusal(&[hole]), "page server: the client sent pages of no object");
    let parent = Command { flags: 1, ..hole };
    let error = refusal(&[open, parent]);
    assert_eq!(error, "page server: the client sent pages in a parent that there is not");
    let odd = Command { vaddr: 0x1001, ..hole };
    assert_eq!(refusal(&[open, odd]), "page server: the client sent pages out of range");
    let far = Command { vaddr: u64::MAX - 4095, ..hole };
    assert_eq!(refusal(&[open, far]), "page server: the client sent pages out of range");
    let error = refusal(&[open, hole, hole]);
    assert_eq!(error, "page server: the client sent runs that are out of order");
    let error = refusal(&[open, open]);
    assert_eq!(error, "page server: the client sent pagemap-7.img twice");
    let absent = Command { op: Op::AddPages, ..hole };
    let error = refusal(&[open, absent]);
    assert_eq!(error, "page server: the client sent pages with flags of other pages");
    let store = Command::bare(Op::Store, Some(FILE));
    let mixed = "page server: the client sent pagemaps and files of pages";
    assert_eq!(refusal(&[store, open]), mixed);
    assert_eq!(refusal(&[open, store]), mixed);
    let far = Command { vaddr: u64::MAX, ..store };
    assert_eq!(refusal(&[far]), "page server: the client sent pages out of range");
    let many = Command::bare(Op::Store, Some(Object { id: 1 << 32, ..FILE }));
    assert!(refusal(&[many]).starts_with("page server: the client sent object"));
}

#[test]
fn a_parent_on_the_server() {
    let dir = tempfile::tempdir().unwrap();
    let [old, new] = ["old", "new"].map(|name| dir.path().join(name));
    for dir in [&old, &new] {
        std::fs::create_dir(dir).unwrap();
    }
    session(&old, [None, None], send_two).1.unwrap();
    ImageDir::open(&new).unwrap().set_parent(Path::new("../old")).unwrap();
    let (asked, served) = session(&new, [None, None], |to| {
        let mut sender = Sender::connect(to)?;
        assert!(sender.open(TASK)?, "the parent has this task");
        sender.run(&Run { in_parent: true, ..run(0x1000, 2, false) })?;
        assert!(!sender.open(Object { id: 8, ..TASK })?, "and not this one");
        sender.close().map(drop)
    });
    served.unwrap();
    asked.unwrap();
    let map = Pagemap::read(&ImageDir::open(&new).unwrap(), TASK.kind, TASK.id).unwrap();
    assert!(map.runs[0].in_parent);
}

/// Two pages at 0x5000 of task 7.
fn stock() -> Lent {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&(0..7_u8).flat_map(|page| [page; 4096]).collect::<Vec<u8>>()).unwrap();
    let mut lent = Lent::default();
    let run = PageSpan { start: 0x5000, end: 0x7000, ..PageSpan::default() };
    lent.push(7, Source::Served(Arc::new(file)), run);
    lent
}

/// What a dump that is lazy is told, with this server.
fn lazy(server: PageServer) -> Options {
    let memory = Memory { lazy: true, page_server: Some(server), ..Memory::default() };
    Options { memory, ..Options::default() }
}

/// Lets a dump with this id, sealed or not, lend [`stock`] to `client`, compressed or not. Says what was compressed.
fn lend_to<T: Send>(
    (id, seal, compress): (&str, Option<&Checkpoint>, Option<Compression>),
    client: impl FnOnce(&PageServer) -> T + Send,
) -> (T, Result<Option<Packed>>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let [ours, theirs] = [ours, theirs].map(|end| Some(Arc::new(OwnedFd::from(end))));
    let opts = lazy(PageServer { socket: theirs, ..PageServer::default() });
    let lent = stock();
    std::thread::scope(|scope| {
        let asked = scope.spawn(move || {
            let to = PageServer { socket: ours, ..PageServer::default() };
            client(&to)
        });
        let lender = Lender::prepare(&opts).unwrap().unwrap();
        let served = lender.serve(Loan { lent: &lent, id, seal, compress });
        let served = served.map(|restore| {
            let packed = restore.packed;
            restore.answer(true);
            packed
        });
        drop(opts);
        (asked.join().unwrap(), served)
    })
}

/// What a restore gets by these commands, and these bytes behind them, of a plain dump, or
/// one that is sealed.
fn lend_raw(
    seal: Option<&Checkpoint>,
    commands: &[Command],
    more: &[u8],
) -> (Vec<u8>, Result<Option<Packed>>) {
    lend_to(("seven", seal, None), |to| {
        let mut socket = UnixStream::from(to.socket.as_ref().unwrap().try_clone().unwrap());
        let mut said = Vec::new();
        for command in commands {
            command.send(&mut said).unwrap();
        }
        said.extend_from_slice(more);
        // At once: a client that is refused at the first command finds nobody to write the next one
        // to.
        socket.write_all(&said).unwrap();
        socket.shutdown(std::net::Shutdown::Write).unwrap();
        let mut bytes = Vec::new();
        match socket.read_to_end(&mut bytes) {
            // Nobody reads what a client that is refused has said behind that.
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
            ended => drop(ended.unwrap()),
        }
        bytes
    })
}

fn lend(commands: &[Command]) -> (Vec<u8>, Result<Option<Packed>>) {
    lend_raw(None, commands, &[])
}

fn sealed() -> Checkpoint {
    let master = MasterKey::random().unwrap();
    Checkpoint::new(Header::new(Suite::Aes256Gcm, None).unwrap(), &master)
}

/// Asks twice for what is lent, and checks it.
fn borrow(to: &PageServer, id: &str, seal: Option<&Checkpoint>) -> Result<()> {
    let mut borrower = Borrower::connect(to, id, seal)?;
    let mut buffer = vec![0; 2 * 4096];
    for range in [0x6000..0x7000, 0x5000..0x7000] {
        borrower.ask(Request { id: 7, range })?;
    }
    borrower.flush()?;
    assert_eq!(borrower.receive(&mut buffer)?, Request { id: 7, range: 0x6000..0x7000 });
    assert_eq!(buffer[..4096], [6; 4096]);
    borrower.receive(&mut buffer)?;
    assert_eq!(buffer, [[5; 4096], [6; 4096]].concat());
    borrower.close(&mut buffer)
}

#[test]
fn pages_are_lent_to_who_restores_them() {
    let seal = sealed();
    for seal in [None, Some(&seal)] {
        for compress in [None, Some(Compression::LZ4), Some(Compression::ZSTD)] {
            let loan = ("seven", seal, compress);
            let (asked, served) = lend_to(loan, |to| borrow(to, "seven", seal));
            assert_eq!(served.unwrap().is_some_and(|p| p.to < p.from), compress.is_some());
            asked.unwrap();
        }
        let (asked, served) = lend_to(("eight", seal, None), |to| borrow(to, "seven", seal));
        let asked = asked.unwrap_err().to_string();
        assert!(asked.contains("of other images than these"), "{asked}");
        assert!(served.unwrap_err().to_string().contains("has other images"));
    }
    // What is sealed for another is none of ours, whatever the id says.
    let other = sealed();
    let (asked, _) = lend_to(("seven", Some(&other), None), |to| borrow(to, "seven", Some(&seal)));
    let asked = asked.unwrap_err().to_string();
    assert!(asked.contains("the page at 6000 was changed on its way"), "{asked}");
}

#[test]
fn sealed_pages_are_lent_sealed() {
    let seal = sealed();
    let greet = Command { pages: 5, ..Command::bare(Op::Greet, None) };
    let mut wanted = Vec::new();
    get(0x5000, 9).send(&mut wanted).unwrap();
    Command::bare(Op::Close, None).send(&mut wanted).unwrap();
    let said = [b"seven".as_slice(), &wanted].concat();
    let (bytes, served) = lend_raw(Some(&seal), &[greet], &said);
    served.unwrap();
    let (greeted, rest) = bytes.split_at(4 + 16);
    let (pages, tags) = rest[Command::SIZE..].split_at(2 * 4096);
    assert!(greeted[..4] == [0; 4] && tags.len() == 2 * 16 + 4);
    let plain = [5, 6].map(|byte| [byte; 8]);
    assert!(!bytes.windows(8).any(|part| plain.iter().any(|plain| part == plain)));
    let mut pages = pages.to_vec();
    let mut transit = seal.receive_pages(4096, greeted[4..].try_into().unwrap()).unwrap();
    transit.open(7, 0x5000, &mut pages, &tags[..2 * 16]).unwrap();
    assert_eq!(pages, [[5; 4096], [6; 4096]].concat());
    // Not to a client that does not say what it restores, or says too much.
    let (bytes, served) = lend_raw(Some(&seal), &[get(0x5000, 1)], &[]);
    assert!(served.is_err() && bytes.is_empty());
    let long = Command { pages: 257, ..greet };
    let (bytes, served) = lend_raw(Some(&seal), &[long], &[0; 257]);
    assert!(served.unwrap_err().to_string().contains("more than the id"));
    assert!(bytes.is_empty());
}

/// A dump that is not Torpor's serves plain pages, which are not for a sealed checkpoint.
#[test]
fn a_dump_that_is_not_torpors() {
    let seal = sealed();
    for seal in [None, Some(&seal)] {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let to = PageServer { socket: Some(Arc::new(ours.into())), ..PageServer::default() };
        std::thread::scope(|scope| {
            scope.spawn(move || {
                Command::receive(&mut theirs).unwrap();
                theirs.write_all(&[0; 4]).unwrap();
            });
            let connected = Borrower::connect(&to, "seven", seal).map(drop);
            match seal {
                None => connected.unwrap(),
                Some(_) => assert!(connected.unwrap_err().to_string().contains("not Torpor's")),
            }
        });
    }
}

fn get(vaddr: u64, pages: u32) -> Command {
    Command { op: Op::Get, flags: 0, pages, vaddr, object: Some(TASK) }
}

#[test]
fn pages_that_are_lent() {
    let close = Command::bare(Op::Close, None);
    let (bytes, served) = lend(&[get(0x6000, 1), get(0x5000, 9), close]);
    served.unwrap();
    let mut expected = Vec::new();
    for (vaddr, pages) in [(0x6000_u32, 6..7), (0x5000, 5..7_u8)] {
        let count = u32::from(pages.end - pages.start);
        // As it is on the wire: present pages, of a task by its bare number.
        for word in [6 | 4 << 16, count, vaddr, 0, 7, 0] {
            expected.extend(word.to_le_bytes());
        }
        expected.extend(pages.flat_map(|page| [page; 4096]));
    }
    expected.extend([0; 4]);
    assert!(bytes == expected, "{} bytes instead of {}", bytes.len(), expected.len());
}

#[test]
fn what_is_not_lent_is_not_given() {
    let other = Command { object: Some(Object { id: 8, ..TASK }), ..get(0x5000, 1) };
    let outside = [get(0x4000, 1), get(0x7000, 1), get(0x5001, 1), get(0x5000, 0), other];
    let open = Command::bare(Op::Open, Some(TASK));
    let far = get(u64::MAX - 4095, 1);
    for command in outside.into_iter().chain([far, open, Command::bare(Op::Abandon, None)]) {
        let (bytes, served) = lend(&[command]);
        served.unwrap_err();
        assert!(bytes.is_empty(), "{command:?}");
    }
}

/// An authority, and certificates in files.
struct Authority {
    dir: tempfile::TempDir,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        // Two authorities of one name could not be told apart but by their signatures.
        params.distinguished_name.push(DnType::CommonName, dir.path().display().to_string());
        let certificate = params.self_signed(&key).unwrap();
        std::fs::write(dir.path().join("ca.pem"), certificate.pem()).unwrap();
        Authority { dir, issuer: Issuer::new(params, key) }
    }

    /// Certifies `name`, with a serial number.
    fn certify(&self, name: &str, serial: u64) -> Tls {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.serial_number = Some(SerialNumber::from(serial));
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let file = |kind: &str| self.dir.path().join(format!("{serial}.{kind}.pem"));
        std::fs::write(file("cert"), certificate.pem()).unwrap();
        std::fs::write(file("key"), key.serialize_pem()).unwrap();
        Tls {
            ca_cert: Some(self.dir.path().join("ca.pem")),
            cert: Some(file("cert")),
            key: Some(file("key")),
            ..Tls::default()
        }
    }

    /// A list of one revoked certificate.
    fn revoke(&self, serial: u64) -> std::path::PathBuf {
        let revoked = RevokedCertParams {
            serial_number: SerialNumber::from(serial),
            revocation_time: date_time_ymd(2024, 1, 1),
            reason_code: None,
            invalidity_date: None,
        };
        let list = CertificateRevocationListParams {
            this_update: date_time_ymd(2024, 1, 1),
            next_update: date_time_ymd(2060, 1, 1),
            crl_number: SerialNumber::from(1_u64),
            issuing_distribution_point: None,
            revoked_certs: vec![revoked],
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let file = self.dir.path().join("crl.pem");
        std::fs::write(&file, list.signed_by(&self.issuer).unwrap().pem().unwrap()).unwrap();
        file
    }
}

#[test]
fn both_ends_show_certificates() {
    let authority = Authority::new();
    let dir = tempfile::tempdir().unwrap();
    let ends = [authority.certify("client", 1), authority.certify("pages.example", 2)];
    let (asked, served) = session(dir.path(), ends.map(Some), send_two);
    served.unwrap();
    asked.unwrap();
    expect_two(dir.path());
}

/// What the client and the server say when they do not get together.
fn disagree(client: Option<Tls>, server: Option<Tls>) -> (String, String) {
    let dir = tempfile::tempdir().unwrap();
    let (asked, served) = session(dir.path(), [client, server], send_two);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    (asked.unwrap_err().to_string(), served.unwrap_err().to_string())
}

#[test]
fn a_server_of_another_name() {
    let authority = Authority::new();
    let (client, server) = (authority.certify("client", 1), authority.certify("other.example", 2));
    let (asked, _) = disagree(Some(client.clone()), Some(server.clone()));
    assert!(asked.contains("not valid for name"), "{asked}");
    let dir = tempfile::tempdir().unwrap();
    let client = Tls { no_cn_verify: true, ..client };
    let (asked, served) = session(dir.path(), [Some(client), Some(server)], send_two);
    served.unwrap();
    asked.unwrap();
    expect_two(dir.path());
}

#[test]
fn a_name_may_be_any_but_not_the_authority() {
    let (authority, stranger) = (Authority::new(), Authority::new());
    let mut client = authority.certify("client", 1);
    client.no_cn_verify = true;
    let (asked, _) = disagree(Some(client), Some(stranger.certify("pages.example", 2)));
    assert!(asked.contains("UnknownIssuer"), "{asked}");
}

#[test]
fn a_client_of_another_authority() {
    let (authority, stranger) = (Authority::new(), Authority::new());
    let mut client = stranger.certify("client", 1);
    client.ca_cert = authority.certify("x", 3).ca_cert;
    let server = authority.certify("pages.example", 2);
    let (_, served) = disagree(Some(client), Some(server));
    assert!(served.contains("UnknownIssuer"), "{served}");
}

#[test]
fn a_client_whose_certificate_is_revoked() {
    let authority = Authority::new();
    let client = authority.certify("client", 1);
    let server = Tls { ca_crl: Some(authority.revoke(1)), ..authority.certify("pages.example", 2) };
    let (_, served) = disagree(Some(client), Some(server));
    assert!(served.contains("Revoked"), "{served}");
}

#[test]
fn a_client_that_does_not_encrypt() {
    let authority = Authority::new();
    let server = authority.certify("pages.example", 2);
    let (_, served) = disagree(None, Some(server));
    assert!(served.contains("TLS with the page client"), "{served}");
}
