//! Work that several threads do at the same time, for one end: once one of them has failed, the others work in vain.

use std::io::{self, Write};
use std::sync::OnceLock;

use crate::error::{Error, Result};

/// Whether one of them has failed, and why.
#[derive(Debug, Default)]
pub(crate) struct Halt(OnceLock<Error>);

impl Halt {
    /// What has come of a part of the work. The first error is that of all.
    pub(crate) fn note(&self, done: Result<()>) {
        if let Err(error) = done {
            // A later one may come of the first.
            let _ = self.0.set(error);
        }
    }

    /// To be asked between two pieces of the work.
    ///
    /// # Errors
    /// If another part of it has failed.
    pub(crate) fn check(&self) -> Result<()> {
        match self.0.get() {
            None => Ok(()),
            Some(why) => {
                Err(Error::Peer(format!("what is done at the same time has failed: {why}")))
            }
        }
    }

    /// What has come of all of it.
    ///
    /// # Errors
    /// If a part has failed: the error that was noted first.
    pub(crate) fn finish(self) -> Result<()> {
        self.0.into_inner().map_or(Ok(()), Err)
    }
}

/// What is written to as long as nothing has failed.
pub(crate) struct Until<'h, W> {
    /// Says so.
    pub halt: &'h Halt,
    /// Gets what is written.
    pub out: W,
}

impl<W: Write> Write for Until<'_, W> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.halt.check().map_err(io::Error::other)?;
        self.out.write(data)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_first_error_is_that_of_all() {
        let halt = Halt::default();
        halt.note(Ok(()));
        halt.check().unwrap();
        halt.note(Err(Error::Gone { pid: 1 }));
        let in_vain = halt.check();
        assert!(in_vain.as_ref().unwrap_err().to_string().ends_with("has failed: task 1 is gone"));
        halt.note(in_vain);
        assert!(matches!(halt.finish(), Err(Error::Gone { pid: 1 })));
        Halt::default().finish().unwrap();
    }

    #[test]
    fn nothing_is_written_any_more() {
        let halt = Halt::default();
        let mut until = Until { halt: &halt, out: Vec::new() };
        until.write_all(b"before").unwrap();
        halt.note(Err(Error::Gone { pid: 1 }));
        let error = until.write_all(b"behind").unwrap_err().to_string();
        assert!(error.contains("task 1 is gone"), "{error}");
        assert_eq!(until.out, b"before");
    }
}
