//! Rules of nftables, as `nft list ruleset` prints them.

use super::lines::lines;

/// Words with which a statement does something else than to describe a rule.
const FORBIDDEN: [&str; 4] = ["include", "define", "undefine", "redefine"];

const FAMILIES: [&str; 6] = ["ip", "ip6", "inet", "arp", "bridge", "netdev"];

/// What a table is made of: the words with which its statements begin.
const PARTS: [&str; 13] = [
    "chain",
    "set",
    "map",
    "flowtable",
    "counter",
    "quota",
    "limit",
    "ct",
    "secmark",
    "synproxy",
    "tunnel",
    "flags",
    "comment",
];

/// The rules without comments.
///
/// # Errors
/// The line that `nft list ruleset` does not print, and what is wrong with it.
pub(super) fn read(rules: &str) -> Result<String, String> {
    let mut reader = RulesetReader::default();
    let out = lines(rules, |line, out| {
        // A line can be as long as all the rules: its parts are not kept.
        let mut all = Tokens { rest: line };
        all.try_for_each(|token| token.map(drop))?;
        let meant = line.get(..line.len() - all.rest.len()).unwrap_or_default();
        Tokens { rest: meant }.try_for_each(|token| reader.token(&token?))?;
        reader.end_of_line()?;
        out.push_str(meant.trim_end_matches([' ', '\t']));
        Ok(())
    })?;
    match reader.depth {
        0 => Ok(out),
        _ => Err("a table has no end".to_owned()),
    }
}

/// Where in the rules a reader is.
#[derive(Default)]
struct RulesetReader<'r> {
    /// How many braces are open.
    depth: u32,
    /// The words since the statement began, outside of tables.
    head: Vec<&'r str>,
    /// Whether the statement has begun.
    inside: bool,
}

impl<'r> RulesetReader<'r> {
    fn token(&mut self, token: &RuleToken<'r>) -> Result<(), String> {
        let begins = !self.inside;
        self.inside = !matches!(token, RuleToken::Mark('{' | '}' | ';'));
        match *token {
            RuleToken::Mark('{') => {
                if self.depth == 0 && !is_table(&std::mem::take(&mut self.head)) {
                    return Err("it is no table".to_owned());
                }
                self.depth += 1;
            }
            RuleToken::Mark('}') => {
                let depth = self.depth.checked_sub(1);
                self.depth = depth.ok_or("a brace without its beginning")?;
            }
            RuleToken::Mark(';') if self.head.is_empty() => {}
            RuleToken::Word(word) if has_forbidden(word) => {
                return Err(format!("{word:?} is no part of a rule"));
            }
            RuleToken::Word(word) if self.depth == 0 => {
                if begins && word != "table" {
                    return Err(format!("{word:?} is no table"));
                }
                self.head.push(word);
                if self.head.len() > 3 {
                    return Err("it is no table".to_owned());
                }
            }
            RuleToken::Mark(_) | RuleToken::Text if self.depth == 0 => {
                return Err("it is no table".to_owned());
            }
            RuleToken::Word(word) if begins && self.depth == 1 && !PARTS.contains(&word) => {
                return Err(format!("{word:?} is no part of a table"));
            }
            RuleToken::Mark(_) | RuleToken::Text if begins && self.depth == 1 => {
                return Err("it is no part of a table".to_owned());
            }
            RuleToken::Word(_) | RuleToken::Mark(_) | RuleToken::Text => {}
        }
        Ok(())
    }

    /// A statement ends where its line does, but for what stands between braces.
    fn end_of_line(&mut self) -> Result<(), String> {
        self.inside = false;
        match self.head.is_empty() {
            true => Ok(()),
            false => Err("it is no table".to_owned()),
        }
    }
}

/// Whether a statement with these words before its brace is a table.
fn is_table(head: &[&str]) -> bool {
    match head {
        ["table", _] => true,
        ["table", family, _] => FAMILIES.contains(family),
        _ => false,
    }
}

/// Whether `nft` could take a part of a word for a statement: it needs no space between signs, numbers and
/// words.
fn has_forbidden(word: &str) -> bool {
    // Where an address or a number ends, and a word begins, is up to nft: `fe80::ainclude`, `0x1include`.
    let is_name = |part: &str| part.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
    let is_sign = |c: char| !c.is_ascii_alphanumeric() && c != '_';
    let has_one = |part: &str| FORBIDDEN.iter().any(|forbidden| part.contains(forbidden));
    word.contains(':') && has_one(word)
        || word.split(is_sign).any(|part| {
            FORBIDDEN.contains(&part) || !part.is_empty() && !is_name(part) && has_one(part)
        })
}

/// A part of a line.
enum RuleToken<'l> {
    /// A keyword, a name, a number.
    Word(&'l str),
    /// Text between quotation marks.
    Text,
    /// A sign that separates.
    Mark(char),
}

/// The parts of a line up to a comment, where it stops.
struct Tokens<'l> {
    rest: &'l str,
}

impl<'l> Iterator for Tokens<'l> {
    type Item = Result<RuleToken<'l>, &'static str>;

