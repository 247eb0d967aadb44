//! External resources: what the images only name and the caller provides.

use std::fmt;
use std::str::FromStr;

/// A resource that is left to the caller (`--external TYPE[ID]:VALUE`).
///
/// The same text means one thing to a dump and another to a restore where the two
/// sides differ: a dump of `mnt[/data]:disk` is restored with `mnt[disk]:/srv/data`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum External {
    /// A mount: `mnt[MOUNTPOINT]:NAME` on dump, `mnt[NAME]:SOURCE` on restore.
    Mnt {
        /// What stands in the brackets.
        key: String,
        /// What follows them.
        val: String,
    },
    /// All mounts from outside of the namespace, found by the dump: `mnt[]:FLAGS`.
    MntAuto {
        /// Also those shared with the outside (`s`).
        sharing: bool,
        /// Also those whose master is outside (`m`).
        masters: bool,
    },
    /// A mounted block device: `dev[MAJOR/MINOR]:NAME` on dump, `dev[NAME]:/dev/PATH`
    /// on restore.
    Dev {
        /// What stands in the brackets.
        key: String,
        /// What follows them.
        val: String,
    },
    /// An open file outside of the mount namespace: `file[MNT_ID:INODE]`, both hexadecimal.
    File {
        /// The mount it was opened through.
        mnt_id: u32,
        /// Its inode.
        inode: u64,
    },
    /// A terminal: `tty[RDEV:DEV]`, both hexadecimal.
    Tty {
        /// The device that it is.
        rdev: u64,
        /// The device that its inode lies on.
        dev: u64,
    },
    /// The console of an LXC container: `console:PATH`. It says only that there is one: what is
    /// open on it is named by [`External::Tty`].
    Console {
        /// The terminal outside.
        path: String,
    },
    /// The profile of a security module: `apparmor:PROFILE`. LXC names it here beside
    /// `--lsm-profile`, which is what counts.
    Profile {
        /// The module and its profile, as they were given.
        text: String,
    },
    /// The inside end of a Unix socket pair: `unix[INODE]`.
    Unix {
        /// The inode of the socket.
        inode: u64,
    },
    /// A network namespace: `net[INODE]:NAME`.
    Net {
        /// The inode of the namespace.
        inode: u64,
        /// The key of the descriptor that `--inherit-fd` brings.
        name: String,
    },
    /// A pid namespace: `pid[INODE]:NAME`.
    Pid {
        /// The inode of the namespace.
        inode: u64,
        /// The key of the descriptor that `--inherit-fd` brings.
        name: String,
    },
    /// The outside end of a veth pair: `veth[INNER]:OUTER[@BRIDGE]`.
    Veth {
        /// The name of the device inside.
        inner: String,
        /// The name of its peer outside.
        outer: String,
        /// The bridge that the peer is added to.
        bridge: Option<String>,
    },
    /// The device that a macvlan device sits on: `macvlan[INNER]:OUTER`.
    Macvlan {
        /// The name of the device inside.
        inner: String,
        /// The name of the device outside.
        outer: String,
    },
    /// A device moved in from outside: `netdev[INNER]:OUTER`.
    NetDev {
        /// The name of the device inside.
        inner: String,
        /// The name of the device outside.
        outer: String,
    },
}

impl External {
    /// The name of the network namespace with this inode, if it is one of these (`--external net[INODE]:NAME`).
    pub(crate) fn network(all: &[External], inode: u64) -> Option<&str> {
        all.iter().find_map(|external| match external {
            External::Net { inode: given, name } if *given == inode => Some(name.as_str()),
            _ => None,
        })
    }

    /// A bind mount by the older options: `KEY:VAL` of `--ext-mount-map`, where
    /// `auto` stands for all mounts from outside.
    ///
    /// # Errors
    /// If there is no value.
    pub fn from_mount_map(text: &str) -> Result<Self, String> {
        if text == "auto" {
            return Ok(Self::MntAuto { sharing: false, masters: false });
        }
        let (key, val) = text.split_once(':').ok_or("expected KEY:VALUE")?;
        Ok(Self::Mnt { key: key.into(), val: val.into() })
    }

