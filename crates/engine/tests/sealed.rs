//! Sealed checkpoints of a process that holds a secret, end to end. A dump needs a process
//! of one thread, so each case runs in one of its own ([`torpor_tests::alone`]).
#![allow(clippy::unwrap_used, clippy::panic)]

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;

use torpor_engine::options::{Memory, Trust};
use torpor_engine::seal::{OpenOptions, SealOptions};
use torpor_engine::{NoHooks, Options};
use torpor_images::compress::Compression;
use torpor_seal::Suite;
use torpor_seal::keys::{AgeRecipient, Identities, Recipient};

#[path = "../../seal/tests/common/mod.rs"]
mod authority;
#[path = "sealed/bytes.rs"]
mod bytes;

const SECRET: &str = "the-quick-brown-secret-that-nobody-may-read-7f3a9";

const CASES: [(&str, fn()); 20] = [
    ("a_plain_checkpoint_shows_its_secrets", a_plain_checkpoint_shows_its_secrets),
    ("sealed_with_gcm_and_back", || sealed_and_back(Suite::Aes256Gcm)),
    ("sealed_with_xts_and_back", || sealed_and_back(Suite::Aes256XtsHmacSha256)),
    ("changed_with_gcm", || what_was_changed_is_not_restored(Suite::Aes256Gcm)),
    ("changed_with_xts", || what_was_changed_is_not_restored(Suite::Aes256XtsHmacSha256)),
    ("rounds_with_gcm", || rounds(Suite::Aes256Gcm)),
    ("rounds_with_xts", || rounds(Suite::Aes256XtsHmacSha256)),
    ("rounds_without_repeated_pages", || {
        rounds_without_repeated_pages(Suite::Aes256Gcm, None);
    }),
    ("rounds_without_repeated_pages_of_a_sum", || {
        rounds_without_repeated_pages(Suite::Aes256XtsHmacSha256, None);
    }),
    ("compressed_rounds_without_repeated_pages", || {
        rounds_without_repeated_pages(Suite::Aes256Gcm, Some(Compression::LZ4));
    }),
    ("what_is_gone_of_a_sum_is_sealed", what_is_gone_of_a_sum_is_sealed),
    ("compressed_and_back", compressed_and_back),
    ("compressed_and_changed", compressed_and_changed),
    ("compressed_with_xts_is_refused", compressed_with_xts_is_refused),
    ("unsigned_images_are_refused", unsigned_images_are_refused),
    ("times_are_in_the_statistics", times_are_in_the_statistics),
    ("each_byte_with_gcm", || bytes::each_counts(EACH)),
    ("each_byte_with_a_signature", || bytes::each_counts(bytes::Form { signed: true, ..EACH })),
    ("each_byte_with_xts", || {
        bytes::each_counts(bytes::Form { suite: Suite::Aes256XtsHmacSha256, step: 997, ..EACH });
    }),
    ("each_byte_compressed", || {
        bytes::each_counts(bytes::Form { compress: Some(Compression::LZ4), step: 3, ..EACH });
    }),
];

const EACH: bytes::Form =
    bytes::Form { suite: Suite::Aes256Gcm, compress: None, signed: false, step: 31 };

fn main() -> ExitCode {
    torpor_tests::alone::main(&CASES)
}

fn build(dir: &Path) -> PathBuf {
    let program = dir.join("subject");
    let source = format!("{}/tests/sealed/subject.c", env!("CARGO_MANIFEST_DIR"));
    let mut cc = Command::new("cc");
    cc.args(["-O1", "-Wall", "-o"]).arg(&program).arg(source);
    assert!(cc.status().unwrap().success());
    program
}

/// A process with a secret, and where it is dumped to.
struct Subject {
    child: Child,
    dir: tempfile::TempDir,
}

