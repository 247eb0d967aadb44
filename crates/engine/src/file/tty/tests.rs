//! Terminals of this process.

use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::termios::Winsize;
use torpor_images::proto::FileEntry;
use torpor_images::{ImageDir, kind};
use torpor_sys::tty;
use torpor_tests::wait::wait_for;

use super::queue;
use crate::error::{Error, Result};
use crate::file::testing::{World, await_readable, fdinfo, link};

/// Until something that is bound to happen has happened.
const PATIENCE: Duration = Duration::from_secs(60);

/// A devpts instance of our own: numbers are not taken by others meanwhile.
struct Terminals {
    world: World,
    at: PathBuf,
}

impl Terminals {
    fn new() -> Self {
        let world = World::new();
        let at = world.path("pts");
        std::fs::create_dir(&at).unwrap();
        let options = c"newinstance,ptmxmode=0666,mode=0620";
        rustix::mount::mount("devpts", &at, "devpts", MountFlags::empty(), options).unwrap();
        Terminals { world, at }
    }

    fn open(&self, name: &str, flags: OFlags) -> OwnedFd {
        let flags = flags | OFlags::NOCTTY;
        rustix::fs::open(self.at.join(name), flags, Mode::empty()).unwrap()
    }

    fn master(&self) -> OwnedFd {
        let master = self.open("ptmx", OFlags::RDWR);
        tty::lock_slave(&master, false).unwrap();
        master
    }

    fn round_trip(&self, files: Vec<OwnedFd>) -> Vec<OwnedFd> {
        let entries = self.world.dump(&files).unwrap();
        drop(files);
        self.restore(&entries)
    }

    fn restore(&self, entries: &[FileEntry]) -> Vec<OwnedFd> {
        patiently(|| self.world.restore(entries))
    }
}

impl Drop for Terminals {
    fn drop(&mut self) {
        rustix::mount::unmount(&self.at, UnmountFlags::DETACH).unwrap();
    }
}

/// Tries again while the number of a terminal is taken: a child that another test starts at this
/// moment has what was closed here, too, until it executes its program.
fn patiently<T>(mut restore: impl FnMut() -> Result<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match restore() {
            Err(Error::Os { source, .. })
                if source.kind() == ErrorKind::ResourceBusy && Instant::now() < deadline =>
            {
                std::thread::sleep(Duration::from_millis(10));
            }
            done => return done.unwrap(),
        }
    }
}

fn read(file: impl AsFd) -> Vec<u8> {
    let mut buffer = [0; 4096];
    let n = rustix::io::read(file, &mut buffer).unwrap();
    buffer[..n].to_vec()
}

fn raw(file: &OwnedFd) {
    let mut termios = tty::termios(file).unwrap();
    (termios.lflag, termios.oflag, termios.iflag) = (0, 0, 0);
    termios.cc[libc::VMIN] = 3;
    tty::set_termios(file, &termios).unwrap();
}

#[test]
fn a_pair_with_its_settings() {
    let terminals = Terminals::new();
    let spare = terminals.master();
    let master = terminals.master();
    drop(spare);
    let slave = terminals.open("1", OFlags::RDWR | OFlags::NONBLOCK);
    raw(&slave);
    let size = Winsize { ws_row: 33, ws_col: 77, ws_xpixel: 5, ws_ypixel: 6 };
    rustix::termios::tcsetwinsize(&slave, size).unwrap();
    rustix::fs::fchown(&slave, Some(rustix::fs::Uid::from_raw(11)), None).unwrap();
    rustix::fs::fchmod(&slave, Mode::from_raw_mode(0o612)).unwrap();
    tty::set_packet_mode(&master, true).unwrap();
    let describe = |files: &[OwnedFd]| {
        let stat = rustix::fs::fstat(&files[1]).unwrap();
        (
            files.iter().map(fdinfo).collect::<Vec<_>>(),
            files.iter().map(link).collect::<Vec<_>>(),
            tty::termios(&files[1]).unwrap(),
            format!("{:?}", rustix::termios::tcgetwinsize(&files[1]).unwrap()),
            (stat.st_uid, stat.st_mode),
            tty::is_packet_mode(&files[0]).unwrap(),
        )
    };
    let files = vec![master, slave];
    let before = describe(&files);
    let files = terminals.round_trip(files);
    assert_eq!(describe(&files), before);
    rustix::io::write(&files[1], b"up").unwrap();
    assert_eq!(read(&files[0]), b"\0up");
}

