//! The words that the configuration of a container has for how something is mounted.
//!
//! What a word takes away has to be known, or nobody can say whether images give more. So a word that is not known
//! narrows a mount as no flag can, and for a file system that is made it has to be among the options of the images.

use crate::mount::Mount;
use crate::spec::SpecMount;

/// Flags of mount(2) that take rights away, and their names.
pub(crate) const NARROW: [(u32, &str); 5] = [
    (READ_ONLY, "ro"),
    (mount_flag(libc::MS_NOSUID), "nosuid"),
    (mount_flag(libc::MS_NODEV), "nodev"),
    (mount_flag(libc::MS_NOEXEC), "noexec"),
    (mount_flag(libc::MS_NOSYMFOLLOW), "nosymfollow"),
];
pub(crate) const READ_ONLY: u32 = mount_flag(libc::MS_RDONLY);
/// Stands for a word of which nobody here knows what it takes away. No flag of mount(2) that a mount has is this one.
const UNKNOWN: u32 = 1 << 31;

/// A flag of mount(2) in the width in which images have all of them: none has more bits.
pub(crate) const fn mount_flag(flag: libc::c_ulong) -> u32 {
    (flag & 0xffff_ffff) as u32
}

/// Words that take nothing away. Those of [`NARROW`] and these can have an `r` before them, for what is mounted below
/// as well.
const PLAIN: [&str; 21] = [
    "rw",
    "suid",
    "dev",
    "exec",
    "symfollow",
    "atime",
    "noatime",
    "diratime",
    "nodiratime",
    "relatime",
    "norelatime",
    "strictatime",
    "nostrictatime",
    "bind",
    "private",
    "slave",
    "shared",
    "unbindable",
    "sync",
    "async",
    "dirsync",
];
/// Those that cannot.
const ONCE: [&str; 16] = [
    "defaults",
    "remount",
    "mand",
    "nomand",
    "lazytime",
    "nolazytime",
    "iversion",
    "noiversion",
    "acl",
    "noacl",
    "silent",
    "loud",
    "tmpcopyup",
    "copy-symlink",
    "src-nofollow",
    "dest-nofollow",
];
/// Keys of file systems that take nothing away from the tasks, or that are compared by their values.
const OF_FILE_SYSTEMS: [&str; 37] = [
    "mode",
    "uid",
    "gid",
    "size",
    "nr_blocks",
    "nr_inodes",
    "huge",
    "mpol",
    "inode32",
    "inode64",
    "hidepid",
    "newinstance",
    "ptmxmode",
    "context",
    "fscontext",
    "defcontext",
    "rootcontext",
    "seclabel",
    "all",
    "none",
    "name",
    "xattr",
    "noprefix",
    "clone_children",
    "cpuset_v2_mode",
    "nsdelegate",
    "favordynmods",
    "memory_localevents",
    "memory_recursiveprot",
    "memory_hugetlb_accounting",
    "pids_localevents",
    "lowerdir",
    "upperdir",
    "workdir",
    "index",
    "xino",
    "metacopy",
];

/// Words with which a runtime shows what is there as it is mounted there; with each other one it mounts it anew.
const AS_IT_IS: [&str; 5] = ["bind", "private", "slave", "shared", "unbindable"];

/// Whether a word says nothing of how something is mounted that is there already.
pub(crate) fn keeps_flags(word: &str) -> bool {
    AS_IT_IS.contains(&word.strip_prefix('r').unwrap_or(word))
}

/// The flags of a configured mount that take rights away.
pub(crate) fn flags(wanted: &SpecMount) -> u32 {
    let named = wanted.options.iter().filter_map(|word| flag(word)).fold(0, |all, flag| all | flag);
    let maps_ids = !wanted.uid_mappings.is_empty() || !wanted.gid_mappings.is_empty();
    let strange = wanted.is_bind() && wanted.options.iter().any(|word| !is_known(word));
    named | if maps_ids || strange { UNKNOWN } else { 0 }
}

/// The flag that a word stands for, if it takes a right away.
fn flag(word: &str) -> Option<u32> {
    let of = |word: &str| NARROW.iter().find(|(_, name)| *name == word).map(|(flag, _)| *flag);
    of(word).or_else(|| of(word.strip_prefix('r')?))
}