impl Subject {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let backwards: String = SECRET.chars().rev().collect();
        let mut child = Command::new(build(dir.path()))
            .arg(backwards)
            .arg(dir.path().join("ghost"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        std::fs::create_dir(dir.path().join("images")).unwrap();
        Self { child, dir }
    }

    fn images(&self) -> PathBuf {
        self.dir.path().join("images")
    }

    fn dump(&mut self, seal: Option<SealOptions>) {
        self.dump_compressed(seal, None).unwrap();
    }

    fn dump_compressed(
        &mut self,
        seal: Option<SealOptions>,
        compress: Option<Compression>,
    ) -> Result<(), torpor_engine::Error> {
        let opts = Options {
            images_dir: self.images(),
            pid: i32::try_from(self.child.id()).unwrap(),
            trust: Trust { seal, ..Trust::default() },
            memory: Memory { compress, ..Memory::default() },
            ..Options::default()
        };
        // The dump waits until the process is gone.
        torpor_engine::dump(&opts, &mut NoHooks).map(drop)
    }

    /// Dumps in three rounds, without what an older one has that a newer one has too if
    /// `dedup`. Returns how many blocks the pages of the first had before the second.
    fn rounds(
        &mut self,
        seal: &SealOptions,
        open: &OpenOptions,
        dedup: bool,
        compress: Option<Compression>,
    ) -> Result<u64, torpor_engine::Error> {
        let options = |name: &str, parent: Option<&str>| Options {
            images_dir: self.dir.path().join(name),
            pid: i32::try_from(self.child.id()).unwrap(),
            trust: Trust { seal: Some(seal.clone()), open: open.clone(), ..Trust::default() },
            memory: Memory {
                parent: parent.map(|parent| format!("../{parent}").into()),
                track: true,
                auto_dedup: dedup,
                compress,
                ..Memory::default()
            },
            ..Options::default()
        };
        torpor_engine::pre_dump(&options("first", None), &mut NoHooks)?;
        let before = blocks(&self.dir.path().join("first"));
        torpor_engine::pre_dump(&options("second", Some("first")), &mut NoHooks)?;
        torpor_engine::dump(&options("images", Some("second")), &mut NoHooks)?;
        Ok(before)
    }

    fn restore(&self, open: OpenOptions) -> Result<i32, torpor_engine::Error> {
        let opts = Options {
            images_dir: self.images(),
            trust: Trust { open, ..Trust::default() },
            ..Options::default()
        };
        torpor_engine::restore(&opts, &mut NoHooks).map(|report| report.pid)
    }
}

impl Drop for Subject {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The process says whether all is as it was.
fn check(pid: i32) {
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::USR1).unwrap();
    let options = rustix::process::WaitOptions::empty();
    let (_, status) = rustix::process::waitpid(Some(pid), options).unwrap().unwrap();
    assert_eq!(status.exit_status(), Some(42));
}

fn keys(suite: Suite) -> (SealOptions, OpenOptions, tempfile::NamedTempFile) {
    let (identity, text) = torpor_seal::keys::AgeIdentity::generate().unwrap();
    let recipient: AgeRecipient = identity.recipient();
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), text.as_bytes()).unwrap();
    let recipients: Arc<[Recipient]> = Recipient::parse(&recipient.to_string()).unwrap().into();
    let seal = SealOptions { recipients, signer: None, suite };
    let identities = Identities::new(&[file.path().display().to_string()]).unwrap();
    (seal, OpenOptions { identities, ..OpenOptions::default() }, file)
}

/// How much space the pages of a directory take.
fn blocks(dir: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    let is_pages = |name: &str| ["pages-1.img", "pages-packed-1.img"].contains(&name);
    let pages = entries.filter(|e| is_pages(e.file_name().to_str().unwrap()));
    pages.map(|entry| entry.metadata().unwrap().blocks()).sum()
}

/// The files of a directory that hold the secret.
fn leaks(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if !path.is_file() {
            continue;
        }
        let bytes = std::fs::read(&path).unwrap();
        if bytes.windows(SECRET.len()).any(|w| w == SECRET.as_bytes()) {
            found.push(path);
        }
    }
    found
}

fn a_plain_checkpoint_shows_its_secrets() {
    let mut subject = Subject::start();
    subject.dump(None);
    let names: Vec<String> = leaks(&subject.images())
        .iter()
        .map(|path| path.file_name().unwrap().to_str().unwrap().to_owned())
        .collect();
    for kind in ["pages-", "pipes-data", "sk-queues", "ghost-file"] {
        assert!(names.iter().any(|name| name.starts_with(kind)), "{kind}: {names:?}");
    }
    check(subject.restore(OpenOptions::default()).unwrap());
}

