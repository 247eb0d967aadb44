//! Rules of iptables, as `iptables-save` prints them.

use std::fmt::{self, Write as _};

use super::lines::lines;

/// The program reads lines into 10,240 bytes (fgets(3)): what is behind them is a line of its own.
const MAX_LINE: usize = 10_000;

const TABLES: [&str; 5] = ["filter", "nat", "mangle", "raw", "security"];

/// What becomes of packets at the end of a chain; those of one's own have none.
const POLICIES: [&str; 5] = ["ACCEPT", "DROP", "QUEUE", "RETURN", "-"];

/// The rules, written anew.
///
/// # Errors
/// The line that `iptables-save` does not print, and what is wrong with it.
pub(super) fn read(rules: &str) -> Result<String, String> {
    lines(rules, |line, out| {
        fits(line)?;
        let line = SavedLine::read(line)?.to_string();
        fits(&line)?;
        out.push_str(&line);
        Ok(())
    })
}

/// Neither the line of an image nor what is written of it may be longer.
fn fits(line: &str) -> Result<(), String> {
    if line.len() > MAX_LINE { Err("it is too long".to_owned()) } else { Ok(()) }
}

/// What a line says.
enum SavedLine<'l> {
    /// Nothing.
    Empty,
    /// When the rules were saved, and by what.
    Comment(&'l str),
    /// The following is of this table.
    Table(&'l str),
    /// There is a chain.
    Chain(SavedChain<'l>),
    /// A rule of a chain.
    Rule(SavedRule<'l>),
    /// The table ends.
    Commit,
}

struct SavedChain<'l> {
    name: &'l str,
    policy: &'l str,
    counters: Option<PacketCounters<'l>>,
}

struct SavedRule<'l> {
    counters: Option<PacketCounters<'l>>,
    chain: String,
    options: Vec<String>,
}

/// Packets and bytes.
#[derive(Clone, Copy)]
struct PacketCounters<'l>(&'l str, &'l str);

impl<'l> SavedLine<'l> {
    fn read(line: &'l str) -> Result<Self, String> {
        if line.is_empty() {
            return Ok(SavedLine::Empty);
        }
        if line.starts_with('#') {
            return Ok(SavedLine::Comment(line));
        }
        if line == "COMMIT" {
            return Ok(SavedLine::Commit);
        }
        if let Some(table) = line.strip_prefix('*') {
            return match TABLES.contains(&table) {
                true => Ok(SavedLine::Table(table)),
                false => Err(format!("there is no table {table:?}")),
            };
        }
        match line.strip_prefix(':') {
            Some(chain) => SavedChain::read(chain).map(SavedLine::Chain),
            None => SavedRule::read(line).map(SavedLine::Rule),
        }
    }
}

impl<'l> SavedChain<'l> {
    /// The program takes no quotation marks here: a name ends where a space is.
    fn read(line: &'l str) -> Result<Self, String> {
        let is_plain = |c: char| !c.is_control() && !matches!(c, '"' | '\\');
        if !line.chars().all(|c| c == '\t' || is_plain(c)) {
            return Err("a chain with a sign that no name has".to_owned());
        }
        let words: Vec<&str> = line.split([' ', '\t']).filter(|word| !word.is_empty()).collect();
        let (name, policy, counters) = match words[..] {
            [name, policy] => (name, policy, None),
            [name, policy, counters] => (name, policy, Some(PacketCounters::read(counters)?)),
            _ => return Err("a chain is a name, what becomes of packets, and counters".to_owned()),
        };
        if line.starts_with([' ', '\t']) || name.starts_with('-') || !POLICIES.contains(&policy) {
            return Err("no chain".to_owned());
        }
        Ok(SavedChain { name, policy, counters })
    }
}

impl<'l> SavedRule<'l> {
    fn read(line: &'l str) -> Result<Self, String> {
        // The program reads what follows the bracket, whether there is a space or not.
        let (counters, rest) = match line.starts_with('[') {
            true => {
                let (counters, rest) = line.split_once(' ').ok_or("no rule")?;
                (Some(PacketCounters::read(counters)?), rest)
            }
            false => (None, line),
        };
        let mut words = words(rest)?.into_iter();
        match words.next().as_deref() {
            Some("-A") => {}
            Some(word) => return Err(format!("{word:?} is no rule")),
            None => return Err("no rule".to_owned()),
        }
        let chain = words.next().filter(|chain| !chain.is_empty() && !chain.starts_with('-'));
        let chain = chain.ok_or("a rule without a chain")?;
        let options: Vec<String> = words.collect();
        check(&options)?;
        Ok(SavedRule { counters, chain, options })
    }
}

impl<'l> PacketCounters<'l> {
    fn read(text: &'l str) -> Result<Self, String> {
        let is_number =
            |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let inner = text.strip_prefix('[').and_then(|text| text.strip_suffix(']'));
        match inner.and_then(|inner| inner.split_once(':')) {
            Some((packets, bytes)) if is_number(packets) && is_number(bytes) => {
                Ok(PacketCounters(packets, bytes))
            }
            _ => Err(format!("{text:?} are no counters")),
        }
    }
}

/// Judges the options of a rule: those that iptables-save prints. The program takes abbreviations.
fn check(words: &[String]) -> Result<(), String> {
    const SHORT: [&str; 10] = ["-p", "-s", "-d", "-i", "-o", "-m", "-j", "-g", "-f", "-c"];
    /// What makes the program run another one, read a file, or leave the table.
    const FORBIDDEN: [&str; 3] = ["modprobe", "object-pinned", "table"];
    /// What makes it load the file of an extension: a chain, too, that does not exist.
    const NAMES_FILE: [&str; 4] = ["match", "jump", "goto", "protocol"];
    /// What a text of the user's follows, with the extension that takes it, as iptables-save prints them.
    const TEXTS: [[&str; 3]; 3] = [
        ["-m", "comment", "--comment"],
        ["-j", "LOG", "--log-prefix"],
        ["-j", "NFLOG", "--nflog-prefix"],
    ];
    let mut names_file = false;
    // Where the words behind the last text begin.
    let mut behind = 0;
    for (at, word) in words.iter().enumerate() {
        // Whatever it begins with. Behind any other words the program might take the option for a text itself.
        if TEXTS.iter().any(|option| words[behind..at].ends_with(&option.map(str::to_owned))) {
            (names_file, behind) = (false, at + 1);
            continue;
        }
        if names_file && word.contains('/') {
            return Err(format!("{word:?} is no name of an extension"));
        }
        names_file = matches!(word.as_str(), "-m" | "-j" | "-g" | "-p");
        let Some(option) = word.strip_prefix('-') else { continue };
        match option.strip_prefix('-') {
            Some(long) => {
                let (name, value) = long.split_once('=').unwrap_or((long, ""));
                let is_one_of = |options: &[&str]| options.iter().any(|o| o.starts_with(name));
                names_file = is_one_of(&NAMES_FILE);
                if is_one_of(&FORBIDDEN) || names_file && value.contains('/') {
                    return Err(format!("the option {word:?}"));
                }
            }
            None if SHORT.contains(&word.as_str()) => {}
            None => return Err(format!("the option {word:?}")),
        }
    }
    Ok(())
}

/// The words of a rule, as iptables-restore takes it apart: quotation marks hold a word together, and in
/// them a backslash takes the next character as it is. What stands right behind the second mark is a word of its own
/// to that program, and iptables-save does not print it.
fn words(line: &str) -> Result<Vec<String>, String> {
    let mut all = vec![];
    let mut chars = line.chars().peekable();
    while let Some(first) = chars.next() {
        match first {
            ' ' | '\t' => {}
            '"' => {
                all.push(quoted(&mut chars)?);
                if chars.peek().is_some_and(|next| !matches!(next, ' ' | '\t')) {
                    return Err("a text that does not end with its word".to_owned());
                }
            }
            first => {
                let mut word = first.to_string();
                word.extend(std::iter::from_fn(|| chars.next_if(|c| !matches!(c, ' ' | '\t'))));
                match word.chars().find(|&c| c.is_control() || matches!(c, '"' | '\\')) {
                    None => all.push(word),
                    Some('"') => return Err("a quotation mark inside of a word".to_owned()),
                    Some('\\') => return Err("a backslash".to_owned()),
                    Some(_) => return Err("a control character".to_owned()),
                }
            }
        }
    }
    Ok(all)
}

/// A text up to its second quotation mark.
fn quoted(chars: &mut impl Iterator<Item = char>) -> Result<String, String> {
    let mut text = String::new();
    while let Some(c) = chars.next() {
        let c = match c {
            '"' => return Ok(text),
            '\\' => chars.next().ok_or("it ends with a backslash")?,
            c => c,
        };
        if c.is_control() {
            return Err("a control character".to_owned());
        }
        text.push(c);
    }
    Err("a text has no end".to_owned())
}

impl fmt::Display for SavedLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SavedLine::Empty => Ok(()),
            SavedLine::Comment(text) => f.write_str(text),
            SavedLine::Table(name) => write!(f, "*{name}"),
            SavedLine::Chain(chain) => {
                write!(f, ":{} {}", chain.name, chain.policy)?;
                chain.counters.map_or(Ok(()), |counters| write!(f, " {counters}"))
            }
            SavedLine::Rule(rule) => {
                rule.counters.map_or(Ok(()), |counters| write!(f, "{counters} "))?;
                write!(f, "-A {}", Quoted(&rule.chain))?;
                rule.options.iter().try_for_each(|word| write!(f, " {}", Quoted(word)))
            }
            SavedLine::Commit => f.write_str("COMMIT"),
        }
    }
}

