//! Runs the corpus and mutations of it through the fuzz targets, so that they
//! are tried wherever the tests are, without a fuzzer.

#![allow(clippy::unwrap_used)]

#[path = "../../crates/images/tests/common/mod.rs"]
mod common;

use std::path::{Path, PathBuf};

use common::Numbers;
use torpor_fuzz::{TARGETS, WITH_PAYLOAD, kinds};

/// How many mutations of the corpus each target gets; those that read whole checkpoints fewer.
const MUTATIONS: u64 = 4000;
const OF_CHECKPOINTS: u64 = 200;

fn corpus(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target)
}

#[test]
fn nothing_in_the_corpus_or_near_it_panics() {
    for (name, target) in TARGETS {
        let mut paths: Vec<PathBuf> =
            std::fs::read_dir(corpus(name)).unwrap().map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        let inputs: Vec<Vec<u8>> = paths.iter().map(|path| std::fs::read(path).unwrap()).collect();
        for (path, input) in paths.iter().zip(&inputs) {
            run(*target, input, &path.display().to_string());
        }
        let mutations = if *name == "plan" { OF_CHECKPOINTS } else { MUTATIONS };
        for seed in 0..mutations {
            let mut numbers = Numbers(seed);
            let mut input = numbers.pick(&inputs).clone();
            for _ in 0..=numbers.below(4) {
                mutate(&mut input, &inputs, &mut numbers);
            }
            run(*target, &input, &format!("{name}, mutation {seed}"));
        }
    }
}

/// Runs `target`; if it panics, the output says on what.
fn run(target: torpor_fuzz::Target, input: &[u8], what: &str) {
    struct Say<'s>(&'s str, &'s [u8]);
    impl Drop for Say<'_> {
        fn drop(&mut self) {
            if std::thread::panicking() {
                eprintln!("the input was {}: {:02x?}", self.0, self.1);
            }
        }
    }
    let _say = Say(what, input);
    target(input);
}

/// Changes `input` a little.
fn mutate(input: &mut Vec<u8>, others: &[Vec<u8>], numbers: &mut Numbers) {
    let at =
        |numbers: &mut Numbers, len: usize| usize::try_from(numbers.below(len as u64 + 1)).unwrap();
    let (from, to) = (at(numbers, input.len()), at(numbers, input.len()));
    let (from, to) = (from.min(to), from.max(to));
    match numbers.below(6) {
        0 => input.truncate(from),
        1 => drop(input.drain(from..to)),
        2 => {
            let part = input[from..to].to_vec();
            input.splice(from..from, part);
        }
        3 => {
            let other = numbers.pick(others);
            let start = at(numbers, other.len());
            input.splice(from..to, other[start..].iter().copied());
        }
        4 if from < input.len() => input[from] = numbers.next().to_le_bytes()[0],
        _ if from < input.len() => input[from] ^= 1 << numbers.below(8),
        _ => input.push(0xff),
    }
}

/// Writes the corpus anew: an image of each kind, its JSON, and requests.
#[test]
#[ignore = "writes into the source tree"]
fn write_corpus() {
    let write = |target: &str, name: &str, input: &[u8]| {
        std::fs::create_dir_all(corpus(target)).unwrap();
        std::fs::write(corpus(target).join(name), input).unwrap();
    };
    for (index, kind) in kinds().into_iter().enumerate() {
        let image = small_image(kind);
        let body = &image[kind.header.words().len() * 4..];
        let name = kind.name.to_lowercase();
        let chosen = |index: usize| [&[u8::try_from(index).unwrap()], body].concat();
        write("entries", &name, &chosen(index));
        write("decode", &name, &chosen(index));
        if let Some(index) = WITH_PAYLOAD.iter().position(|with| *with == kind) {
            write("payloads", &name, &chosen(index));
        }
        if name == "pagemap" {
            write("pagemap", &name, &chosen(0));
        }
        let source = Box::new(std::io::Cursor::new(image.clone()));
        let view = torpor_crit::View { pretty: true, sizes_only: false };
        let len = image.len() as u64;
        let json = torpor_crit::decode(Path::new("image"), source, len, view).unwrap();
        write("encode", &name, json.to_string().as_bytes());
    }
    write_packed(&write);
    write("pagemap", "relatives", &[&[0], &of_relatives()[..]].concat());
    write_seal(&write);
    write_archives(&write);
    write_texts(&write);
    write_lazy(&write);
    write_plan(&write);
    for name in ["criu_req", "criu_resp"] {
        let descriptor = common::POOL.get_message_by_name(&format!("criu.{name}")).unwrap();
        let message = common::message(&descriptor, &mut Numbers(1));
        write("rpc", name, &prost::Message::encode_to_vec(&message));
    }
}