fn sealed_and_back(suite: Suite) {
    let mut subject = Subject::start();
    let (seal, open, _file) = keys(suite);
    subject.dump(Some(seal));
    assert_eq!(leaks(&subject.images()), Vec::<PathBuf>::new());
    let error = subject.restore(OpenOptions::default()).unwrap_err().to_string();
    assert!(error.contains("--identity"), "{error}");
    let (_, other, _other_file) = keys(suite);
    let error = subject.restore(other).unwrap_err().to_string();
    assert!(error.contains("sealed for others"), "{error}");
    check(subject.restore(open).unwrap());
}

/// One changed byte in the middle of any file: an error, and no task is left.
fn what_was_changed_is_not_restored(suite: Suite) {
    let (seal, open, _file) = keys(suite);
    nothing_changed_is_restored(&seal, &open, None);
}

fn nothing_changed_is_restored(
    seal: &SealOptions,
    open: &OpenOptions,
    compress: Option<Compression>,
) {
    let mut subject = Subject::start();
    let (pid, suite) = (subject.child.id(), seal.suite);
    subject.dump_compressed(Some(seal.clone()), compress).unwrap();
    for entry in std::fs::read_dir(subject.images()).unwrap() {
        let path = entry.unwrap().path();
        let bytes = std::fs::read(&path).unwrap();
        if path.file_name().unwrap().to_str().unwrap().starts_with("stats-") || bytes.is_empty() {
            continue;
        }
        let mut changed = bytes.clone();
        changed[bytes.len() / 2] ^= 1;
        std::fs::write(&path, changed).unwrap();
        let restored = subject.restore(open.clone());
        assert!(restored.is_err(), "{suite}: {}", path.display());
        assert!(!Path::new(&format!("/proc/{pid}")).exists(), "{suite}: {}", path.display());
        std::fs::write(&path, bytes).unwrap();
    }
    check(subject.restore(open.clone()).unwrap());
}

/// A signature that is asked for has to be there.
/// Two pre-dumps and a dump. Each names the one that it builds on: another one in its
/// place is noticed before any task is there, even if the keys open it.
fn rounds(suite: Suite) {
    let (seal, open, _file) = keys(suite);
    let mut other = Subject::start();
    other.dump(Some(seal.clone()));
    let mut subject = Subject::start();
    let pid = subject.child.id();
    subject.rounds(&seal, &open, false, None).unwrap();
    let [first, second] = ["first", "second"].map(|name| subject.dir.path().join(name));
    for dir in [&first, &second, &subject.images()] {
        assert_eq!(leaks(dir), Vec::<PathBuf>::new());
    }
    let aside = subject.dir.path().join("aside");
    for (original, wrong) in [(&second, &first), (&second, &other.images()), (&first, &second)] {
        std::fs::rename(original, &aside).unwrap();
        let mut copy = Command::new("cp");
        copy.arg("-a").arg(wrong).arg(original);
        assert!(copy.status().unwrap().success());
        let error = subject.restore(open.clone()).unwrap_err().to_string();
        assert!(error.contains("which the next one builds on"), "{error}");
        assert!(!Path::new(&format!("/proc/{pid}")).exists());
        std::fs::remove_dir_all(original).unwrap();
        std::fs::rename(&aside, original).unwrap();
    }
    check(subject.restore(open).unwrap());
}

/// Pages go from sealed images without being opened, and nobody misses them.
fn rounds_without_repeated_pages(suite: Suite, compress: Option<Compression>) {
    let (seal, open, _file) = keys(suite);
    let mut subject = Subject::start();
    let before = subject.rounds(&seal, &open, true, compress).unwrap();
    let after = blocks(&subject.dir.path().join("first"));
    // Each cluster of so small a process has a page that the later rounds need.
    assert!(after < before || compress.is_some(), "nothing was freed");
    check(subject.restore(open).unwrap());
}

