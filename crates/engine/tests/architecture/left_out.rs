//! What a test leaves out for want of something counts as passed: it says so, in words that `make test` tells of.

use std::io::Write;
use std::process::{Command, Stdio};

use super::{files_below, root};

/// The texts that a source prints, with a word in place of each value.
fn printed(source: &str) -> Vec<String> {
    let text = |rest: &str| {
        let rest = rest.trim_start().strip_prefix('"')?;
        let mut is_escaped = false;
        let end = rest.find(|c| {
            let ends = c == '"' && !is_escaped;
            is_escaped = c == '\\' && !is_escaped;
            ends
        })?;
        let mut parts = rest[..end].split('{');
        let first = parts.next()?.to_owned();
        let behind = |part: &str| part.split_once('}').map_or(String::new(), |(_, s)| s.to_owned());
        Some(parts.fold(first, |sum, part| sum + "word" + &behind(part)))
    };
    source.split("println!(").skip(1).filter_map(text).collect()
}

#[test]
fn what_is_left_out_is_told() {
    let source = "println!(\n    \"left out: {name} (\\\"no\\\")\"\n); eprintln!(\"{a}{b:?}\", c);";
    assert_eq!(printed(source), ["left out: word (\\\"no\\\")", "wordword"]);
    let script = std::fs::read_to_string(root().join("scripts/test.sh")).unwrap();
    let (_, behind) = script.split_once("grep -E '").unwrap();
    let (told, _) = behind.split_once('\'').unwrap();
    let files = ["crates", "bench/tests", "tests"].map(|dir| files_below(&root().join(dir)));
    let sources = files.into_iter().flatten().map(|file| std::fs::read_to_string(file).unwrap());
    let texts = sources.flat_map(|source| printed(&source));
    let is_one =
        |text: &String| text.to_lowercase().contains("skipped") || text.contains("left out");
    let texts: Vec<String> = texts.filter(is_one).map(|text| text.replace('\n', " ")).collect();
    assert!(texts.len() > 40, "{texts:#?}");
    let mut others = Command::new("grep");
    others.args(["--invert-match", "--extended-regexp", told]).stdin(Stdio::piped());
    let mut others = others.stdout(Stdio::piped()).spawn().unwrap();
    others.stdin.take().unwrap().write_all(texts.join("\n").as_bytes()).unwrap();
    let others = others.wait_with_output().unwrap();
    let others = String::from_utf8(others.stdout).unwrap();
    assert!(
        others.is_empty(),
        "`make test` (left_out of scripts/test.sh) passes these over:\n{others}"
    );
}