/// A pagemap with pages of two relatives, without its magic numbers.
fn of_relatives() -> Vec<u8> {
    use torpor_images::pagemap::{PagemapWriter, Run};
    use torpor_images::{ImageDir, kind};
    let top = tempfile::tempdir().unwrap();
    let dir = ImageDir::open(top.path()).unwrap();
    let mut map = PagemapWriter::create(&dir, kind::PAGEMAP, 7, 1).unwrap();
    for (page, relative) in [(1, Some(5)), (2, Some(6)), (3, None)] {
        let present = relative.is_none();
        let run = Run { vaddr: page << 12, pages: 1, present, relative, ..Run::default() };
        map.push(run).unwrap();
    }
    map.finish().unwrap();
    let image = std::fs::read(top.path().join(kind::PAGEMAP.file_name(7))).unwrap();
    image[kind::PAGEMAP.header.words().len() * 4..].to_vec()
}

/// Compressed pages, some alike and some not.
fn write_packed(write: &dyn Fn(&str, &str, &[u8])) {
    use torpor_images::compress::Compression;
    use torpor_images::packed::Packer;
    use torpor_images::pages::PagesWriter;
    use torpor_images::{ImageDir, kind};
    for (name, how) in [("lz4", Compression::LZ4), ("zstd", Compression::ZSTD)] {
        let temp = tempfile::tempdir().unwrap();
        let dir = ImageDir::open(temp.path()).unwrap();
        let pages = PagesWriter::create(&dir, 1, 7, Some(how), None).unwrap();
        let mut numbers = Numbers(1);
        for count in [17u8, 3] {
            let len = usize::from(count) * 4096;
            let mut data: Vec<u8> = (0..len).map(|at| (at / 256).to_le_bytes()[0]).collect();
            data[..64].fill_with(|| numbers.next().to_le_bytes()[0]);
            let span = pages.span(count.into());
            pages
                .write(&span, &[(0x1000, count.into())], &mut data, &mut Packer::default())
                .unwrap();
        }
        pages.finish(&dir).unwrap();
        let read =
            |kind: torpor_images::Kind| std::fs::read(temp.path().join(kind.file_name(1))).unwrap();
        let index = &read(kind::PAGES_INDEX)[8..];
        let len = u16::try_from(index.len()).unwrap().to_le_bytes();
        let input = [&[20], len.as_slice(), index, &read(kind::PAGES_PACKED)].concat();
        write("packed", name, &input);
    }
}

