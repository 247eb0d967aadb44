//! `run --agent`: measures on this machine for a coordinator elsewhere. Both speak through the standard
//! streams of whatever has started the agent: SSH, a container, a shell.
//!
//! The agent reads a [`Request`] as one line, and prints [`Word`]s, each a line of its own behind
//! a mark: what else is printed (a log of Kubernetes holds both streams) is passed over. Results come
//! compressed and in parts that no log cuts.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use flate2::Compression;
use flate2::read::{GzDecoder, GzEncoder};
use serde::{Deserialize, Serialize};

use crate::config::{self, Config};
use crate::results::{self, Results};
use crate::run;

/// What is to be measured.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Request {
    /// The configuration, without what is the coordinator's.
    pub config: Config,
    /// The name of this piece of work: the same name goes on where it was interrupted.
    pub id: String,
    /// Whether to begin anew.
    pub again: bool,
}

/// How many signs of life of an agent may be missing before it is given up.
const MISSING: u64 = 10;

impl Request {
    /// How long an agent may say nothing.
    #[must_use]
    pub(crate) fn silence(&self) -> Duration {
        Duration::from_secs(self.config.deadline.saturating_mul(MISSING))
    }
}

/// What an agent says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Word {
    /// It has begun.
    Hello {
        /// The version of the tool.
        version: String,
    },
    /// A part of the results.
    Part {
        /// Which, from 0.
        number: usize,
        /// How many there are.
        of: usize,
        /// `results.json`, compressed with gzip, in base64.
        data: String,
    },
    /// It is at work.
    Alive,
    /// It cannot do it.
    Error(String),
}

/// What each line of an agent begins with.
const MARK: &str = "{\"torpor-benchmark\":";
/// The end of such a line.
const END: &str = "}";
/// What a coordinator says when it has the results.
const RECEIVED: &str = "received";
/// The longest line of a request.
const LONGEST: u64 = 4 << 20;
/// The length of a part: the CRI cuts lines of logs at 16 KiB.
const PART: usize = 8 << 10;
/// The most parts that are taken in, and the most bytes that they may hold.
const MOST_PARTS: usize = 16 << 10;
const MOST_BYTES: u64 = 512 << 20;
/// Where runs for coordinators are kept until their results are there.
const STATE: &str = "/var/lib/torpor/benchmark";

fn say(word: &Word) -> Result<(), String> {
    say_to(io::stdout().lock(), word).map_err(|e| e.to_string())
}

fn say_to(mut out: impl Write, word: &Word) -> io::Result<()> {
    let text = serde_json::to_string(word)?;
    // Something else may have begun the line.
    writeln!(out, "\n{MARK}{text}{END}").and_then(|()| out.flush())
}

/// Hears what a coordinator wants, and refuses it.
///
/// # Errors
/// If it is gone.
pub(crate) fn refuse(end: impl Read + Write + Copy, why: &str) -> io::Result<()> {
    // Nothing may be left unread: the connection would be cut, and the answer with it.
    BufReader::new(end.take(LONGEST)).read_until(b'\n', &mut Vec::new())?;
    say_to(end, &Word::Error(why.into()))
}

/// Measures for a coordinator, or, with a configuration, for whoever reads the output.
///
/// # Errors
/// If the request makes no sense, or nothing can be measured. The coordinator is told as well.
pub(crate) async fn serve(
    config: Option<Config>,
    output: Option<PathBuf>,
    again: bool,
) -> Result<(), String> {
    say(&Word::Hello { version: env!("CARGO_PKG_VERSION").into() })?;
    let done = answer(config, output, again).await;
    if let Err(error) = &done {
        say(&Word::Error(error.clone()))?;
    }
    done
}

async fn answer(
    config: Option<Config>,
    output: Option<PathBuf>,
    again: bool,
) -> Result<(), String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let (request, received) = match config {
        Some(config) => (Request { config, id: String::new(), again }, None),
        None => {
            let (request, received) = hear()?;
            (request, Some(received))
        }
    };
    let kept = output.is_some();
    let dir = match output {
        Some(dir) => dir,
        None => place(&request.id)?,
    };
    let alive = stay_alive(Duration::from_secs(request.config.deadline));
    let results = run::run(request.config, &dir, request.again || again).await;
    drop(alive);
    send(&results.map_err(|e| text(&e))?)?;
    // Without an answer the results stay, so that the same request is answered at once.
    let safe = received.is_none_or(|received| received.recv().is_ok());
    if safe && !kept {
        std::fs::remove_dir_all(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    }
    Ok(())
}

/// Gives a sign of life again and again, until what is returned is dropped.
fn stay_alive(every: Duration) -> mpsc::Sender<()> {
    let (sender, ended) = mpsc::channel();
    std::thread::spawn(move || {
        let goes_on = || ended.recv_timeout(every) == Err(mpsc::RecvTimeoutError::Timeout);
        while goes_on() && say(&Word::Alive).is_ok() {}
    });
    sender
}

/// The directory of a piece of work.
fn place(id: &str) -> Result<PathBuf, String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-';
    if id.is_empty() {
        return Ok(Path::new(STATE).join("alone"));
    }
    if id.len() > 64 || !id.chars().all(plain) {
        return Err("the name of the work is not made of letters and digits".into());
    }
    Ok(Path::new(STATE).join(id))
}

