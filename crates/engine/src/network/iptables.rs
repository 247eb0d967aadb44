//! Locks by iptables, as CRIU sets them: for a connection a rule in each of the chains `INPUT`
//! and `OUTPUT`; for a whole namespace a chain `CRIU` that both lead to.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::net::IpAddr;

use torpor_sys::number::byte;

use super::nftables;
use super::rules::{Commands, MARK, Scope, argv, output, run};
use crate::error::Result;
use crate::file::socket::address::Address;

const NFPROTO_IPV4: u8 = byte(libc::NFPROTO_IPV4);
const NFPROTO_IPV6: u8 = byte(libc::NFPROTO_IPV6);

/// The chain that stops everything.
pub(super) const CHAIN: &str = "CRIU";

/// Both ways of a connection: the chain that its packets come through, source and destination.
fn ways((remote, local): &(Address, Address)) -> [(&'static str, Address, Address); 2] {
    [("INPUT", *remote, *local), ("OUTPUT", *local, *remote)]
}

/// The rule for packets from `source` to `destination`, behind the name of its chain.
fn rule(source: Address, destination: Address) -> String {
    format!(
        "-p tcp -m mark ! --mark {MARK:#x} -s {} --sport {} -d {} --dport {} -j DROP",
        source.ip(),
        source.port,
        destination.ip(),
        destination.port
    )
}

/// Sets a lock.
pub(super) fn lock(scope: &Scope) -> Commands {
    script(scope, |v6| match scope {
        Scope::All => format!(
            ":{CHAIN} - [0:0]\n-I INPUT -j {CHAIN}\n-I OUTPUT -j {CHAIN}\n\
             -A {CHAIN} -m mark --mark {MARK:#x} -j ACCEPT\n-A {CHAIN} -j DROP\n"
        ),
        Scope::Connections(all) => changes("-I", all, v6),
    })
}

/// Takes away a lock that is there as a whole.
pub(super) fn unlock(scope: &Scope) -> Commands {
    script(scope, |v6| match scope {
        Scope::All => {
            format!("-D INPUT -j {CHAIN}\n-D OUTPUT -j {CHAIN}\n-F {CHAIN}\n-X {CHAIN}\n")
        }
        Scope::Connections(all) => changes("-D", all, v6),
    })
}

/// Drops the first packet of each new TCP connection to some ports, in a chain of this name.
pub(super) fn hold_off(chain: &str, ports: &BTreeSet<u16>) -> Commands {
    let rules = ports.iter().fold(String::new(), |mut text, port| {
        let _ = writeln!(text, "-A {chain} -p tcp --syn --dport {port} -j DROP");
        text
    });
    script(&Scope::All, |_| format!(":{chain} - [0:0]\n-I INPUT -j {chain}\n{rules}"))
}

/// Takes away what [`hold_off`] has made.
pub(super) fn let_in(chain: &str) -> Commands {
    script(&Scope::All, |_| format!("-D INPUT -j {chain}\n-F {chain}\n-X {chain}\n"))
}

fn changes(change: &str, all: &[(Address, Address)], v6: bool) -> String {
    let ways = all.iter().filter(|(remote, _)| remote.is_v6() == v6).flat_map(ways);
    ways.fold(String::new(), |mut text, (chain, source, destination)| {
        let _ = writeln!(text, "{change} {chain} {}", rule(source, destination));
        text
    })
}

fn script(scope: &Scope, changes: impl Fn(bool) -> String) -> Commands {
    let families = families(scope).into_iter();
    families.map(|v6| (restore(v6), format!("*filter\n{}COMMIT\n", changes(v6)))).collect()
}

fn restore(v6: bool) -> Vec<String> {
    argv(&[if v6 { "ip6tables-restore" } else { "iptables-restore" }, "-w", "--noflush"])
}

/// Whether IPv6 is concerned, for each family that is.
fn families(scope: &Scope) -> Vec<bool> {
    match scope {
        Scope::All if std::path::Path::new("/proc/sys/net/ipv6").exists() => vec![false, true],
        Scope::All => vec![false],
        Scope::Connections(all) => [false, true]
            .into_iter()
            .filter(|v6| all.iter().any(|(remote, _)| remote.is_v6() == *v6))
            .collect(),
    }
}

/// Whether the whole namespace of this thread is locked.
pub(super) fn is_locked() -> bool {
    ["iptables", "ip6tables"]
        .iter()
        .any(|program| run(&argv(&[program, "-w", "-n", "-L", CHAIN]), "").is_ok())
}

/// Takes away what is there of a lock, in the network namespace of this thread.
///
/// # Errors
/// If a program fails.
pub(super) fn remove(scope: &Scope) -> Result<()> {
    for v6 in families(scope) {
        if !has_rules(v6) {
            continue;
        }
        let save = if v6 { "ip6tables-save" } else { "iptables-save" };
        // Where it is not installed, or the kernel has no such rules, there are none.
        let Ok(saved) = output(&argv(&[save, "-t", "filter"])) else { continue };
        let changes = removal(&saved, scope);
        if !changes.is_empty() {
            run(&restore(v6), &format!("*filter\n{changes}COMMIT\n"))?;
        }
    }
    Ok(())
}

/// Whether there can be rules of a lock in the network namespace of this thread.
pub(super) fn may_lock() -> bool {
    has_rules(false) || has_rules(true)
}

/// Whether there can be rules of a lock in the network namespace of this thread: the kernel has a table `filter`
/// there, its own or one of nftables. To ask `iptables-save` takes longer than all else in a small restore.
fn has_rules(v6: bool) -> bool {
    let (names, family) = match v6 {
        true => ("/proc/thread-self/net/ip6_tables_names", NFPROTO_IPV6),
        false => ("/proc/thread-self/net/ip_tables_names", NFPROTO_IPV4),
    };
    let own = std::fs::read_to_string(names).unwrap_or_default();
    own.lines().any(|name| name == "filter") || nftables::has(family, "filter")
}

/// The changes that take away the rules of a lock that `iptables-save` has printed.
fn removal(saved: &str, scope: &Scope) -> String {
    let mut changes = String::new();
    for line in saved.lines() {
        let Some(rest) = line.strip_prefix("-A ") else { continue };
        let is_lock = match scope {
            Scope::All => matches!(rest.split_once(' '), Some(("INPUT" | "OUTPUT", "-j CRIU"))),
            Scope::Connections(all) => {
                Rule::parse(rest).is_some_and(|rule| all.iter().flat_map(ways).any(|w| rule.is(w)))
            }
        };
        if is_lock {
            let _ = writeln!(changes, "-D {rest}");
        }
    }
    if *scope == Scope::All && saved.lines().any(|line| line.starts_with(":CRIU ")) {
        let _ = write!(changes, "-F {CHAIN}\n-X {CHAIN}\n");
    }
    changes
}

/// A rule that stops a connection.
#[derive(Debug)]
struct Rule<'a> {
    chain: &'a str,
    ends: [(IpAddr, u16); 2],
}

