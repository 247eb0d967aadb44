//! Archives that two readers could take for different things, and what they may not hold.

use std::fs;

use torpor_images::kind;
use torpor_runtimes_tests::command::command;

use super::{Images, refuses};

/// A tar header for a file.
fn header(change: impl Fn(&mut [u8; 512])) -> [u8; 512] {
    let mut header = [0; 512];
    header[..6].copy_from_slice(b"./file");
    header[100..107].copy_from_slice(b"0000644");
    header[108..115].copy_from_slice(b"0000000");
    header[116..123].copy_from_slice(b"0000000");
    header[124..135].copy_from_slice(b"00000000000");
    header[156] = b'0';
    header[257..265].copy_from_slice(b"ustar  \0");
    change(&mut header);
    header[148..156].copy_from_slice(b"        ");
    let sum: u32 = header.iter().map(|&b| u32::from(b)).sum();
    header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    header
}

#[test]
fn archives() {
    /// In the place of what is in /dev.
    fn archive(images: &Images, parts: &[&[u8]]) {
        let mut device = 0;
        images.mounts(|mounts| {
            device = mounts.iter().find(|mount| mount.mountpoint == b"/dev").unwrap().root_dev;
        });
        let tar = images.scratch.join("archive");
        fs::write(&tar, [&parts.concat()[..], &[0; 1024]].concat()).unwrap();
        let packed = command("gzip", &["--force", "--stdout"]).arg(&tar).output().unwrap();
        images.raw(&kind::TMPFS_DEV.file_name(device.into()), &packed.stdout);
    }
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
                "a set-uid program",
                |images| archive(images, &[&header(|h| h[100..107].copy_from_slice(b"0004755"))]),
                &["tmpfs-dev-", "(mode 4755)", "(foreign.files.set-uid)"],
            ),
            (
                "a device",
                |images| {
                    let disk = header(|h| {
                        h[156] = b'4';
                        h[329..336].copy_from_slice(b"0000010");
                        h[337..344].copy_from_slice(b"0000000");
                    });
                    archive(images, &[&disk]);
                },
                &["tmpfs-dev-", "device b 8:0", "(foreign.files.devices)"],
            ),
        ],
    );
}
