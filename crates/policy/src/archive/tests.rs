#![allow(clippy::unwrap_used)]

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use super::*;

fn asks(archive: &[u8]) -> Result<Vec<Ask>> {
    let mut all = vec![];
    scan(archive, &|_, id| id, &mut |ask| all.push(ask)).map(|_| all)
}

pub(super) fn compressed(tar: &[u8]) -> Vec<u8> {
    let mut gz = flate2::write::GzEncoder::new(vec![], flate2::Compression::fast());
    gz.write_all(tar).unwrap();
    gz.finish().unwrap()
}

/// What tar makes of a directory in a format, with sparse files and long names.
fn packed(format: &str, fill: impl Fn(&std::path::Path)) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let sparse = fs::File::create(dir.path().join("sparse")).unwrap();
    for part in 0..40 {
        std::os::unix::fs::FileExt::write_all_at(&sparse, b"x", part << 16).unwrap();
    }
    let long = dir.path().join("l".repeat(150)).join("m".repeat(150));
    fs::create_dir_all(&long).unwrap();
    fs::write(long.join("file"), [7; 1000]).unwrap();
    fs::hard_link(long.join("file"), dir.path().join("link")).unwrap();
    std::os::unix::fs::symlink("/somewhere", dir.path().join("symlink")).unwrap();
    fill(dir.path());
    let output = Command::new("tar")
        .args(["--create", "--gzip", "--sparse"])
        .args(if format == "posix" {
            &["--xattrs", "--xattrs-include=*", "--acls"][..]
        } else {
            &[]
        })
        .arg(format!("--format={format}"))
        .arg("--directory")
        .arg(dir.path())
        .arg(".")
        .output()
        .unwrap();
    assert!(output.status.success());
    output.stdout
}

#[test]
fn programs_and_devices_are_found_in_both_formats() {
    for format in ["posix", "gnu"] {
        let plain = packed(format, |_| {});
        assert_eq!(asks(&plain).unwrap(), [], "{format}");
        let totals = scan(plain.as_slice(), &|_, id| id, &mut drop).unwrap();
        let bytes = (39 << 16) + 1 + 1000;
        // The first one has a page at each of 40 places, though GNU's format knows blocks of 512 bytes only.
        let expected = Totals { files: 2, bytes, pages: 41, directories: 2, others: 2 };
        assert_eq!(totals, expected, "{format}");
        let archive = packed(format, |dir| {
            fs::write(dir.join("su"), "#!/bin/sh").unwrap();
            fs::set_permissions(dir.join("su"), fs::Permissions::from_mode(0o4755)).unwrap();
            let device = dir.join("disk");
            let made = Command::new("mknod").arg(device).args(["b", "259", "300"]).status();
            assert!(made.unwrap().success());
            // Whiteouts of an overlay are no devices.
            let made = Command::new("mknod").arg(dir.join("gone")).args(["c", "0", "0"]).status();
            assert!(made.unwrap().success());
            let deep = dir.join("l".repeat(150)).join("m".repeat(150)).join("sgid");
            fs::write(&deep, "").unwrap();
            fs::set_permissions(&deep, fs::Permissions::from_mode(0o2711)).unwrap();
        });
        let found = asks(&archive).unwrap();
        assert_eq!(found.len(), 5, "{format}: {found:?}");
        // Which user and group they make of anybody.
        assert!(found.contains(&Ask::User(0)) && found.contains(&Ask::Group(0)), "{found:?}");
        let su =
            |ask: &Ask| matches!(ask, Ask::SetUid { path, mode: 0o4755, .. } if path == "./su");
        assert!(found.iter().any(su), "{format}: {found:?}");
        let sgid = |ask: &Ask| matches!(ask, Ask::SetUid { path, mode: 0o2711, .. } if path.ends_with("/sgid"));
        assert!(found.iter().any(sgid), "{format}: {found:?}");
        let device = Device { block: true, major: Some(259), minor: Some(300) };
        assert!(found.contains(&Ask::Device { path: "./disk".to_owned(), device }), "{found:?}");
    }
}

#[test]
fn programs_with_capabilities_are_found() {
    let archive = packed("posix", |dir| {
        fs::write(dir.join("ping"), "").unwrap();
        let set = Command::new("setcap").arg("cap_net_raw+ep").arg(dir.join("ping")).status();
        assert!(set.unwrap().success());
    });
    let found = asks(&archive).unwrap();
    assert!(
        matches!(&found[..], [Ask::SetUid { path, capabilities: true, .. }] if path == "./ping"),
        "{found:?}"
    );
}