/// Reads a request, and watches for the coordinator's end: then this process ends, too, and its keeper
/// removes what it has made.
fn hear() -> Result<(Request, mpsc::Receiver<()>), String> {
    let mut input = BufReader::new(io::stdin());
    let mut line = String::new();
    let read = (&mut input).take(LONGEST).read_line(&mut line).map_err(|e| e.to_string())?;
    if read == 0 {
        return Err("there is no request on the standard input; `run --agent` is started by a \
                    coordinator, or with a configuration"
            .into());
    }
    let request: Request =
        serde_json::from_str(&line).map_err(|e| format!("the request is broken: {e}"))?;
    config::check(&request.config).map_err(|e| e.to_string())?;
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut line = String::new();
        match input.take(LONGEST).read_line(&mut line) {
            Ok(_) if line.trim() == RECEIVED => drop(sender.send(())),
            _ => std::process::exit(1),
        }
    });
    Ok((request, receiver))
}

fn send(results: &Results) -> Result<(), String> {
    let text = serde_json::to_vec(results).map_err(|e| e.to_string())?;
    let mut packed = Vec::new();
    let mut packer = GzEncoder::new(text.as_slice(), Compression::default());
    packer.read_to_end(&mut packed).map_err(|e| e.to_string())?;
    let text = STANDARD.encode(packed);
    let parts: Vec<&[u8]> = text.as_bytes().chunks(PART).collect();
    for (number, part) in parts.iter().enumerate() {
        let data = String::from_utf8_lossy(part).into_owned();
        say(&Word::Part { number, of: parts.len(), data })?;
    }
    Ok(())
}

/// Sends a request to an agent.
///
/// # Errors
/// If the agent has closed its end.
pub(crate) fn ask(mut to: impl Write, request: &Request) -> io::Result<()> {
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    to.write_all(&line).and_then(|()| to.flush())
}

/// Tells an agent that its results have arrived.
///
/// # Errors
/// If the agent has closed its end.
pub(crate) fn thank(mut to: impl Write) -> io::Result<()> {
    writeln!(to, "{RECEIVED}").and_then(|()| to.flush())
}

/// Reads what an agent prints until its results are there; what is none of its words goes to `log`.
/// What it prints is not trusted.
///
/// # Errors
/// If it says that it cannot, ends before, or its results are none.
pub(crate) fn receive(from: impl Read, name: &str, mut log: impl Write) -> Result<Results, String> {
    let mut from = BufReader::new(from);
    let mut parts: Vec<Option<String>> = Vec::new();
    let mut begun = false;
    loop {
        let mut line = Vec::new();
        let read = (&mut from).take(LONGEST).read_until(b'\n', &mut line);
        if read.map_err(|e| e.to_string())? == 0 {
            let text =
                if begun { "the agent has ended too early" } else { "no agent has answered" };
            return Err(text.into());
        }
        match heard(&String::from_utf8_lossy(&line)) {
            Some(Word::Hello { .. } | Word::Alive) => begun = true,
            Some(Word::Error(text)) => return Err(text),
            Some(Word::Part { number, of, data })
                if of <= MOST_PARTS && number < of && data.len() <= PART =>
            {
                parts.resize(of, None);
                parts[number] = Some(data);
                if parts.iter().all(Option::is_some) {
                    return unpack(&parts.into_iter().flatten().collect::<String>(), name);
                }
            }
            Some(Word::Part { .. }) => return Err("the agent's results are too large".into()),
            None if line.trim_ascii().is_empty() => {}
            // Results are worth more than a log that cannot be written.
            None => drop(log.write_all(&line)),
        }
    }
}

/// What a line holds, if it is one of an agent.
fn heard(line: &str) -> Option<Word> {
    let (_, rest) = line.split_once(MARK)?;
    serde_json::from_str(rest.trim_end().strip_suffix(END)?).ok()
}

fn unpack(text: &str, name: &str) -> Result<Results, String> {
    let packed = STANDARD.decode(text).map_err(|e| format!("the results are damaged: {e}"))?;
    let mut bytes = Vec::new();
    let mut reader = GzDecoder::new(packed.as_slice()).take(MOST_BYTES);
    reader.read_to_end(&mut bytes).map_err(|e| format!("the results are damaged: {e}"))?;
    results::parse(Path::new(name), &bytes).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_found_between_other_output() {
        let word = Word::Error("no".into());
        let line =
            format!("\r35 of 160: Disk{MARK}{}{END}\n", serde_json::to_string(&word).unwrap());
        assert_eq!(heard(&line), Some(word));
        for line in
            ["", "x", MARK, "{\"torpor-benchmark\":3}", "{\"torpor-benchmark\":{\"part\":1}}"]
        {
            assert_eq!(heard(line), None, "{line}");
        }
    }

    #[test]
    fn what_an_agent_says_is_not_trusted() {
        let part = |number: usize, of: usize, data: &str| {
            let word = Word::Part { number, of, data: data.into() };
            format!("{MARK}{}{END}\n", serde_json::to_string(&word).unwrap())
        };
        for (said, word) in [
            (String::new(), "no agent"),
            (part(0, 1, "%%%"), "damaged"),
            (part(0, 1, "aGVsbG8="), "damaged"),
            (part(0, usize::MAX, "aGVsbG8="), "too large"),
            (part(7, 3, "aGVsbG8="), "too large"),
            (part(0, 3, &"a".repeat(PART + 1)), "too large"),
            (part(0, 2, "aGVsbG8="), "no agent"),
        ] {
            let error = receive(said.as_bytes(), "there", io::sink()).unwrap_err();
            assert!(error.contains(word), "{said}: {error}");
        }
    }

    #[test]
    fn names_of_work_stay_in_their_directory() {
        assert!(place("0a-f").is_ok());
        assert!(place("../x").is_err() && place("a/b").is_err());
    }
}
