//! Each byte of each file of a sealed checkpoint of a real process counts: another one is noticed by
//! what opens and verifies a checkpoint, before anything is made.

use std::fs::{File, read, read_dir};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use torpor_engine::options::Trust;
use torpor_engine::seal::{OpenOptions, open};
use torpor_engine::{Error, Options};
use torpor_images::compress::Compression;
use torpor_images::pagemap::{Pagemap, page_size};
use torpor_images::pages::PagesReader;
use torpor_images::{ImageDir, Result, kind};
use torpor_seal::Suite;
use torpor_seal::keys::Trust as Authorities;
use torpor_seal::sign::Signer;

use super::authority::{Authority, NOW};
use super::{Subject, check, keys};

/// How a checkpoint is sealed.
#[derive(Debug, Clone, Copy)]
pub struct Form {
    pub suite: Suite,
    pub compress: Option<Compression>,
    pub signed: bool,
    /// Of the bytes of memory one of so many is changed, or each if there is time (`TORPOR_LONG`): a
    /// process has more than a million. All bytes of all other files are.
    pub step: usize,
}

pub fn each_counts(form: Form) {
    let mut subject = Subject::start();
    let pid = u64::from(subject.child.id());
    let (mut seal, mut open, _key) = keys(form.suite);
    if form.signed {
        let authority = Authority::new(subject.dir.path(), "authority");
        let files = authority.issue("signer", NOW, &[]);
        let trust = Authorities::load(&[authority.cert()], &[]).unwrap();
        let signer = Signer::load(&files.key, &files.cert, &trust).unwrap();
        seal.signer = Some(Arc::new(signer));
        open = OpenOptions { trust: Arc::new(trust), require_signature: true, ..open };
    }
    subject.dump_compressed(Some(seal), form.compress).unwrap();
    let opts = Options {
        images_dir: subject.images(),
        trust: Trust { open: open.clone(), ..Trust::default() },
        ..Options::default()
    };
    let memory = Memory::open(&opts, pid).unwrap();
    memory.read().unwrap();
    let is_long = std::env::var_os("TORPOR_LONG").is_some();
    let step = if is_long && form.suite == Suite::Aes256Gcm { 1 } else { form.step };
    let (mut tried, mut pages) = (0, 0);
    for path in files(&opts.images_dir) {
        let bytes = read(&path).unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        // Of these there is no digest, but a tag for each page, or a sum of all.
        let is_memory =
            ["pages-1.img", "pages-packed-1.img"].iter().any(|name| path.ends_with(name));
        for at in (0..bytes.len()).step_by(if is_memory { step } else { 1 }) {
            file.write_all_at(&[bytes[at] ^ 1 << (at % 8)], at as u64).unwrap();
            let noticed = match is_memory {
                true if form.suite == Suite::Aes256Gcm => memory.read_around(at, form).is_err(),
                true => Memory::open(&opts, pid).unwrap().read().is_err(),
                false => open_all(&opts).is_err(),
            };
            assert!(noticed, "{form:?}: byte {at} of {}", path.display());
            file.write_all_at(&bytes[at..=at], at as u64).unwrap();
            tried += 1;
            pages += usize::from(is_memory);
        }
    }
    println!("{form:?}: {tried} bytes, {pages} of them of memory");
    check(subject.restore(open).unwrap());
}

/// The files that a seal covers.
fn files(dir: &Path) -> Vec<PathBuf> {
    let all = read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let is_plain =
        |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().starts_with("stats-");
    all.filter(|path| !is_plain(path)).collect()
}

fn open_all(opts: &Options) -> std::result::Result<ImageDir, Error> {
    let mut images = opts.images()?;
    open(&mut images, opts)?;
    Ok(images)
}

/// The memory of a process.
struct Memory {
    images: ImageDir,
    pages: PagesReader,
    count: u64,
}

impl Memory {
    fn open(opts: &Options, pid: u64) -> std::result::Result<Self, Error> {
        let images = open_all(opts)?;
        let map = Pagemap::read(&images, kind::PAGEMAP, pid)?;
        let count = map.present_bytes() / page_size();
        let pages = PagesReader::open(&images, &map)?;
        Ok(Memory { images, pages, count })
    }

    /// All of it, as a restore reads it.
    fn read(&self) -> Result<()> {
        (0..self.count).try_for_each(|page| self.read_page(page))?;
        self.images.verify_pages()
    }

    /// The pages that a byte of their file is a part of.
    fn read_around(&self, at: usize, form: Form) -> Result<()> {
        match form.compress {
            None => self.read_page(at as u64 / page_size()),
            Some(_) => self.read(),
        }
    }

    fn read_page(&self, page: u64) -> Result<()> {
        let mut buffer = vec![0; usize::try_from(page_size()).unwrap()];
        self.pages.read_exact_at(&mut buffer, page * page_size())
    }
}
