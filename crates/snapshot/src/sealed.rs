//! What a sealed snapshot hides beside its images: the configuration of the container, what it runs,
//! and what it has changed in its files. The engine seals the images; this is sealed here, with a key
//! of its own for the same recipients.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, BufWriter, Cursor, Read, Seek, Write};
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use torpor_seal::header::Sealed as Head;
use torpor_seal::keys::{Identities, Recipient, Trust};
use torpor_seal::{Checkpoint, Header, MasterKey, Suite};

use crate::description::{Description, Origin, SEALED_VERSION};
use crate::error::{Context, Error, Result};
use crate::{archive, progress};

/// The sealed archive of what the container has changed in its files.
pub const CHANGES: &str = "rootfs-diff.tar.sealed";
/// The name that the rest is sealed under.
const CONTAINER: &str = "container";
/// How well it is compressed before.
const LEVEL: i32 = 3;
/// The most that is unpacked of the container's configuration, and what belongs to it.
const MAX_CONTAINER: u64 = 16 << 20;

/// What is hidden, as it lies in the configuration of the image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hidden {
    /// The key, wrapped for the recipients: a `seal.img`, in base64.
    seal: String,
    /// A [`SealedContainer`], in base64.
    container: String,
    /// Whether the origin has no more to it than what it says in plain.
    whole_origin: bool,
}

/// What is said of the container to those who have the key.
#[derive(Debug, Serialize, Deserialize)]
struct SealedContainer {
    origin: Origin,
    configuration: String,
    configuration_digest: String,
    files_digest: String,
    streams: BTreeMap<u8, String>,
    /// Whether there is an archive of changed files.
    changes: bool,
}

/// The key of a snapshot that is being made.
#[derive(Debug)]
pub struct Seal {
    checkpoint: Checkpoint,
    /// Its `seal.img`.
    head: Vec<u8>,
}

impl Seal {
    /// A new key for those who are named, as `--recipient` has it; none for nobody.
    ///
    /// # Errors
    /// If nothing can be sealed for one of them.
    pub fn new(recipients: &[String]) -> Result<Option<Self>> {
        if recipients.is_empty() {
            return Ok(None);
        }
        let what = || "sealing the snapshot";
        let mut header = Header::new(Suite::default(), None).context(what)?;
        let master = MasterKey::random().context(what)?;
        let binding = header.binding();
        for spec in recipients {
            for recipient in Recipient::parse(spec).context(what)? {
                recipient.check(&Trust::default()).context(what)?;
                header.stanzas.push(recipient.wrap(&master, &binding).context(what)?);
            }
        }
        let head = header.encode(&master).context(what)?;
        Ok(Some(Self { checkpoint: Checkpoint::new(header, &master), head }))
    }

    /// Compresses and seals what `content` writes.
    fn write<W: Write>(
        &self,
        name: &str,
        to: W,
        content: impl FnOnce(&mut dyn Write) -> Result<()>,
    ) -> Result<W> {
        let what = || "sealing the snapshot";
        let to = self.checkpoint.writer(name, to).context(what)?;
        let mut packed = zstd::Encoder::new(to, LEVEL).context(what)?;
        content(&mut packed)?;
        let (to, _) = packed.finish().and_then(|sealed| sealed.finish()).context(what)?;
        Ok(to)
    }

    /// Writes the archive of changed files, which `content` has.
    ///
    /// # Errors
    /// If a file in `content` cannot be read, or `file` cannot be made or written: a full disk.
    pub(crate) fn write_changes(
        &self,
        file: &Path,
        content: impl FnOnce(&mut dyn Write) -> Result<()>,
    ) -> Result<()> {
        let shown = || file.display().to_string();
        let to =
            self.write(CHANGES, BufWriter::new(File::create(file).context(shown)?), content)?;
        to.into_inner().map(drop).map_err(std::io::IntoInnerError::into_error).context(shown)
    }