impl fmt::Display for PacketCounters<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}:{}]", self.0, self.1)
    }
}

/// A word of a rule, between quotation marks where it needs them.
struct Quoted<'w>(&'w str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Quoted(word) = self;
        if !word.is_empty() && !word.contains([' ', '"', '\'', '\\']) {
            return f.write_str(word);
        }
        f.write_char('"')?;
        for c in word.chars() {
            if matches!(c, '"' | '\\') {
                f.write_char('\\')?;
            }
            f.write_char(c)?;
        }
        f.write_char('"')
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn what_iptables_prints() {
        let rules = "# Generated by iptables-save v1.8.9\n*filter\n:INPUT ACCEPT [0:0]\n:MINE - [0:0]\n\
             -A INPUT -s 10.0.0.0/8 ! -d 1.2.3.4/32 -i eth0 -p tcp -m tcp --dport 22 -m comment \
             --comment \"a \\\"b\\\" c\" -j MINE\n[3:4] -A MINE -m conntrack --ctstate \
             RELATED,ESTABLISHED -j LOG --log-prefix \"x: \" --log-level 7\n-A MINE -m mark --mark \
             0x1/0xff -g MINE\nCOMMIT\n# Completed\n";
        assert_eq!(read(rules).unwrap(), rules);
        let texts = "-A INPUT -m comment --comment -M -j ACCEPT\n-A INPUT -m comment --comment \"--table of /x\" -j \
                     LOG --log-prefix \"-> \"\n-A INPUT -j NFLOG --nflog-prefix --modprobe=x\n";
        assert_eq!(read(texts).unwrap(), texts);
        assert_eq!(read("-A  X\t-j \"DROP\" \n").unwrap(), "-A X -j DROP\n");
    }

    #[test]
    fn what_iptables_does_not_print() {
        for rules in [
            "-A INPUT -j DROP -M /tmp/evil",
            "-A INPUT -M/tmp/evil -j DROP",
            "-A INPUT \"-M\" /tmp/evil",
            "-A INPUT --modprobe=/tmp/evil -j DROP",
            "-A INPUT --modp /tmp/evil -j DROP",
            "-A INPUT -fM /tmp/evil",
            "-M /tmp/evil",
            "--modprobe /tmp/evil",
            "-A INPUT -m bpf --object-pinned /sys/fs/bpf/x -j DROP",
            "-A INPUT -m bpf --object-p /sys/fs/bpf/x",
            "-A INPUT -t nat -j DROP",
            "-A INPUT -m ../../tmp/evil",
            "-A INPUT -j ../../tmp/evil",
            "-A INPUT -g ../../tmp/evil",
            "-A INPUT -p ../../tmp/evil",
            "-A INPUT --match ../../tmp/evil",
            "-A INPUT --mat=../../tmp/evil",
            "-A INPUT --jump ../../tmp/evil",
            "-A INPUT --j=../../tmp/evil",
            "-A INPUT --goto=../../tmp/evil",
            "-A INPUT --g ../../tmp/evil",
            "-A INPUT --proto ../../tmp/evil",
            "-I INPUT -j DROP",
            "-F",
            "*evil",
            ":INPUT -M",
            "-A -M /tmp/evil",
            "-A INPUT \\-M x",
            "-A INPUT \"x",
            "-A INPUT -- -M",
            "-A INPUT -m comment --comment x -M /tmp/evil",
            "-A INPUT -m comment --comment -M -M /tmp/evil",
            // The option is the text of another one.
            "-A INPUT -m comment -s --comment -M /tmp/evil -j DROP",
            "-A INPUT -m comment --comment --comment -M /tmp/evil",
            "-A INPUT -m comment --comment -m comment --comment -M /tmp/evil",
            "-A INPUT --comment -M /tmp/evil",
            "-A INPUT -j LOG --log-level --log-prefix -M /tmp/evil",
        ] {
            assert!(read(rules).is_err(), "{rules:?}");
        }
    }

    /// What the program reads otherwise than whoever takes a line for words between spaces.
    #[test]
    fn words_that_the_program_would_read_differently() {
        let long = "x".repeat(10_239);
        let two = format!("#{long}-A INPUT -M /tmp/evil");
        let quotes = format!("-A INPUT{}", " '".repeat(4_000));
        let text = format!("-A INPUT -m comment --comment {long}");
        for (rules, why) in [
            // A word ends with its text, and an option may follow.
            ("-A INPUT --comment \"x\"-M /tmp/evil -j DROP", "does not end with its word"),
            ("-A INPUT -s \"1.1.1.1\"--modprobe=/tmp/evil", "does not end with its word"),
            ("-A INPUT \"\"\"-M\" /tmp/evil", "does not end with its word"),
            ("-A INPUT -j DROP\"-M\" /tmp/evil", "a quotation mark inside of a word"),
            // The rule begins at the bracket.
            ("[0:0]-M/tmp/evil -A INPUT -j DROP", "are no counters"),
            ("[0:0]--modprobe=/tmp/evil -A INPUT", "are no counters"),
            ("[x] -A INPUT -j DROP", "are no counters"),
            ("[0:0 ]-M/tmp/evil -A INPUT", "are no counters"),
            ("[0:0]\t-A INPUT", "are no counters"),
            // What is too long for one line is two.
            (two.as_str(), "it is too long"),
            (quotes.as_str(), "it is too long"),
            (text.as_str(), "it is too long"),
            // No quotation marks hold the name of a chain together.
            (":\"a b\" - [0:0]", "a sign that no name has"),
            (":a DROP -M", "are no counters"),
            (":a EVIL [0:0]", "no chain"),
            (": DROP", "a chain is a name"),
            (":  a DROP", "no chain"),
            (":-M DROP", "no chain"),
        ] {
            let found = read(rules).unwrap_err();
            assert!(found.contains(why), "{rules:?}: {found}");
        }
    }
}
