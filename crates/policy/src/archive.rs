//! What an archive of a tmpfs would make: programs with rights of their own, and
//! device nodes.
//!
//! It is tar(1) that unpacks the archive, so what it and this reader could take for
//! different things is not skipped but an error: the archive is then
//! [obscure](crate::Ask::Obscure).

use std::io::{self, Read};

use flate2::read::MultiGzDecoder;

use crate::request::{Ask, Device};

/// The unit of an archive, in bytes.
const BLOCK: usize = 512;
/// No archive holds more, in bytes.
const MAX_CONTENT: u64 = 64 << 30;
/// No header of names and attributes is larger, in bytes.
const MAX_HEADER: u64 = 1 << 20;
/// Bits of a mode: set-uid and set-gid.
pub(crate) const SET_ID: u32 = 0o6000;
/// The attribute that gives a program capabilities.
const CAPABILITIES: &[u8] = b"SCHILY.xattr.security.capability";

/// Further headers whose meaning is known and changes neither type nor mode nor size.
const PLAIN: [&[u8]; 10] = [
    b"path",
    b"linkpath",
    b"uid",
    b"gid",
    b"uname",
    b"gname",
    b"mtime",
    b"atime",
    b"ctime",
    b"comment",
];
/// Beginnings of such headers.
const PLAIN_PREFIXES: [&[u8]; 4] = [b"SCHILY.xattr.", b"SCHILY.acl.", b"GNU.sparse.", b"RHT."];

/// What further headers said about the next file.
#[derive(Debug, Default)]
struct Extra {
    path: Option<Vec<u8>>,
    size: Option<u64>,
    capabilities: bool,
}

/// Calls `found` with what the compressed archive would make.
///
/// # Errors
/// What is strange about it.
pub fn scan(archive: impl Read, found: &mut impl FnMut(Ask)) -> Result<(), String> {
    let mut tar = MultiGzDecoder::new(archive).take(MAX_CONTENT);
    let mut extra = Extra::default();
    while let Some(header) = block(&mut tar)? {
        if header == [0; BLOCK] {
            return Ok(());
        }
        check_sum(&header)?;
        let size = extra.size.unwrap_or(number(&header[124..136])?);
        match header[156] {
            b'x' => {
                let text = text(&mut tar, number(&header[124..136])?)?;
                records(&text, &mut extra)?;
                continue;
            }
            b'L' => {
                let name = text(&mut tar, number(&header[124..136])?)?;
                extra.path = Some(name.split(|&b| b == 0).next().unwrap_or_default().to_vec());
                continue;
            }
            b'K' => {
                text(&mut tar, number(&header[124..136])?)?;
                continue;
            }
            _ => entry(&header, &extra, size, found)?,
        }
        if header[156] == b'S' {
            skip_sparse_headers(&mut tar, &header)?;
        }
        skip(&mut tar, size)?;
        extra = Extra::default();
    }
    Err("it has no end".to_owned())
}

fn entry(
    header: &[u8; BLOCK],
    extra: &Extra,
    size: u64,
    found: &mut impl FnMut(Ask),
) -> Result<(), String> {
    let mode = u32::try_from(number(&header[100..108])?).map_err(|_| "a mode out of range")?;
    let path = || name(header, extra);
    let has_data = match header[156] {
        0 | b'0' | b'7' | b'S' => true,
        b'1'..=b'6' => false,
        kind => return Err(format!("an entry of type {:?}", char::from(kind))),
    };
    if !has_data && size != 0 {
        return Err(format!("{:?} has data, but is no file", path()));
    }
    match header[156] {
        kind @ (b'3' | b'4') => {
            let number = |range| {
                number(&header[range]).and_then(|n| {
                    u32::try_from(n).map_err(|_| "a device number out of range".to_owned())
                })
            };
            let (major, minor) = (Some(number(329..337)?), Some(number(337..345)?));
            found(Ask::Device {
                path: path(),
                device: Device { block: kind == b'4', major, minor },
            });
        }
        // A directory hands its group on, no right to anyone; links have no mode.
        b'5' | b'2' => {}
        _ if mode & SET_ID != 0 || extra.capabilities => {
            found(Ask::SetUid { path: path(), mode, capabilities: extra.capabilities });
        }
        _ => {}
    }
    Ok(())
}