    /// A veth pair by the older option: `INNER=OUTER[@BRIDGE]` of `--veth-pair`.
    ///
    /// # Errors
    /// If there is no `=`.
    pub fn from_veth_pair(text: &str) -> Result<Self, String> {
        let (inner, outer) = text.split_once('=').ok_or("expected INNER=OUTER")?;
        Ok(Self::veth(inner, outer))
    }

    /// A veth pair, `outer` with an optional `@BRIDGE`.
    #[must_use]
    pub fn veth(inner: &str, outer: &str) -> Self {
        let (outer, bridge) = match outer.split_once('@') {
            Some((outer, bridge)) => (outer, Some(bridge.to_owned())),
            None => (outer, None),
        };
        Self::Veth { inner: inner.into(), outer: outer.into(), bridge }
    }
}

impl FromStr for External {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("console:").filter(|path| !path.is_empty()) {
            return Ok(Self::Console { path: path.into() });
        }
        if let Some(("apparmor" | "selinux", profile)) = text.split_once(':')
            && !profile.is_empty()
        {
            return Ok(Self::Profile { text: text.into() });
        }
        let parsed = split(text).ok_or("expected TYPE[ID] or TYPE[ID]:VALUE")?;
        let Parts { kind, id, value } = parsed;
        let needed = || {
            value
                .filter(|v| !v.is_empty())
                .map(str::to_owned)
                .ok_or(format!("{kind}[…] needs a value"))
        };
        Ok(match kind {
            "mnt" if id.is_empty() => mnt_auto(value.unwrap_or_default())?,
            "mnt" => Self::Mnt { key: id.into(), val: needed()? },
            "dev" => Self::Dev { key: id.into(), val: needed()? },
            "file" => {
                let (mnt_id, inode) = hex_pair(id)?;
                let mnt_id = u32::try_from(mnt_id).map_err(|_| format!("{id}: too large"))?;
                Self::File { mnt_id, inode }
            }
            "tty" => {
                let (rdev, dev) = hex_pair(id)?;
                Self::Tty { rdev, dev }
            }
            "unix" => Self::Unix { inode: decimal(id)? },
            "net" => Self::Net { inode: decimal(id)?, name: needed()? },
            "pid" => Self::Pid { inode: decimal(id)?, name: needed()? },
            "veth" => Self::veth(id, &needed()?),
            "macvlan" => Self::Macvlan { inner: id.into(), outer: needed()? },
            "netdev" => Self::NetDev { inner: id.into(), outer: needed()? },
            _ => return Err(format!("external resources of type {kind:?} are not known")),
        })
    }
}

impl External {
    /// Whether it is of those that LXC names for a container that might have them.
    pub(crate) fn is_place(&self) -> bool {
        matches!(self, External::Mnt { .. } | External::Dev { .. } | External::Tty { .. })
    }
}

impl fmt::Display for External {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mnt { key, val } => write!(f, "mnt[{key}]:{val}"),
            Self::MntAuto { sharing, masters } => {
                let (m, s) = (if *masters { "m" } else { "" }, if *sharing { "s" } else { "" });
                write!(f, "mnt[]:{m}{s}")
            }
            Self::Dev { key, val } => write!(f, "dev[{key}]:{val}"),
            Self::File { mnt_id, inode } => write!(f, "file[{mnt_id:x}:{inode:x}]"),
            Self::Tty { rdev, dev } => write!(f, "tty[{rdev:x}:{dev:x}]"),
            Self::Console { path } => write!(f, "console:{path}"),
            Self::Profile { text } => f.write_str(text),
            Self::Unix { inode } => write!(f, "unix[{inode}]"),
            Self::Net { inode, name } => write!(f, "net[{inode}]:{name}"),
            Self::Pid { inode, name } => write!(f, "pid[{inode}]:{name}"),
            Self::Veth { inner, outer, bridge: None } => write!(f, "veth[{inner}]:{outer}"),
            Self::Veth { inner, outer, bridge: Some(bridge) } => {
                write!(f, "veth[{inner}]:{outer}@{bridge}")
            }
            Self::Macvlan { inner, outer } => write!(f, "macvlan[{inner}]:{outer}"),
            Self::NetDev { inner, outer } => write!(f, "netdev[{inner}]:{outer}"),
        }
    }
}

