//! `torpor snapshot lint`: what usually should not be in a snapshot.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use clap::Args;
use rustix::fs::OFlags;
use serde_json::{Value, json};
use torpor_blobs as store;
use torpor_blobs::oci::Manifest;
use torpor_blobs::reference::Reference;
use torpor_images::proto::{FdTypes, FileEntry, InetSkEntry};
use torpor_images::{ImageDir, kind};
use torpor_seal::Header;
use torpor_seal::keys::Identities;
use torpor_store::each_entry;
use torpor_worker::printable;

use crate::description::Description;
use crate::error::{Context, Error, Result};
use crate::sealed::{self, Openers};
use crate::{archive, mounts, secrets, unpack};

/// The state of a TCP socket that has a connection (linux/tcp_states.h).
const ESTABLISHED: u32 = 1;
/// That of one that has none any more.
const CLOSE: u32 = 7;
/// The protocol of connections.
const TCP: u32 = libc::IPPROTO_TCP.cast_unsigned();
/// Parts of names of variables that hold secrets.
const SECRET: &[&str] =
    &["SECRET", "PASSWORD", "PASSWD", "TOKEN", "CREDENTIAL", "API_KEY", "APIKEY", "PRIVATE_KEY"];

/// The configuration of a container beside its images.
const CONFIGURATION: &str = "spec.dump";
/// Where Podman mounts files that it makes for each container.
const OF_PODMAN: [&str; 5] =
    ["/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/dev/shm", "/run/.containerenv"];

/// Looks for what usually should not be in a snapshot: connections, files outside of the
/// container (mounted, and open there), variables and changed files that look like secrets. The exit status is 2 if there is any.
#[derive(Debug, Args)]
pub struct LintArgs {
    /// Where the snapshot is: dir:PATH:NAME, HOST/NAME:TAG or s3://BUCKET/PREFIX:NAME
    #[arg(value_name = "REF")]
    reference: Reference,
    /// Open a sealed snapshot with the private key in FILE
    #[arg(long, value_name = "KEY")]
    identity: Vec<PathBuf>,
    /// Print a JSON array
    #[arg(long)]
    json: bool,
}

/// Something that should not be there.
struct Finding {
    kind: &'static str,
    text: String,
}

/// Looks through a snapshot. One that is sealed is opened with keys that are `configured`, too.
///
/// # Errors
/// If there is no such snapshot, its place does not answer, or what it has is damaged; if it is sealed, and no key opens it.
pub fn lint(args: &LintArgs, configured: fn() -> Identities) -> Result<ExitCode> {
    let store = store::open(&args.reference)?;
    let manifest = Manifest::parse(&store::found(&*store, &args.reference)?)?;
    let openers = Openers { files: &args.identity, configured };
    let (description, opened) = Description::read(&*store, &manifest)?.opened(&openers)?;
    let dir = tempfile::tempdir().context(|| "a directory for the images")?;
    let dir = dir.path();
    let names = [CONFIGURATION, archive::CHANGES, sealed::CHANGES];
    let packed = unpack::fetch(&*store, &manifest, dir)?;
    let images = unpack::exported(&packed, dir, &names)?;
    let configuration = configuration(&description, dir)?;
    let mut found = variables(&configuration);
    match opened {
        Some(opened) => opened.read_changes(&dir.join(sealed::CHANGES), &mut |from| {
            found.extend(files(from)?);
            Ok(())
        })?,
        None => found.extend(plain_files(&dir.join(archive::CHANGES))?),
    }
    found.extend(outside(&configuration));
    let files: Vec<FileEntry> = open(&images, &openers)?.read_all_or_empty(kind::FILES, 0)?;
    found.extend(open_outside(&files, &configuration));
    found.extend(connections(&files));
    if args.json {
        let rows = found.iter().map(|f| json!({"kind": f.kind, "text": f.text}));
        println!("{}", Value::Array(rows.collect()));
    } else {
        found.iter().for_each(|found| println!("{}: {}", found.kind, printable(&found.text)));
    }
    Ok(if found.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(2) })
}

