//! In which form the fields are shown that are more than numbers.

/// The form of a field's value. All but [`Form::SocketName`] apply to the
/// pretty view only; both views can be read back.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Form {
    /// As it is.
    Plain,
    /// Numbers in hexadecimal; in a message, those of all its fields.
    Hex,
    /// A device number in the kernel's encoding, as `major:minor`.
    Device,
    /// A device number in the encoding of old system calls.
    OldDevice,
    /// One word for an IPv4 address or four for an IPv6 one, as text.
    Address,
    /// Bits that have names.
    Flags(&'static [(u64, &'static str)]),
    /// Values that have names.
    Names(&'static [(u64, &'static str)]),
    /// A socket's name, which may start with a zero byte: quoted-printable.
    SocketName,
}

/// The form of `field` in `message`.
pub(crate) fn form(message: &str, field: &str) -> Form {
    if is_hex(message, field) {
        return Form::Hex;
    }
    match (message, field) {
        ("inotify_wd_entry" | "fanotify_mark_entry", "s_dev")
        | ("ghost_file_entry", "dev")
        | ("mnt_entry", "root_dev") => Form::Device,
        ("irmap_cache_entry", "dev") | ("ghost_file_entry", "rdev") => Form::OldDevice,
        ("inet_sk_entry", "src_addr" | "dst_addr")
        | ("sit_entry", "local" | "remote" | "rd_prefix" | "relay_prefix") => Form::Address,
        ("reg_file_entry" | "memfd_file_entry" | "bpfmap_file_entry", "flags") => {
            Form::Flags(OPEN_FLAGS)
        }
        ("memfd_inode_entry", "seals") => Form::Flags(SEALS),
        ("pagemap_entry", "flags") => Form::Flags(PAGEMAP_FLAGS),
        ("vma_entry", "prot") => Form::Flags(PROT),
        ("vma_entry", "flags") => Form::Flags(MAP_FLAGS),
        ("vma_entry", "status") => Form::Flags(VMA_STATUS),
        ("task_core_entry", "task_state") => Form::Names(TASK_STATE),
        ("inet_sk_entry", "family") => Form::Names(FAMILY),
        ("inet_sk_entry" | "unix_sk_entry", "type") => Form::Names(SOCKET_TYPE),
        ("inet_sk_entry", "proto") => Form::Names(PROTOCOL),
        ("inet_sk_entry" | "unix_sk_entry", "state") => Form::Names(SOCKET_STATE),
        ("unix_sk_entry", "name") => Form::SocketName,
        _ => Form::Plain,
    }
}

fn is_hex(message: &str, field: &str) -> bool {
    match message {
        "sa_entry" => field != "compat_sigaction",
        "mm_entry" => field.starts_with("mm_") && field != "mm_saved_auxv",
        "thread_info_x86" | "thread_info_ppc64" => matches!(field, "clear_tid_addr" | "gpregs"),
        "thread_info_arm" | "thread_info_aarch64" => matches!(field, "clear_tid_addr" | "gpregs"),
        "thread_info_mips" | "thread_info_loongarch64" | "thread_info_riscv64" => {
            matches!(field, "clear_tid_addr" | "gpregs" | "fpregs")
        }
        "thread_info_s390" => matches!(
            field,
            "clear_tid_addr"
                | "gpregs"
                | "fpregs"
                | "vxrs_low"
                | "vxrs_high"
                | "gs_cb"
                | "gs_bc"
                | "ri_cb"
        ),
        "task_core_entry" => matches!(field, "blk_sigset" | "blk_sigset_extended"),
        "inotify_wd_entry" => matches!(field, "mask" | "ignored_mask"),
        "fanotify_mark_entry" => matches!(field, "mflags" | "mask" | "ignored_mask"),
        "fanotify_file_entry" => matches!(field, "flags" | "faflags" | "evflags"),
        "mnt_entry" => matches!(field, "flags" | "sb_flags"),
        "pagemap_entry" => field == "vaddr",
        "signalfd_entry" => matches!(field, "flags" | "sigmask"),
        "tcp_stream_entry" => field == "opt_mask",
        "timerfd_entry" => matches!(field, "flags" | "settime_flags"),
        "unix_sk_entry" => matches!(field, "flags" | "uflags"),
        "vma_entry" => matches!(field, "start" | "end" | "madv" | "fdflags"),
        "inotify_file_entry" | "net_device_entry" | "packet_sock_entry" | "pipe_entry"
        | "inet_sk_entry" | "netlink_sk_entry" | "tty_file_entry" | "tun_link_entry" => {
            field == "flags"
        }
        _ => false,
    }
}