/// One plain file's header, changed.
fn header(change: impl Fn(&mut [u8; BLOCK])) -> Vec<u8> {
    let mut header = [0; BLOCK];
    header[..4].copy_from_slice(b"file");
    header[100..107].copy_from_slice(b"0004755");
    header[124..135].copy_from_slice(b"00000000000");
    header[156] = b'0';
    header[257..265].copy_from_slice(b"ustar\x0000");
    change(&mut header);
    header[148..156].copy_from_slice(b"        ");
    let sum: u32 = header.iter().map(|&b| u32::from(b)).sum();
    header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    [&header[..], &[0; 1024]].concat()
}

/// A header of records before the file of the other header.
fn with_records(records: &[u8], file: &[u8]) -> Vec<u8> {
    let digits = format!("{:011o}", records.len());
    let first = header(|h| {
        h[156] = b'x';
        h[124..135].copy_from_slice(digits.as_bytes());
    });
    let padded = [records, &vec![0; records.len().next_multiple_of(BLOCK) - records.len()]];
    [&first[..BLOCK], &padded.concat(), file].concat()
}

/// A record of a header.
fn record(key: &str, value: &[u8]) -> Vec<u8> {
    let mut record = [b" ", key.as_bytes(), b"=", value, b"\n"].concat();
    let digits = if record.len() + 2 < 100 { 2 } else { 3 };
    record.splice(..0, (record.len() + digits).to_string().into_bytes());
    record
}

/// What decides how a security module takes a program is no owner's to say, nor what an overlay makes of a directory.
#[test]
fn attributes_that_take_a_capability_are_found() {
    let of = |name: &str| {
        let records = record(&format!("SCHILY.xattr.{name}"), b"x");
        let plain = header(|h| h[100..107].copy_from_slice(b"0000755"));
        asks(&compressed(&with_records(&records, &plain))).unwrap()
    };
    for name in ["security.SMACK64EXEC", "security.ima", "trusted.overlay.redirect"] {
        let text = format!("the attribute \"{name}\" of \"./file\"");
        assert_eq!(of(name), [Ask::Use { text, capability: SYS_ADMIN }]);
    }
    for name in ["user.mime", "security.selinux", "security", "trustedly"] {
        assert_eq!(of(name), [], "{name}");
    }
    assert!(matches!(of("security.capability")[..], [Ask::SetUid { .. }]));
}

/// An archive of some hundred kilobytes would fill the memory of whoever unpacks it: what directories are to have is kept
/// until all is there.
#[test]
fn attributes_do_not_fill_memory() {
    let large = vec![0; usize::try_from(MAX_HEADER).unwrap() - 100];
    let digits = large.len().to_string().len();
    let key = "SCHILY.xattr.user.x";
    let length = digits + 1 + key.len() + 1 + large.len() + 1;
    let records = [format!("{length} {key}=").as_bytes(), &large, b"\n"].concat();
    let directory = header(|h| {
        h[156] = b'5';
        h[100..107].copy_from_slice(b"0000755");
    });
    let directory = with_records(&records, &directory[..BLOCK]);
    let of = |directories: usize| {
        let mut gz = flate2::write::GzEncoder::new(vec![], flate2::Compression::best());
        (0..directories).for_each(|_| gz.write_all(&directory).unwrap());
        gz.write_all(&[0; 2 * BLOCK]).unwrap();
        let archive = gz.finish().unwrap();
        assert!(archive.len() < 1 << 20, "{} bytes", archive.len());
        asks(&archive)
    };
    assert_eq!(of(100), Ok(vec![]));
    assert_eq!(of(129), Err("more attributes than an archive can have".to_owned()));
}

