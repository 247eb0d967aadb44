//! What is done with arbitrary bytes: by the fuzzer, which looks for bytes
//! that make it panic, and by a test that replays the corpus and mutations of
//! it.
//!
//! The first byte chooses what kind of image the others are, where there is a
//! choice. The header is not part of the input, so that no run is lost on
//! finding it.

#![forbid(unsafe_code)]
#![allow(clippy::panic, clippy::unwrap_used, clippy::expect_used)]

#[path = "../../crates/images/tests/common/types.rs"]
mod types;

pub mod plan;

use std::io::{self, Write as _};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use flate2::{Compression, write::GzEncoder};
use prost::Message as _;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use torpor_crit::View;
use torpor_engine::lazy::accept_all;
use torpor_engine::page_server::{Command, Incoming, method};
use torpor_images::kind::{self, Kind, Layout};
use torpor_images::pagemap::{Pagemap, Run};
use torpor_images::pages::PagesReader;
use torpor_images::payload::{next_chunk, read_messages, read_semaphores, shm_len};
use torpor_images::proto::{
    BpfmapDataEntry, CriuReq, CriuResp, GhostFileEntry, IpcMsgEntry, IpcSemEntry, IpcShmEntry,
    PipeDataEntry, SkPacketEntry, TcpStreamEntry,
};
use torpor_images::{ImageDir, Reader, Result};
use torpor_policy::{PacketFilter, Policy, Spec, leaves, scan_archive};
use torpor_queue::scheduler::simulation::swf;
use torpor_seal::header::{RecordCipher, Sealed};
use torpor_seal::keys::Trust;
use torpor_seal::page::{PageOpener, PagesFile, Removed};
use torpor_seal::record::RecordReader;
use torpor_seal::sign::Signature;
use torpor_seal::{Header, Manifest, Secret, Suite};
use torpor_sys::socket::{self, Message};
use types::{Check, Entry, every_kind};

/// How many packets [`lazy`] sends at most.
const PACKETS: usize = 64;
/// How many jobs of a trace [`texts`] reads at most.
const TASKS: usize = 100;
/// How many pages behind one command [`pages`] receives at most.
const MAX_PAGES: u32 = 300;

/// A target.
pub type Target = fn(&[u8]);

/// Every target and its name.
pub const TARGETS: &[(&str, Target)] = &[
    ("entries", entries),
    ("pagemap", pagemap),
    ("packed", packed),
    ("payloads", payloads),
    ("decode", decode),
    ("encode", encode),
    ("rpc", rpc),
    ("seal", seal),
    ("archive", archive),
    ("texts", texts),
    ("pages", pages),
    ("lazy", lazy),
    ("plan", plan::plan),
];

/// The kinds that have entries, in the order in which a byte chooses them.
pub fn kinds() -> Vec<Kind> {
    kind::ALL.iter().copied().filter(|kind| kind.layout != Layout::Raw).collect()
}

/// The kinds with data behind their entries, likewise.
pub const WITH_PAYLOAD: &[Kind] = &[
    kind::PIPES_DATA,
    kind::SK_QUEUES,
    kind::TCP_STREAM,
    kind::BPFMAP_DATA,
    kind::IPCNS_SHM,
    kind::IPCNS_SEM,
    kind::IPCNS_MSG,
    kind::GHOST_FILE,
];

/// The image that `data` stands for, and its kind.
fn image(kinds: &[Kind], data: &[u8]) -> Option<(Kind, Vec<u8>)> {
    let (choice, body) = data.split_first()?;
    let kind = kinds[usize::from(*choice) % kinds.len()];
    let header = kind.header.words().into_iter().flat_map(u32::to_le_bytes);
    Some((kind, header.chain(body.iter().copied()).collect()))
}

fn reader(kind: Kind, image: &[u8]) -> Reader {
    Reader::from_bytes(kind, Path::new("image"), image).expect("the header is right")
}

/// Reads an image's entries as the types that they are.
pub fn entries(data: &[u8]) {
    struct Typed<'d>(Kind, &'d [u8]);
    impl Check for Typed<'_> {
        fn check<H: Entry, M: Entry>(&mut self, kind: Kind) {
            if kind == self.0 {
                let mut reader = reader(kind, self.1);
                let _ = each::<H, M>(&mut reader);
                assert!(reader.offset() <= self.1.len() as u64);
            }
        }
    }
    fn each<H: Entry, M: Entry>(reader: &mut Reader) -> Result<()> {
        same_again(&reader.expect::<H>()?);
        while let Some(entry) = reader.next::<M>()? {
            same_again(&entry);
        }
        Ok(())
    }
    if let Some((kind, image)) = image(&kinds(), data) {
        every_kind(&mut Typed(kind, &image));
    }
}

