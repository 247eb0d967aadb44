//! Locks by nftables, as CRIU sets them: a table of each dump's own.

use std::fmt::Write as _;

use super::rules::{MARK, Scope, Script, argv, run};
use crate::file::socket::address::Address;

/// How long `inet` and the name of a table are together, in bytes: CRIU has no more room.
const MAX_NAME: usize = 31;

/// The table of the dump with this id.
pub fn table(id: &str) -> String {
    let mut name = format!("inet CRIU-{id}");
    name.truncate(MAX_NAME);
    name
}

/// Sets a lock; `more` adds connections to one that is there.
pub fn lock(id: &str, scope: &Scope, more: bool) -> Script {
    let name = table(id);
    let input = match scope {
        Scope::Connections(all) if more => elements(&name, all),
        Scope::Connections(all) => {
            // A table that is there already is emptied: it may be from a dump that was killed.
            let empty = format!("add table {name}\ndelete table {name}\n");
            empty + &rules(&name, "accept", &sets(), CONNECTIONS) + &elements(&name, all)
        }
        Scope::All => {
            format!("add table {name}\ndelete table {name}\n") + &rules(&name, "drop", "", "")
        }
    };
    vec![(argv(&["nft", "-f", "-"]), input)]
}

/// Takes away a lock, which need not be there.
pub fn unlock(id: &str) -> Script {
    let name = table(id);
    // To delete what is not there is an error, to add what is there is none.
    let input = format!("add table {name}\ndelete table {name}\n");
    vec![(argv(&["nft", "-f", "-"]), input)]
}

/// Whether there is a lock in the network namespace of this thread.
pub fn is_locked(table: &str) -> bool {
    let words: Vec<&str> = ["nft", "list", "table"].into_iter().chain(table.split(' ')).collect();
    run(&argv(&words), "").is_ok()
}

/// The rules of both chains.
const CONNECTIONS: &str = "  ip saddr . tcp sport . ip daddr . tcp dport @conns4 drop\n  \
                           ip6 saddr . tcp sport . ip6 daddr . tcp dport @conns6 drop\n";

fn sets() -> String {
    [("conns4", "ipv4"), ("conns6", "ipv6")].iter().fold(String::new(), |mut text, (set, kind)| {
        let _ = writeln!(
            text,
            " set {set} {{ type {kind}_addr . inet_service . {kind}_addr . inet_service; }}"
        );
        text
    })
}

fn rules(name: &str, policy: &str, sets: &str, rules: &str) -> String {
    let chain = |hook: &str| {
        format!(
            " chain {hook} {{\n  type filter hook {hook} priority 0; policy {policy};\n  \
             meta mark {MARK:#x} accept\n{rules} }}\n"
        )
    };
    format!("table {name} {{\n{sets}{}{}}}\n", chain("output"), chain("input"))
}

/// Each connection is in its set both ways round.
fn elements(name: &str, all: &[(Address, Address)]) -> String {
    let mut text = String::new();
    for (v6, set) in [(false, "conns4"), (true, "conns6")] {
        let ends = all.iter().filter(|(remote, _)| remote.is_v6() == v6);
        let both = ends.flat_map(|&(a, b)| [(a, b), (b, a)]);
        let listed: Vec<String> = both
            .map(|(a, b)| format!("{} . {} . {} . {}", a.ip(), a.port, b.ip(), b.port))
            .collect();
        if !listed.is_empty() {
            let _ = writeln!(text, "add element {name} {set} {{ {} }}", listed.join(", "));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_cut_as_criu_cuts_them() {
        let id = "0a5f76b7-695d-43ef-8f62-e53f69704809";
        assert_eq!(table(id), "inet CRIU-0a5f76b7-695d-43ef-8f");
        assert_eq!(table("42"), "inet CRIU-42");
    }
}