const OPEN_FLAGS: &[(u64, &str)] = &[
    (0o1, "O_WRONLY"),
    (0o2, "O_RDWR"),
    (0o100, "O_CREAT"),
    (0o200, "O_EXCL"),
    (0o400, "O_NOCTTY"),
    (0o1000, "O_TRUNC"),
    (0o2000, "O_APPEND"),
    (0o4000, "O_NONBLOCK"),
    (0o10000, "O_DSYNC"),
    (0o20000, "FASYNC"),
    (0o40000, "O_DIRECT"),
    (0o100000, "O_LARGEFILE"),
    (0o200000, "O_DIRECTORY"),
    (0o400000, "O_NOFOLLOW"),
    (0o1000000, "O_NOATIME"),
    (0o2000000, "O_CLOEXEC"),
];

const SEALS: &[(u64, &str)] = &[
    (1, "F_SEAL_SEAL"),
    (2, "F_SEAL_SHRINK"),
    (4, "F_SEAL_GROW"),
    (8, "F_SEAL_WRITE"),
    (0x10, "F_SEAL_FUTURE_WRITE"),
];

const PAGEMAP_FLAGS: &[(u64, &str)] = &[(1, "PE_PARENT"), (2, "PE_LAZY"), (4, "PE_PRESENT")];

const PROT: &[(u64, &str)] = &[(1, "PROT_READ"), (2, "PROT_WRITE"), (4, "PROT_EXEC")];

const MAP_FLAGS: &[(u64, &str)] =
    &[(1, "MAP_SHARED"), (2, "MAP_PRIVATE"), (0x20, "MAP_ANON"), (0x100, "MAP_GROWSDOWN")];

const VMA_STATUS: &[(u64, &str)] = &[
    (1, "VMA_AREA_REGULAR"),
    (1 << 1, "VMA_AREA_STACK"),
    (1 << 2, "VMA_AREA_VSYSCALL"),
    (1 << 3, "VMA_AREA_VDSO"),
    (1 << 5, "VMA_AREA_HEAP"),
    (1 << 6, "VMA_FILE_PRIVATE"),
    (1 << 7, "VMA_FILE_SHARED"),
    (1 << 8, "VMA_ANON_SHARED"),
    (1 << 9, "VMA_ANON_PRIVATE"),
    (1 << 10, "VMA_AREA_SYSVIPC"),
    (1 << 11, "VMA_AREA_SOCKET"),
    (1 << 12, "VMA_AREA_VVAR"),
    (1 << 13, "VMA_AREA_AIORING"),
    (1 << 14, "VMA_AREA_MEMFD"),
    (1 << 15, "VMA_AREA_SHSTK"),
    (1 << 16, "VMA_AREA_GUARD"),
    (1 << 17, "VMA_AREA_UPROBES"),
    (1 << 31, "VMA_UNSUPP"),
];

const TASK_STATE: &[(u64, &str)] = &[(1, "Alive"), (3, "Zombie"), (6, "Stopped")];

const FAMILY: &[(u64, &str)] =
    &[(1, "UNIX"), (2, "INET"), (10, "INET6"), (16, "NETLINK"), (17, "PACKET")];

const SOCKET_TYPE: &[(u64, &str)] =
    &[(1, "STREAM"), (2, "DGRAM"), (3, "RAW"), (5, "SEQPACKET"), (10, "PACKET")];

const PROTOCOL: &[(u64, &str)] = &[(0, "IP"), (6, "TCP"), (17, "UDP"), (136, "UDPLITE")];

const SOCKET_STATE: &[(u64, &str)] = &[
    (1, "ESTABLISHED"),
    (2, "SYN_SENT"),
    (3, "SYN_RECV"),
    (4, "FIN_WAIT1"),
    (5, "FIN_WAIT2"),
    (6, "TIME_WAIT"),
    (7, "CLOSE"),
    (8, "CLOSE_WAIT"),
    (9, "LAST_ACK"),
    (10, "LISTEN"),
];

