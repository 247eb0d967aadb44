//! `restore --rounds`: a tree is built by its first images while its tasks still run elsewhere,
//! and follows them round by round.
//!
//! The program that directs it listens at a Unix socket, and says a line at a time:
//!
//! ```text
//!                                    ◀────  ready           the tree is built, by --images-dir
//!       round DIRECTORY              ────▶
//!                                    ◀────  ready           it has the pages of that round
//!       last DIRECTORY               ────▶                  it is completed, and woken
//! ```
//!
//! If the connection ends before the last round, nothing of the tree remains.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use torpor_engine::stages::Plan;
use torpor_engine::{Error, Hooks, Options, RestoreReport, Result};
use torpor_images::ImageDir;

/// The longest line.
const MAX_LINE: u64 = 8192;

/// What is to be done with a round.
enum Word {
    /// More follow.
    Round(PathBuf),
    /// None does.
    Last(PathBuf),
}

/// Whoever says which rounds there are.
struct Director {
    stream: BufReader<UnixStream>,
}

impl Director {
    fn connect(socket: &Path) -> Result<Self> {
        let stream = UnixStream::connect(socket)
            .map_err(|e| Error::Peer(format!("--rounds {}: {e}", socket.display())))?;
        Ok(Self { stream: BufReader::new(stream) })
    }

    fn ready(&mut self) -> Result<()> {
        self.stream
            .get_mut()
            .write_all(b"ready\n")
            .map_err(|e| Error::Peer(format!("nobody waits for rounds any more: {e}")))
    }

    fn word(&mut self) -> Result<Word> {
        let mut line = String::new();
        (&mut self.stream)
            .take(MAX_LINE)
            .read_line(&mut line)
            .map_err(|e| Error::Peer(format!("what the next round is: {e}")))?;
        match line.strip_suffix('\n').and_then(|line| line.split_once(' ')) {
            Some(("round", dir)) => Ok(Word::Round(PathBuf::from(dir))),
            Some(("last", dir)) => Ok(Word::Last(PathBuf::from(dir))),
            _ if line.is_empty() => Err(Error::Peer("the last round does not come".to_owned())),
            _ => Err(Error::Protocol(format!("{line:?} names no round"))),
        }
    }
}

/// Restores what `opts` say, in rounds that are told of at `socket`.
///
/// # Errors
/// If nobody says what the last round is; if a round cannot be read or restored (see [`Plan`]).
pub(crate) fn restore(
    opts: &Options,
    socket: &Path,
    hooks: &mut dyn Hooks,
) -> Result<RestoreReport> {
    let mut director = Director::connect(socket)?;
    let last;
    // Pages that are to be fetched later are those that the last round leaves out.
    let mut first = opts.clone();
    first.memory.lazy = false;
    let mut skeleton = Plan::read(&first)?.for_rounds()?.build(hooks)?;
    director.ready()?;
    let images_dir = loop {
        match director.word()? {
            Word::Round(dir) => {
                let applied = skeleton.apply(ImageDir::open(&dir)?)?;
                tracing::debug!("{}: {} pages", dir.display(), applied.written);
                director.ready()?;
            }
            Word::Last(dir) => break dir,
        }
    };
    last = Options { images_dir, ..opts.clone() };
    let complete = skeleton.complete(&last, hooks)?;
    if let Some(why) = complete.rebuilt() {
        tracing::warn!("the tree was built anew after the last round: {why}");
    }
    complete.verify(hooks)?.wake(hooks)
}