impl<'a> Rule<'a> {
    /// Reads a rule behind `-A`; `None` if it is of another kind.
    fn parse(text: &'a str) -> Option<Self> {
        let words: Vec<&str> = text.split_ascii_whitespace().collect();
        let after = |key: &str| {
            let at = words.iter().position(|word| *word == key)?;
            words.get(at + 1).copied()
        };
        let mark = u32::from_str_radix(after("--mark")?.strip_prefix("0x")?, 16);
        let is_drop = after("-j") == Some("DROP") && after("-p") == Some("tcp");
        if !is_drop || mark != Ok(MARK) {
            return None;
        }
        let ip = |key: &str| after(key)?.split('/').next()?.parse().ok();
        let port = |key: &str| after(key)?.parse().ok();
        let ends = [(ip("-s")?, port("--sport")?), (ip("-d")?, port("--dport")?)];
        Some(Rule { chain: words.first()?, ends })
    }

    fn is(&self, (chain, source, destination): (&str, Address, Address)) -> bool {
        self.chain == chain && self.ends == [source, destination].map(|end| (end.ip(), end.port))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What CRIU 4.2 has set, as `iptables-save` shows it.
    const SAVED: &str = "*filter\n:INPUT ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\n\
        -A INPUT -s 127.0.0.1/32 -d 127.0.0.1/32 -p tcp -m mark ! --mark 0xc114 -m tcp \
        --sport 54096 --dport 18731 -j DROP\n\
        -A INPUT -p tcp -m tcp --dport 22 -j ACCEPT\n\
        -A OUTPUT -s 127.0.0.1/32 -d 127.0.0.1/32 -p tcp -m mark ! --mark 0xc114 -m tcp \
        --sport 18731 --dport 54096 -j DROP\n\
        -A OUTPUT -s 127.0.0.1/32 -d 127.0.0.1/32 -p tcp -m mark ! --mark 0xc114 -m tcp \
        --sport 18731 --dport 54098 -j DROP\nCOMMIT\n";

    fn end(port: u16) -> Address {
        let words = [u32::from_ne_bytes([127, 0, 0, 1]), 0, 0, 0];
        Address { words, port, ..Address::unspecified(libc::AF_INET) }
    }

    #[test]
    fn rules_of_a_connection_are_found() {
        let scope = Scope::Connections(vec![(end(54096), end(18731))]);
        let changes = removal(SAVED, &scope);
        let lines: Vec<&str> = changes.lines().collect();
        assert_eq!(lines.len(), 2, "{changes}");
        assert!(lines[0].starts_with("-D INPUT") && lines[0].contains("--sport 54096"));
        assert!(lines[1].starts_with("-D OUTPUT") && lines[1].contains("--dport 54096"));
        let other = Scope::Connections(vec![(end(1), end(18731))]);
        assert_eq!(removal(SAVED, &other), "");
    }

    #[test]
    fn the_chain_of_a_namespace_is_found() {
        let saved = ":CRIU - [0:0]\n-A INPUT -j CRIU\n-A OUTPUT -j CRIU\n-A INPUT -j MINE\n\
                     -A CRIU -m mark --mark 0xc114 -j ACCEPT\n-A CRIU -j DROP\n";
        let expected = "-D INPUT -j CRIU\n-D OUTPUT -j CRIU\n-F CRIU\n-X CRIU\n";
        assert_eq!(removal(saved, &Scope::All), expected);
        assert_eq!(removal(SAVED, &Scope::All), "");
    }
}