    /// Takes from a description what only those who have the key are to know. `changes` tells whether there
    /// is an archive of changed files.
    ///
    /// # Errors
    /// If the key of the images does not seal.
    pub fn hide(&self, open: Description, changes: bool) -> Result<Description> {
        let plain = Origin { from: open.origin.from.clone(), ..Origin::default() };
        let whole_origin = plain == open.origin;
        let container = SealedContainer {
            origin: open.origin,
            configuration: open.configuration,
            configuration_digest: open.configuration_digest,
            files_digest: open.files_digest,
            streams: open.streams,
            changes,
        };
        let text = serde_json::to_vec(&container).context(|| "the description")?;
        let sealed = self.write(CONTAINER, Vec::new(), |to| {
            to.write_all(&text).context(|| "sealing the description")
        })?;
        let hidden = Hidden {
            seal: STANDARD.encode(&self.head),
            container: STANDARD.encode(sealed),
            whole_origin,
        };
        Ok(Description {
            version: SEALED_VERSION,
            origin: plain,
            configuration: String::new(),
            configuration_digest: String::new(),
            files_digest: String::new(),
            streams: BTreeMap::new(),
            hidden: Some(hidden),
            ..open
        })
    }
}

/// Who may open sealed snapshots here.
#[derive(Debug, Clone, Copy)]
pub struct Openers<'a> {
    /// Files with private keys.
    pub files: &'a [PathBuf],
    /// Those that the configuration of this program names.
    pub configured: fn() -> Identities,
}

impl Openers<'_> {
    /// The keys that open them.
    ///
    /// # Errors
    /// If one of the files has none.
    pub fn identities(&self) -> Result<Identities> {
        let mut all = (self.configured)();
        self.files.iter().try_for_each(|file| all.add_file(file)).context(|| "--identity")?;
        Ok(all)
    }
}

/// What opens the changed files of a snapshot.
#[derive(Debug)]
pub struct Opened {
    checkpoint: Checkpoint,
    /// Whether there are any.
    changes: bool,
}

impl Description {
    /// Whether the origin is all there, even if the rest is sealed.
    #[must_use]
    pub(crate) fn says_origin(&self) -> bool {
        self.hidden.as_ref().is_none_or(|hidden| hidden.whole_origin)
    }

    /// The description with what was hidden in it, and what opens the changed files if they are
    /// sealed: in a snapshot that was sealed by an earlier version only the images are.
    ///
    /// # Errors
    /// If there is no key for it; if it is not what was sealed.
    pub fn opened(mut self, openers: &Openers<'_>) -> Result<(Self, Option<Opened>)> {
        let Some(hidden) = self.hidden.take() else { return Ok((self, None)) };
        let checkpoint = hidden.unwrap(openers).map_err(|error| match hidden.whole_origin {
            true => error,
            false => error.during("what the container runs is sealed with the snapshot"),
        })?;
        let container = hidden.container(&checkpoint)?;
        if container.origin.from != self.origin.from {
            return Err(Error::new("the snapshot does not say of itself what was sealed with it"));
        }
        let opened = Opened { checkpoint, changes: container.changes };
        let description = Self {
            origin: container.origin,
            configuration: container.configuration,
            configuration_digest: container.configuration_digest,
            files_digest: container.files_digest,
            streams: container.streams,
            ..self
        };
        Ok((description, Some(opened)))
    }
}

impl Hidden {
    fn unwrap(&self, openers: &Openers<'_>) -> Result<Checkpoint> {
        let what = || "its key";
        let head = Head::parse(&binary(&self.seal)?).context(what)?;
        let unsure = head.unauthenticated();
        let master = openers.identities()?.unwrap(&unsure.stanzas, &unsure.binding());
        let master = master.map_err(|error| {
            Error::new(error.to_string()).hint("--identity KEY names the key that opens it")
        })?;
        Ok(Checkpoint::new(head.authenticate(&master).context(what)?, &master))
    }

