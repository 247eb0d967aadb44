//! `torpor snapshot list`, `verify`, `rm` and `gc`.

use std::fs;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use aws_lc_rs::digest::{self, SHA256};
use clap::Args;
use serde_json::json;
use torpor_blobs::oci::{self, Descriptor, Manifest};
use torpor_blobs::reference::Reference;
use torpor_blobs::{self as store, Store};
use torpor_worker::{printable, tell};

use crate::create;
use crate::description::{Description, MAX_CONFIG};
use crate::error::{Context, Error, Result};
use crate::instance;
use crate::page_list::{self, Comparison};
use crate::progress::{self, size};
use crate::publish::stored;
use crate::runc::Runtime;
use crate::signature::{self, TrustIn};
use crate::{cache, places, template};

/// How much of a blob is read at once.
const PART: u64 = 4 << 20;

/// What is to be done about a list of pages that names others.
const TAMPERED: &str =
    "somebody has changed it where it lies: make anew what was made with it as --base, too";

/// A list of the snapshots in a place.
#[derive(Debug, Args)]
pub struct ListArgs {
    /// Where the snapshots are: dir:PATH, HOST/NAME or s3://BUCKET/PREFIX
    #[arg(value_name = "REF")]
    reference: Reference,
    /// Print a JSON array
    #[arg(long)]
    json: bool,
}

