//! Settings of namespaces. Those of networks have values without names in images, in the order of lists
//! of names.

use torpor_images::proto::{NetDeviceEntry, NetnsEntry, SysctlEntry};
use torpor_images::{Kind, kind};

use crate::error::{Error, Result};

/// The names of settings, in the order of their values in images.
#[derive(Debug, Clone, Copy)]
pub struct Names {
    /// Of `net.ipv4.conf.DEVICE`.
    pub v4: &'static [&'static str],
    /// Of `net.ipv6.conf.DEVICE`.
    pub v6: &'static [&'static str],
    /// Of `net.unix`.
    pub unix: &'static [&'static str],
    /// Of `net.ipv4`.
    pub ipv4: &'static [&'static str],
}

/// A setting that images have a value for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    /// The image file.
    pub image: String,
    /// Where it is below `/proc/sys`: `net/ipv4/conf/eth0`.
    pub directory: String,
    /// Its name there.
    pub name: &'static str,
    /// The directory of the one that it has its value from by itself.
    pub base: String,
    /// Its value.
    pub value: String,
}

/// The settings that a restore writes in a network namespace: the policy judges those that differ
/// from what is there by itself.
#[derive(Debug, Default)]
pub struct Written {
    /// Those of the namespace, which new devices take theirs from, in the order in which they are
    /// written.
    pub namespace: Vec<Setting>,
    /// Those of each device, in the order of the devices.
    pub devices: Vec<OfDevice>,
}

/// The settings of a device.
#[derive(Debug, Default)]
pub struct OfDevice {
    /// `net.ipv4.conf.DEVICE`.
    pub v4: Vec<Setting>,
    /// `net.ipv6.conf.DEVICE`.
    pub v6: Vec<Setting>,
}

impl Setting {
    /// Its path below `/proc/sys`.
    #[must_use]
    pub fn path(&self) -> String {
        format!("{}/{}", self.directory, self.name)
    }

    /// The path of the one that it has its value from by itself.
    #[must_use]
    pub fn base_path(&self) -> String {
        format!("{}/{}", self.base, self.name)
    }

    /// Its name as sysctl(8) has it: `net.ipv4.conf.eth0.forwarding`.
    #[must_use]
    pub fn key(&self) -> String {
        self.path().replace('/', ".")
    }
}

impl Written {
    /// Those of namespace `id` and its devices.
    ///
    /// # Errors
    /// More values than there are names.
    pub fn of(
        names: &Names,
        id: u64,
        netns: &NetnsEntry,
        devices: &[NetDeviceEntry],
    ) -> Result<Self> {
        let conf = |version: u8, device: &str| format!("net/ipv{version}/conf/{device}");
        let mut all = Written::default();
        for (directory, names, values) in [
            (conf(4, "all"), names.v4, &netns.all_conf4),
            (conf(4, "default"), names.v4, &netns.def_conf4),
            (conf(6, "all"), names.v6, &netns.all_conf6),
            (conf(6, "default"), names.v6, &netns.def_conf6),
            ("net/unix".to_owned(), names.unix, &netns.unix_conf),
            ("net/ipv4".to_owned(), names.ipv4, &netns.ipv4_sysctl),
        ] {
            all.namespace.extend(list((kind::NETNS, id), [&directory; 2], names, values)?);
        }
        for device in devices {
            // New devices have what is the default.
            let base = if device.name == "lo" { "lo" } else { "default" };
            let of = |version, names, values: &[SysctlEntry]| {
                let directories = [conf(version, &device.name), conf(version, base)];
                list((kind::NETDEV, id), directories.each_ref(), names, values)
            };
            all.devices.push(OfDevice {
                v4: of(4, names.v4, &device.conf4)?,
                v6: of(6, names.v6, &device.conf6)?,
            });
        }
        Ok(all)
    }

    /// All of them.
    pub fn all(&self) -> impl Iterator<Item = &Setting> {
        let of_devices = self.devices.iter().flat_map(|device| device.v4.iter().chain(&device.v6));
        self.namespace.iter().chain(of_devices)
    }
}

fn list(
    (image, id): (Kind, u64),
    [directory, base]: [&String; 2],
    names: &[&'static str],
    values: &[SysctlEntry],
) -> Result<Vec<Setting>> {
    let image = image.file_name(id);
    if values.len() > names.len() {
        let reason = format!("{} values for {directory}", values.len());
        return Err(Error::Invalid { image, reason });
    }
    let named = names.iter().zip(values).filter_map(|(name, entry)| {
        let value = entry.iarg.map(|number| number.to_string()).or_else(|| entry.sarg.clone())?;
        Some(Setting {
            image: image.clone(),
            directory: directory.clone(),
            name,
            base: base.clone(),
            value,
        })
    });
    Ok(named.collect())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const NAMES: Names =
        Names { v4: &["a", "b"], v6: &["c"], unix: &["d"], ipv4: &["ping_group_range"] };

    fn number(iarg: i32) -> SysctlEntry {
        SysctlEntry { iarg: Some(iarg), ..SysctlEntry::default() }
    }

    #[test]
    fn values_get_their_names() {
        let netns = NetnsEntry {
            all_conf4: vec![number(1), number(2)],
            ipv4_sysctl: vec![SysctlEntry {
                sarg: Some("1 0".to_owned()),
                ..SysctlEntry::default()
            }],
            ..NetnsEntry::default()
        };
        // One that this kernel does not have has no value.
        let device = |name: &str| NetDeviceEntry {
            name: name.to_owned(),
            conf4: vec![SysctlEntry::default(), number(7)],
            ..NetDeviceEntry::default()
        };
        let written = Written::of(&NAMES, 3, &netns, &[device("lo"), device("eth0")]).unwrap();
        let all = written.all().map(|s| (s.image.as_str(), s.key(), s.base_path(), &*s.value));
        let all: Vec<_> = all.collect();
        let expected = [
            ("netns-3.img", "net.ipv4.conf.all.a", "net/ipv4/conf/all/a", "1"),
            ("netns-3.img", "net.ipv4.conf.all.b", "net/ipv4/conf/all/b", "2"),
            ("netns-3.img", "net.ipv4.ping_group_range", "net/ipv4/ping_group_range", "1 0"),
            ("netdev-3.img", "net.ipv4.conf.lo.b", "net/ipv4/conf/lo/b", "7"),
            ("netdev-3.img", "net.ipv4.conf.eth0.b", "net/ipv4/conf/default/b", "7"),
        ];
        let expected = expected
            .map(|(image, key, base, value)| (image, key.to_owned(), base.to_owned(), value));
        assert_eq!(all, expected);
    }

    #[test]
    fn too_many_values_are_refused() {
        let netns = NetnsEntry { unix_conf: vec![number(1), number(2)], ..NetnsEntry::default() };
        let error = Written::of(&NAMES, 3, &netns, &[]).unwrap_err().to_string();
        assert_eq!(error, "netns-3.img: 2 values for net/unix");
    }
}
