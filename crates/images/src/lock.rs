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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_the_name_that_criu_gives_it() {
        assert_eq!(table("0a5f76b7-695d-43ef-8f62-e53f69704809"), "CRIU-0a5f76b7-695d-43ef-8f");
        assert_eq!(table("42"), "CRIU-42");
    }
}
