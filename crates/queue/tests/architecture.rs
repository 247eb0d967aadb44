//! What the parts of the queue may use of each other.

#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

/// What a node agent of a cluster is to use as it is, without a queue around it.
#[test]
fn the_logic_of_preemption_imports_nothing_of_the_queue() {
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/preemption");
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let source = std::fs::read_to_string(&path).unwrap();
        for (line, text) in source.lines().enumerate() {
            // Nothing that lies above this module, and no other crate of this workspace.
            let outside =
                ["crate::", "super::super", "torpor_"].iter().find(|w| text.contains(**w));
            let inside = text.contains("crate::preemption");
            assert!(outside.is_none() || inside, "{}:{}: {text}", path.display(), line + 1);
        }
        // From the module's own file, what is above it is one step away.
        let above = |text: &str| text.contains("super::") && !text.contains("use super::*;");
        let own = path.ends_with("mod.rs");
        assert!(!own || !source.lines().any(above), "{}", path.display());
    }
}