/// Whether the word of a mount of what is there already is known: it is a flag.
fn is_known(word: &str) -> bool {
    let recursive = word.strip_prefix('r').is_some_and(|word| PLAIN.contains(&word));
    flag(word).is_some() || recursive || PLAIN.contains(&word) || ONCE.contains(&word)
}

/// The flags that take rights away which a mount lacks, of those in `wanted`.
pub(crate) fn lost(wanted: u32, mount: &Mount) -> Vec<&'static str> {
    let lost = NARROW.iter().filter(|(flag, _)| wanted & flag != 0 && mount.flags & flag == 0);
    let unknown = (wanted & UNKNOWN != 0).then_some("with options that a restore does not know");
    lost.map(|(_, name)| *name).chain(unknown).collect()
}

/// What of the options that the configuration has for a file system the one of the images lacks. `memory`: that of this
/// host, in bytes.
pub(crate) fn looser(wanted: &SpecMount, mount: &Mount, memory: u64) -> Option<String> {
    let options = mount.fs.options();
    let shown: Vec<&str> = options.split(',').collect();
    let mut words = wanted.options.iter().map(String::as_str);
    let of_type = |word: &str| OF_FILE_SYSTEMS.contains(&key(word)) || is_controller(wanted, word);
    let lacks = |word: &&str| !is_known(word) && !of_type(word) && !shown.contains(word);
    if let Some(word) = words.clone().find(lacks) {
        return Some(word.to_owned());
    }
    match wanted.kind.as_str() {
        "proc" => words.find(|word| !hides_as_much(word, &wanted.options, &shown)),
        "tmpfs" => words.find(|word| !holds_no_more(word, &shown, memory)),
        _ => None,
    }
    .map(str::to_owned)
}

fn key(word: &str) -> &str {
    word.split('=').next().unwrap_or_default()
}

fn value<'w>(word: &'w str, of: &str) -> Option<&'w str> {
    word.split_once('=').filter(|(key, _)| *key == of).map(|(_, value)| value)
}

/// The controllers of a hierarchy.
fn is_controller(wanted: &SpecMount, word: &str) -> bool {
    wanted.kind == "cgroup" && word.chars().all(|c| c.is_ascii_lowercase() || "_,".contains(c))
}

/// Whether a procfs hides the processes of others as the configuration says.
fn hides_as_much(word: &str, wanted: &[String], shown: &[&str]) -> bool {
    let Some(hides) = value(word, "hidepid").map(hiding) else { return true };
    let as_much = shown.iter().any(|word| value(word, "hidepid").map(hiding) == Some(hides));
    // They are shown to this group all the same.
    let mut groups = shown.iter().filter(|word| key(word) == "gid");
    hides == "0" || as_much && groups.all(|group| wanted.iter().any(|word| word == group))
}

/// The numbers that `hidepid` has names for (filesystems/proc.rst).
fn hiding(value: &str) -> &str {
    match value {
        "off" => "0",
        "noaccess" => "1",
        "invisible" => "2",
        "ptraceable" => "4",
        number => number,
    }
}

/// Whether a tmpfs has no more room than the configuration says.
fn holds_no_more(word: &str, shown: &[&str], memory: u64) -> bool {
    // The kernel gives a tmpfs whole pages, and does not show what it gives each.
    const PAGE: u64 = 4096;
    const LARGEST_PAGE: u64 = 1 << 16;
    let bytes = |word: &str| match key(word) {
        "size" => value(word, "size").map(|value| amount(value, memory)),
        "nr_blocks" => {
            value(word, "nr_blocks").map(|value| amount(value, memory).saturating_mul(PAGE))
        }
        _ => None,
    };
    let inodes = |word: &str| value(word, "nr_inodes").map(|value| amount(value, memory));
    let most = |of: &dyn Fn(&str) -> Option<u64>| shown.iter().filter_map(|word| of(word)).max();
    let half = memory / 2;
    match (bytes(word), inodes(word)) {
        (Some(given), _) => most(&bytes).unwrap_or(half) <= given.saturating_add(LARGEST_PAGE),
        (_, Some(given)) => most(&inodes).unwrap_or(half / PAGE) <= given,
        _ => true,
    }
}

