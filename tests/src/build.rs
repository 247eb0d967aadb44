//! Builds the programs of the zoo, the launcher, and finds the `torpor` under test.

use crate::program::{self, Program, repository};
use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{FlockOperation, flock};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::SystemTime;

/// Where everything lies that the harness makes.
///
/// # Errors
/// The directory of the running program is not known.
pub fn area() -> Result<PathBuf> {
    Ok(target()?.1.join("zoo"))
}

/// The build profile's directory and the target directory above it.
fn target() -> Result<(PathBuf, PathBuf)> {
    let me = std::env::current_exe()?;
    let mut profile = me.parent().context("no directory")?;
    if profile.ends_with("deps") {
        profile = profile.parent().context("no directory")?;
    }
    Ok((profile.to_owned(), profile.parent().context("no directory")?.to_owned()))
}

/// The path of a compiled program, or of the launcher `container`.
///
/// # Errors
/// See [`area`].
pub fn binary(name: &str) -> Result<PathBuf> {
    Ok(area()?.join("bin").join(name))
}

/// Compiles what is out of date.
///
/// # Errors
/// A program does not compile; the compiler's words are in the error.
pub fn programs(programs: &[Program]) -> Result<()> {
    let bin = area()?.join("bin");
    std::fs::create_dir_all(&bin)?;
    let lock = std::fs::File::create(area()?.join("lock"))?;
    flock(&lock, FlockOperation::LockExclusive)?;
    let zoo = std::fs::read_dir(repository().join("zoo"))?;
    let paths = zoo.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    let headers = paths.iter().filter(|path| path.extension().is_some_and(|end| end == "h"));
    let times = headers.map(|header| modified(header)).collect::<Result<Vec<_>>>()?;
    let header = times.into_iter().max().context("no header")?;
    compile(&repository().join("tests/container.c"), &bin.join("container"), header, &[])?;
    let next = AtomicUsize::new(0);
    let worker = || -> Result<()> {
        while let Some(program) = programs.get(next.fetch_add(1, Ordering::Relaxed)) {
            compile(&program.source, &bin.join(&program.name), header, &program.build)?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..2).map(|_| scope.spawn(worker)).collect();
        workers.into_iter().try_for_each(|worker| match worker.join() {
            Ok(result) => result,
            Err(_) => bail!("a compiling thread panicked"),
        })
    })
}

fn modified(path: &Path) -> Result<SystemTime> {
    let meta = std::fs::metadata(path).with_context(|| format!("{}", path.display()))?;
    Ok(meta.modified()?)
}

fn compile(source: &Path, binary: &Path, header: SystemTime, more: &[String]) -> Result<()> {
    if modified(binary)
        .is_ok_and(|built| built > header && modified(source).is_ok_and(|written| built > written))
    {
        return Ok(());
    }
    let done = Command::new("gcc")
        .args(["-O2", "-g", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"])
        .arg(binary)
        .arg(source)
        .args(more)
        .current_dir(repository())
        .output()
        .context("gcc")?;
    ensure!(
        done.status.success(),
        "{} does not compile:\n{}",
        source.display(),
        String::from_utf8_lossy(&done.stderr)
    );
    Ok(())
}

/// Builds `torpor` in the profile that the tests are built in, and links `criu` to it.
///
/// `TORPOR_BIN` names another program to test instead.
///
/// # Errors
/// It does not build.
pub fn torpor() -> Result<()> {
    let (profile, _) = target()?;
    let torpor = match std::env::var_os("TORPOR_BIN") {
        Some(path) => PathBuf::from(path),
        None => {
            let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
            let mut build = Command::new(cargo);
            build.args(["build", "--quiet", "--package", "torpor-cli"]);
            if profile.ends_with("release") {
                build.arg("--release");
            }
            let status = build.current_dir(repository()).status().context("cargo")?;
            ensure!(status.success(), "torpor does not build");
            profile.join("torpor")
        }
    };
    ensure!(torpor.exists(), "{} is not there", torpor.display());
    let dir = area()?.join("criu");
    std::fs::create_dir_all(&dir)?;
    let (link, fresh) = (dir.join("criu"), dir.join(format!("criu.{}", std::process::id())));
    std::os::unix::fs::symlink(&torpor, &fresh)?;
    std::fs::rename(fresh, link)?;
    Ok(())
}

/// The `criu` to run.
///
/// # Errors
/// See [`area`].
pub fn criu() -> Result<PathBuf> {
    Ok(area()?.join("criu/criu"))
}

/// Builds all that the zoo needs and lists its programs.
///
/// # Errors
/// See [`programs`] and [`torpor`].
pub fn everything() -> Result<Vec<Program>> {
    let all = program::all()?;
    programs(&all)?;
    torpor()?;
    Ok(all)
}
