//! What jobs have in common that behave alike: what is learned of one counts for the others.

use std::path::Path;

use serde::{Deserialize, Serialize};
use torpor_blobs::oci;

/// Jobs of which what is learned of one counts for the others. What two owners or projects call by the same
/// name may be two things.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Group {
    /// Whose they are.
    pub owner: String,
    /// What they are for.
    pub project: String,
    /// Their kind.
    pub kind: String,
}

/// Programs that run what is named after them.
const INTERPRETERS: [&str; 9] =
    ["sh", "bash", "dash", "ksh", "zsh", "python", "perl", "ruby", "node"];

/// Digits of a script's digest in the name of its kind.
const DIGITS: usize = 12;

/// Characters of a script in the name of its kind: people are to know it again.
const SHOWN: usize = 24;

/// The name of no kind is longer: what is longer is a beginning and a digest.
const LONGEST: usize = 255;

/// The kind of jobs that run these words: their program; of an interpreter the file, the module or the text
/// that it runs. A digest tells texts apart that begin alike.
#[must_use]
pub(crate) fn of_command(words: &[String]) -> String {
    short(of_words(words))
}

/// A name for a kind, made shorter if it is long.
#[must_use]
pub(crate) fn short(kind: String) -> String {
    if kind.len() > LONGEST { shortened(&kind) } else { kind }
}

fn of_words(words: &[String]) -> String {
    let mut words = words;
    let (program, rest) = loop {
        let Some((program, rest)) = words.split_first() else { return String::new() };
        match name(program) {
            env if env == "env" => words = after_env(rest),
            program => break (program, rest),
        }
    };
    let language = program.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.');
    if !INTERPRETERS.contains(&language) {
        return program;
    }
    match script(language, rest) {
        Some(Script::File(file)) => format!("{program} {}", name(file)),
        Some(Script::Module(module)) => format!("{program} -m {module}"),
        Some(Script::Text(text)) => format!("{program} -c {}", shortened(text)),
        None => program,
    }
}

fn name(word: &str) -> String {
    let name = Path::new(word).file_name();
    name.map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}

/// The command that env(1) runs.
fn after_env(words: &[String]) -> &[String] {
    let mut rest = words;
    while let Some((word, after)) = rest.split_first() {
        let taken = match word.as_str() {
            "-u" | "-C" => 2,
            word if word.starts_with('-') || word.contains('=') => 1,
            _ => return rest,
        };
        rest = after.get(taken - 1..).unwrap_or_default();
    }
    rest
}

/// What an interpreter runs.
enum Script<'a> {
    File(&'a str),
    Module(&'a str),
    Text(&'a str),
}

fn script<'a>(language: &str, words: &'a [String]) -> Option<Script<'a>> {
    let mut words = words.iter().map(String::as_str);
    while let Some(word) = words.next() {
        let Some(option) = word.strip_prefix('-').filter(|option| !option.is_empty()) else {
            return Some(Script::File(word));
        };
        if option.starts_with('-') {
            continue;
        }
        // Options of one letter are written together, and the last one has its value after it.
        match (language, option.chars().last()?) {
            ("python", 'm') => return words.next().map(Script::Module),
            ("perl" | "ruby" | "node", 'e' | 'E') => return words.next().map(Script::Text),
            ("perl" | "ruby" | "node", _) => {}
            (_, 'c') => return words.next().map(Script::Text),
            ("python", 'W' | 'X') => drop(words.next()),
            ("python", _) => {}
            // `set -o pipefail` and the like of shells.
            (_, 'o' | 'O') => drop(words.next()),
            _ => {}
        }
    }
    None
}

/// The first words of a text, and its digest.
fn shortened(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let shown: String = line.chars().filter(|c| !c.is_control()).take(SHOWN).collect();
    let digest = oci::sha256(text.as_bytes());
    let digest = oci::hex_of(&digest).and_then(|hex| hex.get(..DIGITS)).unwrap_or_default();
    format!("{} #{digest}", shown.trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(line: &str) -> String {
        let words: Vec<String> = line.split('|').map(str::to_owned).collect();
        of_command(&words)
    }

    /// Whoever submits a job could make the daemon run out of its stack.
    #[test]
    fn a_command_may_be_long() {
        assert_eq!(of_command(&vec!["env".to_owned(); 1_000_000]), "");
    }

    /// Kinds are remembered when their jobs are forgotten.
    #[test]
    fn a_kind_is_short() {
        let long = "x".repeat(1 << 20);
        let [a, b] = ["a", "b"].map(|end| of(&format!("python3|-m|{long}{end}")));
        assert!(a.starts_with("python3 -m xxxx") && a.len() < 64, "{a}");
        assert_ne!(a, b);
    }

    #[test]
    fn kinds_are_programs_or_what_they_interpret() {
        assert_eq!(of("/usr/bin/make|fuzz"), "make");
        assert_eq!(of("python3|/x/suite.py|-v"), "python3 suite.py");
        assert_eq!(of("/usr/bin/python3.11|-u|-W|error|suite.py"), "python3.11 suite.py");
        assert_eq!(of("python3|-m|pytest|tests"), "python3 -m pytest");
        assert_eq!(of("bash|-e|-o|pipefail|/x/run.sh"), "bash run.sh");
        assert_eq!(of("env|-i|-u|HOME|A=1|make|fuzz"), "make");
        assert_eq!(of("env|bash|run.sh"), "bash run.sh");
        assert_eq!(of("sh"), "sh");
        assert_eq!(of_command(&[]), "");
    }

    #[test]
    fn texts_are_told_apart_however_they_begin() {
        let long = "echo one two three four five six seven";
        let [a, b] = ["a", "b"].map(|end| of(&format!("bash|-euo|pipefail|-c|{long} {end}")));
        assert!(a.starts_with("bash -c echo one two three four #"), "{a}");
        assert_ne!(a, b);
        assert_eq!(a, of(&format!("bash|-c|{long} a|argument")));
        assert_eq!(of("perl|-e|print 1").split('#').next(), Some("perl -c print 1 "));
        assert_eq!(of("sh|-ec|\ttrue;\n\ttrue").split('#').next(), Some("sh -c true; true "));
    }
}
