//! Waiting for a place that does not answer yet: a registry that a pipeline has started a moment ago, or that
//! is started again.

use std::time::{Duration, Instant};
use std::{io, thread};

use torpor_blobs::error::{Error, Result};

use crate::interrupt;

/// How long is waited between two requests.
const PAUSE: Duration = Duration::from_millis(250);
/// How often it is said what is waited for.
const LINE: Duration = Duration::from_secs(5);

/// Makes a call again as long as its place cannot be reached, for `patience` at most, and says so on the
/// standard error.
///
/// # Errors
/// The last one of the call; another one at once.
pub fn patiently<T>(patience: Duration, call: impl FnMut() -> Result<T>) -> Result<T> {
    patiently_to(&mut io::stderr(), patience, call)
}

fn patiently_to<T>(
    to: &mut dyn io::Write,
    patience: Duration,
    mut call: impl FnMut() -> Result<T>,
) -> Result<T> {
    let begin = Instant::now();
    let mut said = None;
    loop {
        let error = match call() {
            Err(error) if error.is_absent && !patience.is_zero() => error,
            done => return done,
        };
        let waited = begin.elapsed();
        if waited >= patience {
            return Err(error.during(format!("after {} s of waiting", patience.as_secs())));
        }
        if said.is_none_or(|at| waited - at >= LINE) {
            said = Some(waited);
            let (now, most) = (waited.as_secs(), patience.as_secs());
            // Nobody may listen.
            let _ = writeln!(to, "waiting for an answer ({now} s of {most}): {error}");
        }
        thread::sleep(PAUSE.min(patience - waited));
        interrupt::check().map_err(|error| Error::new(error.to_string()))?;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const LONG: Duration = Duration::from_secs(3600);

    #[test]
    fn who_cannot_be_reached_is_asked_again() {
        let (mut said, mut asked) = (Vec::new(), 0);
        let answer = patiently_to(&mut said, LONG, || {
            asked += 1;
            if asked < 3 { Err(Error::new("nobody").absent()) } else { Ok("here") }
        });
        assert_eq!((answer.unwrap(), asked), ("here", 3));
        let said = String::from_utf8(said).unwrap();
        assert!(said.starts_with("waiting for an answer (0 s of 3600): nobody\n"), "{said}");
    }

    #[test]
    fn what_is_answered_is_not_waited_for() {
        for (error, patience) in
            [(Error::new("no"), LONG), (Error::new("nobody").absent(), Duration::ZERO)]
        {
            let (mut error, mut said) = (Some(error), Vec::new());
            let answer: Result<()> =
                patiently_to(&mut said, patience, || Err(error.take().unwrap()));
            assert!(answer.is_err() && said.is_empty());
        }
    }

    #[test]
    fn patience_has_an_end() {
        let most = Duration::from_millis(1);
        let call = || -> Result<()> { Err(Error::new("nobody").absent()) };
        let error = patiently_to(&mut Vec::new(), most, call).unwrap_err();
        assert_eq!(error.to_string(), "after 0 s of waiting: nobody");
    }
}
