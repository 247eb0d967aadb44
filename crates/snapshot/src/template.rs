//! `torpor snapshot keep`: a snapshot that was restored once and stays, stopped, for containers
//! to be born by it. They share its memory until they write.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use clap::Args;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use torpor_blobs::oci::{self, Manifest};
use torpor_blobs::reference::Reference;
use torpor_blobs::{self as store, Store};
use torpor_images::kind;
use torpor_worker::logs;

use crate::cache::Names;
use crate::description::Description;
use crate::error::{Context, Error, Result};
use crate::fetch::Fetch;
use crate::process::start_of;
use crate::{archive, places, unpack};

/// The file that names the process, as the engine writes it.
const PROCESS: &str = "template";
/// The file with the digest of the snapshot's manifest.
const DIGEST: &str = "digest";
/// What the names of templates begin with that go with the command that has made them.
const BATCH: &str = "batch-";
/// What those of templates begin with that are not complete.
const NEW: &str = "new-";

/// Restores a snapshot once and keeps it, stopped: `run` starts containers as copies of it, which
/// share its memory until they write. With a template of an earlier snapshot of this name there,
/// that one goes; what was started from it goes on.
#[derive(Debug, Args)]
pub struct KeepArgs {
    /// Where the snapshot is: dir:PATH:NAME, HOST/NAME:TAG or s3://BUCKET/PREFIX:NAME
    #[arg(value_name = "REF")]
    reference: Reference,
    /// End the template
    #[arg(long)]
    release: bool,
    /// Print a JSON object: reference, digest, pid, memory
    #[arg(long)]
    json: bool,
}

/// A snapshot that was restored once.
#[derive(Debug)]
pub struct Template {
    dir: PathBuf,
    /// Whether it ends with this value. The file shows that somebody uses it.
    batch: Option<File>,
}

impl Drop for Template {
    fn drop(&mut self) {
        if self.batch.is_some() {
            end(&self.dir);
        }
    }
}

impl Template {
    /// The file that tells the engine which process it is.
    #[must_use]
    pub fn process(&self) -> PathBuf {
        self.dir.join(PROCESS)
    }

    /// Puts the packs of the snapshot beside other images of it.
    ///
    /// # Errors
    /// If the directory cannot be read, or no link be made in `images`: the disk is full, or it is on another.
    pub(crate) fn link_packs(&self, images: &Path) -> Result<()> {
        let own = self.dir.join("images");
        let shown = || own.display().to_string();
        for entry in fs::read_dir(&own).context(shown)? {
            let name = entry.context(shown)?.file_name();
            let is_pack =
                name.to_str().is_some_and(|name| kind::PAGES_PACKED.id_of(name).is_some());
            if is_pack {
                fs::hard_link(own.join(&name), images.join(&name)).context(shown)?;
            }
        }
        Ok(())
    }
}

fn all() -> PathBuf {
    places::state().join("templates")
}

/// The directory of the template that is kept for a name.
fn dir_of(reference: &Reference) -> PathBuf {
    let key = oci::sha256(reference.absolute().to_string().as_bytes());
    all().join(&key[7..39])
}

/// The process of a template, if it is there.
fn process(dir: &Path) -> Option<Pid> {
    let text = fs::read_to_string(dir.join(PROCESS)).ok()?;
    let mut words = text.split(' ');
    let (pid, start) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
    Pid::from_raw(pid).filter(|pid| start_of(*pid) == Some(start))
}

/// Ends a template and removes its files.
fn end(dir: &Path) {
    if let Some(pid) = process(dir) {
        // It may have ended just now.
        let _ = kill_process(pid, Signal::KILL);
    }
    // `gc` tries again.
    let _ = fs::remove_dir_all(dir);
}

/// The template that is kept of a snapshot, if it is one of this manifest.
#[must_use]
pub fn find(reference: &Reference, digest: &str) -> Option<Template> {
    let dir = dir_of(reference);
    let is_same = fs::read_to_string(dir.join(DIGEST)).is_ok_and(|known| known == digest);
    (is_same && process(&dir).is_some()).then_some(Template { dir, batch: None })
}

/// Whether the engine, which worked in `work`, had the container be born by a template.
#[must_use]
pub(crate) fn was_used(work: &Path) -> bool {
    let log = fs::read_to_string(work.join("restore.log")).unwrap_or_default();
    !log.is_empty() && !log.contains("the template is not used")
}

