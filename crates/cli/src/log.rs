//! The log: what the engine says through `tracing`, in lines as CRIU writes them,
//! since scripts search them for `Error (` and for the time in front.

use std::fmt::{self, Write as _};
use std::fs::File;
use std::io::{self, Write as _};
use std::path::Path;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Instant;

use rustix::time::{ClockId, Timespec, clock_gettime};
use torpor_engine::work_file;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span;
use tracing::{Event, Level, Metadata, Subscriber};

use crate::options::DEFAULT_VERBOSITY;

/// From this level on each line begins with the time since the start.
const LEVEL_WITH_TIME: u8 = 3;

static LOG: OnceLock<&'static Log> = OnceLock::new();

/// Where lines go, and which.
#[derive(Debug)]
pub struct Log {
    level: AtomicU8,
    start: Instant,
    /// The same by the clock that all programs share.
    clock: Timespec,
    target: Mutex<Target>,
}

/// Takes the level and the text of each record, and its fields by themselves.
pub type Listener = Box<dyn Fn(Level, &str, Vec<(String, String)>) + Send>;

enum Target {
    Nowhere,
    Stderr,
    Stdout,
    File(File),
    Listener(Listener),
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nowhere => "Nowhere",
            Self::Stderr => "Stderr",
            Self::Stdout => "Stdout",
            Self::File(_) => "File",
            Self::Listener(_) => "Listener",
        })
    }
}

/// The program's log; it goes to the standard error until it is told otherwise.
pub fn get() -> &'static Log {
    LOG.get_or_init(|| {
        let log: &'static Log = Box::leak(Box::new(Log {
            level: AtomicU8::new(DEFAULT_VERBOSITY),
            start: Instant::now(),
            clock: clock_gettime(ClockId::Monotonic),
            target: Mutex::new(Target::Stderr),
        }));
        // Fails only if there is a subscriber already, as in tests.
        let _ = tracing::subscriber::set_global_default(log);
        log
    })
}

impl Log {
    /// From which time by the clock that all programs share the times of its lines count, in seconds.
    pub fn began(&self) -> String {
        format!("{}.{:09}", self.clock.tv_sec, self.clock.tv_nsec)
    }

    /// Lets through errors from 1 on, warnings from 2, information from 3, debugging
    /// from 4, everything from 5.
    pub(crate) fn set_level(&self, level: u8) {
        self.level.store(level, Ordering::Relaxed);
        tracing::callsite::rebuild_interest_cache();
    }

    /// From now on lines go to the file `path`, which is made anew; `-` is the standard
    /// output.
    ///
    /// # Errors
    /// If the file cannot be made: its directory is missing, or it is a link in a work directory, or no regular file there.
    pub(crate) fn to_file(&self, path: &Path) -> io::Result<()> {
        let target = match path == Path::new("-") {
            true => Target::Stdout,
            // Lines of forked helpers do not overwrite each other there.
            false => Target::File(work_file::begin(path, 0o600)?),
        };
        self.set_target(target);
        Ok(())
    }

    /// From now on lines go to the standard error.
    pub(crate) fn to_stderr(&self) {
        self.set_target(Target::Stderr);
    }

    /// From now on `listener` gets what is said, as it is said, until a file takes it.
    pub(crate) fn to_listener(&self, listener: Listener) {
        self.set_target(Target::Listener(listener));
    }

    /// Whether lines go to a listener.
    pub(crate) fn has_listener(&self) -> bool {
        matches!(*self.target.lock().unwrap_or_else(PoisonError::into_inner), Target::Listener(_))
    }

    /// From now on lines are lost: the standard error is not the caller's own.
    pub(crate) fn to_nowhere(&self) {
        self.set_target(Target::Nowhere);
    }

    /// Whether lines are lost.
    pub fn is_silent(&self) -> bool {
        matches!(*self.target.lock().unwrap_or_else(PoisonError::into_inner), Target::Nowhere)
    }

    /// Whether lines go to a file, so that a person does not see them.
    pub fn is_file(&self) -> bool {
        matches!(*self.target.lock().unwrap_or_else(PoisonError::into_inner), Target::File(_))
    }

    fn set_target(&self, target: Target) {
        *self.target.lock().unwrap_or_else(PoisonError::into_inner) = target;
    }

    fn lets_through(&self, level: Level) -> bool {
        number(level) <= self.level.load(Ordering::Relaxed)
    }

    fn line(&self, meta: &Metadata<'_>, text: &str) -> String {
        let mut line = String::new();
        if self.level.load(Ordering::Relaxed) >= LEVEL_WITH_TIME {
            let time = self.start.elapsed();
            let _ = write!(line, "({:02}.{:06}) ", time.as_secs(), time.subsec_micros());
        }
        let place = SourceLine(meta);
        let _ = match *meta.level() {
            Level::ERROR => write!(line, "Error {place}: "),
            Level::WARN => write!(line, "Warn  {place}: "),
            _ => Ok(()),
        };
        line.push_str(text);
        line.push('\n');
        line
    }
}

/// `(engine/dump/mod.rs:12)`.
struct SourceLine<'a>(&'a Metadata<'a>);