struct Parts<'a> {
    kind: &'a str,
    id: &'a str,
    value: Option<&'a str>,
}

/// Splits `KIND[ID]` or `KIND[ID]:VALUE`. An id (a path, say) may hold brackets of
/// its own: the first `]:` ends it, or the `]` at the end.
fn split(text: &str) -> Option<Parts<'_>> {
    let (kind, rest) = text.split_once('[')?;
    if let Some((id, value)) = rest.split_once("]:") {
        return Some(Parts { kind, id, value: Some(value) });
    }
    let id = rest.strip_suffix(']')?;
    Some(Parts { kind, id, value: None })
}

fn mnt_auto(flags: &str) -> Result<External, String> {
    if let Some(other) = flags.chars().find(|c| !matches!(c, 'm' | 's')) {
        return Err(format!("mnt[]: flag {other:?} is neither m nor s"));
    }
    Ok(External::MntAuto { sharing: flags.contains('s'), masters: flags.contains('m') })
}

fn hex_pair(text: &str) -> Result<(u64, u64), String> {
    let number = |s: &str| {
        u64::from_str_radix(s, 16).map_err(|_| format!("{s:?} is not a hexadecimal number"))
    };
    let (a, b) = text.split_once(':').ok_or(format!("{text:?}: expected two numbers"))?;
    Ok((number(a)?, number(b)?))
}

fn decimal(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("{text:?} is not an inode number"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_is_read_and_written() {
        for text in [
            "mnt[/data]:disk",
            "mnt[]:",
            "mnt[]:m",
            "mnt[]:ms",
            "dev[8/1]:sda1",
            "dev[sda1]:/dev/sda1",
            "file[1f:2a6]",
            "tty[8800:d]",
            "console:/dev/pts/0",
            "apparmor:unconfined",
            "unix[4711]",
            "net[4026531840]:outer",
            "pid[4026531836]:outer",
            "veth[eth0]:veth1",
            "veth[eth0]:veth1@br0",
            "macvlan[eth0]:lan0",
            "netdev[eth0]:eth1",
        ] {
            let external: External = text.parse().unwrap();
            assert_eq!(external.to_string(), text);
        }
        assert_eq!("mnt[]".parse(), Ok(External::MntAuto { sharing: false, masters: false }));
    }

    #[test]
    fn paths_with_brackets_and_colons() {
        assert_eq!(
            "mnt[/a[1]/b:c]:name".parse(),
            Ok(External::Mnt { key: "/a[1]/b:c".into(), val: "name".into() })
        );
    }

    #[test]
    fn nonsense_is_refused() {
        for text in [
            "",
            "mnt",
            "mnt[/data]",
            "mnt[/data]:",
            "mnt[]:x",
            "dev[1/2",
            "file[1]",
            "file[x:y]",
            "file[100000000:1]",
            "tty[1:]",
            "unix[ff]",
            "net[1]",
            "gpu[0]",
            "[]",
        ] {
            assert!(text.parse::<External>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn older_options() {
        assert_eq!(External::from_mount_map("a:b").unwrap().to_string(), "mnt[a]:b");
        assert_eq!(External::from_mount_map("auto").unwrap().to_string(), "mnt[]:");
        assert_eq!(External::from_veth_pair("e=v@b").unwrap().to_string(), "veth[e]:v@b");
        assert!(External::from_veth_pair("e").is_err());
    }
}