/// The configuration of the container. That of one of Podman's is none that a start compares: it lies with the images.
fn configuration(description: &Description, dir: &Path) -> Result<Value> {
    let file = dir.join(CONFIGURATION);
    let is_podmans = description.configuration.is_empty() && file.exists();
    if !is_podmans {
        return Ok(serde_json::from_str(&description.configuration).unwrap_or_default());
    }
    let shown = || CONFIGURATION;
    let mut config: Value =
        serde_json::from_slice(&fs::read(file).context(shown)?).context(shown)?;
    if let Some(mounts) = config["mounts"].as_array_mut() {
        let of_podman = |mount: &Value| OF_PODMAN.iter().any(|at| mount["destination"] == *at);
        mounts.retain(|mount| !of_podman(mount));
    }
    Ok(config)
}

/// The images, which may be sealed.
fn open(dir: &Path, openers: &Openers<'_>) -> Result<ImageDir> {
    let mut images = ImageDir::open(dir)?;
    if images.is_sealed()? {
        // They are in packs, and nobody looks at them here.
        images.miss_pages();
        let identities = openers.identities()?;
        let unwrap =
            move |header: &Header| Ok(identities.unwrap(&header.stanzas, &header.binding())?);
        let signed = images.unseal(&(Arc::new(unwrap) as Arc<_>))?;
        images.verify(&signed)?;
    }
    Ok(images)
}

/// Variables whose names or values are those of secrets. Their values are not shown.
fn variables(config: &Value) -> Vec<Finding> {
    let all = config["process"]["env"].as_array().cloned().unwrap_or_default();
    let variables = all.iter().filter_map(|entry| entry.as_str()?.split_once('='));
    let texts = variables.filter_map(|(name, value)| {
        let by_name = SECRET.iter().any(|part| name.to_ascii_uppercase().contains(part));
        match secrets::within(value.as_bytes()) {
            _ if value.is_empty() => None,
            Some(what) => Some(format!("the variable {name} has {what}, and is in memory")),
            None => by_name.then(|| format!("the variable {name} is in memory")),
        }
    });
    texts.map(|text| Finding { kind: "secret", text }).collect()
}

/// The same as [`files`] of an archive that may not be there.
fn plain_files(changes: &Path) -> Result<Vec<Finding>> {
    match changes.exists() {
        true => files(&mut File::open(changes).context(|| "the archive of changed files")?),
        false => Ok(Vec::new()),
    }
}

/// Files with secrets, of those that the container has changed.
fn files(changes: &mut dyn Read) -> Result<Vec<Finding>> {
    let what = || "the archive of changed files";
    let mut found = Vec::new();
    let failed = |error| Error::failed(what(), &error);
    each_entry(changes, failed, |entry| {
        if let Some(secret) = secrets::within_file(&mut *entry).context(what)? {
            let path = entry.path().context(what)?;
            let text = format!("the file /{} has {secret}", path.display());
            found.push(Finding { kind: "secret", text });
        }
        Ok(())
    })?;
    Ok(found)
}

/// Mounts of files outside of the container, which must be there at each start.
fn outside(config: &Value) -> Vec<Finding> {
    let texts = mounts::of_host(config).into_iter();
    let texts = texts.map(|(target, source)| format!("{target} is {source} of the host"));
    texts.map(|text| Finding { kind: "outside", text }).collect()
}