/// A number as the kernel reads it (memparse, or a share of the memory); 0 is no limit, and so is what makes no sense.
fn amount(text: &str, memory: u64) -> u64 {
    let text = text.trim();
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let Ok(number) = digits.parse::<u64>() else { return u64::MAX };
    let bits = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        "p" => 50,
        "%" => return (memory / 100).saturating_mul(number),
        _ => return u64::MAX,
    };
    match number {
        0 => u64::MAX,
        number => number.saturating_mul(1 << bits),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mount::FileSystem;

    fn wanted(kind: &str, options: &[&str]) -> SpecMount {
        let options = options.iter().map(|&word| word.to_owned()).collect();
        SpecMount { kind: kind.to_owned(), options, ..SpecMount::default() }
    }

    #[test]
    fn words_take_away_what_their_plain_forms_take_away() {
        let of = |options: &[&str]| flags(&wanted("bind", options));
        for (flag, word) in NARROW {
            assert_eq!([of(&[word]), of(&["rbind", &format!("r{word}")])], [flag; 2], "{word}");
        }
        assert_eq!(of(&["rbind", "rw", "rprivate", "rro", "rnosuid", "rrelatime", "rrw"]), 3);
        // What nobody knows is lost, whatever flags a mount has.
        for word in
            ["idmap", "ridmap", "idmap=uids=0-1-2", "RO", "rrro", "x", "", "r", "subset=pid"]
        {
            let all = Mount { flags: u32::MAX, ..Mount::default() };
            let lost = lost(of(&["bind", word]), &all);
            assert_eq!(lost, ["with options that a restore does not know"], "{word}");
        }
        let mapped = SpecMount { uid_mappings: vec![serde::de::IgnoredAny], ..wanted("bind", &[]) };
        assert_eq!(flags(&mapped), UNKNOWN);
        // File systems that are made have options of their own.
        assert_eq!(flags(&wanted("tmpfs", &["nosuid", "mode=755", "noswap"])), 2);
    }

    /// The kernel shows options in its own words, and not those that have their usual values.
    #[test]
    fn file_systems_have_the_options_that_take_something_away() {
        let memory = 1 << 30;
        let of = |kind: &str, options: &[&str], shown: &str| {
            let fs = FileSystem { options: shown.into(), ..FileSystem::default() };
            looser(&wanted(kind, options), &Mount { fs, ..Mount::default() }, memory)
        };
        for (kind, options, shown) in [
            ("proc", &["hidepid=invisible", "nosuid"][..], "hidepid=2"),
            ("proc", &["hidepid=2", "gid=7", "subset=pid"], "gid=7,hidepid=invisible,subset=pid"),
            ("proc", &["hidepid=off"], ""),
            ("tmpfs", &["size=64m", "mode=1777", "uid=7"], "size=65536k,inode64"),
            ("tmpfs", &["size=1000"], "size=4k"),
            ("tmpfs", &["size=50%"], ""),
            ("tmpfs", &["size=1g", "tmpcopyup"], ""),
            ("tmpfs", &["nr_inodes=10k", "nr_blocks=4"], "size=16k,nr_inodes=10240"),
            ("tmpfs", &["noswap"], "noswap"),
            ("devpts", &["newinstance", "ptmxmode=0666", "mode=0620", "gid=5"], "gid=5,mode=620"),
            ("cgroup", &["memory", "ro"], "memory"),
        ] {
            assert_eq!(of(kind, options, shown), None, "{options:?} {shown}");
        }
        for (kind, options, shown, lost) in [
            ("proc", &["hidepid=invisible"][..], "", "hidepid=invisible"),
            ("proc", &["hidepid=invisible"], "hidepid=noaccess", "hidepid=invisible"),
            ("proc", &["hidepid=2"], "hidepid=invisible,gid=0", "hidepid=2"),
            ("proc", &["nosuid", "subset=pid"], "", "subset=pid"),
            ("tmpfs", &["size=1m"], "", "size=1m"),
            ("tmpfs", &["size=1m"], "size=2048k", "size=1m"),
            ("tmpfs", &["size=1m"], "size=1024k,size=0", "size=1m"),
            ("tmpfs", &["size=1m"], "size=1024k,nr_blocks=1g", "size=1m"),
            ("tmpfs", &["size=1m"], "size=lots", "size=1m"),
            ("tmpfs", &["size=10%"], "size=900m", "size=10%"),
            ("tmpfs", &["nr_inodes=5"], "size=4k", "nr_inodes=5"),
            ("tmpfs", &["noswap"], "", "noswap"),
            ("sysfs", &["new-word"], "", "new-word"),
        ] {
            assert_eq!(of(kind, options, shown).as_deref(), Some(lost), "{options:?} {shown}");
        }
    }
}
