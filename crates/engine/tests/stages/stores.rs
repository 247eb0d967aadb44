//! What a dump writes into a store comes back from it, whatever the store is and the dump does.

use std::path::PathBuf;
use std::sync::Arc;

use torpor_engine::options::{Memory, Stop, Trust};
use torpor_engine::{NoHooks, Options, Session};
use torpor_store::{Archive, Directory, Shelf, Store};

use super::{Case, FAMILY, IDENTITY, PLAIN, Subject, is_there, kill, open};

/// Where checkpoints lie.
#[derive(Clone, Copy)]
enum Place {
    Directory,
    Memory,
    Archive,
}

/// How they come to be, and back.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// All at once.
    Whole,
    /// In rounds, the last of which builds on the one before.
    Rounds,
    /// Sealed and compressed.
    Sealed,
    /// The pages come back when the tasks run.
    Lazy,
}

/// All of them in turn.
pub(super) const CASES: [(&str, fn()); 12] = [
    ("directory_whole", || comes_back(Place::Directory, Way::Whole)),
    ("directory_rounds", || comes_back(Place::Directory, Way::Rounds)),
    ("directory_sealed", || comes_back(Place::Directory, Way::Sealed)),
    ("directory_lazy", || comes_back(Place::Directory, Way::Lazy)),
    ("memory_whole", || comes_back(Place::Memory, Way::Whole)),
    ("memory_rounds", || comes_back(Place::Memory, Way::Rounds)),
    ("memory_sealed", || comes_back(Place::Memory, Way::Sealed)),
    ("memory_lazy", || comes_back(Place::Memory, Way::Lazy)),
    ("archive_whole", || comes_back(Place::Archive, Way::Whole)),
    ("archive_rounds", || comes_back(Place::Archive, Way::Rounds)),
    ("archive_sealed", || comes_back(Place::Archive, Way::Sealed)),
    ("archive_lazy", || comes_back(Place::Archive, Way::Lazy)),
];

/// Checkpoints side by side: `../1` leads from one to another.
struct Stores {
    place: Place,
    dir: PathBuf,
    shelf: Shelf,
}

impl Stores {
    /// A new one, to be written.
    fn create(&self, name: u32) -> Arc<dyn Store> {
        let path = self.dir.join(name.to_string());
        match self.place {
            Place::Directory => Arc::new(Directory::create(path).unwrap()),
            Place::Memory => Arc::new(self.shelf.place(&name.to_string()).unwrap()),
            Place::Archive => Arc::new(Archive::create(path).unwrap()),
        }
    }

    /// One that was written.
    fn read(&self, name: u32) -> Arc<dyn Store> {
        let path = self.dir.join(name.to_string());
        match self.place {
            Place::Directory => Arc::new(Directory::open(path).unwrap()),
            Place::Memory => Arc::new(self.shelf.place(&name.to_string()).unwrap()),
            Place::Archive => Arc::new(Archive::open(path).unwrap()),
        }
    }
}

/// A family is dumped into a store, ends, and goes on from what is there, which is nowhere else.
fn comes_back(place: Place, way: Way) {
    let sealed = way == Way::Sealed;
    let subject = Subject::start(&Case { mode: "f", family: FAMILY, sealed, ..PLAIN });
    let dir = subject.dir.path().join("stores");
    std::fs::create_dir(&dir).unwrap();
    let stores = Stores { place, dir, shelf: Shelf::new() };
    let last = if way == Way::Rounds { 2 } else { 1 };
    let mut session = None;
    for name in 1..=last {
        let mut opts = Options { store: Some(stores.create(name)), ..subject.round(name) };
        opts.memory.track = name < last;
        if name < last {
            let session = session.insert(Session::open(&opts).unwrap());
            let written = session.freeze(&opts, &mut NoHooks).unwrap().write(&mut NoHooks).unwrap();
            written.resume(&mut NoHooks).unwrap();
            let before = subject.checks(FAMILY);
            subject.wait_for_checks(FAMILY, &before);
            continue;
        }
        opts.stop = Stop::default();
        let mut session = session.take().unwrap_or_else(|| Session::open(&opts).unwrap());
        let written = session.freeze(&opts, &mut NoHooks).unwrap().write(&mut NoHooks).unwrap();
        written.kill(&mut NoHooks).unwrap();
    }
    assert!(!is_there(subject.pid), "the tasks were not killed");
    let before = subject.checks(FAMILY);
    for name in 1..=last {
        assert_eq!(std::fs::read_dir(subject.images(name)).unwrap().count(), 0);
    }
    let opts = Options {
        store: Some(stores.read(last)),
        images_dir: subject.images(last),
        shell_job: true,
        memory: Memory { lazy: way == Way::Lazy, ..Memory::default() },
        trust: Trust { open: open(&subject.dir.path().join(IDENTITY)), ..Trust::default() },
        ..Options::default()
    };
    let report = torpor_engine::restore(&opts, &mut NoHooks).unwrap();
    subject.wait_for_checks(FAMILY, &before);
    kill(report.pid);
}
