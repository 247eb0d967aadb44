//! User and group ids in mount options: the kernel shows them as the host sees
//! them and takes them as the user namespace of the mounter does.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use super::fs::{join_options, split_options};
use crate::dump::Dump;
use crate::error::Result;
use crate::namespace::NsKind;
use crate::proc;

/// The way from the ids of the host to those of the tasks.
#[derive(Debug, Default)]
pub struct Translation {
    users: Vec<Range>,
    groups: Vec<Range>,
}

/// A line of `/proc/PID/uid_map`.
#[derive(Debug, Clone, Copy)]
struct Range {
    inside: u32,
    outside: u32,
    count: u32,
}

impl Translation {
    /// For the user namespace of the tree.
    ///
    /// # Errors
    /// The kernel's.
    pub fn of(cx: &Dump<'_>) -> Result<Self> {
        let ns = cx.ns.of_kind(NsKind::User).next().filter(|ns| !ns.is_host);
        let Some(task) = ns.and_then(|ns| cx.tasks.get(ns.task)) else {
            return Ok(Translation::default());
        };
        Ok(Translation {
            users: parse(&proc::read(task.pid, "uid_map")?),
            groups: parse(&proc::read(task.pid, "gid_map")?),
        })
    }

    /// The options as the tasks would give them.
    pub fn options(&self, options: &OsStr) -> OsString {
        let translated: Vec<OsString> = split_options(options).map(|o| self.option(o)).collect();
        join_options(translated.iter().map(OsString::as_os_str))
    }

    fn option(&self, option: &OsStr) -> OsString {
        for (key, map) in [("uid=", &self.users), ("gid=", &self.groups)] {
            let id = option.as_bytes().strip_prefix(key.as_bytes());
            let id = id.and_then(|id| std::str::from_utf8(id).ok()?.parse::<u32>().ok());
            if let Some(inside) = id.and_then(|id| map.iter().find_map(|r| r.inside(id))) {
                return OsString::from_vec(format!("{key}{inside}").into_bytes());
            }
        }
        option.to_owned()
    }
}

impl Range {
    fn inside(&self, outside: u32) -> Option<u32> {
        let at = outside.checked_sub(self.outside).filter(|at| *at < self.count)?;
        self.inside.checked_add(at)
    }
}

fn parse(map: &str) -> Vec<Range> {
    let line = |line: &str| {
        let mut numbers = line.split_ascii_whitespace().map(str::parse);
        let mut next = || numbers.next()?.ok();
        Some(Range { inside: next()?, outside: next()?, count: next()? })
    };
    map.lines().filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_options_are_translated() {
        let users = parse("         0     100000      65536\n");
        let translation = Translation { groups: users.clone(), users };
        let options = translation.options(OsStr::new("size=4k,uid=100000,gid=100005,mode=620"));
        assert_eq!(options, "size=4k,uid=0,gid=5,mode=620");
        assert_eq!(translation.options(OsStr::new("uid=7")), "uid=7");
        assert_eq!(Translation::default().options(OsStr::new("gid=5")), "gid=5");
    }
}