#[test]
fn what_is_strange_is_said() {
    assert_eq!(asks(&compressed(&header(|_| {}))).unwrap().len(), 2);
    let strange = |tar: &[u8], expected: &str| {
        let error = asks(&compressed(tar)).unwrap_err();
        assert!(error.contains(expected), "{error}");
    };
    strange(&header(|h| h[156] = b'V'), "type 'V'");
    strange(&header(|h| h[156] = b'g'), "type 'g'");
    strange(&header(|h| h[130] = b'9'), "a number that is none");
    strange(&header(|h| (h[156], h[134]) = (b'2', b'1')), "has data, but is no file");
    let mut wrong = header(|_| {});
    wrong[0] ^= 1;
    strange(&wrong, "check sum");
    strange(&header(|_| {})[..512], "it has no end");
    strange(&[&header(|h| h[132] = b'7')[..512], &[1; 9]].concat(), "it ends within a file");
    assert!(asks(b"no gzip").is_err());
    // What two readers take for different things.
    strange(&header(|h| h[4] = b'/'), "ends with a slash");
    strange(&header(|h| h[..2].copy_from_slice(b"/x")), "no path in a directory");
    strange(&header(|h| h[..4].copy_from_slice(b"../x")), "leads upwards");
    strange(&header(|h| h[..4].copy_from_slice(b"./.\0")), "a file without a name");
    strange(&header(|h| h[100..107].copy_from_slice(b"0104755")), "mode");
    strange(&header(|h| h[156] = b'7'), "type '7'");
    let end = [&header(|_| {})[..], &header(|_| {})[..]].concat();
    strange(&end, "goes on behind its end");
    let twice = with_records(b"10 path=x\n", &with_records(b"14 mtime=1.25\n", &header(|_| {})));
    strange(&twice, "says something twice");
    // Maps of holes: more data than there is, less, in disorder, beyond the end.
    let holes = |at: &[u8; 11], len: &[u8; 11], size: &[u8; 11], data: &[u8; 11]| {
        header(|h| {
            h[156] = b'S';
            h[257..265].copy_from_slice(b"ustar  \0");
            h[386..397].copy_from_slice(at);
            h[398..409].copy_from_slice(len);
            h[483..494].copy_from_slice(size);
            h[124..135].copy_from_slice(data);
        })
    };
    let (none, few, many) = (b"00000000000", b"00000000001", b"00000001000");
    strange(&holes(none, many, many, none), "512 bytes of data, of which there are 0");
    strange(&holes(none, none, many, few), "0 bytes of data, of which there are 1");
    strange(&holes(many, few, few, few), "in disorder");
}

#[test]
fn records_are_read_strictly() {
    let read = |texts: &[&[u8]]| {
        let mut extra = Extra::default();
        texts.iter().try_for_each(|text| extra.records(text)).map(|()| extra)
    };
    for text in ["5 a=\n", "x", "22 GNU.volume.label=x\n", "99 path=x\n", "11 size=-1\n"] {
        assert!(read(&[text.as_bytes()]).is_err(), "{text}");
    }
    let extra = read(&[b"11 path=/x\n21 GNU.sparse.name=y\n15 mtime=-1.25\n"]).unwrap();
    assert_eq!(extra.name(&[0; BLOCK]), b"y");
    assert_eq!(extra.modified, Some((-2, 750_000_000)));
    assert!(read(&[b"11 path=/x\n", b"11 path=/y\n"]).is_err());
    // As tar(1) writes names with what a record has a use for.
    let extra = read(&[b"36 SCHILY.xattr.user.100%25%3D%41=v\n"]).unwrap();
    assert_eq!(extra.attributes, [(b"user.100%=%41".to_vec(), b"v".to_vec())].into());
    // A second before the first that there is.
    assert!(read(&[b"33 mtime=-9223372036854775808.5\n"]).is_err());
}

/// tar(1) writes a list twice if it is told to: as an attribute, with numbers, and as text, with names where it
/// knows some.
#[test]
fn lists_have_numbers() {
    let read = |records: &[&[u8]]| {
        let mut extra = Extra::default();
        extra.records(&records.concat())?;
        extra.lists()
    };
    let list = AccessList::of_text("u::rw-,u:1:rw-,g::r--,m::rw-,o::r--").unwrap();
    let attribute = list.attribute(Some, Some).unwrap();
    let attribute = &record("SCHILY.xattr.system.posix_acl_default", &attribute)[..];
    let text =
        |user: &str| format!("user::rw-\nuser:{user}:rw-\ngroup::r--\nmask::rw-\nother::r--\n");
    let names = &record("SCHILY.acl.default", text("daemon").as_bytes())[..];
    let numbers = &record("SCHILY.acl.default", text("1").as_bytes())[..];
    for records in [&[attribute][..], &[attribute, names], &[names, attribute], &[numbers]] {
        assert_eq!(read(records), Ok([None, Some(list.clone())]));
    }
    assert_eq!(read(&[names]), Err("an access control list that is none".to_owned()));
    for records in [[attribute, attribute], [numbers, numbers]] {
        assert_eq!(read(&records), Err("a header that says something twice".to_owned()));
    }
}

