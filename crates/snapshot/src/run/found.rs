//! The snapshot that is asked for: whether it is there, is to be believed, and fits.

use std::cell::OnceCell;
use std::fs::File;
use std::time::Duration;

use torpor_blobs::oci::{self, Manifest};
use torpor_blobs::reference::Reference;
use torpor_blobs::{self as store, Store};
use torpor_worker::tell;

use super::{RunArgs, Start};
use crate::belief::{Granted, Said};
use crate::cache::Names;
use crate::description::{Description, Origin};
use crate::error::{Error, Result};
use crate::patience::patiently;
use crate::sealed::{Opened, Openers};
use crate::signature::Believed;
use crate::source::Base;
use crate::template::Template;
use crate::{fits, interrupt, places, small, template};

/// A snapshot that is there, signed as it was asked for.
pub(super) struct FoundSnapshot {
    store: Box<dyn Store>,
    /// The digest of its manifest.
    digest: String,
    manifest: Manifest,
    description: Description,
    /// Whether somebody who is trusted has signed it, or it was made here.
    is_believed: bool,
    /// What is known here of its place.
    known: Option<Origin>,
}

impl FoundSnapshot {
    pub(super) fn open(args: &RunArgs, believed: &Believed) -> Result<Self> {
        let store = store::open(&args.reference)?;
        let bytes =
            patiently(Duration::from_secs(args.wait), || store::found(&*store, &args.reference))?;
        let manifest = Manifest::parse(&bytes)?;
        let digest = oci::sha256(&bytes);
        let signer = believed.check(&args.reference, &digest)?;
        let is_believed = signer.is_some() || places::has_made(&digest);
        let description = small::description(&args.reference, &*store, &manifest)?;
        Ok(Self { store, digest, manifest, description, is_believed, known: args.known() })
    }

    /// What a start uses of what it claims.
    fn grant(&self, said: &Said<'_>, claimed: &Origin) -> Result<Granted> {
        said.grant(claimed, self.is_believed, self.known.as_ref())
    }

    /// What it was made from, as far as the caller or somebody who is believed says it.
    pub(super) fn origin(&self, said: &Said<'_>, openers: &Openers<'_>) -> Result<Origin> {
        let claimed = match self.description.says_origin() {
            true => self.description.origin.clone(),
            false => self.description.clone().opened(openers)?.0.origin,
        };
        Ok(self.grant(said, &claimed)?.origin)
    }
}

/// A snapshot that fits, and what it is restored with.
pub(super) struct Snapshot {
    pub(super) store: Box<dyn Store>,
    pub(super) manifest: Manifest,
    pub(super) description: Description,
    /// Whether somebody who is trusted has signed it, or it was made here.
    pub(super) is_believed: bool,
    /// Under which names its packs are in the cache.
    pub(super) names: Names,
    /// What opens its changed files, if they are sealed.
    pub(super) opened: Option<Opened>,
    /// What it is of.
    pub(super) base: Base,
    pub(super) template: Option<Template>,
    /// Its small layer, when it has been fetched.
    small: OnceCell<File>,
}

impl Snapshot {
    /// Finds the snapshot that is asked for. What is started cold in its place is in `cold` as soon as that
    /// can be believed, even if the snapshot does not fit.
    pub(super) fn open(start: &Start<'_>, cold: &OnceCell<Origin>) -> Result<Self> {
        let (args, said) = (start.args, start.args.said(start.binds));
        let found = FoundSnapshot::open(args, start.believed)?;
        if found.description.says_origin() {
            let _ = cold.set(found.grant(&said, &found.description.origin)?.origin);
        }
        let (description, opened) = found.description.clone().opened(&start.openers)?;
        let Granted { origin, lasting } = found.grant(&said, &description.origin)?;
        let FoundSnapshot { store, digest, manifest, is_believed, .. } = found;
        let base = Base::of(cold.get_or_init(|| origin))?;
        if matches!(base, Base::Image(_)) && !is_believed {
            return Err(Error::new(
                "the snapshot brings all of its container's configuration for Podman, with mounts and \
                 privileges: nobody who is believed has signed it, and it was not made here",
            )
            .hint("a signature allows it (--trust, --cosign-key); --from podman:IMAGE starts the image"));
        }
        fits::check(&description, &manifest, &base)?;
        // For when the place does not answer. That it cannot be noted is no reason not to start.
        let _ = places::note(&args.reference, &lasting);
        let (small, names) = (OnceCell::new(), Names::of(&digest, is_believed));
        let mut template = template::find(&args.reference, &digest);
        let is_alike = matches!(base, Base::Bundle(_)) && !description.sealed;
        if template.is_none() && args.count > 1 && is_alike {
            interrupt::heed();
            let made = small::layer(&args.reference, &*store, &manifest).and_then(|packed| {
                let packed = small.get_or_init(|| packed);
                let cached = (!args.reference.is_near()).then_some(&names);
                template::for_batch(cached, &*store, (&description, &manifest), packed)
            });
            // Without one each has its own memory.
            template = made.map_err(|error| tell!("They share no memory: {error}")).ok();
        }
        Ok(Self { store, manifest, description, is_believed, names, opened, base, template, small })
    }

    /// Its small layer, fetched once for all containers that are started.
    pub(super) fn small(&self, reference: &Reference) -> Result<&File> {
        if let Some(packed) = self.small.get() {
            return Ok(packed);
        }
        let packed = small::layer(reference, &*self.store, &self.manifest)?;
        Ok(self.small.get_or_init(|| packed))
    }
}
