//! Gates: how an engine that a runtime has started asks whoever has called the runtime.
//!
//! ```text
//!     caller ── runtime ── engine ── sh ── gate
//!       ▲                                   │
//!       └────────────── socket ─────────────┘
//! ```
//!
//! At its points the engine runs a script (`--action-script`), which runs the hidden command of a
//! gate, and waits for its end. The gate tells the caller of the point, and ends well if the caller
//! says so. A caller that is gone cannot have meant yes.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ExitCode;

/// The hidden command that makes the program a gate; the path of the caller's socket follows.
pub const COMMAND: &str = "agent gate";
/// What a gate hears if the engine is to go on.
const GO: &str = "go\n";
/// The longest line that is said.
const MAX_LINE: u64 = 200;

/// Asks at the gate whose socket this is. In a script of the engine.
#[must_use]
pub fn pass(socket: &Path) -> ExitCode {
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    let line = format!("{} {}\n", variable("CRTOOLS_SCRIPT_ACTION"), variable("CRTOOLS_INIT_PID"));
    let ask = || -> io::Result<bool> {
        let mut stream = UnixStream::connect(socket)?;
        stream.write_all(line.as_bytes())?;
        let mut answer = String::new();
        stream.take(MAX_LINE).read_to_string(&mut answer)?;
        Ok(answer == GO)
    };
    if ask().unwrap_or(false) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// An engine that waits at a gate. It gives up when this is dropped without a word.
#[derive(Debug)]
pub struct Waiting {
    stream: UnixStream,
    /// The point, by its name in `CRTOOLS_SCRIPT_ACTION`.
    pub point: String,
    /// The root task, if the point is about one.
    pub pid: Option<i32>,
}

impl Waiting {
    /// Hears who has connected; nobody, if it says nothing of use.
    #[must_use]
    pub fn hear(stream: UnixStream) -> Option<Self> {
        let mut line = String::new();
        BufReader::new((&stream).take(MAX_LINE)).read_line(&mut line).ok()?;
        let (point, pid) = line.trim_end_matches('\n').split_once(' ')?;
        Some(Self { point: point.to_owned(), pid: pid.parse().ok(), stream })
    }

    /// Lets it go on.
    pub fn go_on(mut self) {
        // If it is gone, the engine has noticed.
        let _ = self.stream.write_all(GO.as_bytes());
    }
}
