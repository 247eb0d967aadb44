//! What a trial start asks for of sealed pages. Nothing says what of a sealed memory was touched (that is nobody's business who
//! has no key), but which blocks of its files were read: those are needed first at other starts.

use std::io::{self, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{fs, mem, thread};

use torpor_images::feed::SOCKET;

use crate::error::{Context, Result};
use crate::feed::{self, Request};
use crate::sealed_pack::{Blocks, blocks_of};

/// Notes what is asked for, in place of whoever brings it at other starts: all of it is there already.
#[derive(Debug)]
pub struct Listener {
    listener: UnixListener,
    socket: PathBuf,
    heard: Arc<Mutex<Heard>>,
}

#[derive(Debug, Default)]
struct Heard {
    blocks: Blocks,
    /// Those who have asked.
    lines: Vec<UnixStream>,
    is_over: bool,
}

impl Listener {
    /// Notes from now on what is asked for of the images in `images`.
    ///
    /// # Errors
    /// If there is no place for the socket.
    pub fn start(images: &Path) -> Result<Self> {
        let (listener, socket) = (feed::listen(images)?, images.join(SOCKET));
        let incoming = listener.try_clone().context(|| "noting what a start needs")?;
        let listener = Self { listener, socket, heard: Arc::default() };
        let heard = Arc::clone(&listener.heard);
        thread::spawn(move || {
            for stream in incoming.incoming().map_while(io::Result::ok) {
                let heard = Arc::clone(&heard);
                // A connection that ends is the end of a thread of the engine.
                thread::spawn(move || hear(stream, &heard).ok());
            }
        });
        Ok(listener)
    }

    /// What was asked for. Nobody is answered any more: the tasks have to be gone.
    #[must_use]
    pub fn finish(self) -> Blocks {
        mem::take(&mut lock(&self.heard).blocks)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let mut heard = lock(&self.heard);
        heard.is_over = true;
        // What is gone by itself need not be ended.
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
        heard.lines.iter().for_each(|line| drop(line.shutdown(Shutdown::Both)));
        let _ = fs::remove_file(&self.socket);
    }
}

fn lock(heard: &Mutex<Heard>) -> MutexGuard<'_, Heard> {
    heard.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Notes what is asked for by one connection.
fn hear(mut stream: UnixStream, heard: &Mutex<Heard>) -> io::Result<()> {
    let line = stream.try_clone()?;
    {
        let mut heard = lock(heard);
        if heard.is_over {
            return Ok(());
        }
        heard.lines.push(line);
    }
    loop {
        let Request { file, offset, len, is_patient } = Request::read(&mut stream)?;
        // What nobody waits for does not come: it would be there before somebody shows that it is needed.
        if !is_patient {
            lock(heard).blocks.extend(blocks_of(file, offset, len));
            stream.write_all(&[0])?;
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::Read;

    use torpor_images::ImageDir;
    use torpor_images::feed::{Feed, PATIENT, REQUEST};

    use super::*;

    #[test]
    fn what_somebody_waits_for_is_noted() {
        let dir = tempfile::tempdir().unwrap();
        let listener = Listener::start(dir.path()).unwrap();
        let images = ImageDir::open(dir.path()).unwrap();
        let feed = Feed::of(&images).unwrap().unwrap();
        feed.want(3, 100 << 10, 70 << 10).unwrap();
        let mut ahead = UnixStream::connect(dir.path().join(SOCKET)).unwrap();
        let mut request = [0; REQUEST];
        request[12..].copy_from_slice(&(1 | PATIENT).to_le_bytes());
        ahead.write_all(&request).unwrap();
        assert_eq!(listener.finish(), [(3, 3), (3, 4), (3, 5)].into());
        assert_eq!(ahead.read(&mut [0]).unwrap_or(0), 0, "it is not answered");
        assert!(feed.want(3, 0, 1).is_err());
        assert!(Feed::of(&images).unwrap().is_none());
    }
}