#[test]
fn queued_data_is_there_after_the_dump_and_after_the_restore() {
    let terminals = Terminals::new();
    let (master, slave) = (terminals.master(), terminals.open("0", OFlags::RDWR));
    let mut termios = tty::termios(&slave).unwrap();
    termios.lflag &= !libc::ECHO;
    tty::set_termios(&slave, &termios).unwrap();
    // What is special is so only once: the first time it comes.
    rustix::io::write(&master, b"line\rend of file\x04par\x16\x03t").unwrap();
    rustix::io::write(&slave, b"out\nput").unwrap();
    let check = |master: &OwnedFd, slave: &OwnedFd| {
        assert_eq!(tty::termios(slave).unwrap(), termios);
        assert_eq!(read(slave), b"line\n");
        assert_eq!(read(slave), b"end of file");
        rustix::io::write(master, b"y\n").unwrap();
        assert_eq!(read(slave), b"par\x03ty\n");
        assert_eq!(read(master), b"out\r\nput");
    };
    let entries = terminals.world.dump(&[&master, &slave]).unwrap();
    check(&master, &slave);
    drop((master, slave));
    let files = terminals.restore(&entries);
    check(&files[0], &files[1]);
}

#[test]
fn the_end_of_the_other_side() {
    let terminals = Terminals::new();
    // One slave was never opened, one is closed with output unread, one has no master.
    let never = terminals.master();
    let closed = terminals.master();
    let slave = terminals.open("1", OFlags::RDWR);
    raw(&slave);
    rustix::io::write(&slave, b"last words").unwrap();
    drop(slave);
    wait_for("the slave to be closed", PATIENCE, || {
        Ok(queue::has_closed_slave(&closed).unwrap().then_some(()))
    })
    .unwrap();
    let master = terminals.master();
    let hung_up = terminals.open("2", OFlags::RDWR);
    drop(master);
    await_readable(&hung_up);
    let files = terminals.round_trip(vec![never, closed, hung_up]);
    assert!(!queue::has_closed_slave(&files[0]).unwrap());
    assert_eq!(read(&files[1]), b"last words");
    assert!(queue::has_closed_slave(&files[1]).unwrap());
    assert_eq!(read(&files[2]), b"");
    assert_eq!(rustix::io::write(&files[2], b"x"), Err(rustix::io::Errno::IO));
    assert!(link(&files[2]).ends_with("/pts/2 (deleted)"), "{}", link(&files[2]));
}

#[test]
fn a_slave_without_its_master_is_refused_or_given_a_new_one() {
    let mut terminals = Terminals::new();
    let master = terminals.master();
    let slave = terminals.open("0", OFlags::RDWR);
    raw(&slave);
    let error = terminals.world.dump(&[&slave]).unwrap_err().to_string();
    assert!(error.contains("--shell-job") && error.contains("/pts/0"), "{error}");
    terminals.world.opts.files.orphan_pts_master = true;
    let entries = terminals.world.dump(&[&slave]).unwrap();
    let settings = tty::termios(&slave).unwrap();
    drop((master, slave));
    let (slave, master) = patiently(|| {
        let mut cx = crate::restore::Restore::into_this_process(&terminals.world.opts)?;
        let slave = cx.open_all(&[entries[0].id])?.pop().unwrap();
        Ok((slave, cx.files.take_orphan_masters().pop().unwrap()))
    });
    assert_eq!(tty::termios(&slave).unwrap(), settings);
    rustix::io::write(&master, b"abc").unwrap();
    assert_eq!(read(&slave), b"abc");
}

#[test]
fn a_number_that_is_taken() {
    let terminals = Terminals::new();
    let master = terminals.master();
    let entries = terminals.world.dump(&[&master]).unwrap();
    let error = terminals.world.restore(&entries).unwrap_err().to_string();
    assert!(error.contains("pts/0, whose number is in use"), "{error}");
}

/// Each file system of terminals has one of each number.
#[test]
fn a_terminal_of_somebody_else_is_not_taken() {
    let (terminals, others) = (Terminals::new(), Terminals::new());
    let (theirs, master) = (others.master(), terminals.master());
    let slave = terminals.open("0", OFlags::RDWR);
    raw(&slave);
    let entries = terminals.world.dump(&[&master, &slave]).unwrap();
    drop((master, slave));
    let images = ImageDir::open(&terminals.world.opts.images_dir).unwrap();
    let mut all: Vec<FileEntry> = images.read_all(kind::FILES, 0).unwrap();
    let at = |terminals: &Terminals| terminals.at.join("0").to_str().unwrap().as_bytes().to_vec();
    let mut named = all.iter_mut().filter_map(|file| file.reg.as_mut());
    named.find(|reg| reg.name == at(&terminals)).unwrap().name = at(&others);
    images.write_all(kind::FILES, 0, &all).unwrap();
    let files = terminals.restore(&entries);
    rustix::io::write(&files[1], b"own").unwrap();
    assert_eq!(read(&files[0]), b"own");
    drop(theirs);
}