    fn next(&mut self) -> Option<Self::Item> {
        self.rest = self.rest.trim_start_matches([' ', '\t']);
        let rest = self.rest;
        let token = match rest.chars().next()? {
            '#' => return None,
            '"' => match rest.get(1..).and_then(|text| text.find('"')) {
                Some(end) => Ok((RuleToken::Text, end + 2)),
                None => Err("a text has no end"),
            },
            '\\' => Err("a backslash"),
            '$' => Err("a variable"),
            '\'' | '`' => Err("a quotation mark that nft does not print"),
            c if c.is_control() => Err("a control character"),
            // It would end a word before it begins, for ever: `a {` and U+00A0 did.
            c if c.is_whitespace() => Err("a space that nft does not print"),
            mark @ ('{' | '}' | ';' | ',' | '=' | '(' | ')') => Ok((RuleToken::Mark(mark), 1)),
            _ => {
                let ends = |c: char| c.is_whitespace() || "{};,=()\"#\\$'`".contains(c);
                let len = rest.find(ends).unwrap_or(rest.len());
                rest.get(..len).map(|word| (RuleToken::Word(word), len)).ok_or("no text")
            }
        };
        let len = token.as_ref().map_or(rest.len(), |(_, len)| *len);
        self.rest = rest.get(len..).unwrap_or_default();
        Some(token.map(|(token, _)| token))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn what_nft_prints() {
        let rules = "table inet t {\n\tset s {\n\t\ttype ipv4_addr\n\t\telements = { 10.0.0.1, \
                     10.0.0.2 timeout 1h }\n\t}\n\n\tchain c {\n\t\ttype filter hook input \
                     priority filter; policy accept;\n\t\tip saddr @s log prefix \"include \" \
                     accept comment \"define $x\" # handle 3\n\t\tiifname \"eth*\" tcp dport \
                     { 22, 80 } drop\n\t}\n}\ntable ip t { }; table ip6 t { }\n# Warning: table ip x is managed by iptables-nft\n";
        let read_of = read(rules).unwrap();
        assert_eq!(
            read_of,
            rules
                .replace(" # handle 3", "")
                .replace("# Warning: table ip x is managed by iptables-nft", "")
        );
        assert_eq!(read("").unwrap(), "");
    }

    /// All that a table can have, as `nft` prints it.
    #[test]
    fn what_a_table_is_made_of() {
        let rules = "table ip t {\n\tcomment \"of x\"\n\tflags dormant\n\n\tcounter c {\n\t\tcomment \"a\"\n\t\t\
                     packets 0 bytes 0\n\t}\n\n\tquota q {\n\t\t25 mbytes\n\t}\n\n\tct helper h {\n\t\ttype \"ftp\" \
                     protocol tcp\n\t\tl3proto ip\n\t}\n\n\tlimit l {\n\t\trate 1/second\n\t}\n\n\tsynproxy y {\n\t\t\
                     mss 1460\n\t\twscale 7\n\t\ttimestamp sack-perm\n\t}\n\n\tmap m {\n\t\ttype ipv4_addr : verdict\n\
                     \t\telements = { 10.0.0.1 : jump user_defined,\n\t\t\t     10.0.0.2 : accept }\n\t}\n\n\t\
                     flowtable f {\n\t\thook ingress priority filter\n\t\tdevices = { lo }\n\t}\n\n\tchain \
                     user_defined {\n\t\tct state established,related counter name \"c\" accept\n\t\tip6 saddr \
                     fe80::def/64 meta mark set 0x000000de drop\n\t\ttcp flags & (fin | syn) == syn th dport \
                     >= 1024 return\n\t}\n}\n";
        assert_eq!(read(rules).unwrap(), rules);
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
            // Where a number or an address ends, a word begins.
            ("table ip t 1include \"/x\";", "\"1include\""),
            ("table ip t { chain c {\n 0x1include \"/x\"\n} }", "\"0x1include\""),
            ("table ip t { chain c {\n 1dundefine x\n} }", "\"1dundefine\""),
            ("table ip t { chain c {\n fe80::ainclude \"/x\"\n} }", "\"fe80::ainclude\""),
            ("table ip t { chain c {\n 10.0.0.1/8include \"/x\"\n} }", "8include\""),
            // What is no table, and no part of one.
            ("table ip t\n", "it is no table"),
            ("table ip t;", "it is no table"),
            ("table ip t x { }", "it is no table"),
            ("table evil t { }", "it is no table"),
            ("table ip \"t\" { }", "it is no table"),
            ("{ }", "it is no table"),
            ("table ip t { list ruleset; }", "\"list\" is no part of a table"),
            ("table ip t {\n add chain c\n}", "\"add\" is no part of a table"),
            ("table ip t {\n \"/x\"\n}", "it is no part of a table"),
            ("table ip t { chain c { } drop }", "\"drop\" is no part of a table"),
        ] {
            let found = read(rules).unwrap_err();
            assert!(found.contains(why), "{rules:?}: {found}");
        }
    }
}
