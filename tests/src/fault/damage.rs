//! Restores from images that are damaged, or without a file that they need.

use super::Play;
use crate::commands;
use crate::inside::{ENGINE, World};
use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};

impl Play<'_> {
    /// Each image in turn cut off, overwritten, or missing: an error, no panic, nothing left over.
    pub(super) fn bad_images(&self, root: i32) -> Result<()> {
        self.put_to_sleep(root)?;
        let images = self.runner.images();
        let mut files: Vec<PathBuf> = std::fs::read_dir(&images)?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| path.extension().is_some_and(|extension| extension == "img"))
            .collect();
        files.sort();
        ensure!(files.len() > 10, "there are only {} images", files.len());
        for file in &files {
            let whole = std::fs::read(file)?;
            for (what, content, must_fail) in self.damages(file, &whole) {
                std::fs::write(file, content)?;
                self.damaged(file, &what, must_fail)?;
            }
            if !file.ends_with("stats-dump.img") {
                std::fs::remove_file(file)?;
                self.damaged(file, "removed", false)?;
            }
            std::fs::write(file, &whole)?;
        }
        self.wake_and_finish()
    }

    /// Damaged versions of an image, and whether a restore from them has to fail.
    fn damages(&self, file: &Path, whole: &[u8]) -> Vec<(String, Vec<u8>, bool)> {
        let name = file.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let raw = name.starts_with("pages-") || name.starts_with("stats-");
        let cut = |len: usize| whole.get(..len).unwrap_or(whole).to_vec();
        let mut damages = vec![
            ("cut off at its half".to_owned(), cut(whole.len() / 2), !name.starts_with("stats-")),
            ("cut off by a byte".to_owned(), cut(whole.len().saturating_sub(1)), !raw),
            ("empty".to_owned(), Vec::new(), !name.starts_with("stats-")),
            ("cut off in its magic".to_owned(), cut(3), !raw),
        ];
        let length = u64::try_from(whole.len()).unwrap_or(1);
        for _ in 0..6 {
            let mut copy = whole.to_vec();
            let at = self.random.below(length);
            let bit = 1 << self.random.below(8);
            if let Some(byte) = usize::try_from(at).ok().and_then(|at| copy.get_mut(at)) {
                *byte ^= bit;
            }
            damages.push((format!("byte {at} changed by {bit:#x}"), copy, at < 4 && !raw));
        }
        damages
    }

    fn damaged(&self, file: &Path, what: &str, must_fail: bool) -> Result<()> {
        let world = World::observe()?;
        let name = file.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let about = || format!("{name}, {what}: {}", self.runner.log_tail("restore"));
        let mut command = self.runner.command("restore", &["-d"])?;
        let status = commands::run(&self.runner.dir, "restore", &mut command, ENGINE);
        let status = status.with_context(about)?;
        let out = self.runner.output("restore");
        ensure!(!out.contains("panicked"), "it panicked: {}", about());
        ensure!(status.code().is_some(), "it died: {}", about());
        if status.success() {
            ensure!(!must_fail, "it succeeded: {}", about());
            return self.clear(&world).with_context(about);
        } else if must_fail {
            let log = std::fs::read_to_string(self.runner.images().join("restore.log"))?;
            let named = log.lines().any(|line| line.contains("Error") && line.contains(name));
            ensure!(named, "the error does not name the file: {}", about());
        }
        self.runner.gone(0).with_context(about)?;
        world.must_be_unchanged().with_context(about)
    }

    /// A file that a task had mapped is not there any more: the restore fails late.
    pub(super) fn missing_file(&self, root: i32) -> Result<()> {
        let lost = self.runner.work().join("out");
        self.put_to_sleep(root)?;
        let hidden = lost.with_extension("hidden");
        std::fs::rename(&lost, &hidden)?;
        self.damaged(Path::new("out"), "missing", true)?;
        std::fs::rename(hidden, &lost)?;
        self.wake_and_finish()
    }
}