/// What tar makes of files of each type, in both of its formats, and the commands of a page
/// client.
fn write_archives(write: &dyn Fn(&str, &str, &[u8])) {
    use std::process::Command;
    let dir = tempfile::tempdir().unwrap();
    let long = dir.path().join("l".repeat(120));
    std::fs::create_dir(&long).unwrap();
    std::fs::write(long.join("file"), "text").unwrap();
    let script = "mknod disk b 8 1; mkfifo fifo; ln -s fifo link; ln l*/file hard; \
                  cp l*/file su; chmod 4755 su; truncate -s 64K sparse; echo x >>sparse";
    let made = Command::new("sh").args(["-c", script]).current_dir(dir.path()).status();
    assert!(made.unwrap().success());
    for format in ["posix", "gnu"] {
        let mut tar = Command::new("tar");
        tar.args(["--create", "--sparse", "--sort=name", "--mtime=@1", "--owner=0", "--group=0"]);
        tar.arg(format!("--format={format}")).arg("--directory").arg(dir.path()).arg(".");
        let archive = tar.output().unwrap().stdout;
        write("archive", format, &[&[1], archive.as_slice()].concat());
        let packed = tar.arg("--gzip").output().unwrap().stdout;
        write("archive", &format!("{format}_packed"), &[&[0], packed.as_slice()].concat());
    }
    let command = |op: u32, pages: u32, vaddr: u64, object: u64| {
        [&op.to_le_bytes()[..], &pages.to_le_bytes(), &vaddr.to_le_bytes(), &object.to_le_bytes()]
            .concat()
    };
    let all = [
        command(5, 0, 0, 0x101),
        command(4, 0, 0, 0x102),
        command(2 | 1 << 16, 3, 0x1000, 0x101),
        command(6 | 4 << 16, 3, 0x4000, 0x101),
        command(7, 1, 0x4000, 1),
        command(0x1023, 0, 0, 0),
        command(5, 0, 0, 0x74_6f72_706f_7201),
        command(0x5450, 5000, 0x2000, 0x355),
        command(0x5451, 36, 0, 0),
        // Pages in a cluster: one that has become smaller, and one that has not.
        [command(6 | 0x1004 << 16, 1, 0x1000, 7), packed_page()].concat(),
        [command(6 | 0x2004 << 16, 1, 0x1000, 7), vec![0, 16, 0, 0], vec![7; 4096]].concat(),
    ];
    write("pages", "commands", &all.concat());
    all.iter().enumerate().for_each(|(i, bytes)| write("pages", &format!("command_{i}"), bytes));
}

/// A page of zeros as it is on the wire: the size of its cluster, and the cluster.
fn packed_page() -> Vec<u8> {
    let mut packer = torpor_images::packed::Packer::default();
    let (sizes, cluster) =
        packer.pack(torpor_images::compress::Compression::LZ4, &[0; 4096]).unwrap();
    [sizes[0].to_le_bytes().as_slice(), cluster].concat()
}

/// The images as they are, and some edits of each.
fn write_plan(write: &dyn Fn(&str, &str, &[u8])) {
    for (number, tree) in torpor_fuzz::plan::TREES.iter().enumerate() {
        let mut numbers = Numbers(number as u64 + 1);
        let number = u8::try_from(number).unwrap();
        write("plan", tree, &[number]);
        for edits in 1..=8 {
            let mut input = vec![number];
            input.extend((0..edits * 7).map(|_| numbers.next().to_le_bytes()[0]));
            write("plan", &format!("{tree}_{edits}"), &input);
        }
    }
}

/// Two tasks, one of them without memory that waits.
fn write_lazy(write: &dyn Fn(&str, &str, &[u8])) {
    // One byte says how many descriptors and how long.
    let packet = |files: u8, data: &[u8]| {
        let len = if data.len() < 16 { data.len() } else { 15 + data.len() / 16 };
        [&[files << 5 | u8::try_from(len).unwrap()], data].concat()
    };
    let words =
        |words: &[u64]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>();
    let task = |id: u64, ranges: &[u64]| {
        let packets = [packet(2, &words(&[id])), packet(0, &words(ranges)), packet(0, b".")];
        packets.concat()
    };
    let ranges = [0x1000, 0x3000, 0x7f00_0000_0000, 0x7f00_0001_0000];
    let end = packet(0, b"end");
    let input = [packet(0, b"images 0"), task(1, &ranges), task(2, &ranges[..2]), end];
    write("lazy", "tasks", &input.concat());
}

