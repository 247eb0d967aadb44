//! Groups outside of the caller's, and devices that their controller lets in.

use std::fs;
use std::path::Path;
use std::time::Duration;

use serde_json::json;
use torpor_images::proto::{CgSetEntry, CgroupDirEntry, CgroupPerms, CgroupPropEntry};
use torpor_runtimes_tests::runc::cgroup_left;
use torpor_runtimes_tests::scratch::Scratch;

use super::{Asleep, FOREIGN, Images, Row, bundle, refuses, refuses_of};

#[test]
fn groups_and_devices() {
    const BELOW: &[&str] = &["cgroup.img: cgroup \"/\"", "(foreign.cgroups.allow)"];
    fn to_root(set: &mut CgSetEntry) {
        set.ctls.iter_mut().for_each(|member| member.path = b"/".to_vec());
    }
    fn new_set(images: &Images, change: fn(&mut CgSetEntry)) {
        images.cgroups(|groups| {
            let mut set = groups.sets.last().unwrap().clone();
            set.id = 900_001;
            change(&mut set);
            groups.sets.push(set);
        });
    }
    /// A group inside that of the container.
    fn child(images: &Images, change: fn(&mut CgroupDirEntry)) {
        images.cgroups(|groups| {
            let own = &mut groups.controllers[0].dirs[0];
            let mut child =
                CgroupDirEntry { dir_name: b"inside".to_vec(), children: vec![], ..own.clone() };
            change(&mut child);
            own.children.push(child);
        });
    }
    refuses(
        "images-cgroups",
        &[
            (
                "a child at the root",
                |images| {
                    new_set(images, to_root);
                    images.core(*images.tasks().last().unwrap(), |core| {
                        core.thread_core.as_mut().unwrap().cg_set = Some(900_001);
                    });
                },
                BELOW,
            ),
            (
                "two sets for one task",
                |images| {
                    new_set(images, to_root);
                    images.core(*images.tasks().last().unwrap(), |core| {
                        core.tc.as_mut().unwrap().cg_set = Some(900_001);
                    });
                },
                &["core-", "two sets of cgroups"],
            ),
            (
                "a group beside that of the container",
                |images| {
                    new_set(images, |set| {
                        set.ctls.iter_mut().for_each(|member| member.path = b"/other".to_vec());
                    });
                    images.core(*images.tasks().last().unwrap(), |core| {
                        core.thread_core.as_mut().unwrap().cg_set = Some(900_001);
                    });
                },
                &["cgroup \"/other\"", "(foreign.cgroups.allow)"],
            ),
            (
                "a cgroup namespace that begins above the group of the container",
                |images| {
                    let last = *images.tasks().last().unwrap();
                    new_set(images, |set| {
                        // A part of the path, which is the name of another group.
                        set.ctls.iter_mut().for_each(|member| member.cgns_prefix = Some(4));
                    });
                    images.core(last, |core| {
                        core.thread_core.as_mut().unwrap().cg_set = Some(900_001);
                    });
                    images.ids(last, |ids| ids.cgroup_ns_id = Some(900_002));
                },
                &["cgroup.img: cgroup \"/", "(foreign.cgroups.allow)"],
            ),
            (
                "a path that climbs",
                |images| {
                    new_set(images, |set| {
                        set.ctls.iter_mut().for_each(|member| member.path.extend(b"/../.."))
                    });
                },
                &["cgroup.img: set 900001: ", "is no path of a group"],
            ),
            (
                "a set that there is not",
                |images| {
                    images.core(*images.tasks().last().unwrap(), |core| {
                        core.thread_core.as_mut().unwrap().cg_set = Some(900_001);
                    });
                },
                &["core-", "its set of cgroups, 900001, is not in cgroup.img"],
            ),
            (
                "a group inside that belongs to somebody",
                |images| child(images, |child| child.dir_perms.as_mut().unwrap().uid = 1000),
                &["/inside\" belongs to 1000:", "(foreign.cgroups.delegate)"],
            ),
            (
                "a group inside that everybody may change",
                |images| child(images, |child| child.dir_perms.as_mut().unwrap().mode = 0o777),
                &["/inside\" belongs to 0:0 (mode 777)", "(foreign.cgroups.delegate)"],
            ),
            (
                "a limit that somebody may lift",
                |images| {
                    child(images, |child| {
                        let perms = Some(CgroupPerms { mode: 0o100_644, uid: 1000, gid: 0 });
                        let (name, value) = ("pids.max".into(), "10".into());
                        child.properties = vec![CgroupPropEntry { name, value, perms }];
                    });
                },
                &["/inside\" belongs to 1000:0 (mode 644)", "(foreign.cgroups.delegate)"],
            ),
            (
                "a program of this host for an empty group",
                |images| {
                    child(images, |child| {
                        let (name, value) = ("release_agent".into(), "/vol/program".into());
                        child.properties.push(CgroupPropEntry { name, value, perms: None });
                    });
                },
                &["has \"/vol/program\" run on this host", "(foreign.cgroups.release-agent)"],
            ),
            (
                "all devices, at the root",
                |images| {
                    images.cgroups(|groups| {
                        let property = CgroupPropEntry {
                            name: "devices.allow".into(),
                            value: "a *:* rwm".into(),
                            perms: None,
                        };
                        let dir = CgroupDirEntry {
                            dir_name: b"/".to_vec(),
                            properties: vec![property],
                            ..Default::default()
                        };
                        groups.controllers[0].dirs.push(dir);
                    });
                },
                &["cgroup.img: device b *:* at \"//devices.allow\"", "(foreign.files.devices)"],
            ),
        ],
    );
}