/// The removal of a snapshot.
#[derive(Debug, Args)]
pub struct RmArgs {
    /// Where the snapshot is: dir:PATH:NAME, HOST/NAME:TAG or s3://BUCKET/PREFIX:NAME, as list
    /// --json has it
    #[arg(value_name = "REF", value_parser = Reference::of_any_name)]
    reference: Reference,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Compares all of a snapshot with its digests, the lists of its pages with the pages, and its
/// signature with the signers that are trusted.
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// Where the snapshot is: dir:PATH:NAME, HOST/NAME:TAG or s3://BUCKET/PREFIX:NAME
    #[arg(value_name = "REF")]
    reference: Reference,
    #[command(flatten)]
    trust: TrustIn,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A command on a place that has snapshots.
#[derive(Debug, Args)]
pub struct GcArgs {
    /// Where the snapshots are: dir:PATH, HOST/NAME or s3://BUCKET/PREFIX; without, what this machine
    /// keeps is looked through: the cache, and files of containers that are gone
    #[arg(value_name = "REF")]
    reference: Option<Reference>,
    #[command(flatten)]
    runtime: Runtime,
    /// Print a JSON object: how many bytes are free again
    #[arg(long)]
    json: bool,
}

/// What a list says of a snapshot: where it is, what it says of itself, how many bytes it takes.
type Shelved = (Reference, Description, u64);

/// The snapshot of this name, if that is one: a place may hold other images.
fn listed(reference: Reference) -> Result<Option<Shelved>> {
    let store = store::open(&reference)?;
    let Some(bytes) = store.manifest()? else { return Ok(None) };
    let Ok(manifest) = Manifest::parse(&bytes) else { return Ok(None) };
    let config = store::whole(&*store, &manifest.config, MAX_CONFIG)?;
    let description = Description::parse(&config).ok();
    Ok(description.map(|description| (reference, description, stored(&manifest, &bytes))))
}

/// Names the snapshots in a place. One that cannot be read is named on the standard error, and the status is 1 then.
///
/// # Errors
/// If the place does not answer.
pub fn list(args: &ListArgs) -> Result<ExitCode> {
    let (mut found, mut status) = (Vec::new(), ExitCode::SUCCESS);
    for name in place(&args.reference)?.names()? {
        let reference = args.reference.beside(&name);
        match listed(reference.clone()) {
            Ok(listed) => found.extend(listed),
            Err(error) => {
                let reference = printable(&reference.to_string());
                tell!("{reference} cannot be read: {error}");
                status = ExitCode::FAILURE;
            }
        }
    }
    if args.json {
        let rows = found.iter().map(|(reference, description, stored)| {
            json!({
                "reference": reference.to_string(),
                "from": description.origin.from,
                "created": description.created,
                "memory": description.memory,
                "size": stored,
            })
        });
        println!("{}", serde_json::Value::Array(rows.collect()));
        return Ok(status);
    }
    if found.is_empty() {
        tell!("There are no snapshots there.");
    }
    for (reference, description, stored) in found {
        let (memory, stored) = (size(description.memory), size(stored));
        let content = match description.sealed {
            true => format!("sealed in {stored}"),
            false => format!("{memory} of memory in {stored}"),
        };
        let (from, age) = (printable(&description.origin.from), age(description.created));
        let reference = printable(&reference.to_string());
        println!("{reference}  {from}  {content}  {age}");
    }
    Ok(status)
}

/// A place that has snapshots, or may have had some: a path that leads nowhere is a mistake.
fn place(reference: &Reference) -> Result<Box<dyn Store>> {
    match reference {
        Reference::Dir { path, .. } if !path.is_dir() => {
            Err(Error::new(format!("there is no directory {}", path.display())))
        }
        _ => Ok(store::open(reference)?),
    }
}

/// How long ago something was.
pub(crate) fn age(created: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    match now.saturating_sub(created) {
        seconds @ 0..120 => format!("{seconds} seconds old"),
        seconds @ 120..7200 => format!("{} minutes old", seconds / 60),
        seconds @ 7200..172_800 => format!("{} hours old", seconds / 3600),
        seconds => format!("{} days old", seconds / 86400),
    }
}

/// Reads all of a snapshot and compares it with its digests, and the lists of its pages with the pages.
///
/// # Errors
/// If there is none, it is damaged, or a list names what is not there.
pub fn verify(args: &VerifyArgs) -> Result<ExitCode> {
    let believed = args.trust.read()?;
    let store = store::open(&args.reference)?;
    let found = store::found(&*store, &args.reference)?;
    let manifest = Manifest::parse(&found)?;
    let signed = believed.check(&args.reference, &oci::sha256(&found))?;
    let description = Description::read(&*store, &manifest)?;
    let bytes = stored(&manifest, &found);
    let done = AtomicU64::new(found.len() as u64);
    let so_far = || done.load(Ordering::Relaxed);
    // What is sealed has no such lists: the engine compares it with what was sealed.
    let packs = match description.sealed {
        true => Vec::new(),
        false => description.layers(&manifest)?,
    };
    progress::during("verifying", bytes, &so_far, || {
        manifest.blobs().try_for_each(|blob| {
            let pack = packs.iter().find(|(_, layer)| layer.digest == blob.digest);
            let list =
                pack.map(|(pack, layer)| page_list::read(&*store, pack, layer)).transpose()?;
            verify_blob(&*store, blob, list.as_deref(), &done)
        })
    })?;
    match args.json {
        true => {
            let reference = args.reference.to_string();
            println!("{}", json!({"reference": reference, "verified": bytes, "signed": signed}));
        }
        false => {
            println!("{}: all {} are as they were packed", args.reference, size(bytes));
            signed.iter().for_each(|name| println!("signed by {}", printable(name)));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Compares a blob with its digest, and if it is a pack with the list of its pages.
fn verify_blob(
    store: &dyn Store,
    blob: &Descriptor,
    list: Option<&[u8]>,
    done: &AtomicU64,
) -> Result<()> {
    let mut sum = digest::Context::new(&SHA256);
    let mut comparison = list.map(Comparison::new).transpose().context(|| &blob.digest)?;
    let mut at = 0;
    while at < blob.size {
        let end = (at + PART).min(blob.size);
        let part = store.read(blob, at..end)?;
        sum.update(&part);
        comparison.iter_mut().for_each(|comparison| comparison.take(&part));
        done.fetch_add(end - at, Ordering::Relaxed);
        at = end;
    }
    if oci::written(sum.finish().as_ref()) != blob.digest {
        return Err(Error::new(format!("{} is damaged", blob.digest)));
    }
    let compared = comparison.map_or(Ok(()), Comparison::finish);
    compared.context(|| &blob.digest).map_err(|error| error.hint(TAMPERED))
}

/// Takes the name of a snapshot away, and its signature.
///
/// # Errors
/// If there is none, or the place does not allow it.
pub fn rm(args: &RmArgs) -> Result<ExitCode> {
    let store = store::open(&args.reference)?;
    // What is damaged can be taken away, too.
    let bytes = store.manifest().ok().flatten();
    if !store.remove()? {
        return Err(Error::new(format!("there is no snapshot {}", args.reference)));
    }
    if let Some(bytes) = bytes
        && !has_a_name(args, &*store, &bytes)?
    {
        signature::remove(&args.reference, &oci::sha256(&bytes))?;
    }
    if args.json {
        println!("{}", json!({ "removed": args.reference.to_string() }));
    }
    Ok(ExitCode::SUCCESS)
}

/// Whether the snapshot of this manifest has a name yet: it may have had several.
fn has_a_name(args: &RmArgs, store: &dyn Store, manifest: &[u8]) -> Result<bool> {
    for name in store.names()? {
        // One that cannot be read may be it.
        let found = store::open(&args.reference.beside(&name))?.manifest();
        if found.is_err() || found.is_ok_and(|found| found.is_some_and(|found| found == manifest)) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Removes what nobody needs any more.
///
/// # Errors
/// If a store does not answer, or a file that nobody needs cannot be removed.
pub fn gc(args: &GcArgs) -> Result<ExitCode> {
    let mut freed = 0;
    if let Some(reference) = &args.reference {
        freed += place(reference)?.collect()?;
    } else {
        template::sweep();
        for entry in fs::read_dir(places::instances()).into_iter().flatten().flatten() {
            freed += instance::collect(&entry.path(), args.runtime.root.as_deref())?;
        }
        // What is left of commands that were killed.
        for entry in fs::read_dir(places::state()).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let created = name.strip_prefix(places::CREATE);
            let is_open = created.is_some() || name.starts_with(places::IMPORT);
            if is_open && places::claim(&entry.path()).is_ok() {
                if let Some(number) = created {
                    let runc = instance::runtime_of(&entry.path(), args.runtime.root.as_deref())?;
                    freed +=
                        create::clean(&runc, &format!("torpor-create-{number}"), &entry.path());
                }
                freed += instance::release(&entry.path());
            }
        }
        // What those had needed may go now.
        freed += cache::evict()?;
    }
    match args.json {
        true => println!("{}", json!({ "freed": freed })),
        false => println!("{} are free again", size(freed)),
    }
    Ok(ExitCode::SUCCESS)
}
