//! Rules of packet filters as text: what their programs would do with it besides.
//!
//! `nft` and `iptables-restore` read a language in which a file of the host can be named, so
//! nothing reaches them but plain rules, in the form in which they print them themselves.

use std::io::Read;

use torpor_images::{ImageDir, Kind, kind};

use crate::error::{Error, Result as Collected};

/// More than any rules are, in bytes: sets of a million addresses are a fifth of it.
const MAX_RULES: u64 = 128 << 20;

/// Plain rules of a packet filter. There are none that were not checked: whoever hands rules to
/// their program hands over what was judged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PacketFilter(String);

impl PacketFilter {
    /// The rules in an image of a network namespace; `None` if it has no such image.
    ///
    /// # Errors
    /// Damaged images; a line that is no plain rule.
    pub fn read(images: &ImageDir, image: Kind, id: u64) -> Collected<Option<Self>> {
        let Some(mut file) = images.reader(image, id)? else { return Ok(None) };
        let invalid = |reason| Error::Invalid { image: image.file_name(id), reason };
        if file.remaining() > MAX_RULES {
            return Err(invalid(format!("has more than {MAX_RULES} bytes of rules")));
        }
        let mut text = String::new();
        file.read_to_string(&mut text).map_err(|error| invalid(error.to_string()))?;
        Self::of(image, text).map(Some).map_err(invalid)
    }

    /// Rules of the kind that is in these images.
    ///
    /// # Errors
    /// The line that is no plain rule, and what is wrong with it.
    pub fn of(image: Kind, text: String) -> Result<Self, String> {
        let check = if image == kind::NFTABLES { check_nftables } else { check_iptables };
        check(&text).map(|()| PacketFilter(text))
    }

    /// The text.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.0
    }
}

/// Why a line is none that `nft list ruleset` prints.
///
/// # Errors
/// The line, and what is wrong with it.
pub fn check_nftables(rules: &str) -> Result<(), String> {
    // Words with which a statement does something else than to describe a rule.
    const FORBIDDEN: [&str; 4] = ["include", "define", "undefine", "redefine"];
    let mut depth = 0_u32;
    for (number, line) in rules.lines().enumerate() {
        let wrong = |what: &str| Err(format!("line {}: {what}", number + 1));
        let mut first = true;
        for token in tokens(line) {
            let token = match token {
                Ok(token) => token,
                Err(what) => return wrong(what),
            };
            match token {
                Token::Mark('{') => depth += 1,
                Token::Mark('}') if depth == 0 => return wrong("a brace without its beginning"),
                Token::Mark('}') => depth -= 1,
                Token::Mark(';') => {}
                Token::Mark(_) if depth == 0 => return wrong("it is no table"),
                Token::Mark(_) | Token::Text => {}
                // nft needs no space between signs and words.
                Token::Word(word)
                    if word
                        .split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
                        .any(|part| FORBIDDEN.contains(&part)) =>
                {
                    return wrong(&format!("{word:?} is no part of a rule"));
                }
                Token::Word(word) if depth == 0 && first && word != "table" => {
                    return wrong(&format!("{word:?} is no table"));
                }
                Token::Word(_) => {}
            }
            // What follows is a command of its own.
            first = match token {
                Token::Mark(';') => true,
                Token::Mark('}') => depth == 0,
                _ => false,
            };
        }
    }
    match depth {
        0 => Ok(()),
        _ => Err("a table has no end".to_owned()),
    }
}

/// A part of a line of `nft`.
enum Token<'l> {
    /// A keyword, a name, a number.
    Word(&'l str),
    /// Text between quotation marks.
    Text,
    /// A sign that separates.
    Mark(char),
}