fn name(header: &[u8; BLOCK], extra: &Extra) -> String {
    let until_zero = |bytes: &[u8]| bytes.split(|&b| b == 0).next().unwrap_or_default().to_vec();
    let bytes = extra.path.clone().unwrap_or_else(|| until_zero(&header[..100]));
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The next block; `None` at the end.
fn block(tar: &mut impl Read) -> Result<Option<[u8; BLOCK]>, String> {
    let mut block = [0; BLOCK];
    match tar.read_exact(&mut block) {
        Ok(()) => Ok(Some(block)),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
        Err(error) => Err(error.to_string()),
    }
}

/// A number: octal digits between spaces and zeros, or binary behind a set bit.
fn number(field: &[u8]) -> Result<u64, String> {
    let wrong = || "a number that is none".to_owned();
    if field[0] & 0x80 != 0 {
        let (head, tail) = field.split_at(field.len() - 8.min(field.len() - 1));
        if head[0] != 0x80 || head[1..].iter().any(|&b| b != 0) {
            return Err(wrong());
        }
        return Ok(tail.iter().fold(0, |n, &b| n << 8 | u64::from(b)));
    }
    let text = std::str::from_utf8(field).map_err(|_| wrong())?;
    let digits = text.trim_start_matches(' ').trim_end_matches([' ', '\0']);
    if digits.is_empty() {
        return Ok(0);
    }
    if !digits.bytes().all(|b| matches!(b, b'0'..=b'7')) {
        return Err(wrong());
    }
    u64::from_str_radix(digits, 8).map_err(|_| wrong())
}

fn check_sum(header: &[u8; BLOCK]) -> Result<(), String> {
    let bytes = header.iter().enumerate();
    let sum: u64 =
        bytes.map(|(i, &b)| if (148..156).contains(&i) { 32 } else { u64::from(b) }).sum();
    match number(&header[148..156])? == sum {
        true => Ok(()),
        false => Err("a header with a wrong check sum".to_owned()),
    }
}

/// The data of an entry that describes the next one.
fn text(tar: &mut impl Read, size: u64) -> Result<Vec<u8>, String> {
    if size > MAX_HEADER {
        return Err(format!("a header of {size} bytes"));
    }
    let padded = size.next_multiple_of(BLOCK as u64);
    let mut bytes = vec![0; usize::try_from(padded).unwrap_or(0)];
    tar.read_exact(&mut bytes).map_err(|error| error.to_string())?;
    bytes.truncate(usize::try_from(size).unwrap_or(0));
    Ok(bytes)
}

/// Records of the form `LENGTH KEY=VALUE\n`.
fn records(mut text: &[u8], extra: &mut Extra) -> Result<(), String> {
    let wrong = || "a record that is none".to_owned();
    while !text.is_empty() {
        let space = text.iter().position(|&b| b == b' ').filter(|&at| (1..20).contains(&at));
        let digits = std::str::from_utf8(&text[..space.ok_or_else(wrong)?]).map_err(|_| wrong())?;
        let len: usize = digits.parse().map_err(|_| wrong())?;
        let record = text.get(digits.len() + 1..len).ok_or_else(wrong)?;
        let record = record.strip_suffix(b"\n").ok_or_else(wrong)?;
        let equals = record.iter().position(|&b| b == b'=').ok_or_else(wrong)?;
        let (key, value) = (&record[..equals], &record[equals + 1..]);
        text = &text[len..];
        match key {
            b"size" => {
                let digits = std::str::from_utf8(value).map_err(|_| wrong())?;
                extra.size = Some(digits.parse().map_err(|_| wrong())?);
            }
            CAPABILITIES => extra.capabilities = true,
            key if PLAIN.contains(&key) || PLAIN_PREFIXES.iter().any(|p| key.starts_with(p)) => {
                if matches!(key, b"path" | b"GNU.sparse.name") {
                    extra.path = Some(value.to_vec());
                }
            }
            key => return Err(format!("a record {:?}", String::from_utf8_lossy(key))),
        }
    }
    Ok(())
}

/// The further headers of a sparse file in the older form of GNU tar: a flag in each
/// says whether another one follows.
fn skip_sparse_headers(tar: &mut impl Read, header: &[u8; BLOCK]) -> Result<(), String> {
    let mut more = header[482] != 0;
    while more {
        let next = block(tar)?.ok_or("it ends within a header")?;
        more = next[504] != 0;
    }
    Ok(())
}

fn skip(tar: &mut impl Read, size: u64) -> Result<(), String> {
    let padded = size.checked_next_multiple_of(BLOCK as u64).ok_or("a size out of range")?;
    let skipped = io::copy(&mut tar.take(padded), &mut io::sink()).map_err(|e| e.to_string())?;
    match skipped == padded {
        true => Ok(()),
        false => Err("it ends within a file".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::fs;
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;
    use std::process::Command;

    use super::*;

    fn asks(archive: &[u8]) -> Result<Vec<Ask>, String> {
        let mut all = vec![];
        scan(archive, &mut |ask| all.push(ask)).map(|()| all)
    }

    fn compressed(tar: &[u8]) -> Vec<u8> {
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
            assert_eq!(asks(&packed(format, |_| {})).unwrap(), [], "{format}");
            let archive = packed(format, |dir| {
                fs::write(dir.join("su"), "#!/bin/sh").unwrap();
                fs::set_permissions(dir.join("su"), fs::Permissions::from_mode(0o4755)).unwrap();
                let device = dir.join("disk");
                let made = Command::new("mknod").arg(device).args(["b", "259", "300"]).status();
                assert!(made.unwrap().success());
                let deep = dir.join("l".repeat(150)).join("m".repeat(150)).join("sgid");
                fs::write(&deep, "").unwrap();
                fs::set_permissions(&deep, fs::Permissions::from_mode(0o2711)).unwrap();
            });
            let found = asks(&archive).unwrap();
            assert_eq!(found.len(), 3, "{format}: {found:?}");
            let su =
                |ask: &Ask| matches!(ask, Ask::SetUid { path, mode: 0o4755, .. } if path == "./su");
            assert!(found.iter().any(su), "{format}: {found:?}");
            let sgid = |ask: &Ask| matches!(ask, Ask::SetUid { path, mode: 0o2711, .. } if path.ends_with("/sgid"));
            assert!(found.iter().any(sgid), "{format}: {found:?}");
            let device = Device { block: true, major: Some(259), minor: Some(300) };
            assert!(
                found.contains(&Ask::Device { path: "./disk".to_owned(), device }),
                "{found:?}"
            );
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

    #[test]
    fn what_is_strange_is_said() {
        assert_eq!(asks(&compressed(&header(|_| {}))).unwrap().len(), 1);
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
        let mut extra = Extra::default();
        for text in
            ["5 a=\n", "x", "9 GNU.volume.label=x\n", "22 GNU.volume.label=x\n", "99 path=x\n"]
        {
            assert!(records(text.as_bytes(), &mut extra).is_err(), "{text}");
        }
        records(b"11 path=/x\n21 GNU.sparse.name=y\n", &mut extra).unwrap();
        assert_eq!(extra.path.as_deref(), Some(&b"y"[..]));
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
}