/// Makes a template that ends with the value that is returned, of a snapshot whose small layer is `packed`. Its packs are
/// `cached` under these names, if at all.
///
/// # Errors
/// If the snapshot cannot be had or restored so.
pub(crate) fn for_batch(
    cached: Option<&Names>,
    store: &dyn Store,
    snapshot: (&Description, &Manifest),
    packed: &File,
) -> Result<Template> {
    let dir = all().join(format!("{BATCH}{}", std::process::id()));
    end(&dir);
    places::make(&dir)?;
    let batch = Some(places::claim(&dir)?);
    let template = Template { dir, batch };
    fill(&template.dir, cached, store, snapshot, packed)?;
    Ok(template)
}

/// Makes the template in `dir`.
fn fill(
    dir: &Path,
    cached: Option<&Names>,
    store: &dyn Store,
    (description, manifest): (&Description, &Manifest),
    packed: &File,
) -> Result<()> {
    if description.sealed {
        return Err(Error::new("a sealed snapshot cannot be kept: its memory would lie open"));
    }
    let images = dir.join("images");
    places::make(&images)?;
    let changes = dir.join(archive::CHANGES);
    unpack::images(packed, &images, (archive::CHANGES, &changes))?;
    let _ = fs::remove_file(changes);
    Fetch::new(store, (description, manifest), &images, cached)?.shown()?;
    let mut engine = Command::new(places::engine()?.join("criu"));
    engine.args(["restore", "--images-dir"]).arg(&images).arg("--work-dir").arg(dir);
    engine.args(["--log-file", "keep.log", "-v4", "--keep-template"]).arg(dir.join(PROCESS));
    engine.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let output = engine.output().context(|| "starting the engine")?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(logs::first_error(&dir.join("keep.log"))
            .map_or_else(|| Error::new(said), Error::new)
            .during("keeping the snapshot"));
    }
    Ok(())
}

/// Keeps a snapshot.
///
/// # Errors
/// If there is none, or it cannot be kept. One that was kept before stays then.
pub fn keep(args: &KeepArgs) -> Result<ExitCode> {
    let dir = dir_of(&args.reference);
    if args.release {
        if process(&dir).is_none() {
            return Err(Error::new(format!("there is no template of {}", args.reference)));
        }
        end(&dir);
        return Ok(ExitCode::SUCCESS);
    }
    let store = store::open(&args.reference)?;
    let bytes = store::found(&*store, &args.reference)?;
    let (digest, manifest) = (oci::sha256(&bytes), Manifest::parse(&bytes)?);
    let description = Description::read(&*store, &manifest)?;
    if find(&args.reference, &digest).is_none() {
        let new = all().join(format!("{NEW}{}", std::process::id()));
        end(&new);
        places::make(&new)?;
        let claim = places::claim(&new)?;
        let snapshot = (&description, &manifest);
        let is_own = places::has_made(&digest);
        let names = Names::of(&digest, is_own);
        let cached = (!args.reference.is_near()).then_some(&names);
        let done = unpack::fetch(&*store, &manifest, &new)
            .and_then(|packed| fill(&new, cached, &*store, snapshot, &packed))
            .and_then(|()| fs::write(new.join(DIGEST), &digest).context(|| "noting the template"));
        if let Err(error) = done {
            end(&new);
            return Err(error);
        }
        end(&dir);
        let taken = fs::rename(&new, &dir).context(|| dir.display().to_string());
        if let Err(error) = taken {
            end(&new);
            // Another call may have been faster.
            find(&args.reference, &digest).ok_or(error)?;
        }
        drop(claim);
        if is_own {
            places::note(&args.reference, &description.origin)?;
        }
    }
    let pid = process(&dir).map_or(0, |pid| pid.as_raw_nonzero().get());
    if args.json {
        let object = json!({
            "reference": args.reference.to_string(),
            "digest": digest,
            "pid": pid,
            "memory": description.memory,
        });
        println!("{object}");
    } else {
        println!("{} is kept as process {pid}", args.reference);
    }
    Ok(ExitCode::SUCCESS)
}

/// Removes templates whose process is gone, and those of commands that were killed.
pub fn sweep() {
    for entry in fs::read_dir(all()).into_iter().flatten().flatten() {
        let (dir, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        let is_open = name.starts_with(BATCH) || name.starts_with(NEW);
        let is_left = if is_open { places::claim(&dir).is_ok() } else { process(&dir).is_none() };
        if is_left {
            end(&dir);
        }
    }
}
