//! CRIU saves the rules of a network namespace when it has locked that: its lock is among them,
//! and would keep the restored tasks from all the world.
//!
//! With iptables it is a chain `CRIU`, and the rules that lead there; with nftables a table
//! `CRIU-` and the root task's pid. Either lets packets with [`MARK`] pass.

use torpor_images::lock::is_table;

use crate::network::accept;
use crate::network::rules::MARK;

/// The name of the chain.
const NAME: &str = "CRIU";

/// The rules, as `nft` or `iptables-save` has printed them, without such a lock.
pub(super) fn without(rules: &str) -> String {
    let chain_locks = has_lock(rules);
    without_named(rules, is_table, |chain| chain_locks && chain == NAME)
}

/// The rules without what the dump itself holds new connections off with: nobody else would take that away.
pub(super) fn without_held_off(rules: &str) -> String {
    let holds_off = |name: &str| name.starts_with(accept::NAME);
    without_named(rules, holds_off, holds_off)
}

/// The rules without some tables, and without some chains and what leads there.
fn without_named(
    rules: &str,
    is_table: impl Fn(&str) -> bool,
    is_chain: impl Fn(&str) -> bool,
) -> String {
    let mut out = String::with_capacity(rules.len());
    let mut lines = rules.lines();
    while let Some(line) = lines.next() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let is_out = match words[..] {
            ["table", _, name, "{"] => is_table(name),
            ["chain", name, "{"] => is_chain(name),
            _ => false,
        };
        if is_out {
            // The brace that closes it stands where it begins.
            let indent = line.len() - line.trim_start().len();
            let end = |inner: &&str| inner.len() == indent + 1 && inner.trim() == "}";
            lines.find(end);
        } else if !chains_of(&words).into_iter().flatten().any(&is_chain) {
            out.push_str(line);
            out.push('\n');
        }
    }
    out
}

/// Whether the chain of that name is a lock.
fn has_lock(rules: &str) -> bool {
    let mut in_chain = false;
    rules.lines().any(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["chain", name, "{"] => in_chain = name == NAME,
            ["}"] => in_chain = false,
            _ => {}
        }
        let of_chain = in_chain || words.starts_with(&["-A", NAME]);
        let mark = |word: &&str| {
            let digits = word.trim_end_matches("/0xffffffff").strip_prefix("0x");
            digits.and_then(|digits| u32::from_str_radix(digits, 16).ok()) == Some(MARK)
        };
        of_chain && words.iter().any(mark)
    })
}

/// The chains that a line makes or fills, or jumps to.
fn chains_of<'l>(words: &[&'l str]) -> [Option<&'l str>; 2] {
    let own = match words {
        ["-A", chain, ..] => Some(*chain),
        [first, ..] => first.strip_prefix(':'),
        [] => None,
    };
    let other = match words {
        [.., "jump" | "-j", chain] => Some(*chain),
        _ => None,
    };
    [own, other]
}

#[cfg(test)]
mod tests {
    use super::*;

    const NFT: &str = "table ip filter {
	chain CRIU {
		meta mark 0x0000c114 counter packets 0 bytes 0 accept
		counter packets 0 bytes 0 drop
	}

	chain INPUT {
		type filter hook input priority filter; policy accept;
		counter packets 0 bytes 0 jump CRIU
		tcp dport 22 accept
	}
}
table inet CRIU-42 {
	chain output {
		type filter hook output priority filter; policy drop;
		meta mark 0x0000c114 accept
	}
}
table inet mine {
	chain CRIU-like {
		drop
	}
}
";

    #[test]
    fn a_lock_is_left_out() {
        let expected = "table ip filter {

	chain INPUT {
		type filter hook input priority filter; policy accept;
		tcp dport 22 accept
	}
}
table inet mine {
	chain CRIU-like {
		drop
	}
}
";
        assert_eq!(without(NFT), expected);
        let saved = "*filter\n:INPUT ACCEPT [0:0]\n:CRIU - [0:0]\n-A INPUT -j CRIU\n\
                     -A CRIU -m mark --mark 0xc114 -j ACCEPT\n-A CRIU -j DROP\n\
                     -A INPUT -p tcp -j ACCEPT\nCOMMIT\n";
        let expected = "*filter\n:INPUT ACCEPT [0:0]\n-A INPUT -p tcp -j ACCEPT\nCOMMIT\n";
        assert_eq!(without(saved), expected);
    }

    #[test]
    fn what_holds_connections_off_is_left_out() {
        let saved = "*filter\n:INPUT ACCEPT [0:0]\n:CRIU-accept-42 - [0:0]\n\
                     -A INPUT -j CRIU-accept-42\n-A INPUT -p tcp -j DROP\n\
                     -A CRIU-accept-42 -p tcp --dport 80 -j DROP\nCOMMIT\n";
        let expected = "*filter\n:INPUT ACCEPT [0:0]\n-A INPUT -p tcp -j DROP\nCOMMIT\n";
        assert_eq!(without_held_off(saved), expected);
        let nft = "table ip filter {\n\tchain CRIU-accept-42 {\n\t\ttcp dport 80 drop\n\t}\n\n\
                   \tchain INPUT {\n\t\tcounter packets 0 bytes 0 jump CRIU-accept-42\n\t}\n}\n\
                   table inet CRIU-accept-42 {\n}\n";
        assert_eq!(without_held_off(nft), "table ip filter {\n\n\tchain INPUT {\n\t}\n}\n");
    }

    #[test]
    fn what_is_no_lock_stays() {
        let own = NFT.replace("0000c114", "00000001").replace("CRIU-42", "other");
        assert_eq!(without(&own), own);
        let saved = ":CRIU - [0:0]\n-A INPUT -j CRIU\n-A CRIU -j DROP\n";
        assert_eq!(without(saved), saved);
    }
}