/// A message that was read can be written and read again.
fn same_again<M: Entry>(message: &M) {
    let again = M::decode(message.encode_to_vec().as_slice());
    assert_eq!(again.as_ref(), Ok(message));
}

/// Reads a pagemap.
pub fn pagemap(data: &[u8]) {
    let Some((kind, image)) = image(&[kind::PAGEMAP], data) else { return };
    let Ok(map) = Pagemap::from_reader(&mut reader(kind, &image)) else { return };
    assert!(map.runs.windows(2).all(|pair| pair[0].range().end <= pair[1].vaddr));
    let last = map.offsets().filter_map(|(run, offset)| Some(offset? + run.bytes())).last();
    assert_eq!(last.unwrap_or(0), map.present_bytes());
}

/// Reads compressed pages: after the bytes with the number of pages and the length of the
/// index (2 bytes) come the index without its magic numbers, and what is stored.
pub fn packed(data: &[u8]) {
    let Some((&[pages, low, high], data)) = data.split_first_chunk() else { return };
    let (index, stored) =
        data.split_at(usize::from(u16::from_le_bytes([low, high])).min(data.len()));
    let header = kind::PAGES_INDEX.header.words().into_iter().flat_map(u32::to_le_bytes);
    let index: Vec<u8> = header.chain(index.iter().copied()).collect();
    let top = tempfile::tempdir_in("/dev/shm").expect("a directory");
    std::fs::write(top.path().join(kind::PAGES_INDEX.file_name(1)), index).expect("a file");
    std::fs::write(top.path().join(kind::PAGES_PACKED.file_name(1)), stored).expect("a file");
    let dir = ImageDir::open(top.path()).expect("a directory");
    let run = Run { vaddr: 0x1000, pages: pages.into(), present: true, ..Run::default() };
    let map = Pagemap { pages_id: 1, packed: true, owner: 7, runs: vec![run] };
    let Ok(reader) = PagesReader::open(&dir, &map) else { return };
    let mut all = vec![0; usize::from(pages) * 4096];
    let read = reader.read_exact_at(&mut all, 0);
    let mut page = [0; 4096];
    for (number, expected) in (0..).zip(all.chunks(4096)) {
        // Alone, each page is what it is among the others.
        let alone = reader.read_exact_at(&mut page, number * 4096);
        assert!(read.is_err() || alone.is_ok() && page == expected);
    }
}

/// Reads the data behind entries.
pub fn payloads(data: &[u8]) {
    if let Some((kind, image)) = image(WITH_PAYLOAD, data) {
        let mut reader = reader(kind, &image);
        let _ = read_payloads(kind, &mut reader);
        assert!(reader.offset() <= image.len() as u64);
    }
}

fn read_payloads(kind: Kind, reader: &mut Reader) -> Result<()> {
    while reader.remaining() > 0 {
        match kind {
            kind::PIPES_DATA => {
                let entry: PipeDataEntry = reader.expect()?;
                reader.raw(entry.bytes.into())?;
            }
            kind::SK_QUEUES => {
                let entry: SkPacketEntry = reader.expect()?;
                reader.raw(entry.length.into())?;
            }
            kind::TCP_STREAM => {
                let entry: TcpStreamEntry = reader.expect()?;
                reader.raw(entry.inq_len.into())?;
                reader.raw(entry.outq_len.into())?;
            }
            kind::BPFMAP_DATA => {
                let entry: BpfmapDataEntry = reader.expect()?;
                reader.raw(u64::from(entry.keys_bytes) + u64::from(entry.values_bytes))?;
            }
            kind::IPCNS_SHM => {
                let entry: IpcShmEntry = reader.expect()?;
                reader.padded(shm_len(&entry), 4)?;
            }
            kind::IPCNS_SEM => {
                let entry: IpcSemEntry = reader.expect()?;
                assert_eq!(read_semaphores(reader, &entry)?.len() as u64, u64::from(entry.nsems));
            }
            kind::IPCNS_MSG => {
                let entry: IpcMsgEntry = reader.expect()?;
                assert_eq!(read_messages(reader, &entry)?.len() as u64, u64::from(entry.qnum));
            }
            _ => return read_ghost(reader),
        }
    }
    Ok(())
}