/// Files in such mounts that somebody has open: each start has to find them as they were. Those that are only read,
/// as libraries are, are counted.
fn open_outside(files: &[FileEntry], config: &Value) -> Vec<Finding> {
    let (mut written, mut read) = (BTreeSet::new(), BTreeMap::<_, BTreeSet<&Path>>::new());
    for file in files.iter().filter_map(|file| file.reg.as_ref()) {
        let name = Path::new(OsStr::from_bytes(&file.name));
        let Some(mount) = mounts::of_host_at(config, name) else { continue };
        if file.flags & OFlags::ACCMODE.bits() == OFlags::RDONLY.bits() {
            read.entry(mount).or_default().insert(name);
        } else {
            written.insert((name, mount.1));
        }
    }
    let written = written.iter().map(|(name, source)| {
        format!("{} is open to be written, in {source} of the host", name.display())
    });
    let read = read.iter().map(|((at, source), names)| {
        format!("open in {at} to be read, in {source} of the host: {}", names.len())
    });
    written.chain(read).map(|text| Finding { kind: "outside", text }).collect()
}

/// Connections, which nobody is at the other end of when the snapshot starts.
fn connections(files: &[FileEntry]) -> Vec<Finding> {
    let sockets = files.iter().filter(|file| file.r#type() == FdTypes::Inetsk);
    let sockets: Vec<&InetSkEntry> = sockets.filter_map(|file| file.isk.as_ref()).collect();
    let is_other = |one: &InetSkEntry, other: &InetSkEntry| {
        (one.src_port, &one.src_addr) == (other.dst_port, &other.dst_addr)
            && (one.dst_port, &one.dst_addr) == (other.src_port, &other.src_addr)
            && one.ns_id == other.ns_id
    };
    // Both ends of what goes on within the container are there.
    let within = |isk: &&InetSkEntry| sockets.iter().any(|other| is_other(isk, other));
    let texts = sockets.iter().filter(|isk| !within(isk)).filter_map(|isk| connection(isk));
    texts.map(|text| Finding { kind: "connection", text }).collect()
}

/// What is said of a socket that has a connection, or had one until the snapshot was made. Of a
/// connection that had ended before, the peer is known nevertheless.
fn connection(isk: &InetSkEntry) -> Option<String> {
    let (from, to) = (isk.src_port, isk.dst_port);
    if isk.state == ESTABLISHED || to > 0 {
        return Some(format!("from port {from} to port {to}"));
    }
    let is_closed = isk.state == CLOSE && isk.shutdown.is_some() && isk.torpor_peer_port.is_none();
    let is_tcp = isk.proto == TCP && from > 0;
    (is_tcp && is_closed).then(|| format!("from port {from}, which comes back closed"))
}

#[cfg(test)]
mod tests {
    use torpor_images::proto::RegFileEntry;

    use super::*;

    #[test]
    fn secrets_and_mounts_are_named() {
        let config = json!({
            "process": {"env": ["PATH=/bin", "db_password=x", "EMPTY_TOKEN=", "GITHUB_TOKEN=y"]},
            "mounts": [
                {"type": "proc", "source": "proc", "destination": "/proc"},
                {"type": "bind", "source": "/srv/data", "destination": "/data"},
            ],
        });
        let texts = |found: Vec<Finding>| found.into_iter().map(|f| f.text).collect::<Vec<_>>();
        assert_eq!(
            texts(variables(&config)),
            ["the variable db_password is in memory", "the variable GITHUB_TOKEN is in memory"]
        );
        assert_eq!(texts(outside(&config)), ["/data is /srv/data of the host"]);
        assert!(variables(&Value::Null).is_empty());
        let file = |(name, flags): (&str, u32)| {
            let reg = RegFileEntry { name: name.into(), flags, ..RegFileEntry::default() };
            FileEntry { reg: Some(reg), ..FileEntry::default() }
        };
        let opened = [("/data/log", 1), ("/data/log", 2), ("/data/a.so", 0), ("/etc/own", 1)];
        assert_eq!(
            texts(open_outside(&opened.map(file), &config)),
            [
                "/data/log is open to be written, in /srv/data of the host",
                "open in /data to be read, in /srv/data of the host: 1"
            ]
        );
        let config = json!({"process": {"env": ["DATABASE_URL=postgres://shop:hunter2@db/shop"]}});
        let said = texts(variables(&config));
        assert_eq!(
            said,
            ["the variable DATABASE_URL has a password in an address, and is in memory"]
        );
    }
}
