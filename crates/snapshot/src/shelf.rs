//! `torpor snapshot list`, `inspect`, `verify`, `rm` and `gc`.

use std::fs;
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use aws_lc_rs::digest::{self, SHA256};
use clap::Args;
use serde_json::json;

use crate::create::{self, size};
use crate::description::Description;
use crate::error::{Context, Error, Result};
use crate::instance;
use crate::oci::{self, Descriptor, Manifest};
use crate::reference::Reference;
use crate::runc::Runc;
use crate::store::{self, Store};
use crate::{Runtime, cache, places, template};

/// How much of a blob is read at once.
const PART: u64 = 4 << 20;

/// A command on one snapshot.
#[derive(Debug, Args)]
pub struct OneArgs {
    /// Where the snapshot is: dir:PATH:NAME or HOST/NAME:TAG
    #[arg(value_name = "REF")]
    reference: Reference,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A command on a place that has snapshots.
#[derive(Debug, Args)]
pub struct GcArgs {
    /// Where the snapshots are: dir:PATH or HOST/NAME; without, what this machine keeps is looked
    /// through: the cache, and files of containers that are gone
    #[arg(value_name = "REF")]
    reference: Option<Reference>,
    #[command(flatten)]
    runtime: Runtime,
}

/// Names the snapshots in a place.
///
/// # Errors
/// If the place does not answer.
pub fn list(args: &OneArgs) -> Result<ExitCode> {
    let mut found = Vec::new();
    for name in store::open(&args.reference)?.names()? {
        let mut reference = args.reference.clone();
        match &mut reference {
            Reference::Dir { name: place, .. } | Reference::S3 { name: place, .. } => *place = name,
            Reference::Registry { tag, .. } => *tag = name,
        }
        let store = store::open(&reference)?;
        let Some(bytes) = store.manifest()? else { continue };
        // A place may hold other images.
        let Ok(manifest) = Manifest::parse(&bytes) else { continue };
        if let Ok(description) = Description::read(&*store, &manifest) {
            found.push((reference, description, stored(&manifest)));
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
        return Ok(ExitCode::SUCCESS);
    }
    for (reference, description, stored) in found {
        println!(
            "{reference}  {}  {} of memory in {}  {}",
            description.origin.from,
            size(description.memory),
            size(stored),
            age(description.created)
        );
    }
    Ok(ExitCode::SUCCESS)
}

fn stored(manifest: &Manifest) -> u64 {
    manifest.blobs().map(|blob| blob.size).sum()
}

/// How long ago something was.
fn age(created: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    match now.saturating_sub(created) {
        seconds @ 0..120 => format!("{seconds} seconds old"),
        seconds @ 120..7200 => format!("{} minutes old", seconds / 60),
        seconds @ 7200..172_800 => format!("{} hours old", seconds / 3600),
        seconds => format!("{} days old", seconds / 86400),
    }
}

/// Says what a snapshot is.
///
/// # Errors
/// If there is none, or it is damaged.
pub fn inspect(args: &OneArgs) -> Result<ExitCode> {
    let store = store::open(&args.reference)?;
    let bytes = store.manifest()?.ok_or_else(|| Error::new("there is no such snapshot"))?;
    let manifest = Manifest::parse(&bytes)?;
    let description = Description::read(&*store, &manifest)?;
    let packs = description.packs.len();
    if args.json {
        let mut object = serde_json::to_value(&description).context(|| "the description")?;
        object["reference"] = json!(args.reference.to_string());
        object["digest"] = json!(oci::sha256(&bytes));
        object["size"] = json!(stored(&manifest));
        object["packs"] = json!(packs);
        println!("{object}");
        return Ok(ExitCode::SUCCESS);
    }
    let machine = &description.machine;
    println!("{} {}", args.reference, oci::sha256(&bytes));
    println!("made from    {}, {}", description.origin.from, age(description.created));
    println!("processes    {}", description.tasks);
    println!(
        "memory       {}, of which {} are needed first",
        size(description.memory),
        size(description.working_set)
    );
    println!("stored       {} in {packs} packs", size(stored(&manifest)));
    println!("needs        {}, Linux {} or later", machine.architecture, machine.kernel);
    println!("made on      {}", machine.processor);
    println!("sealed       {}", if description.sealed { "yes" } else { "no" });
    Ok(ExitCode::SUCCESS)
}

/// Reads all of a snapshot and compares it with its digests.
///
/// # Errors
/// If there is none, or it is damaged.
pub fn verify(args: &OneArgs) -> Result<ExitCode> {
    let store = store::open(&args.reference)?;
    let manifest = store::manifest(&*store)?;
    Description::read(&*store, &manifest)?;
    let mut bytes = 0;
    for blob in manifest.blobs() {
        verify_blob(&*store, blob)?;
        bytes += blob.size;
    }
    match args.json {
        true => println!("{}", json!({"reference": args.reference.to_string(), "verified": bytes})),
        false => println!("{}: all {} are as they were packed", args.reference, size(bytes)),
    }
    Ok(ExitCode::SUCCESS)
}

fn verify_blob(store: &dyn Store, blob: &Descriptor) -> Result<()> {
    let mut sum = digest::Context::new(&SHA256);
    let mut at = 0;
    while at < blob.size {
        let end = (at + PART).min(blob.size);
        sum.update(&store.read(blob, at..end)?);
        at = end;
    }
    match oci::written(sum.finish().as_ref()) == blob.digest {
        true => Ok(()),
        false => Err(Error::new(format!("{} is damaged", blob.digest))),
    }
}

/// Takes the name of a snapshot away.
///
/// # Errors
/// If there is none, or the place does not allow it.
pub fn rm(args: &OneArgs) -> Result<ExitCode> {
    if !store::open(&args.reference)?.remove()? {
        return Err(Error::new(format!("there is no snapshot {}", args.reference)));
    }
    Ok(ExitCode::SUCCESS)
}

/// Removes what nobody needs any more.
///
/// # Errors
/// If it cannot be removed.
pub fn gc(args: &GcArgs) -> Result<ExitCode> {
    let mut freed = 0;
    if let Some(reference) = &args.reference {
        freed += store::open(reference)?.collect()?;
    } else {
        freed += cache::evict()?;
        template::sweep();
        let runc = Runc::new(args.runtime.root.as_deref())?;
        for entry in fs::read_dir(places::instances()).into_iter().flatten().flatten() {
            let id = entry.file_name().to_string_lossy().into_owned();
            if runc.state(&id)?.is_none() {
                instance::release(&entry.path());
            }
        }
        // What is left of a create that was killed.
        for entry in fs::read_dir(places::state()).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let Some(number) = name.strip_prefix("create-") else { continue };
            if places::claim(&entry.path()).is_ok() {
                create::clean(&runc, &format!("torpor-create-{number}"), &entry.path());
                instance::release(&entry.path());
            }
        }
    }
    println!("{} are free again", size(freed));
    Ok(ExitCode::SUCCESS)
}