/// Which pages have left a sum nobody can change, take back or make up.
fn what_is_gone_of_a_sum_is_sealed() {
    let (seal, open, _file) = keys(Suite::Aes256XtsHmacSha256);
    let mut subject = Subject::start();
    let pid = subject.child.id();
    subject.rounds(&seal, &open, true, None).unwrap();
    let [first, second] = ["first", "second"].map(|name| subject.dir.path().join(name));
    let holes = first.join("pages-holes-1.img");
    let bytes = std::fs::read(&holes).unwrap();
    assert_eq!(leaks(&first), Vec::<PathBuf>::new());
    let refused = |wanted: &str| {
        let error = subject.restore(open.clone()).unwrap_err().to_string();
        assert!(error.contains(wanted), "{wanted}: {error}");
        assert!(!Path::new(&format!("/proc/{pid}")).exists());
    };
    let mut changed = bytes.clone();
    changed[bytes.len() / 2] ^= 1;
    std::fs::write(&holes, changed).unwrap();
    refused("pages-holes-1.img");
    std::fs::remove_file(&holes).unwrap();
    refused("the sum of its pages differs");
    // That of another checkpoint with the same key.
    std::fs::copy(second.join("pages-holes-1.img"), &holes).unwrap();
    refused("pages-holes-1.img");
    std::fs::write(&holes, bytes).unwrap();
    check(subject.restore(open).unwrap());
}

/// Plain and sealed, by either method; a program that knows of no compression is told by the
/// version.
fn compressed_and_back() {
    let (seal, open, _file) = keys(Suite::Aes256Gcm);
    for (how, seal, open) in [
        (Compression::LZ4, None, OpenOptions::default()),
        (Compression::ZSTD, None, OpenOptions::default()),
        (Compression::LZ4, Some(seal.clone()), open.clone()),
        (Compression::ZSTD, Some(seal), open),
    ] {
        let mut subject = Subject::start();
        let sealed = seal.is_some();
        subject.dump_compressed(seal, Some(how)).unwrap();
        assert!(!subject.images().join("pages-1.img").exists());
        let dir = torpor_images::ImageDir::open(subject.images()).unwrap();
        let stats: torpor_images::proto::StatsEntry =
            dir.read_one(torpor_images::kind::STATS_DUMP, 0).unwrap();
        let stats = stats.dump.unwrap();
        let (from, to) = (stats.torpor_compress_from_bytes(), stats.torpor_compress_to_bytes());
        assert!(0 < to && to < from, "{from} bytes became {to}");
        if sealed {
            assert_eq!(leaks(&subject.images()), Vec::<PathBuf>::new());
        } else {
            assert_eq!(dir.inventory().unwrap().img_version, 3);
        }
        check(subject.restore(open).unwrap());
    }
}

fn compressed_and_changed() {
    let (seal, open, _file) = keys(Suite::Aes256Gcm);
    nothing_changed_is_restored(&seal, &open, Some(Compression::LZ4));
}

fn compressed_with_xts_is_refused() {
    let (seal, _, _file) = keys(Suite::Aes256XtsHmacSha256);
    let mut subject = Subject::start();
    let error =
        subject.dump_compressed(Some(seal), Some(Compression::LZ4)).unwrap_err().to_string();
    assert!(error.contains("--compress lz4:-4 with the suite aes-256-xts"), "{error}");
    assert!(subject.child.try_wait().unwrap().is_none(), "it goes on");
}

fn unsigned_images_are_refused() {
    let mut subject = Subject::start();
    let (seal, open, _file) = keys(Suite::Aes256Gcm);
    subject.dump(Some(seal));
    let strict = OpenOptions { require_signature: true, ..open };
    let error = subject.restore(strict).unwrap_err().to_string();
    assert!(error.contains("are not signed"), "{error}");
}

fn times_are_in_the_statistics() {
    let mut subject = Subject::start();
    let (seal, open, _file) = keys(Suite::Aes256Gcm);
    subject.dump(Some(seal));
    check(subject.restore(open).unwrap());
    let dir = torpor_images::ImageDir::open(subject.images()).unwrap();
    let stats = |kind| dir.read_one::<torpor_images::proto::StatsEntry>(kind, 0).unwrap();
    let dump = stats(torpor_images::kind::STATS_DUMP).dump.unwrap();
    assert!(dump.torpor_seal_pages_time.unwrap() > 0 && dump.torpor_seal_records_time.unwrap() > 0);
    let restore = stats(torpor_images::kind::STATS_RESTORE).restore.unwrap();
    assert!(restore.torpor_open_pages_time.unwrap() > 0);
    assert!(restore.torpor_open_records_time.unwrap() > 0);
    assert!(restore.torpor_verify_time.unwrap() > 0);
}
