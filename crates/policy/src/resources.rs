//! `linux.resources` of a configuration: what the group of a container may use.

use std::collections::BTreeMap;

use serde::Deserialize;

/// What the group may use. What is not named is not limited.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Resources {
    pub(crate) devices: Vec<DeviceRule>,
    pub(crate) memory: Memory,
    pub(crate) cpu: Cpu,
    pub(crate) pids: Pids,
    #[serde(rename = "blockIO")]
    pub(crate) block_io: BlockIo,
    pub(crate) network: PacketMarks,
    #[serde(rename = "hugepageLimits")]
    pub(crate) huge_pages: Vec<HugePages>,
    /// What it may have of the devices of these names.
    pub(crate) rdma: BTreeMap<String, Rdma>,
    /// Files of a group of version 2, and what is in them.
    pub(crate) unified: BTreeMap<String, String>,
}

/// What the group of the container may do with devices; without numbers it is about all.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct DeviceRule {
    pub(crate) allow: bool,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) major: Option<i64>,
    pub(crate) minor: Option<i64>,
    pub(crate) access: String,
}

/// In bytes; below 1 is no limit.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Memory {
    pub(crate) limit: Option<i64>,
    pub(crate) reservation: Option<i64>,
    /// That of memory and swap together.
    pub(crate) swap: Option<i64>,
    pub(crate) kernel: Option<i64>,
    #[serde(rename = "kernelTCP")]
    pub(crate) kernel_tcp: Option<i64>,
}

/// Times are in microseconds.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Cpu {
    pub(crate) shares: Option<u64>,
    pub(crate) quota: Option<i64>,
    pub(crate) burst: Option<u64>,
    pub(crate) period: Option<u64>,
    pub(crate) realtime_runtime: Option<i64>,
    pub(crate) realtime_period: Option<u64>,
    pub(crate) cpus: String,
    pub(crate) mems: String,
    pub(crate) idle: Option<i64>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Pids {
    /// Below 1 is no limit.
    pub(crate) limit: Option<i64>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct BlockIo {
    pub(crate) weight: Option<u64>,
    pub(crate) weight_device: Vec<DeviceWeight>,
    pub(crate) throttle_read_bps_device: Vec<DeviceRate>,
    pub(crate) throttle_write_bps_device: Vec<DeviceRate>,
    #[serde(rename = "throttleReadIOPSDevice")]
    pub(crate) throttle_read_iops_device: Vec<DeviceRate>,
    #[serde(rename = "throttleWriteIOPSDevice")]
    pub(crate) throttle_write_iops_device: Vec<DeviceRate>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct DeviceWeight {
    pub(crate) weight: Option<u64>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct DeviceRate {
    pub(crate) major: i64,
    pub(crate) minor: i64,
    /// What may be read or written in a second.
    pub(crate) rate: u64,
}

/// What this host's packet filters and queues know the packets of the group by.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct PacketMarks {
    #[serde(rename = "classID")]
    pub(crate) class: Option<u32>,
    pub(crate) priorities: Vec<Priority>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Priority {
    pub(crate) name: String,
    pub(crate) priority: u32,
}

/// Huge pages of one size, in bytes.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct HugePages {
    /// As the files of groups have it: `2MB`.
    pub(crate) page_size: String,
    pub(crate) limit: u64,
}

/// What a device has that reads and writes the memory of other hosts.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Rdma {
    pub(crate) hca_handles: Option<u32>,
    pub(crate) hca_objects: Option<u32>,
}
