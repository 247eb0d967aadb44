//! What refusals say: a program is told by `hint` what to do, which is what follows the last semicolon.

use torpor_engine::ADVICE;

/// What advice begins with, if it is no option.
const VERBS: [&str; 24] = [
    "allow", "close", "detach", "do", "dump", "end", "give", "install", "leave", "let", "make",
    "mount", "provide", "put", "read", "remove", "run", "say", "start", "try", "type", "unmount",
    "use", "write",
];

/// The texts between quotes in what refuses something, in one line each.
fn refusals(source: &str) -> Vec<String> {
    let code: Vec<&str> = source.lines().filter(|line| !line.trim().starts_with("//")).collect();
    let code = code.join("\n");
    let mut found = Vec::new();
    for begin in ["refuse(", "refused(", "reason = "] {
        for (at, _) in code.match_indices(begin) {
            // Within a text no line ends with a semicolon.
            let statement = code[at..].split(";\n").next().unwrap_or_default();
            found.extend(texts(statement));
        }
    }
    found
}

fn texts(statement: &str) -> Vec<String> {
    let mut texts = vec![String::new()];
    let mut rest = statement.chars();
    while let Some(c) = rest.next() {
        match c {
            '"' => texts.push(String::new()),
            '\\' => match rest.next() {
                // The text goes on in the next line.
                Some('\n') => rest = rest.as_str().trim_start().chars(),
                Some(other) => texts.last_mut().unwrap().push(other),
                None => {}
            },
            _ => texts.last_mut().unwrap().push(c),
        }
    }
    // Every other one is within quotes.
    texts.into_iter().skip(1).step_by(2).collect()
}

/// The advice of a text, and whether it says what to do.
fn advice(text: &str) -> Option<(&str, bool)> {
    let (_, advice) = text.rsplit_once(ADVICE)?;
    let first = advice.split(' ').next().unwrap_or_default();
    Some((advice, advice.starts_with("--") || VERBS.contains(&first)))
}

#[test]
fn texts_of_refusals_are_found() {
    let source = "let a = refuse(\n    // No \"text\".\n    \"it is so; \\\n     it goes\",\n);\nx(\"y; z\");\n";
    assert_eq!(refusals(source), ["it is so; it goes"]);
    assert_eq!(advice("it is so; it goes"), Some(("it goes", false)));
    assert_eq!(advice("it is so; --option keeps it"), Some(("--option keeps it", true)));
    assert_eq!(advice("it is so, and so it stays"), None);
}

/// What is behind a semicolon is advice, and nothing else is.
#[test]
fn what_refusals_end_with_says_what_to_do() {
    let files = super::files_of_engine().into_iter().filter(|(file, _)| file != "error.rs");
    let all: Vec<(String, String)> = files
        .flat_map(|(file, text)| refusals(&text).into_iter().map(move |text| (file.clone(), text)))
        .collect();
    let advised = all.iter().filter_map(|(file, text)| Some((file, advice(text)?)));
    let (good, bad): (Vec<_>, Vec<_>) = advised.partition(|(_, (_, says))| *says);
    assert!(bad.is_empty(), "hints that do not say what to do: {bad:#?}");
    assert!(good.len() > 50, "{} refusals have advice", good.len());
}