    fn container(&self, checkpoint: &Checkpoint) -> Result<SealedContainer> {
        let what = || "the sealed description of the snapshot";
        let sealed = Cursor::new(binary(&self.container)?);
        let mut text = Vec::new();
        read(checkpoint, CONTAINER, (sealed, MAX_CONTAINER), &mut |from| {
            from.read_to_end(&mut text).map(drop).context(what)
        })?;
        serde_json::from_slice(&text).context(what)
    }
}

impl Opened {
    /// Reads the archive of changed files, if the container has changed any. Those without a key may not know how large it
    /// becomes, and everybody can seal for those with one: it is no larger than one that lies in plain may be.
    ///
    /// # Errors
    /// If it is not what was sealed, is too large, or is not there.
    pub(crate) fn read_changes(
        &self,
        file: &Path,
        content: &mut dyn FnMut(&mut dyn Read) -> Result<()>,
    ) -> Result<()> {
        if !self.changes {
            return Ok(());
        }
        let what = || "the sealed changes of files";
        let file = File::open(file).context(what)?;
        let most = archive::most(file.metadata().context(what)?.len());
        read(&self.checkpoint, CHANGES, (BufReader::new(file), most), content)
    }
}

fn binary(text: &str) -> Result<Vec<u8>> {
    let decoded = STANDARD.decode(text);
    decoded.map_err(|error| Error::new(format!("what is sealed of the snapshot: {error}")))
}

/// Opens and unpacks what was sealed under `name`, which may become so many bytes.
fn read<R: Read + Seek>(
    checkpoint: &Checkpoint,
    name: &str,
    (from, most): (R, u64),
    content: &mut dyn FnMut(&mut dyn Read) -> Result<()>,
) -> Result<()> {
    let what = || "opening the snapshot";
    let packed = checkpoint.reader(name, from).context(what)?;
    let mut plain = zstd::Decoder::new(packed).context(what)?.take(most.saturating_add(1));
    let done = content(&mut plain);
    // What is cut looks damaged.
    match plain.limit() {
        0 => Err(Error::new(format!(
            "what is sealed as {name} is more than {}, the most that is unpacked of it",
            progress::size(most)
        ))),
        _ => done,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::{fs, io};

    use tar::{Builder, EntryType};
    use torpor_seal::keys::AgeIdentity;

    use super::*;
    use crate::changes::{self, SetId};

    /// Whoever knows for whom to seal can send little that becomes much.
    #[test]
    fn changed_files_do_not_fill_the_disk() {
        let dir = tempfile::tempdir().unwrap();
        let recipient = AgeIdentity::generate().unwrap().0.recipient();
        let (file, most) = (dir.path().join("sealed"), archive::most(1));
        // An archive has a block in front of the file, and two behind it, of which one is read.
        let sizes = [(most - 3 * 512, true), (most - 512, false), (most * 4, false)];
        for (number, (size, is_taken)) in sizes.into_iter().enumerate() {
            let seal = Seal::new(&[recipient.to_string()]).unwrap().unwrap();
            seal.write_changes(&file, |to| {
                let mut archive = Builder::new(to);
                let mut head = archive::header(EntryType::Regular, size, 0o600);
                head.set_uid(0);
                head.set_gid(0);
                archive.append_data(&mut head, "zeros", io::repeat(0).take(size)).unwrap();
                archive.finish().context(|| "the archive")
            })
            .unwrap();
            assert_eq!(archive::most(fs::metadata(&file).unwrap().len()), most);
            let opened = Opened { checkpoint: seal.checkpoint, changes: true };
            let upper = dir.path().join(number.to_string());
            fs::create_dir(&upper).unwrap();
            let read =
                opened.read_changes(&file, &mut |from| changes::apply(from, &upper, SetId::Taken));
            let found = fs::metadata(upper.join("zeros")).unwrap().len();
            assert!(found <= most, "{found}");
            match is_taken {
                true => read.unwrap(),
                false => {
                    let said = read.unwrap_err().to_string();
                    assert!(said.contains("the most that is unpacked of it"), "{said}");
                }
            }
        }
    }
}