/// The parts of a line, up to a comment.
fn tokens(line: &str) -> impl Iterator<Item = Result<Token<'_>, &'static str>> {
    let mut rest = line;
    std::iter::from_fn(move || {
        rest = rest.trim_start_matches([' ', '\t']);
        let first = rest.chars().next()?;
        let (token, len) = match first {
            '#' => {
                rest = "";
                return None;
            }
            '"' => match rest.get(1..).and_then(|text| text.find('"')) {
                Some(end) => (Ok(Token::Text), end + 2),
                None => (Err("a text has no end"), rest.len()),
            },
            '\\' => (Err("a backslash"), rest.len()),
            '$' => (Err("a variable"), rest.len()),
            '\'' | '`' => (Err("a quotation mark that nft does not print"), rest.len()),
            c if c.is_control() => (Err("a control character"), rest.len()),
            // It would end a word before it begins, for ever: `a {` and U+00A0 did.
            c if c.is_whitespace() => (Err("a space that nft does not print"), rest.len()),
            '{' | '}' | ';' | ',' | '=' | '(' | ')' => (Ok(Token::Mark(first)), 1),
            _ => {
                let ends = |c: char| c.is_whitespace() || "{};,=()\"#\\$'`".contains(c);
                let len = rest.find(ends).unwrap_or(rest.len());
                (rest.get(..len).map(Token::Word).ok_or("no text"), len)
            }
        };
        rest = rest.get(len..).unwrap_or_default();
        Some(token)
    })
}

/// Why a line is none that `iptables-save` prints.
///
/// # Errors
/// The line, and what is wrong with it.
pub fn check_iptables(rules: &str) -> Result<(), String> {
    for (number, line) in rules.lines().enumerate() {
        iptables_line(line).map_err(|what| format!("line {}: {what}", number + 1))?;
    }
    Ok(())
}

fn iptables_line(line: &str) -> Result<(), String> {
    const TABLES: [&str; 5] = ["filter", "nat", "mangle", "raw", "security"];
    if line.is_empty() || line.starts_with('#') || line == "COMMIT" {
        return Ok(());
    }
    if let Some(table) = line.strip_prefix('*') {
        return match TABLES.contains(&table) {
            true => Ok(()),
            false => Err(format!("there is no table {table:?}")),
        };
    }
    let words = words(line)?;
    let mut words = words.iter().map(String::as_str);
    let first = match words.next() {
        // Counters.
        Some(word) if word.starts_with('[') => words.next(),
        word => word,
    };
    match first {
        Some(":") | None => Err("no rule".to_owned()),
        Some(chain) if chain.starts_with(':') => {
            match words.all(|word| !word.starts_with('-') || word == "-") {
                true => Ok(()),
                false => Err("a chain with an option".to_owned()),
            }
        }
        Some("-A") => {
            let chain = words.next().unwrap_or_default();
            match chain.is_empty() || chain.starts_with('-') {
                true => Err("a rule without a chain".to_owned()),
                false => options(words),
            }
        }
        Some(word) => Err(format!("{word:?} is no rule")),
    }
}

/// The options of a rule: those that iptables-save prints. The program takes abbreviations.
fn options<'w>(words: impl Iterator<Item = &'w str>) -> Result<(), String> {
    const SHORT: [&str; 10] = ["-p", "-s", "-d", "-i", "-o", "-m", "-j", "-g", "-f", "-c"];
    /// What makes the program run another one, read a file, or leave the table.
    const FORBIDDEN: [&str; 3] = ["modprobe", "object-pinned", "table"];
    /// What makes it load the file of an extension: a chain, too, that does not exist.
    const NAMES_FILE: [&str; 4] = ["match", "jump", "goto", "protocol"];
    let mut names_file = false;
    for word in words {
        if names_file && word.contains('/') {
            return Err(format!("{word:?} is no name of an extension"));
        }
        names_file = matches!(word, "-m" | "-j" | "-g" | "-p");
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
            None if SHORT.contains(&word) => {}
            None => return Err(format!("the option {word:?}")),
        }
    }
    Ok(())
}

