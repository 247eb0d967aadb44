//! `torpor snapshot inspect`: what a snapshot is, what it needs of a host, and who is said to have signed it.

use std::process::ExitCode;

use clap::Args;
use serde_json::{Value, json};
use torpor_blobs as store;
use torpor_blobs::oci::{self, Manifest};
use torpor_blobs::reference::Reference;
use torpor_kernel::processor::instructions;
use torpor_worker::printable;

use crate::description::{Description, Machine};
use crate::error::{Context, Result};
use crate::progress::size;
use crate::publish::stored;
use crate::shelf::age;
use crate::{cosign, mounts, signature};

/// The look at one snapshot.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// Where the snapshot is: dir:PATH:NAME, HOST/NAME:TAG or s3://BUCKET/PREFIX:NAME
    #[arg(value_name = "REF")]
    reference: Reference,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
}

/// What is known of a snapshot.
struct Inspection {
    description: Description,
    digest: String,
    /// The bytes that it takes where it lies.
    stored: u64,
    /// The configuration of its container; none, where that is sealed, or Podman's.
    config: Value,
    /// What a program may have found, and this machine has not.
    lacks: Vec<String>,
    /// Who is said to have signed it with a certificate.
    signed: Option<String>,
    /// Who is said to have signed it with cosign.
    cosign: Vec<String>,
}

impl Inspection {
    fn open(args: &InspectArgs) -> Result<Self> {
        let store = store::open(&args.reference)?;
        let bytes = store::found(&*store, &args.reference)?;
        let (manifest, digest) = (Manifest::parse(&bytes)?, oci::sha256(&bytes));
        let description = Description::read(&*store, &manifest)?;
        let here = instructions();
        Ok(Self {
            lacks: description.machine.instructions.difference(&here).cloned().collect(),
            config: serde_json::from_str(&description.configuration).unwrap_or_default(),
            signed: signature::claimed(&args.reference, &digest)?,
            cosign: cosign::claimed(&args.reference, &digest)?,
            stored: stored(&manifest, &bytes),
            description,
            digest,
        })
    }

    /// It as an object: the description, and what is known beside it.
    fn object(&self, args: &InspectArgs) -> Result<Value> {
        let mut object = serde_json::to_value(&self.description).context(|| "the description")?;
        let mounts = mounts::of_host(&self.config).into_iter();
        let mounts = mounts.map(|(at, from)| json!({"destination": at, "source": from}));
        object["reference"] = json!(args.reference.to_string());
        object["digest"] = json!(self.digest);
        object["size"] = json!(self.stored);
        object["packs"] = json!(self.description.packs.len());
        object["mounts"] = mounts.collect();
        object["lacks"] = json!(self.lacks);
        object["signed"] = json!(self.signed);
        object["cosign"] = json!(self.cosign);
        Ok(object)
    }

    /// It for people.
    fn print(&self, args: &InspectArgs) {
        let Self { description, .. } = self;
        let (packs, machine) = (description.packs.len(), &description.machine);
        println!("{} {}", args.reference, self.digest);
        println!(
            "made from    {}, {}",
            printable(&description.origin.from),
            age(description.created)
        );
        println!("processes    {}", description.tasks);
        let (memory, first) = (size(description.memory), size(description.working_set));
        match (description.sealed, description.tried) {
            (true, _) => println!("memory       sealed"),
            (_, true) => println!("memory       {memory}, of which {first} are needed first"),
            (_, false) => {
                println!("memory       {memory}; no trial start has shown what is needed first")
            }
        }
        println!("stored       {} in {packs} packs", size(self.stored));
        let (architecture, kernel) = (printable(&machine.architecture), printable(&machine.kernel));
        println!("needs        {architecture}, Linux {kernel} or later");
        if !machine.instructions.is_empty() {
            println!("             {}", self.instructions(machine));
        }
        for (at, from) in mounts::of_host(&self.config) {
            println!("             {} of the host, at {}", printable(from), printable(at));
        }
        println!("made on      {}", printable(&machine.processor));
        println!("sealed       {}", sealed(description));
        let all: Vec<&String> = self.signed.iter().chain(&self.cosign).collect();
        if all.is_empty() {
            println!("signed by    nobody");
        }
        all.iter().for_each(|who| println!("signed by    {}", printable(who)));
    }

    /// What it needs of a processor.
    fn instructions(&self, machine: &Machine) -> String {
        let needs = format!("{} sets of instructions", machine.instructions.len());
        match self.lacks.is_empty() {
            true => format!("{needs}, all of which this machine has"),
            false => format!("{needs}, of which this machine lacks {}", self.lacks.join(", ")),
        }
    }
}

/// What is sealed of it.
fn sealed(description: &Description) -> &'static str {
    match (description.sealed, &description.hidden) {
        (false, _) => "no",
        (true, Some(_)) if description.packs.is_empty() => {
            "yes, by an earlier version: it comes whole; create it again"
        }
        (true, Some(_)) => "yes",
        (true, None) => "only its images, by an earlier version: create it again",
    }
}

/// Says what a snapshot is.
///
/// # Errors
/// If there is none, or it is damaged; if the place does not answer.
pub fn inspect(args: &InspectArgs) -> Result<ExitCode> {
    let inspected = Inspection::open(args)?;
    match args.json {
        true => println!("{}", inspected.object(args)?),
        false => inspected.print(args),
    }
    Ok(ExitCode::SUCCESS)
}
