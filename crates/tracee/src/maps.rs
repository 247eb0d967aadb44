//! `/proc/PID/maps`.

/// A line of `/proc/PID/maps`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapping {
    /// First address.
    pub start: u64,
    /// Address behind the last byte.
    pub end: u64,
    /// `PROT_*` bits.
    pub prot: i32,
    /// Whether it is shared.
    pub shared: bool,
    /// Offset into the file.
    pub offset: u64,
    /// Device of the file.
    pub dev: u64,
    /// Inode number of the file, 0 for none.
    pub inode: u64,
    /// The path or the name in brackets; escapes are left as they are.
    pub name: String,
}

/// Parses the content of `/proc/PID/maps`; lines that do not parse are the
/// kernel's bug and are left out.
pub fn parse_maps(text: &str) -> Vec<Mapping> {
    text.lines().filter_map(parse_line).collect()
}

fn parse_line(line: &str) -> Option<Mapping> {
    let mut fields = line.splitn(6, ' ');
    let (start, end) = fields.next()?.split_once('-')?;
    let perms = fields.next()?.as_bytes();
    let offset = fields.next()?;
    let (major, minor) = fields.next()?.split_once(':')?;
    let inode = fields.next()?;
    let name = fields.next().unwrap_or("").trim_start();
    let hex = |s: &str| u64::from_str_radix(s, 16).ok();
    let flag = |i: usize, c: u8, bit: i32| if perms.get(i) == Some(&c) { bit } else { 0 };
    Some(Mapping {
        start: hex(start)?,
        end: hex(end)?,
        prot: flag(0, b'r', libc::PROT_READ)
            | flag(1, b'w', libc::PROT_WRITE)
            | flag(2, b'x', libc::PROT_EXEC),
        shared: perms.get(3) == Some(&b's'),
        offset: hex(offset)?,
        dev: rustix::fs::makedev(
            u32::try_from(hex(major)?).ok()?,
            u32::try_from(hex(minor)?).ok()?,
        ),
        inode: inode.parse().ok()?,
        name: name.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_a_file_an_anonymous_and_a_named_line() {
        let maps = parse_maps(
            "7f00-8f00 r-xp 00001000 fe:00 325835                     /lib/a b.so\n\
             10000-20000 rw-s 00000000 00:00 0 \n\
             30000-31000 rw-p 00000000 00:00 0                        [stack]\n",
        );
        assert_eq!(maps.len(), 3);
        assert_eq!(maps[0].name, "/lib/a b.so");
        assert_eq!(maps[0].prot, libc::PROT_READ | libc::PROT_EXEC);
        assert!(maps[1].shared && maps[1].name.is_empty());
        assert_eq!(maps[2].name, "[stack]");
    }
}