fn read_ghost(reader: &mut Reader) -> Result<()> {
    let ghost: GhostFileEntry = reader.expect()?;
    if !ghost.chunks() {
        return reader.rest().map(drop);
    }
    let mut end = 0;
    while let Some(chunk) = next_chunk(reader, end, ghost.size)? {
        reader.copy_to(chunk.len, &mut io::sink(), "contents")?;
        end = chunk.off + chunk.len;
    }
    reader.end()
}

/// Shows an image as JSON and makes it again.
pub fn decode(data: &[u8]) {
    let Some((_, image)) = image(&kinds(), data) else { return };
    for pretty in [false, true] {
        let Ok(json) = show(&image, pretty) else { continue };
        // A missing required field is shown, but not made.
        let Ok(again) = torpor_crit::encode(&json) else { continue };
        assert_eq!(show(&again, pretty).expect("what was made"), json);
    }
}

fn show(image: &[u8], pretty: bool) -> torpor_crit::Result<serde_json::Value> {
    let source = Box::new(io::Cursor::new(image.to_vec()));
    let view = View { pretty, sizes_only: false };
    torpor_crit::decode(Path::new("image"), source, image.len() as u64, view)
}

/// Makes an image from JSON text and shows it.
pub fn encode(data: &[u8]) {
    let Ok(json) = serde_json::from_slice(data) else { return };
    if let Ok(image) = torpor_crit::encode(&json) {
        let plain = show(&image, false).expect("what was made");
        assert_eq!(torpor_crit::encode(&plain).expect("what was shown"), image);
    }
}

/// Reads a request and a response of the RPC.
pub fn rpc(data: &[u8]) {
    // What the server takes is what decodes, less what has fields that it does not know.
    let taken = torpor_cli::rpc::parse(data);
    if let Ok(request) = CriuReq::decode(data) {
        same_again(&request);
        assert!(taken.as_ref().is_ok_and(|taken| *taken == request) || taken.is_err());
    } else {
        assert!(taken.is_err());
    }
    if let Ok(response) = CriuResp::decode(data) {
        same_again(&response);
    }
}

/// The header of the sealed checkpoint that the corpus is of, and its key.
pub fn sealed() -> (Header, Secret) {
    let header = Header {
        suite: Suite::Aes256Gcm,
        cipher: RecordCipher::Aes256Gcm,
        id: [1; 32],
        parent: None,
        stanzas: vec![],
        marks: vec![],
    };
    (header, Secret::take(&mut [2; 32]))
}

/// An authority whose signatures count, and its key: a certificate of the tests of keys.
pub fn authority(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/seal/tests/keys").join(file)
}

/// What the corpus has a signature over.
pub const SIGNED: &[u8] = b"signed";

/// Takes a signature and its certificates apart, which anybody who can seal may have written.
fn signature(data: &[u8]) {
    static TRUST: OnceLock<Trust> = OnceLock::new();
    let trust = TRUST.get_or_init(|| Trust::load(&[authority("ed25519.crt")], &[]).expect("trust"));
    let Ok(signature) = Signature::decode(data) else { return };
    if let Ok(who) = signature.verify(SIGNED, trust) {
        assert_eq!(who.name, "ed25519 of OpenSSL");
        assert!(signature.verify(b"something else", trust).is_err());
    }
}

/// Reads what a sealed checkpoint is made of, with a key that made some of it: the first
/// byte chooses between header, records, manifest, tags and signature.
pub fn seal(data: &[u8]) {
    let Some((choice, data)) = data.split_first() else { return };
    let (header, master) = sealed();
    let keys = header.keys(&master);
    match choice % 5 {
        0 => {
            let Ok(found) = Sealed::parse(data) else { return };
            if let Ok(header) = found.authenticate(&master) {
                assert_eq!(header.encode(&master).expect("it was encoded"), data);
            }
        }
        1 => {
            let source = io::Cursor::new(data);
            let Ok(mut reader) = RecordReader::new(&keys, header.cipher, "a.img", source) else {
                return;
            };
            let announced = reader.plain_len();
            if let Ok(len) = io::copy(&mut reader, &mut io::sink()) {
                assert_eq!(len, announced);
            }
        }
        2 => {
            let Ok(manifest) = Manifest::decode(data, &header) else { return };
            let again = Manifest::decode(&manifest.encode(), &header);
            assert_eq!(again.expect("it was encoded"), manifest);
        }
        4 => signature(data),
        _ => {
            let place = PagesFile { name: "pages-1.img", owner: 1, page: 4096 };
            let runs = [(0x1000, 1), (0x3000, 1)];
            let tags = (data, data.len() as u64);
            let Ok(opener) = PageOpener::new(&keys, place, runs, tags, &Removed::default()) else {
                return;
            };
            let tags = &data[data.len() - 32..];
            assert!(opener.open(0, &mut [0; 8192], tags).is_err());
        }
    }
}