/// The words of a line, as iptables-restore takes it apart: quotation marks hold a word
/// together, a backslash takes the next character as it is.
fn words(line: &str) -> Result<Vec<String>, String> {
    let (mut all, mut word, mut quoted, mut begun) = (vec![], String::new(), false, false);
    let mut chars = line.chars();
    while let Some(c) = chars.next() {
        match c {
            '"' => (quoted, begun) = (!quoted, true),
            '\\' if quoted => word.push(chars.next().ok_or("it ends with a backslash")?),
            '\\' => return Err("a backslash".to_owned()),
            ' ' | '\t' if !quoted => {
                if begun {
                    all.push(std::mem::take(&mut word));
                }
                begun = false;
            }
            c if c.is_control() => return Err("a control character".to_owned()),
            c => {
                word.push(c);
                begun = true;
            }
        }
    }
    if quoted {
        return Err("a text has no end".to_owned());
    }
    if begun {
        all.push(word);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// All of the rules are looked at, however much stands before.
    #[test]
    fn rules_behind_much_else() {
        let dir = tempfile::tempdir().unwrap();
        let images = ImageDir::open(dir.path()).unwrap();
        let read = |text: &str| {
            let mut writer = images.writer(kind::NFTABLES, 3).unwrap();
            writer.raw(text.as_bytes()).unwrap();
            writer.finish().unwrap();
            PacketFilter::read(&images, kind::NFTABLES, 3)
        };
        assert_eq!(read("table ip t {\n}\n").unwrap().unwrap().text(), "table ip t {\n}\n");
        let much = format!("# {}\n", "x".repeat(64 << 20));
        let error = read(&format!("{much}include \"/etc/passwd\"\n")).unwrap_err().to_string();
        assert!(error.starts_with("nftables-3.img: line 2: \"include\""), "{error}");
        assert_eq!(PacketFilter::read(&images, kind::NFTABLES, 4).unwrap(), None);
    }

    #[test]
    fn what_nft_prints() {
        let rules = "table inet t {\n\tset s {\n\t\ttype ipv4_addr\n\t\telements = { 10.0.0.1, \
                     10.0.0.2 timeout 1h }\n\t}\n\n\tchain c {\n\t\ttype filter hook input \
                     priority filter; policy accept;\n\t\tip saddr @s log prefix \"include \" \
                     accept comment \"define $x\" # handle 3\n\t\tiifname \"eth*\" tcp dport \
                     { 22, 80 } drop\n\t}\n}\ntable ip t { }; table ip6 t { }\n# Warning: table ip x is managed by iptables-nft\n";
        check_nftables(rules).unwrap();
        check_nftables("").unwrap();
    }

    #[test]
    fn what_nft_does_not_print() {
        for (rules, why) in [
            ("include \"/etc/passwd\"", "line 1: \"include\""),
            ("table ip t {\n include \"/x\"\n}", "line 2: \"include\""),
            ("table ip t { chain c { }; include \"/x\"; }", "\"include\""),
            ("table ip t { }; include \"/x\"", "\"include\""),
            ("\tinclude\"/x\"", "\"include\""),
            ("define a = 1", "\"define\""),
            ("add rule ip t c drop", "\"add\" is no table"),
            ("flush ruleset", "\"flush\" is no table"),
            ("table ip t { } ; flush ruleset", "\"flush\" is no table"),
            ("table ip t { } flush ruleset", "\"flush\" is no table"),
            ("table ip t {\n}; delete table ip x", "line 2: \"delete\" is no table"),
            ("table ip t { chain c { }; } ;; monitor", "\"monitor\" is no table"),
            ("; monitor", "\"monitor\" is no table"),
            ("table ip t {\n ip saddr $x\n}", "a variable"),
            ("table ip t {\n incl\\\nude \"/x\"\n}", "a backslash"),
            ("table ip t {\n !include \"/x\"\n}", "\"!include\""),
            ("table ip t {", "no end"),
            ("}", "without its beginning"),
            ("table ip t { \"}", "a text has no end"),
            ("table ip t {\u{a0}}", "a space that nft does not print"),
            ("table ip t { a\u{2028}b }", "a space that nft does not print"),
        ] {
            let found = check_nftables(rules).unwrap_err();
            assert!(found.contains(why), "{rules:?}: {found}");
        }
    }

    #[test]
    fn what_iptables_prints() {
        check_iptables(
            "# Generated by iptables-save v1.8.9\n*filter\n:INPUT ACCEPT [0:0]\n:MINE - [0:0]\n\
             -A INPUT -s 10.0.0.0/8 ! -d 1.2.3.4/32 -i eth0 -p tcp -m tcp --dport 22 -m comment \
             --comment \"a \\\"b\\\" c\" -j MINE\n[3:4] -A MINE -m conntrack --ctstate \
             RELATED,ESTABLISHED -j LOG --log-prefix \"x: \" --log-level 7\n-A MINE -m mark --mark \
             0x1/0xff -g MINE\nCOMMIT\n# Completed\n",
        )
        .unwrap();
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
        ] {
            assert!(check_iptables(rules).is_err(), "{rules:?}");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_text_comes_to_an_end(text in r"(\PC|[a-z\-]|\s|[{};,=()])*") {
            let _ = check_nftables(&text);
            let _ = check_nftables(&format!("table t {{{text}"));
            let _ = check_iptables(&text);
            let _ = check_iptables(&format!("-A {text}"));
        }
    }
}
