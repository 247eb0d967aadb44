//! What holds the network still while the tasks of a checkpoint are asleep, so that it answers nobody in
//! their name, by the names that CRIU gives.

/// How long `inet` and the name of a table are together, in bytes: CRIU has no more room.
const MAX_NAME: usize = 31;
/// The family of the tables.
pub const FAMILY: &str = "inet";

/// Packets with this mark pass a lock: the restore's own.
pub const MARK: u32 = 0xC114;

/// How the names of tables begin.
const PREFIX: &str = "CRIU-";

/// How the names of files end that note tables.
const NOTE: &str = ".lock";

/// The table of nftables of the dump with this id (`dump_criu_run_id`).
#[must_use]
pub fn table(id: &str) -> String {
    let mut name = format!("{PREFIX}{id}");
    name.truncate(MAX_NAME - FAMILY.len() - 1);
    name
}

/// Whether this is the name of such a table.
#[must_use]
pub fn is_table(name: &str) -> bool {
    name.starts_with(PREFIX)
}

/// The words of the command that removes a table.
#[must_use]
pub fn removal(table: &str) -> Vec<String> {
    ["nft", "delete", "table", FAMILY, table].map(str::to_owned).to_vec()
}

/// The name of the empty file that notes, beside the images of a dump that is under way, which table it has made: a dump
/// that is killed with what would undo its work leaves both. It goes when the inventory names the table.
#[must_use]
pub fn note(table: &str) -> String {
    format!("{table}{NOTE}")
}

/// The table that a file of this name notes.
#[must_use]
pub fn noted(file: &str) -> Option<&str> {
    // It becomes a word of a command: nothing but what our own names are made of.
    let is_plain = |table: &&str| {
        let id = table.strip_prefix(PREFIX).unwrap_or_default();
        !id.is_empty() && id.bytes().all(|b| b.is_ascii_hexdigit() || b == b'-')
    };
    file.strip_suffix(NOTE).filter(is_plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_the_name_that_criu_gives_it() {
        assert_eq!(table("0a5f76b7-695d-43ef-8f62-e53f69704809"), "CRIU-0a5f76b7-695d-43ef-8f");
        assert_eq!(table("42"), "CRIU-42");
    }

    #[test]
    fn a_note_names_a_table_and_nothing_else() {
        let table = table("0a5f76b7-695d-43ef-8f62-e53f69704809");
        assert_eq!(noted(&note(&table)), Some(table.as_str()));
        for other in ["CRIU-42", "filter.lock", "CRIU-.lock", "CRIU-4;2.lock", ".lock"] {
            assert_eq!(noted(other), None, "{other}");
        }
    }
}
