//! Archives that two readers could take for different things, and what they may not hold.

use std::fs;

use torpor_images::kind;
use torpor_runtimes_tests::command::command;

use super::{Images, refuses};

/// A tar header for a file.
pub(crate) fn header(change: impl Fn(&mut [u8; 512])) -> [u8; 512] {
    let mut header = [0; 512];
    header[..6].copy_from_slice(b"./file");
    header[100..107].copy_from_slice(b"0000644");
    header[108..115].copy_from_slice(b"0000000");
    header[116..123].copy_from_slice(b"0000000");
    header[124..135].copy_from_slice(b"00000000000");
    header[156] = b'0';
    header[257..265].copy_from_slice(b"ustar  \0");
    change(&mut header);
    summed(header)
}

/// A header with its check sum.
fn summed(mut header: [u8; 512]) -> [u8; 512] {
    header[148..156].copy_from_slice(b"        ");
    let sum: u32 = header.iter().map(|&b| u32::from(b)).sum();
    header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    header
}

/// A header of records for the next file, with its data.
fn records(text: &[u8]) -> Vec<u8> {
    let digits = format!("{:011o}", text.len());
    let header = header(|h| {
        h[156] = b'x';
        h[124..135].copy_from_slice(digits.as_bytes());
    });
    let mut all = [&header[..], text].concat();
    all.resize(512 + text.len().next_multiple_of(512), 0);
    all
}

/// The header of a device, with the fields of its numbers.
fn device(kind: u8, major: &[u8; 7], minor: &[u8; 7]) -> [u8; 512] {
    header(|h| {
        h[156] = kind;
        h[329..336].copy_from_slice(major);
        h[337..344].copy_from_slice(minor);
    })
}

/// Puts an archive in the place of what is in /dev.
pub(crate) fn archive(images: &Images, parts: &[&[u8]]) {
    let mut device = 0;
    images.mounts(|mounts| {
        device = mounts.iter().find(|mount| mount.mountpoint == b"/dev").unwrap().root_dev;
    });
    let tar = images.scratch.join("archive");
    fs::write(&tar, [&parts.concat()[..], &[0; 1024]].concat()).unwrap();
    let packed = command("gzip", &["--force", "--stdout"]).arg(&tar).output().unwrap();
    images.raw(&kind::TMPFS_DEV.file_name(device.into()), &packed.stdout);
}

#[test]
fn archives() {
    refuses(
        "images-archive",
        &[
            (
                "a file that looks like a directory",
                |images| {
                    let file = header(|h| (h[6], h[134]) = (b'/', b'1'));
                    let inner = header(|h| h[100..107].copy_from_slice(b"0004755"));
                    archive(images, &[&file, &inner]);
                },
                &["tmpfs-dev-", "ends with a slash, but is no directory"],
            ),
            (
                "a map of more data than there is",
                |images| {
                    let sparse = header(|h| {
                        h[156] = b'S';
                        h[386..397].copy_from_slice(b"00000000000");
                        h[398..409].copy_from_slice(b"00000001000");
                        h[483..494].copy_from_slice(b"00000001000");
                    });
                    let inner = header(|h| h[100..107].copy_from_slice(b"0004755"));
                    archive(images, &[&sparse, &inner]);
                },
                &["tmpfs-dev-", "512 bytes of data, of which there are 0"],
            ),
            (
                "a path that climbs",
                |images| archive(images, &[&header(|h| h[..7].copy_from_slice(b"../../x"))]),
                &["tmpfs-dev-", "\"../../x\" leads upwards"],
            ),
            (
                "something behind the end",
                |images| archive(images, &[&header(|_| {}), &[0; 1024], &header(|_| {})]),
                &["tmpfs-dev-", "goes on behind its end"],
            ),
            (
                "two names for one file",
                |images| archive(images, &[&records(b"10 path=x\n10 path=y\n"), &header(|_| {})]),
                &["tmpfs-dev-", "a header that says something twice"],
            ),
            (
                "a header for all files",
                |images| archive(images, &[&header(|h| h[156] = b'g'), &header(|_| {})]),
                &["tmpfs-dev-", "an entry of type 'g'"],
            ),
            (
                "a record that only some know",
                |images| {
                    let record = b"22 GNU.volume.label=x\n";
                    archive(images, &[&records(record), &header(|_| {})]);
                },
                &["tmpfs-dev-", "a record \"GNU.volume.label\""],
            ),
            (
                "a way through a link",
                |images| {
                    let link = header(|h| {
                        (h[156], h[157]) = (b'2', b'/');
                    });
                    let behind = header(|h| h[..12].copy_from_slice(b"./file/etc/x"));
                    archive(images, &[&link, &behind]);
                },
                &["file/etc/x"],
            ),
            (
                "a set-gid program",
                |images| archive(images, &[&header(|h| h[100..107].copy_from_slice(b"0002755"))]),
                &["tmpfs-dev-", "(mode 2755)", "(foreign.files.set-uid)"],
            ),
            (
                "a set-uid pipe",
                |images| {
                    let pipe = header(|h| {
                        h[156] = b'6';
                        h[100..107].copy_from_slice(b"0004755");
                    });
                    archive(images, &[&pipe]);
                },
                &["tmpfs-dev-", "(mode 4755)", "(foreign.files.set-uid)"],
            ),
            (
                "a program with capabilities",
                |images| {
                    let record = b"38 SCHILY.xattr.security.capability=x\n";
                    archive(images, &[&records(record), &header(|_| {})]);
                },
                &["tmpfs-dev-", "with capabilities of its own", "(foreign.files.set-uid)"],
            ),
            (
                "a set-uid program",
                |images| archive(images, &[&header(|h| h[100..107].copy_from_slice(b"0004755"))]),
                &["tmpfs-dev-", "(mode 4755)", "(foreign.files.set-uid)"],
            ),
            (
                "a device",
                |images| archive(images, &[&device(b'4', b"0000010", b"0000000")]),
                &["tmpfs-dev-", "device b 8:0", "(foreign.files.devices)"],
            ),
            (
                "the memory of this host",
                |images| archive(images, &[&device(b'3', b"0000001", b"0000001")]),
                &["tmpfs-dev-", "device c 1:1", "(foreign.files.devices)"],
            ),
            (
                "a device in binary numbers",
                |images| archive(images, &[&device(b'4', b"\x80\0\0\0\0\0\0", b"0000000")]),
                &["tmpfs-dev-", "device b 0:0", "(foreign.files.devices)"],
            ),
            (
                "a device behind a directory",
                |images| {
                    let dir = header(|h| (h[6], h[156]) = (b'/', b'5'));
                    let mut disk = device(b'4', b"0000010", b"0000000");
                    disk[..11].copy_from_slice(b"./file/disk");
                    archive(images, &[&dir, &summed(disk)]);
                },
                &["tmpfs-dev-", "device b 8:0 at \"./file/disk\"", "(foreign.files.devices)"],
            ),
        ],
    );
}
