//! Options that nothing carries out yet.
//!
//! A dump or restore that is told something it does not do must say so: a user who asked for
//! it counts on it. Whoever carries an option out removes its line here; a test finds
//! options that are neither here nor read anywhere.

use crate::error::{Error, Result};
use crate::options::Options;

/// An option, by CRIU's name, and whether it was used.
type Row = (&'static str, fn(&Options) -> bool);

/// Of every operation.
const MISSING: &[Row] =
    &[("--lsm-mount-context", |o| o.mounts.lsm_context.is_some()), ("--stream", |o| o.stream)];

/// Refuses options that nothing carries out.
///
/// # Errors
/// [`Error::Unsupported`] if one of them is used.
pub(crate) fn check(opts: &Options) -> Result<()> {
    match MISSING.iter().find(|(_, used)| used(opts)) {
        Some((name, _)) => Err(Error::Unsupported((*name).to_owned())),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// What only says how to get to the same end, or serves to notice a mistake.
    const HINTS: &[&str] =
        &["files.ghost_fiemap", "mounts.compat_mode", "memory.pre_dump_mode", "memory.pidfd_store"];

    /// What allows more than is done without it: the dump refuses what it would allow.
    const PERMISSIONS: &[&str] = &["files.evasive_devices", "stop.allow_uprobes"];

    /// The names of the fields of `Options`, and of its parts with the name of the part.
    fn fields() -> Vec<String> {
        let parts = [
            ("stop", include_str!("options/stop.rs")),
            ("given", include_str!("options/given.rs")),
            ("birth", include_str!("options/birth.rs")),
            ("network", include_str!("options/network.rs")),
            ("files", include_str!("options/files.rs")),
            ("cgroups", include_str!("options/cgroups.rs")),
            ("mounts", include_str!("options/mounts.rs")),
            ("memory", include_str!("options/memory.rs")),
            ("trust", include_str!("options/trust.rs")),
        ];
        let own = fields_of(include_str!("options/mod.rs"));
        let own = own.into_iter().filter(|name| parts.iter().all(|(part, _)| name != part));
        let inner = parts.iter().flat_map(|(part, source)| {
            fields_of(source).into_iter().map(move |name| format!("{part}.{name}"))
        });
        own.chain(inner).collect()
    }

    /// The names of the fields of the first public structure of a source.
    fn fields_of(source: &str) -> Vec<String> {
        let start = source.find("pub struct ").unwrap();
        let end = start + source[start..].find("\n}").unwrap();
        let lines = source[start..end].lines().filter_map(|line| line.strip_prefix("    pub "));
        lines.filter_map(|line| line.split_once(':')).map(|(name, _)| name.to_owned()).collect()
    }

    fn sources(dir: &Path, out: &mut String) {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                sources(&path, out);
            } else if !path.ends_with("support.rs") {
                out.push_str(&std::fs::read_to_string(&path).unwrap());
            }
        }
    }

    fn reads(text: &str, field: &str) -> bool {
        let accessed = if field.contains('.') { field.to_owned() } else { format!("opts.{field}") };
        text.match_indices(&accessed).any(|(at, _)| {
            let next = text[at + accessed.len()..].chars().next();
            !next.is_some_and(|c| c.is_alphanumeric() || c == '_')
        })
    }

    #[test]
    fn no_option_is_ignored() {
        let mut text = String::new();
        sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut text);
        // `timeout` is read through `patience()`, `threads` through `workers()`, `store` and
        // `images_dir` through `images()`; where mounts are made others have that name.
        text = text.replace("opts.images()", "opts.store opts.images_dir");
        text = text.replace("stop.patience()", "stop.timeout");
        text = text.replace("opts.memory.workers()", "opts.memory.threads");
        text = text.replace("cx.wanted.", "mounts.");
        // What the caller gives says itself whether it may be given in vain.
        text = text.replace("self.refuse_unused_", "given.refuse_unused_");
        let own = include_str!("support.rs");
        let missing = &own[..own.find("#[cfg(test)]").unwrap()];
        for field in fields() {
            let refused = missing.contains(&format!("o.{field}"));
            let listed = [HINTS, PERMISSIONS].concat().contains(&field.as_str());
            let read = reads(&text, &field);
            assert!(refused || listed || read, "nothing reads {field}: refuse it in support.rs");
            assert!(!(refused && read), "{field} is read: take it out of support.rs");
        }
    }

    #[test]
    fn the_option_is_named() {
        assert!(check(&Options::default()).is_ok());
        let error = check(&Options { stream: true, ..Options::default() }).unwrap_err();
        assert_eq!(error.to_string(), "--stream is not supported");
    }
}