/// Looks through the archive of a tmpfs, before it is known who made it: compressed, or (the
/// first byte is odd) what is compressed in it.
pub fn archive(data: &[u8]) {
    let Some((choice, data)) = data.split_first() else { return };
    let mut found = 0_usize;
    if choice % 2 == 0 {
        let _ = scan_archive(data, &|_, id| id, &mut |_| found += 1);
        return;
    }
    let mut tar = data.to_vec();
    tar.chunks_exact_mut(512).for_each(right_sum);
    let mut gz = GzEncoder::new(Vec::new(), Compression::fast());
    gz.write_all(&tar).expect("memory");
    let packed = gz.finish().expect("memory");
    let _ = scan_archive(packed.as_slice(), &|_, id| id, &mut |_| found += 1);
    // Each of them has a header.
    assert!(found * 512 <= data.len());
}

/// Makes the check sum of a header right, so that no run is lost on finding it.
fn right_sum(block: &mut [u8]) {
    if &block[257..262] == b"ustar" {
        block[148..156].fill(b' ');
        let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
        block[148..154].copy_from_slice(format!("{sum:06o}").as_bytes());
    }
}

/// Reads what people and runtimes write: a policy, a container's configuration, a file of
/// options, a file of a machine's options, rules of packet filters.
pub fn texts(data: &[u8]) {
    let Some((choice, data)) = data.split_first() else { return };
    let Ok(text) = std::str::from_utf8(data) else { return };
    match choice % 7 {
        0 => drop(Policy::parse(text)),
        1 => drop(Spec::parse(data)),
        2 => drop(torpor_cli::options::parse_config(text)),
        3 => drop(leaves(text)),
        4 => rules(kind::NFTABLES, text),
        5 => rules(kind::IPTABLES, text),
        _ => drop(swf::read(&mut &*data, TASKS, &|queue| (queue == 1).then(|| "a".to_owned()))),
    }
}

/// Reads rules of a packet filter. What is written for their program is read as they were.
fn rules(image: Kind, text: &str) {
    let Ok(rules) = PacketFilter::of(image, text) else { return };
    assert_eq!(PacketFilter::of(image, rules.text()).as_ref(), Ok(&rules));
}

/// Reads the commands of a page client, and the pages behind those that are compressed.
pub fn pages(data: &[u8]) {
    let mut rest = data;
    let mut incoming = Incoming::default();
    while let Ok(command) = Command::receive(&mut rest) {
        let mut again = Vec::new();
        command.send(&mut again).expect("it was received");
        assert_eq!(Command::receive(&mut again.as_slice()).expect("it was sent"), command);
        let Ok(how @ Some(_)) = method(command.flags) else { continue };
        let mut pages = vec![0; command.pages.min(MAX_PAGES) as usize * 4096];
        if incoming.receive(how, &mut pages, None, &mut rest).is_err() {
            break;
        }
    }
}

/// Receives what a restore hands over to who brings in its pages. Packets have a byte in front,
/// with the number of descriptors that come along in its upper three bits, and in the others
/// the length: up to 15 bytes, then in steps of 16.
pub fn lazy(data: &[u8]) {
    let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let (ours, theirs) = pair.expect("sockets");
    let file = std::fs::File::open("/dev/null").expect("a file");
    let mut rest = data;
    let mut said = 0;
    // As many as the socket takes while nobody receives.
    for _ in 0..PACKETS {
        let Some((&head, behind)) = rest.split_first() else { break };
        let len = match usize::from(head & 31) {
            bytes @ ..16 => bytes,
            steps => (steps - 15) * 16,
        };
        let (packet, behind) = behind.split_at(len.min(behind.len()));
        let files = vec![file.as_fd(); usize::from(head >> 5)];
        let message = Message { data: packet, files: &files, ..Message::default() };
        socket::send(ours.as_fd(), &message, 0).expect("it is connected");
        (rest, said) = (behind, said + packet.len());
    }
    drop(ours);
    let restorer = rustix::process::getpid();
    let restorer = rustix::process::pidfd_open(restorer, rustix::process::PidfdFlags::empty());
    let mut taken = 0;
    let images = accept_all(&theirs, &restorer.expect("a process"), |_, space| {
        taken += 8 + space.missing.as_slice().len() * 16;
        Ok(())
    });
    if let Ok(images) = images {
        assert!(images.len() + taken <= said);
    }
}
