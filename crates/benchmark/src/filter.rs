//! Which benchmarks are meant: names with `*` for any text, and `!` for all but these.

use serde::{Deserialize, Serialize};

/// A list of patterns. Without one that takes something in, all is taken in.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Filters(pub Vec<String>);

impl Filters {
    /// Whether a name is meant.
    #[must_use]
    pub fn take(&self, name: &str) -> bool {
        let (mut wanted, mut any, mut out) = (false, false, false);
        for pattern in &self.0 {
            match pattern.strip_prefix('!') {
                Some(pattern) => out |= matches(pattern, name),
                None => {
                    any = true;
                    wanted |= matches(pattern, name);
                }
            }
        }
        (wanted || !any) && !out
    }
}

/// Whether `name` is `pattern`, where each `*` stands for any text.
fn matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = name.strip_prefix(parts.next().unwrap_or_default()) else {
        return false;
    };
    let mut parts = parts.peekable();
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            return rest.ends_with(part);
        }
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_stand_for_any_text() {
        assert!(matches("performance.*", "performance.cpu.total"));
        assert!(matches("*.disk.*", "performance.disk.read"));
        assert!(matches("a.b", "a.b"));
        assert!(matches("*", "x"));
        assert!(!matches("a.b", "a.bc"));
        assert!(!matches("*.disk.*", "performance.memory.total"));
        assert!(!matches("a*a", "a"));
    }
}
