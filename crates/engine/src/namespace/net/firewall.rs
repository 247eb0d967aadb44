//! Packet filters: the rules of iptables, ip6tables and nftables, as their own programs
//! print and read them. Those are only run where there are rules.

use std::io::Read;
use std::process::Command;

use torpor_images::{ImageDir, Kind, kind};
use torpor_kernel::netlink::{Message, NETFILTER, NFTA_TABLE_NAME, Socket, of_netfilter};
use torpor_policy::PacketFilter;

use super::filling::NetworkFilling;
use super::{iptables_nft, lock_of_criu};
use crate::error::{Error, Result};
use crate::tool;

const GET_TABLES: u16 = of_netfilter(libc::NFNL_SUBSYS_NFTABLES, libc::NFT_MSG_GETTABLE);
/// Bytes of `struct nfgenmsg`.
const NFGENMSG: usize = 4;

/// The programs for old-style rules of a family.
struct Legacy {
    image: Kind,
    save: [&'static str; 2],
    restore: [&'static str; 2],
    /// Names the tables that exist.
    tables: &'static str,
    /// What nft calls the family, and the programs for rules of iptables in nftables.
    family: &'static str,
    save_nft: [&'static str; 2],
    restore_nft: [&'static str; 2],
}

/// Where iptables writes nftables rules, another program of its package is for the
/// kernel's old ones.
const LEGACY: [Legacy; 2] = [
    Legacy {
        image: kind::IPTABLES,
        save: ["iptables-legacy-save", "iptables-save"],
        restore: ["iptables-legacy-restore", "iptables-restore"],
        tables: "/proc/thread-self/net/ip_tables_names",
        family: "ip",
        save_nft: ["iptables-nft-save", "iptables-save"],
        restore_nft: ["iptables-nft-restore", "iptables-restore"],
    },
    Legacy {
        image: kind::IP6TABLES,
        save: ["ip6tables-legacy-save", "ip6tables-save"],
        restore: ["ip6tables-legacy-restore", "ip6tables-restore"],
        tables: "/proc/thread-self/net/ip6_tables_names",
        family: "ip6",
        save_nft: ["ip6tables-nft-save", "ip6tables-save"],
        restore_nft: ["ip6tables-nft-restore", "ip6tables-restore"],
    },
];

/// Writes the rules of the calling thread's namespace.
///
/// # Errors
/// A program that is missing, or fails.
pub(super) fn dump(images: &ImageDir, ns_id: u32) -> Result<()> {
    for legacy in LEGACY {
        if std::fs::read_to_string(legacy.tables).is_ok_and(|names| !names.trim().is_empty()) {
            let (rules, _) = run(&legacy.save, &[], None, "iptables")?;
            write(images, legacy.image, ns_id, &rules)?;
        }
    }
    let tables = Socket::open(NETFILTER)?.list(GET_TABLES, &[0; 4]);
    // An error: a kernel without nftables. The dump's own lock is not asked for: the tasks are stopped.
    let is_meant = |table: &Message| {
        let name = table.attributes(NFGENMSG).text(NFTA_TABLE_NAME);
        !name.is_some_and(torpor_images::lock::is_table)
    };
    if tables.is_ok_and(|tables| tables.iter().any(is_meant)) {
        let (rules, messages) = run(&["nft"], &["list", "ruleset"], None, "nftables")?;
        let tables = iptables_nft::tables(&messages);
        let saved = dump_of_iptables(images, ns_id, &tables)?;
        if saved.len() < tables.len() {
            tracing::warn!(
                "rules that iptables has written to nftables come back as those of nft: they do the \
                 same, but iptables does not read them any more; use iptables-legacy where a program \
                 changes them"
            );
        }
        let others = match saved.as_slice() {
            [] => rules,
            saved => iptables_nft::without(&String::from_utf8_lossy(&rules), saved).into_bytes(),
        };
        if !others.trim_ascii().is_empty() {
            write(images, kind::NFTABLES, ns_id, &others)?;
        }
    }
    Ok(())
}

/// Writes those tables of iptables in nftables that its program understands, and returns them. Where there are rules of
/// the old iptables as well, these have the image.
fn dump_of_iptables(
    images: &ImageDir,
    ns_id: u32,
    tables: &[iptables_nft::RulesTable],
) -> Result<Vec<iptables_nft::RulesTable>> {
    let mut saved = Vec::new();
    for legacy in LEGACY {
        let own = || tables.iter().filter(|(family, _)| family == legacy.family);
        if own().next().is_none() || images.has(legacy.image, ns_id.into())? {
            continue;
        }
        let program = |args: &[&str]| Ok(run(&legacy.save_nft, args, None, "iptables")?.0);
        let Some(rules) = iptables_nft::save(&program, own().map(|(_, name)| name.as_str())) else {
            continue;
        };
        write(images, legacy.image, ns_id, &rules)?;
        saved.extend(own().cloned());
    }
    Ok(saved)
}

fn write(images: &ImageDir, kind: Kind, ns_id: u32, rules: &[u8]) -> Result<()> {
    let mut writer = images.writer(kind, ns_id.into())?;
    match std::str::from_utf8(rules) {
        Ok(text) => writer.raw(lock_of_criu::without_held_off(text).as_bytes())?,
        Err(_) => writer.raw(rules)?,
    }
    Ok(writer.finish()?)
}

/// Sets the rules of the calling thread's namespace.
///
/// # Errors
/// A program that is missing, or fails.
pub(super) fn restore(filling: &NetworkFilling) -> Result<()> {
    for legacy in LEGACY {
        if let Some(rules) = filling.rules(legacy.image) {
            let programs = match iptables_nft::has_saved(rules.text()) {
                true => legacy.restore_nft,
                false => legacy.restore,
            };
            run(&programs, &[], Some(rules), "iptables")?;
        }
    }
    if let Some(rules) = filling.rules(kind::NFTABLES) {
        run(&["nft"], &["-f", "-"], Some(rules), "nftables")?;
    }
    Ok(())
}

/// Takes out of an image of rules what is different in two dumps of the same ones: the lock of the dump itself, when it
/// was made, and how many packets have met each rule.
pub(crate) fn forget_packets(kind: Kind, bytes: &mut Vec<u8>) {
    if ![kind::IPTABLES, kind::IP6TABLES, kind::NFTABLES].contains(&kind) {
        return;
    }
    let Ok(rules) = std::str::from_utf8(bytes) else { return };
    let rules = lock_of_criu::without(rules);
    // iptables-save begins and ends with the time, as a comment.
    let said = rules.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty());
    *bytes = said.map(uncounted).collect::<String>().into_bytes();
}

/// A rule or chain, with nothing counted: `[PACKETS:BYTES]` by iptables, `counter packets N bytes N` by nft.
fn uncounted(line: &str) -> String {
    let is_number = |word: &str| word.bytes().all(|byte| byte.is_ascii_digit());
    let is_count = |word: &str| {
        let pair = word.strip_prefix('[').and_then(|word| word.strip_suffix(']')?.split_once(':'));
        pair.is_some_and(|(packets, bytes)| is_number(packets) && is_number(bytes))
    };
    let mut words: Vec<&str> = line.split_whitespace().collect();
    for at in 0..words.len() {
        match &mut words[at..] {
            ["counter", "packets", packets, "bytes", bytes, ..] => (*packets, *bytes) = ("0", "0"),
            [word, ..] if is_count(word) => *word = "[0:0]",
            _ => {}
        }
    }
    words.join(" ") + "\n"
}

/// Runs the first of `programs` that exists, in the calling thread's namespaces: what it prints, and what it says besides.
fn run(
    programs: &[&str],
    args: &[&str],
    input: Option<&PacketFilter>,
    package: &str,
) -> Result<(Vec<u8>, String)> {
    for program in programs {
        let mut command = Command::new(program);
        command.args(args);
        let mut output = Vec::new();
        let mut input = input.map(|rules| rules.text().as_bytes());
        let input = input.as_mut().map(|input| input as &mut (dyn Read + Send));
        let Some(done) = tool::run(&mut command, input, &mut output)? else { continue };
        if done.status.success() {
            return Ok((output, done.messages));
        }
        let last = done.messages.lines().rfind(|line| !line.trim().is_empty());
        return Err(tool::failed(format!("{program} {}", args.join(" ")), done.status, last));
    }
    Err(Error::Program {
        program: programs.join(" or "),
        reason: format!("not found; install the package {package}"),
    })
}