/// The documented policy, the configuration of a container, files of options, rules of packet filters, a
/// trace of jobs.
fn write_texts(write: &dyn Fn(&str, &str, &[u8])) {
    let part = |number: u8, text: &str| [&[number], text.as_bytes()].concat();
    let page = include_str!("../../docs/policy.md");
    let policy = page.split("```toml\n").nth(1).unwrap().split("```").next().unwrap();
    write("texts", "policy", &part(0, policy));
    let spec = r#"{"ociVersion":"1.0.2","process":{"capabilities":{"bounding":["CAP_KILL"]},"noNewPrivileges":true},
        "root":{"path":"rootfs","readonly":true},"mounts":[{"destination":"/proc","type":"proc","source":"proc"},
        {"destination":"/data","type":"bind","source":"/srv","options":["rbind","ro"]}],
        "linux":{"namespaces":[{"type":"pid"}],"maskedPaths":["/proc/kcore"],"devices":[{"type":"c","major":1,"minor":3}],
        "uidMappings":[{"containerID":0,"hostID":1000,"size":10}],"seccomp":{}}}"#;
    write("texts", "spec", &part(1, spec));
    let options = "# a comment\ntcp-established\nlog-file /tmp/x # more\nexternal \"mnt[a b]:c\"\n";
    write("texts", "options", &part(2, options));
    let machine = "encrypt = true\nrecipient = ['age1x', 'b']\n[log]\nverbosity = 4\n";
    write("texts", "machine", &part(3, machine));
    let nftables = "table ip t {\n\tchain c {\n\t\tip saddr 10.0.0.1 accept # handle 3\n\t}\n}\n";
    write("texts", "nftables", &part(4, nftables));
    write("texts", "nftables_space", &part(4, "table ip t {\u{a0}}"));
    let iptables =
        "*filter\n:INPUT ACCEPT [0:0]\n-A INPUT -m comment --comment \"a b\" -j DROP\nCOMMIT\n";
    write("texts", "iptables", &part(5, iptables));
    let trace = "; MaxNodes: 64\n; MaxProcs: 128\n1 0 10 3600 16 -1 2048 16 7200 -1 1 3 4 5 1 -1 -1 -1\n\
                 2 30 -1 60.5 -1 -1 -1 2 300 1024 1 3 4 5 0 -1 -1 -1\n";
    write("texts", "trace", &part(6, trace));
}

/// Parts of a sealed checkpoint.
fn write_seal(write: &dyn Fn(&str, &str, &[u8])) {
    use torpor_seal::keys::Trust;
    use torpor_seal::record::RecordWriter;
    use torpor_seal::sign::Signer;
    use torpor_seal::{Manifest, Stanza, Sum};
    let (header, master) = torpor_fuzz::sealed();
    let part = |number: u8, bytes: &[u8]| [&[number], bytes].concat();
    let stanza = Stanza { kind: "test".into(), args: vec![vec![1]], body: vec![2; 8] };
    let with = torpor_seal::Header { stanzas: vec![stanza], ..header.clone() };
    write("seal", "header", &part(0, &with.encode(&master).unwrap()));
    let keys = header.keys(&master);
    let mut records = RecordWriter::new(&keys, header.cipher, "a.img", Vec::new()).unwrap();
    for entry in ["one", "another"] {
        std::io::Write::write_all(&mut records, entry.as_bytes()).unwrap();
        records.end_record().unwrap();
    }
    write("seal", "records", &part(1, &records.finish().unwrap().0));
    let mut manifest = Manifest::new(&header);
    manifest.files.insert("core-1.img".into(), Sum { len: 5, sha256: Some([3; 32]) });
    manifest.files.insert("pages-1.img".into(), Sum { len: 4096, sha256: None });
    write("seal", "manifest", &part(2, &manifest.encode()));
    let (key, cert) =
        (torpor_fuzz::authority("ed25519.key"), torpor_fuzz::authority("ed25519.crt"));
    let signer = Signer::load(&key, &cert, &Trust::default()).unwrap();
    let signature = signer.sign(torpor_fuzz::SIGNED).unwrap();
    write("seal", "signature", &part(4, &prost::Message::encode_to_vec(&signature)));
    write("seal", "tags", &part(3, &[b"TORPTAGS".as_slice(), &[4; 48]].concat()));
}

/// One of the smaller images of a kind, but not the smallest.
fn small_image(kind: torpor_images::Kind) -> Vec<u8> {
    let mut images: Vec<Vec<u8>> =
        (0..15).map(|seed| common::image(kind, &mut Numbers(seed))).collect();
    images.sort_by_key(Vec::len);
    images.swap_remove(4)
}