impl Form {
    /// The number as text, if that is how this form shows it.
    pub(crate) fn show(self, number: u64) -> Option<String> {
        match self {
            Self::Plain | Self::Address | Self::SocketName => None,
            Self::Hex => Some(format!("{number:#x}")),
            Self::Device => Some(format!("{}:{}", number >> 20, number & 0xf_ffff)),
            Self::OldDevice => {
                let minor = (number & 0xff) | ((number >> 12) & 0xf_ff00);
                Some(format!("{}:{minor}", (number >> 8) & 0xfff))
            }
            Self::Flags(names) => Some(show_flags(names, number)),
            Self::Names(names) => {
                names.iter().find(|(value, _)| *value == number).map(|(_, name)| (*name).to_owned())
            }
        }
    }

    /// The number that `text` stands for, in this form or as a plain number.
    pub(crate) fn parse(self, text: &str) -> Option<u64> {
        match self {
            Self::Device => {
                let (major, minor) = device(text)?;
                (major <= 0xfff && minor <= 0xf_ffff).then_some((major << 20) | minor)
            }
            Self::OldDevice => {
                let (major, minor) = device(text)?;
                let fits = major <= 0xfff && minor <= 0xf_ffff;
                fits.then_some((minor & 0xff) | (major << 8) | ((minor & 0xf_ff00) << 12))
            }
            Self::Flags(names) => parse_flags(names, text),
            Self::Names(names) => named(names, text),
            _ => None,
        }
        .or_else(|| number(text))
    }
}

/// A number as text: decimal, or hexadecimal after `0x`.
fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

fn device(text: &str) -> Option<(u64, u64)> {
    let (major, minor) = text.split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

fn named(names: &[(u64, &str)], text: &str) -> Option<u64> {
    names.iter().find(|(_, name)| *name == text).map(|(value, _)| *value)
}

fn show_flags(names: &[(u64, &str)], number: u64) -> String {
    let mut rest = number;
    let mut parts = vec![];
    for (bit, name) in names.iter().filter(|(bit, _)| number & bit != 0) {
        parts.push((*name).to_owned());
        rest &= !bit;
    }
    if rest != 0 {
        parts.push(format!("{rest:#x}"));
    }
    parts.join(" | ")
}

fn parse_flags(names: &[(u64, &str)], text: &str) -> Option<u64> {
    if text.trim().is_empty() {
        return Some(0);
    }
    text.split('|').try_fold(0, |flags, part| {
        let part = part.trim();
        Some(flags | named(names, part).or_else(|| number(part))?)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As CRIU's tool shows them.
    #[test]
    fn forms_are_shown_and_read() {
        for (form, number, text) in [
            (Form::Hex, 0, "0x0"),
            (Form::Hex, u64::MAX, "0xffffffffffffffff"),
            (Form::Device, 8 << 20 | 1, "8:1"),
            (Form::Device, 0xffff_ffff, "4095:1048575"),
            (Form::OldDevice, 8 << 8 | 1, "8:1"),
            (Form::OldDevice, 0x1234_5678, "1110:74616"),
            (Form::OldDevice, 0xffff_ffff, "4095:1048575"),
            (Form::Flags(PROT), 0, ""),
            (Form::Flags(PROT), 3, "PROT_READ | PROT_WRITE"),
            (Form::Flags(PROT), 0x1c, "PROT_EXEC | 0x18"),
            (Form::Flags(VMA_STATUS), 0x8000_0010, "VMA_UNSUPP | 0x10"),
            (Form::Names(PROTOCOL), 6, "TCP"),
        ] {
            assert_eq!(form.show(number).as_deref(), Some(text), "{form:?}");
            assert_eq!(form.parse(text), Some(number), "{form:?}");
        }
        assert_eq!(Form::Names(PROTOCOL).show(7), None);
        for text in ["", "x", "-1", "0x", "1:2", "0x1|", "18446744073709551616"] {
            assert_eq!(Form::Hex.parse(text), None, "{text}");
        }
        for text in ["4096:0", "0:1048576", "1:", ":1", "1:2:3"] {
            assert_eq!(Form::Device.parse(text), None, "{text}");
            assert_eq!(Form::OldDevice.parse(text), None, "{text}");
        }
        assert_eq!(Form::Flags(PROT).parse("PROT_READ | PROT_NONSENSE"), None);
    }
}