/// A disk of this machine: its numbers. Behind it is a device: loops, which other tests attach and detach meanwhile, have
/// none, and come first in the list.
fn disk() -> (u32, u32) {
    let list = fs::read_to_string("/proc/partitions").unwrap();
    let mut disks = list.lines().filter_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [major, minor, _, name] = words[..] else { return None };
        let is_real = Path::new("/sys/block").join(name).join("device").exists();
        Some((major.parse().ok().filter(|_| is_real)?, minor.parse().ok()?))
    });
    disks.next().unwrap()
}

/// The kernel counts what each group of version 1 transfers by itself, whatever the group is in.
#[test]
fn transfers_of_groups_inside() {
    /// A group inside that of the container, with what limits its transfers.
    fn inside(images: &Images, limit: Option<&str>) {
        images.cgroups(|groups| {
            let is_it = |names: &[String]| names.iter().any(|name| name == "blkio");
            let hierarchy = groups.controllers.iter_mut().find(|all| is_it(&all.cnames)).unwrap();
            let own = &mut hierarchy.dirs[0];
            let property = limit.map(|limit| {
                let (major, minor) = disk();
                let name = "blkio.throttle.read_bps_device".to_owned();
                CgroupPropEntry { name, value: format!("{major}:{minor} {limit}"), perms: None }
            });
            own.children.push(CgroupDirEntry {
                dir_name: b"inside".to_vec(),
                children: vec![],
                properties: property.into_iter().collect(),
                ..own.clone()
            });
        });
    }
    const MORE: &str = "/inside\" gets blkio.throttle.read_bps_device = \"";
    let scratch = Scratch::new("images-transfers");
    let bundle = bundle(&scratch).configure(|config| {
        let (major, minor) = disk();
        let rate = json!({ "major": major, "minor": minor, "rate": 100 << 20 });
        config["linux"]["resources"]["blockIO"] = json!({ "throttleReadBpsDevice": [rate] });
    });
    let rows: &[Row] = &[
        ("a group without a limit", |i| inside(i, None), &[MORE, "(foreign.cgroups.limits)"]),
        ("one that limits nothing", |i| inside(i, Some("0")), &[MORE, "(foreign.cgroups.limits)"]),
        (
            "one with a higher limit",
            |i| inside(i, Some("104857601")),
            &[MORE, "more than is given"],
        ),
    ];
    refuses_of(&scratch, &bundle, "", rows, |images| inside(images, Some("1048576")));
}

/// The group that runc has made for the container keeps the limits of the configuration, also where the restore is told to
/// write the files of groups that are there.
#[test]
fn limits_of_the_group_that_is_given() {
    /// Gives a file of the group of the container a value.
    fn set(images: &Images, controller: &str, name: &str, value: &str) {
        images.cgroups(|groups| {
            let named = |names: &[String]| names.iter().any(|name| name == controller);
            let hierarchy = groups.controllers.iter_mut().find(|all| named(&all.cnames)).unwrap();
            let group = &mut hierarchy.dirs[0];
            group.properties.retain(|property| property.name != name);
            let (name, value) = (name.to_owned(), value.to_owned());
            group.properties.push(CgroupPropEntry { name, value, perms: None });
        });
    }
    let scratch = Scratch::new("images-group-limits");
    scratch.configure(FOREIGN);
    // What runc asks for by itself counts more than the other file.
    fs::write("/etc/criu/runc.conf", "manage-cgroups full\n").unwrap();
    let bundle = bundle(&scratch).configure(|config| {
        let resources = &mut config["linux"]["resources"];
        resources["pids"] = json!({ "limit": 64 });
        resources["memory"] = json!({ "limit": 256 << 20 });
        resources["cpu"] = json!({ "quota": 150_000, "period": 100_000 });
    });
    let asleep = Asleep::of(&scratch, &bundle);
    const RULE: &str = "(foreign.cgroups.limits)";
    asleep.refused(&[
        (
            "more processes",
            |images| set(images, "pids", "pids.max", "max"),
            &["cgroup.img: cgroup \"/torpor-images-group", " gets pids.max = \"max\"", RULE],
        ),
        (
            "more memory",
            |images| set(images, "memory", "memory.limit_in_bytes", "-1"),
            &[" gets memory.limit_in_bytes = \"-1\", more than is given", RULE],
        ),
        (
            "more time in a shorter period",
            |images| set(images, "cpu", "cpu.cfs_period_us", "10000"),
            &[" gets cpu.cfs_period_us = \"10000\", more than is given", RULE],
        ),
        (
            "processors that others do not get",
            |images| set(images, "cpuset", "cpuset.cpu_exclusive", "1"),
            &[" gets cpuset.cpu_exclusive = \"1\", more than is given", RULE],
        ),
        (
            "all devices, of which the kernel reads no more than the first letter",
            |images| set(images, "devices", "devices.list", "a *:* m"),
            &["cgroup.img: device b *:* at ", "(foreign.files.devices)"],
        ),
        (
            "a limit that somebody may lift",
            |images| {
                set(images, "pids", "pids.max", "1");
                images.cgroups(|groups| {
                    let all = groups.controllers.iter_mut().flat_map(|of| &mut of.dirs);
                    let files = all.flat_map(|group| &mut group.properties);
                    let limits = files.filter(|file| file.name == "pids.max");
                    let perms = CgroupPerms { mode: 0o100_644, uid: 1000, gid: 0 };
                    limits.for_each(|file| file.perms = Some(perms));
                });
            },
            &[" gets pids.max = \"1\", more than is given", RULE],
        ),
        (
            "a file that nobody knows",
            |images| set(images, "memory", "memory.pressure_level", "1"),
            &[" gets memory.pressure_level = \"1\", more than is given", RULE],
        ),
    ]);
    let container = asleep.wakes();
    let groups = container.cgroups();
    let group = groups.lines().find_map(|line| line.split_once(":pids:")).unwrap().1;
    let limit = fs::read_to_string(format!("/sys/fs/cgroup/pids{group}/pids.max")).unwrap();
    assert_eq!(limit.trim(), "64");
}

