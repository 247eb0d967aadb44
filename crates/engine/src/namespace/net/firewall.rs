//! Packet filters: the rules of iptables, ip6tables and nftables, as their own programs
//! print and read them. Those are only run where there are rules.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::process::{Command, Stdio};

use torpor_images::{ImageDir, Kind, kind};

use super::netlink::{NETFILTER, Socket};
use crate::error::{Context, Error, Result};

/// `NFNL_SUBSYS_NFTABLES` and `NFT_MSG_GETTABLE` (linux/netfilter).
const GET_TABLES: u16 = 10 << 8 | 1;

/// A program pair for old-style rules of a family.
struct Legacy {
    image: Kind,
    save: [&'static str; 2],
    restore: [&'static str; 2],
    /// Names the tables that exist.
    tables: &'static str,
}

/// Where iptables writes nftables rules, another program of its package is for the
/// kernel's old ones.
const LEGACY: [Legacy; 2] = [
    Legacy {
        image: kind::IPTABLES,
        save: ["iptables-legacy-save", "iptables-save"],
        restore: ["iptables-legacy-restore", "iptables-restore"],
        tables: "/proc/thread-self/net/ip_tables_names",
    },
    Legacy {
        image: kind::IP6TABLES,
        save: ["ip6tables-legacy-save", "ip6tables-save"],
        restore: ["ip6tables-legacy-restore", "ip6tables-restore"],
        tables: "/proc/thread-self/net/ip6_tables_names",
    },
];

/// Writes the rules of the calling thread's namespace.
///
/// # Errors
/// A program that is missing, or fails.
pub fn dump(images: &ImageDir, ns_id: u32) -> Result<()> {
    for legacy in LEGACY {
        if std::fs::read_to_string(legacy.tables).is_ok_and(|names| !names.trim().is_empty()) {
            let rules = run(&legacy.save, &[], None, "iptables")?;
            write(images, legacy.image, ns_id, &rules)?;
        }
    }
    let tables = Socket::open(NETFILTER)?.list(GET_TABLES, &[0; 4]);
    // An error: a kernel without nftables.
    if tables.is_ok_and(|t| !t.is_empty()) {
        let rules = run(&["nft"], &["list", "ruleset"], None, "nftables")?;
        write(images, kind::NFTABLES, ns_id, &rules)?;
    }
    Ok(())
}

fn write(images: &ImageDir, kind: Kind, ns_id: u32, rules: &[u8]) -> Result<()> {
    let mut file = images.raw_file_create(kind, ns_id.into())?;
    file.write_all(rules).context(|| format!("write {}", kind.file_name(ns_id.into())))
}

/// Sets the rules of the calling thread's namespace.
///
/// # Errors
/// A program that is missing, or fails.
pub fn restore(images: &ImageDir, ns_id: u32) -> Result<()> {
    for legacy in LEGACY {
        if let Some(rules) = rules(images, legacy.image, ns_id)? {
            run(&legacy.restore, &[], Some(rules), "iptables")?;
        }
    }
    if let Some(rules) = rules(images, kind::NFTABLES, ns_id)? {
        run(&["nft"], &["-f", "-"], Some(rules), "nftables")?;
    }
    Ok(())
}

/// The file with rules, if it is there and not empty.
fn rules(images: &ImageDir, kind: Kind, ns_id: u32) -> Result<Option<File>> {
    match images.raw_file_open(kind, ns_id.into()) {
        Ok(mut file) => {
            let name = || format!("read {}", kind.file_name(ns_id.into()));
            let empty = file.read(&mut [0]).context(name)? == 0;
            file.seek(SeekFrom::Start(0)).context(name)?;
            Ok((!empty).then_some(file))
        }
        Err(e) if e.is_missing() => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// Runs the first of `programs` that exists, in the calling thread's namespaces.
fn run(programs: &[&str], args: &[&str], input: Option<File>, package: &str) -> Result<Vec<u8>> {
    for program in programs {
        let mut command = Command::new(program);
        command.args(args).stdin(match &input {
            Some(file) => file.try_clone().context(|| "dup".to_owned())?.into(),
            None => Stdio::null(),
        });
        let done = match command.output() {
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            other => other.context(|| format!("run {program}"))?,
        };
        if done.status.success() {
            return Ok(done.stdout);
        }
        let said = String::from_utf8_lossy(&done.stderr);
        let last = said.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default();
        return Err(Error::Program {
            program: format!("{program} {}", args.join(" ")),
            reason: format!("{}: {last}", done.status),
        });
    }
    Err(Error::Program {
        program: programs.join(" or "),
        reason: format!("not found; install the package {package}"),
    })
}