impl fmt::Display for SourceLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let file = self.0.file().unwrap_or("?");
        let file = file.strip_prefix("crates/").unwrap_or(file).replacen("/src/", "/", 1);
        write!(f, "({file}:{})", self.0.line().unwrap_or(0))
    }
}

/// What is let through at a level of the log.
fn filter(level: u8) -> LevelFilter {
    match level {
        0 => LevelFilter::OFF,
        1 => LevelFilter::ERROR,
        2 => LevelFilter::WARN,
        3 => LevelFilter::INFO,
        4 => LevelFilter::DEBUG,
        _ => LevelFilter::TRACE,
    }
}

fn number(level: Level) -> u8 {
    match level {
        Level::ERROR => 1,
        Level::WARN => 2,
        Level::INFO => 3,
        Level::DEBUG => 4,
        Level::TRACE => 5,
    }
}

impl Subscriber for &'static Log {
    // What is not let through costs next to nothing: libraries have a record for each frame that they send.
    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(filter(self.level.load(Ordering::Relaxed)))
    }

    fn enabled(&self, meta: &Metadata<'_>) -> bool {
        !meta.is_span() && self.lets_through(*meta.level())
    }

    fn event(&self, event: &Event<'_>) {
        let mut text = Text::default();
        event.record(&mut text);
        let (text, fields) = text.finish();
        let meta = event.metadata();
        let mut target = self.target.lock().unwrap_or_else(PoisonError::into_inner);
        // There is nowhere to report that the log cannot be written.
        let _ = match &mut *target {
            Target::Nowhere => Ok(()),
            Target::Stderr => io::stderr().write_all(self.line(meta, &text).as_bytes()),
            Target::Stdout => io::stdout().write_all(self.line(meta, &text).as_bytes()),
            Target::File(file) => file.write_all(self.line(meta, &text).as_bytes()),
            Target::Listener(listener) => {
                listener(*meta.level(), &text, fields);
                Ok(())
            }
        };
    }

    // Spans have no place in these lines.
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

/// The message of an event, and its other fields behind it.
#[derive(Default)]
struct Text {
    message: String,
    fields: Vec<(String, String)>,
}

impl Text {
    /// All on one line, whatever the names of files and tasks hold, and the fields by themselves.
    fn finish(self) -> (String, Vec<(String, String)>) {
        let mut text = self.message;
        for (name, value) in &self.fields {
            text.extend([" ", name, "=", value]);
        }
        (escaped(text.trim_end()), self.fields)
    }
}

/// A text on one line, without what a terminal would obey: names of files and tasks may hold anything.
pub fn escaped(text: &str) -> String {
    if !text.contains(char::is_control) {
        return text.to_owned();
    }
    let mut out = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter.is_control() {
            true => out.extend(letter.escape_default()),
            false => out.push(letter),
        }
    }
    out
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        match field.name() {
            "message" => {
                let _ = write!(self.message, "{value:?}");
            }
            name => self.fields.push((name.to_owned(), format!("{value:?}"))),
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => self.message.push_str(value),
            name => self.fields.push((name.to_owned(), value.to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::mpsc;

    use super::*;

    type Told = (Level, String, Vec<(String, String)>);

    /// A log, and what is told to its listener.
    fn heard() -> (&'static Log, mpsc::Receiver<Told>) {
        let (sender, told) = mpsc::channel();
        let listener: Listener = Box::new(move |level, text, fields| {
            sender.send((level, text.to_owned(), fields)).unwrap();
        });
        let log: &'static Log = Box::leak(Box::new(Log {
            level: AtomicU8::new(DEFAULT_VERBOSITY),
            start: Instant::now(),
            clock: clock_gettime(ClockId::Monotonic),
            target: Mutex::new(Target::Listener(listener)),
        }));
        (log, told)
    }

    /// A place in the code says what it says at the level of the moment, whatever it was before.
    #[test]
    fn levels_may_change() {
        let (log, told) = heard();
        tracing::subscriber::with_default(log, || {
            for level in [0, 1, 4, 5, 2, 4] {
                log.set_level(level);
                assert_eq!(log.max_level_hint(), Some(filter(level)));
                tracing::error!("{level}");
                tracing::debug!("{level}");
                tracing::trace!("{level}");
            }
        });
        let told: Vec<String> =
            told.try_iter().map(|(level, text, _)| format!("{level} {text}")).collect();
        assert_eq!(
            told,
            [
                "ERROR 1", "ERROR 4", "DEBUG 4", "ERROR 5", "DEBUG 5", "TRACE 5", "ERROR 2",
                "ERROR 4", "DEBUG 4"
            ]
        );
    }

    #[test]
    fn a_listener_gets_fields_by_themselves() {
        let (log, told) = heard();
        tracing::subscriber::with_default(log, || {
            tracing::warn!(group = "a", pid = 7, "cannot be\nremoved\x1b[2J");
            tracing::debug!("not at this level");
        });
        let field = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let fields = vec![field("group", "a"), field("pid", "7")];
        let text = "cannot be\\nremoved\\u{1b}[2J group=a pid=7".to_owned();
        assert_eq!(told.try_iter().collect::<Vec<_>>(), [(Level::WARN, text, fields)]);
    }
}