/// The groups of this name that a restore has made, in all hierarchies. They go with this value.
struct MadeGroups(String);

impl Drop for MadeGroups {
    fn drop(&mut self) {
        for hierarchy in fs::read_dir("/sys/fs/cgroup").unwrap() {
            let group = hierarchy.unwrap().path().join(&self.0);
            // Its tasks may be about to end.
            for _ in 0..1000 {
                if !group.exists() || fs::remove_dir(&group).is_ok() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }
}

/// A group that the restore makes has the limits of the configuration when the tasks wake, also where this kernel has no such
/// file as the one that images limit it by. The caller names a root that is not there, which runtimes do not.
#[test]
fn limits_of_groups_that_are_made() {
    /// Changes the files of the group of the container.
    fn files(images: &Images, controller: &str, change: impl Fn(&mut Vec<CgroupPropEntry>)) {
        images.cgroups(|groups| {
            let named = |names: &[String]| names.iter().any(|name| name == controller);
            let hierarchy = groups.controllers.iter_mut().find(|all| named(&all.cnames)).unwrap();
            change(&mut hierarchy.dirs[0].properties);
        });
    }
    let scratch = Scratch::new("images-made-groups");
    let made = MadeGroups(format!("{}-made", scratch.name()));
    let roots = ["", "blkio:", "devices:", "pids:"]
        .map(|of| format!("cgroup-root {of}/{}\n", made.0))
        .concat();
    scratch.configure(&format!("{FOREIGN}{roots}"));
    let bundle = bundle(&scratch).configure(|config| {
        let resources = &mut config["linux"]["resources"];
        resources["pids"] = json!({ "limit": 64 });
        resources["blockIO"] = json!({ "weight": 10 });
    });
    let asleep = Asleep::of(&scratch, &bundle);
    const MORE: &str = ", more than is given";
    const RULE: &str = "(foreign.cgroups.limits)";
    asleep.refused(&[
        (
            "a file that this kernel does not have",
            |images| {
                files(images, "blkio", |all| {
                    let weight = all.iter_mut().find(|file| file.name == "blkio.bfq.weight");
                    weight.unwrap().name = "blkio.weight".to_owned();
                });
            },
            &[" gets blkio.bfq.weight = \"100\"", MORE, "is not in force here", RULE],
        ),
        (
            "no limit of processes",
            |images| files(images, "pids", |all| all.retain(|file| file.name != "pids.max")),
            &[" gets pids.max = \"max\"", MORE, RULE],
        ),
        (
            "a higher limit of processes",
            |images| {
                files(images, "pids", |all| {
                    all.iter_mut().find(|file| file.name == "pids.max").unwrap().value =
                        "65".into();
                });
            },
            &[" gets pids.max = \"65\"", MORE, RULE],
        ),
        (
            "no list of devices",
            |images| files(images, "devices", |all| all.retain(|file| file.name != "devices.list")),
            &["device b *:* at \"/", "-made/devices.list\"", "(foreign.files.devices)"],
        ),
    ]);
    assert!(!cgroup_left(&made.0));
    let container = asleep.wakes();
    let groups = container.cgroups();
    for (controller, file, limit) in
        [("pids", "pids.max", "64"), ("blkio", "blkio.bfq.weight", "10")]
    {
        assert!(groups.contains(&format!(":{controller}:/{}", made.0)), "{groups}");
        let file = format!("/sys/fs/cgroup/{controller}/{}/{file}", made.0);
        assert_eq!(fs::read_to_string(&file).unwrap().trim(), limit, "{file}");
    }
}