/// What tar writes comes out as it went in.
#[test]
fn all_of_a_file_is_read() {
    for format in ["posix", "gnu"] {
        let archive = packed(format, |_| {});
        let mut archive = Archive::new(&archive[..]);
        let mut seen = vec![];
        while let Some(entry) = archive.next().unwrap() {
            if let Make::File { size, data } = &entry.make
                && entry.path == b"sparse"
            {
                let filled = data.iter().filter(|stretch| stretch.len > 0).count();
                assert_eq!((*size, filled), ((39 << 16) + 1, 40), "{format}");
                let mut byte = [0];
                let mut read = 0;
                while archive.read(&mut byte).unwrap() == 1 {
                    read += usize::from(byte == *b"x");
                }
                assert_eq!(read, 40, "{format}");
            }
            seen.push((entry.path.len(), entry.make));
        }
        let has = |len: usize, make: &Make| seen.iter().any(|(l, m)| (*l, m) == (len, make));
        assert!(has(0, &Make::Directory) && has(301, &Make::Directory), "{format}: {seen:?}");
        assert!(has(7, &Make::Symlink(b"/somewhere".to_vec())), "{format}: {seen:?}");
        let linked = |(_, make): &(usize, Make)| matches!(make, Make::Link(_));
        assert!(seen.iter().any(linked), "{format}: {seen:?}");
    }
}

/// What the crate `tar` reads of an archive, for which there is a reader of its own here (docs/adr/0021-own-reader-of-archives.md):
/// the paths of all entries, each with its content.
fn by_library(archive: &[u8]) -> io::Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let mut archive = tar::Archive::new(MultiGzDecoder::new(archive));
    let mut all = vec![];
    for entry in archive.entries()? {
        let mut entry = entry?;
        let (path, mut content) = (entry.path_bytes().into_owned(), vec![]);
        entry.read_to_end(&mut content)?;
        all.push((path, content));
    }
    Ok(all)
}

/// Holes are zeros that it makes up, so that a file of a terabyte is one to write; those of the format posix, which a
/// dump writes, it does not know: the file has another name then, and begins with its map.
#[test]
fn a_library_loses_holes() {
    let length = (39 << 16) + 1;
    let of = |format: &str, is_it: fn(&[u8]) -> bool| {
        let all = by_library(&packed(format, |_| {})).unwrap();
        all.into_iter().find(|(path, _)| is_it(path)).unwrap()
    };
    let (_, content) = of("gnu", |path| path == b"./sparse");
    assert_eq!(content.len(), length);
    assert_eq!(content.iter().filter(|&&byte| byte != 0).count(), 40);
    let (path, content) = of("posix", |path| path.windows(13).any(|part| part == b"GNUSparseFile"));
    let path = String::from_utf8(path).unwrap();
    assert!(path.starts_with("./GNUSparseFile.") && path.ends_with("/sparse"), "{path}");
    // The last one says where the file ends.
    assert!(content.starts_with(b"41\n") && content.len() < length, "{} bytes", content.len());
}

/// What two readers take for different things is an error here, and goes through there.
#[test]
fn a_library_takes_what_is_strange() {
    let plain = header(|_| {});
    let upwards = header(|h| (h[156], h[157]) = (b'1', b'/'));
    for (tar, why) in [
        ([&plain[..], &plain[..]].concat(), "goes on behind its end"),
        (plain[..BLOCK].to_vec(), "it has no end"),
        (header(|h| h[4] = b'/'), "ends with a slash"),
        (header(|h| h[..4].copy_from_slice(b"../x")), "leads upwards"),
        (upwards, "no path in a directory"),
        (header(|h| h[100..107].copy_from_slice(b"0104755")), "the mode 104755"),
        (header(|h| h[156] = b'V'), "type 'V'"),
        (header(|h| h[156] = b'g'), "type 'g'"),
        (with_records(b"10 path=x\n10 path=y\n", &plain), "says something twice"),
        (with_records(b"11 size=-1\n", &plain), "a record that is none"),
        (with_records(b"8 path=x\n", &plain), "a record that is none"),
        (with_records(b"20 GNU.sparse.major=1\n", &plain), "a record that is none"),
        (with_records(b"22 GNU.sparse.major=1\n", &plain), "a form that is not known"),
        (with_records(b"22 GNU.volume.label=x\n", &plain), "a record \"GNU.volume.label\""),
    ] {
        let archive = compressed(&tar);
        let error = asks(&archive).unwrap_err();
        assert!(error.contains(why), "{why}: {error}");
        assert!(!by_library(&archive).expect(why).is_empty(), "{why}");
    }
}

proptest::proptest! {
    #[test]
    fn any_archive_comes_to_an_end(bytes: Vec<u8>, at in 0_usize..512, byte: u8) {
        let _ = asks(&bytes);
        let _ = asks(&compressed(&bytes));
        let mut tar = header(|h| h[at] = byte);
        let _ = asks(&compressed(&tar));
        tar[at] = byte;
        let _ = asks(&compressed(&tar));
    }
}
