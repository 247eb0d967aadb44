//! Reading TOML so that a mistake is named with its line, and with what was meant.

use std::ops::Range;

use toml_edit::{Document, Item, Table, Value};

/// No file of settings is larger, in bytes.
const MAX_SIZE: usize = 1 << 20;

/// What is wrong, and where.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {reason}")]
pub struct Mistake {
    /// The line, from 1.
    pub line: usize,
    /// What is wrong with it.
    pub reason: String,
}

/// A setting.
#[derive(Debug, Clone)]
pub struct Leaf {
    /// Its name, with those of the tables that it is in before it.
    pub path: Vec<String>,
    /// Its line, from 1.
    pub line: usize,
    /// Its value.
    pub value: Value,
}

impl Leaf {
    /// An error about it.
    #[must_use]
    pub(crate) fn mistake(&self, reason: impl Into<String>) -> Mistake {
        Mistake { line: self.line, reason: reason.into() }
    }

    /// Its name as it is written.
    #[must_use]
    pub fn name(&self) -> String {
        self.path.join(".")
    }

    /// Its strings, if it is a list of them.
    #[must_use]
    pub fn strings(&self) -> Option<Vec<&str>> {
        self.value.as_array()?.iter().map(Value::as_str).collect()
    }
}

/// The settings of `text`, in order. Tables without settings do not appear.
///
/// # Errors
/// What is no TOML.
pub fn leaves(text: &str) -> Result<Vec<Leaf>, Mistake> {
    if text.len() > MAX_SIZE {
        return Err(Mistake { line: 1, reason: format!("it is over {MAX_SIZE} bytes") });
    }
    let document = Document::parse(text).map_err(|error| Mistake {
        line: line_at(text, error.span()),
        reason: error.message().trim().replace('\n', "; "),
    })?;
    let mut found = vec![];
    walk(text, document.as_table(), &mut vec![], &mut found)?;
    found.sort_by_key(|leaf: &Leaf| leaf.line);
    Ok(found)
}

fn line_at(text: &str, span: Option<Range<usize>>) -> usize {
    let start = span.map_or(0, |span| span.start).min(text.len());
    text.as_bytes()[..start].iter().filter(|&&byte| byte == b'\n').count() + 1
}

fn walk(
    text: &str,
    table: &Table,
    path: &mut Vec<String>,
    found: &mut Vec<Leaf>,
) -> Result<(), Mistake> {
    for (key, item) in table {
        let span = table.key(key).and_then(toml_edit::Key::span).or_else(|| item.span());
        let line = line_at(text, span);
        path.push(key.to_owned());
        match item {
            Item::None => {}
            Item::Table(inner) => walk(text, inner, path, found)?,
            Item::Value(Value::InlineTable(inner)) => {
                walk(text, &inner.clone().into_table(), path, found)?;
            }
            Item::Value(value) => {
                found.push(Leaf { path: path.clone(), line, value: value.clone() });
            }
            Item::ArrayOfTables(_) => {
                let reason = format!("{} stands in single brackets", path.join("."));
                return Err(Mistake { line, reason });
            }
        }
        path.pop();
    }
    Ok(())
}

/// The one of `known` that `word` is most like, if it is like any.
fn nearest<'k>(word: &str, known: impl IntoIterator<Item = &'k str>) -> Option<&'k str> {
    let distance = |name: &&str| strsim::damerau_levenshtein(word, name);
    let best = known.into_iter().min_by_key(distance)?;
    (distance(&best) <= best.len().max(word.len()) / 3 + 1).then_some(best)
}

/// The end of an error about a word that is not known: which of `known` it may be for, behind `prefix`.
/// Empty if it is like none.
pub fn meant<'k>(word: &str, known: impl IntoIterator<Item = &'k str>, prefix: &str) -> String {
    // A word that is far too long is like none, and comparing it would take long.
    let word: String = word.chars().take(64).collect();
    match nearest(&word, known) {
        Some(name) => format!("; did you mean {prefix}{name}?"),
        None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn settings_and_their_lines() {
        let text = "a = 1\n[t]\n# why\n\"b c\" = [\"x\", \"y\"]\nd.e = true\nf = { g = 2 }\n[u.v]\nh = 1\n";
        let found = leaves(text).unwrap();
        let names: Vec<_> = found.iter().map(|leaf| (leaf.name(), leaf.line)).collect();
        let expected = [("a", 1), ("t.b c", 4), ("t.d.e", 5), ("t.f.g", 6), ("u.v.h", 8)];
        assert_eq!(names, expected.map(|(name, line)| (name.to_owned(), line)));
        assert_eq!(found[1].strings(), Some(vec!["x", "y"]));
        assert_eq!(leaves("a = 1\nb = = 2").unwrap_err().line, 2);
        assert_eq!(leaves("a = 1\n\na = 2").unwrap_err().line, 3);
        assert_eq!(leaves("[[a]]\nb = 1").unwrap_err().line, 1);
        assert!(leaves(&"#".repeat(MAX_SIZE + 1)).is_err());
    }

    #[test]
    fn words_that_were_meant() {
        let known = ["capabilities", "mounts"];
        assert_eq!(nearest("capabilites", known), Some("capabilities"));
        assert_eq!(nearest("mount", known), Some("mounts"));
        assert_eq!(nearest("zebra", known), None);
    }
}
