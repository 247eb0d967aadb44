//! Devices by descriptors, mappings and terminals.

use torpor_images::kind;
use torpor_images::proto::{
    FdTypes, FileEntry, MmEntry, PstreeEntry, RegFileEntry, TtyFileEntry, TtyInfoEntry, TtyType,
    VmaEntry,
};

use super::{Images, refuses_by};

/// A policy without a device, and images that lead there by a descriptor and in other ways.
#[test]
fn devices() {
    const DENIED: &[&str] = &["files.img: open device c 10:200 at \"/tun\"", "files.devices)"];
    fn lead(images: &Images, which: impl Fn(&FileEntry) -> bool) {
        let mut led = 0;
        images.files(|files| {
            for file in files.iter_mut().filter(|file| which(file)) {
                let reg = file.reg.as_mut().unwrap();
                (reg.name, reg.size, reg.mode) = (b"/tun".to_vec(), None, None);
                reg.mnt_id = None;
                led += 1;
            }
        });
        assert!(led > 0);
        without_groups(images);
    }
    /// What a group may use is another matter.
    fn without_groups(images: &Images) {
        images.cgroups(|groups| {
            let dirs = groups.controllers.iter_mut().flat_map(|controller| &mut controller.dirs);
            dirs.for_each(|dir| dir.properties.clear());
        });
    }
    /// A descriptor that is said to be a terminal, by the path of something else.
    fn terminal(images: &Images, ty: TtyType) {
        let sid = images.dir.read_all::<PstreeEntry>(kind::PSTREE, 0).unwrap()[0].sid;
        let info = TtyInfoEntry { id: 900_010, r#type: ty.into(), sid, ..Default::default() };
        images.dir.write_all(kind::TTY_INFO, 0, [&info]).unwrap();
        let path = images.file("/dev/null");
        images.files(|files| {
            let mut reg = path.reg.unwrap();
            (reg.id, reg.size, reg.mode) = (900_011, None, None);
            files.push(FileEntry { id: 900_011, reg: Some(reg), ..path });
        });
        images.open(FdTypes::Tty, |entry| {
            let regf_id = Some(900_011);
            entry.tty = Some(TtyFileEntry {
                id: entry.id,
                tty_info_id: info.id,
                regf_id,
                ..Default::default()
            });
        });
        lead(images, |file| file.id == 900_011);
    }
    /// One mapping of the program's file leads there, and nothing else: the program itself is what it was.
    fn mapped(images: &Images, change: impl Fn(&mut VmaEntry)) {
        let (id, program) = (900_012, images.file("/busybox"));
        let mut led = 0;
        for task in images.tasks() {
            let mut mm: MmEntry = images.dir.read_one(kind::MM, task.into()).unwrap();
            let of_program = |vma: &&mut VmaEntry| vma.shmid == u64::from(program.id);
            for vma in mm.vmas.iter_mut().filter(of_program).take(1) {
                vma.shmid = id.into();
                change(vma);
                led += 1;
            }
            images.dir.write_one(kind::MM, task.into(), &mm).unwrap();
        }
        assert!(led > 0);
        images.files(|files| {
            let mut reg = program.reg.clone().unwrap();
            reg.id = id;
            files.push(FileEntry { id, reg: Some(reg), ..program.clone() });
        });
        lead(images, |file| file.id == id);
    }
    fn has_path(file: &FileEntry, path: &str) -> bool {
        file.reg.as_ref().is_some_and(|reg| reg.name.ends_with(path.as_bytes()))
    }
    refuses_by(
        "images-devices",
        "foreign.files.devices = ['c 1:*', 'c 5:*', 'c 136:*']",
        &[
            ("a descriptor", |images| lead(images, |file| has_path(file, "/dev/null")), DENIED),
            ("a program", |images| lead(images, |file| has_path(file, "/busybox")), DENIED),
            (
                "the terminal of whoever restores, as a plain file",
                |images| {
                    images.open(FdTypes::Reg, |entry| {
                        let (id, name) = (entry.id, b"/dev/tty".to_vec());
                        let reg = RegFileEntry { id, name, flags: 2, ..RegFileEntry::default() };
                        entry.reg = Some(reg);
                    });
                    without_groups(images);
                },
                &["/dev/tty: would be the terminal of the restoring program here"],
            ),
            ("a serial line", |images| terminal(images, TtyType::Serial), DENIED),
            ("a console", |images| terminal(images, TtyType::Console), DENIED),
            ("the terminal of the session", |images| terminal(images, TtyType::Ctty), DENIED),
            ("a mapping alone", |images| mapped(images, |_| ()), DENIED),
            (
                "a mapping alone, with flags of its own",
                |images| mapped(images, |vma| vma.fdflags = Some(2)),
                DENIED,
            ),
            (
                "a mapping alone, that is locked",
                |images| mapped(images, |vma| vma.torpor_flock = Some(1)),
                DENIED,
            ),
            (
                "a mapping with flags of its own",
                |images| {
                    lead(images, |file| has_path(file, "/busybox"));
                    images.memory(|mm| mm.vmas.iter_mut().for_each(|vma| vma.fdflags = Some(2)));
                },
                DENIED,
            ),
            (
                "a mapping that is locked",
                |images| {
                    lead(images, |file| has_path(file, "/busybox"));
                    images.memory(|mm| {
                        let files = mm.vmas.iter_mut().filter(|vma| vma.status & 0xc0 != 0);
                        files.for_each(|vma| vma.torpor_flock = Some(1));
                    });
                },
                DENIED,
            ),
        ],
    );
}

/// Every container may use tun by this number, in its own network: what is opened here would be in this host's.
#[test]
fn network_devices_of_this_host() {
    refuses_by(
        "images-tun",
        "",
        &[(
            "a plain file of tun",
            |images| {
                images.open(FdTypes::Reg, |entry| {
                    let (id, name) = (entry.id, b"/tun".to_vec());
                    let reg = RegFileEntry { id, name, flags: 2, ..RegFileEntry::default() };
                    entry.reg = Some(reg);
                });
            },
            &["/tun: would have the network devices of this host here"],
        )],
    );
}
