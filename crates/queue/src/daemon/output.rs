//! What a job writes on another machine comes into the files of its output here.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use serde::{Deserialize, Deserializer};

use super::follow::{FRAME_END, FRAME_ERR, FRAME_OUT};
use crate::files::{self, JobDir};
use crate::shepherd::message::Exit;
use crate::shepherd::pump::has_room;

/// No frame of output is longer.
const MOST_FRAME: u32 = 1 << 20;

/// What has come of a job that runs elsewhere.
#[derive(Debug)]
pub(super) enum Came {
    /// A part of its output.
    Part,
    /// All of it.
    End(EndThere),
    /// More than it may write.
    TooMuch,
}

/// How a job ended there.
#[derive(Debug, Deserialize)]
pub(super) struct EndThere {
    pub exit: Exit,
    pub note: Option<String>,
    #[serde(default)]
    pub given_up: bool,
    /// Whether what came before it ended may be of runs that do not count.
    #[serde(default)]
    pub rewritten: bool,
    #[serde(rename = "state")]
    #[serde(deserialize_with = "cancelled")]
    pub cancelled: Option<()>,
}

fn cancelled<'de, D: Deserializer<'de>>(from: D) -> Result<Option<()>, D::Error> {
    Ok((String::deserialize(from)? == "cancelled").then_some(()))
}

/// Adds what the job writes to its output here, until it ends, the other machine goes away, or this is more than the
/// job may have: with its input, `room` bytes. `ask` is asked for what is written from these bytes of both streams on.
///
/// # Errors
/// If the other machine goes away, or there is no room for it here.
pub(super) fn read<R: Read>(
    dir: &JobDir,
    room: Option<u64>,
    ask: impl FnOnce([u64; 2]) -> io::Result<R>,
) -> io::Result<Came> {
    read_into(&[dir.out(), dir.err()], dir, room, ask)
}

/// Puts the output of a job, which has ended, in the place of all that is here of it. That stays until all has come,
/// which may be never: the other machine may be lost meanwhile. What has come then counts when it is tried again.
///
/// # Errors
/// As those of [`read`].
pub(super) fn read_again<R: Read>(
    dir: &JobDir,
    room: Option<u64>,
    ask: impl FnOnce([u64; 2]) -> io::Result<R>,
) -> io::Result<Came> {
    let again = [dir.out(), dir.err()].map(|path| path.with_extension("again"));
    let came = read_into(&again, dir, room, ask)?;
    match came {
        Came::End(_) => {
            for path in &again {
                fs::rename(path, path.with_extension(""))?;
            }
            files::sync_dir(dir.path())?;
        }
        Came::Part => {}
        Came::TooMuch => again.iter().try_for_each(fs::remove_file)?,
    }
    Ok(came)
}

fn read_into<R: Read>(
    paths: &[PathBuf; 2],
    dir: &JobDir,
    room: Option<u64>,
    ask: impl FnOnce([u64; 2]) -> io::Result<R>,
) -> io::Result<Came> {
    // Nobody else may read what a job writes.
    let open = |path: &PathBuf| OpenOptions::new().create(true).append(true).mode(0o600).open(path);
    let mut files = [open(&paths[0])?, open(&paths[1])?];
    let length = |file: &File| file.metadata().map(|meta| meta.len());
    let from = [length(&files[0])?, length(&files[1])?];
    let input = fs::metadata(dir.stdin()).map_or(0, |meta| meta.len());
    let has = from.into_iter().fold(input, u64::saturating_add);
    let mut left = room.map(|most| most.saturating_sub(has));
    let mut answer = ask(from)?;
    loop {
        let mut head = [0; 5];
        answer.read_exact(&mut head)?;
        let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]);
        if length > MOST_FRAME {
            return Err(io::Error::other("its answer makes no sense"));
        }
        let mut data = vec![0; length as usize];
        answer.read_exact(&mut data)?;
        let file = match head[0] {
            FRAME_OUT => &mut files[0],
            FRAME_ERR => &mut files[1],
            FRAME_END => {
                files.iter().try_for_each(File::sync_all)?;
                files::sync_dir(dir.path())?;
                let end: Option<EndThere> = serde_json::from_slice(&data)?;
                return Ok(end.map_or(Came::Part, Came::End));
            }
            _ => continue,
        };
        if let Some(left) = &mut left {
            let Some(rest) = left.checked_sub(length.into()) else { return Ok(Came::TooMuch) };
            *left = rest;
        }
        // Where there is no room it comes again.
        if !has_room(file, length.into())? {
            return Err(io::ErrorKind::StorageFull.into());
        }
        file.write_all(&data)?;
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const END: &str = r#"{"exit":{"code":0},"note":null,"state":"done","rewritten":true}"#;

    fn frames(frames: &[(u8, &str)]) -> Vec<u8> {
        let one = |(kind, data): &(u8, &str)| {
            let length = u32::try_from(data.len()).unwrap().to_be_bytes();
            [&[*kind], &length[..], data.as_bytes()].concat()
        };
        frames.iter().flat_map(one).collect()
    }

    /// A job that has written this here.
    fn job(out: &str) -> (tempfile::TempDir, JobDir) {
        let place = tempfile::tempdir().unwrap();
        let dir = JobDir::at(place.path().to_owned());
        fs::write(dir.out(), out).unwrap();
        fs::write(dir.err(), "").unwrap();
        (place, dir)
    }

    fn out(dir: &JobDir) -> String {
        fs::read_to_string(dir.out()).unwrap()
    }

    fn names(dir: &JobDir) -> Vec<String> {
        let name = |entry: io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string();
        let mut names: Vec<String> =
            fs::read_dir(dir.path()).unwrap().map(|entry| name(entry).unwrap()).collect();
        names.sort();
        names
    }

    /// Until all of it is here what was here stays; and what has come does not come again.
    #[test]
    fn output_that_comes_again_is_whole_or_not_there() {
        let (_place, dir) = job("of another run");
        let refused = read_again(&dir, None, |_| Err::<&[u8], _>(io::Error::other("away")));
        assert!(refused.is_err());
        assert_eq!(out(&dir), "of another run");
        let part = frames(&[(FRAME_OUT, "one ")]);
        assert!(read_again(&dir, None, |_| Ok(part.as_slice())).is_err(), "it is cut off");
        assert_eq!(out(&dir), "of another run");
        let rest = frames(&[(FRAME_OUT, "two"), (FRAME_ERR, "e"), (FRAME_END, END)]);
        let came = read_again(&dir, None, |from| {
            assert_eq!(from, [4, 0]);
            Ok(rest.as_slice())
        });
        assert!(matches!(came, Ok(Came::End(_))), "{came:?}");
        assert_eq!(out(&dir), "one two");
        assert_eq!(fs::read_to_string(dir.err()).unwrap(), "e");
        assert_eq!(names(&dir), ["err", "out"]);
        for path in [dir.out(), dir.err()] {
            let mode = fs::metadata(path).unwrap().permissions().mode();
            assert_eq!(mode & 0o077, 0, "others can read it");
        }
    }

    /// What it takes the place of does not count: it goes.
    #[test]
    fn output_that_comes_again_may_be_as_much_as_any() {
        let (_place, dir) = job("12345678");
        let all = frames(&[(FRAME_OUT, "abcdefgh"), (FRAME_ERR, "12"), (FRAME_END, END)]);
        let came = read_again(&dir, Some(9), |_| Ok(all.as_slice()));
        assert!(matches!(came, Ok(Came::TooMuch)), "{came:?}");
        assert_eq!(
            (out(&dir).as_str(), names(&dir)),
            ("12345678", vec!["err".into(), "out".into()])
        );
        let came = read_again(&dir, Some(10), |_| Ok(all.as_slice()));
        assert!(matches!(came, Ok(Came::End(_))), "{came:?}");
        assert_eq!(out(&dir), "abcdefgh");
    }

    /// Files of a job that has gone count where it is: here they are as they were.
    #[test]
    fn input_and_output_count_and_files_that_stay_behind_do_not() {
        let (_place, dir) = job("12");
        fs::create_dir(dir.work()).unwrap();
        fs::write(dir.work().join("file"), vec![0; 1 << 20]).unwrap();
        fs::write(dir.stdin(), "345").unwrap();
        let four = frames(&[(FRAME_OUT, "6789"), (FRAME_END, END)]);
        let came = read(&dir, Some(8), |_| Ok(four.as_slice()));
        assert!(matches!(came, Ok(Came::TooMuch)), "{came:?}");
        let came = read(&dir, Some(9), |_| Ok(four.as_slice()));
        assert!(matches!(came, Ok(Came::End(_))), "{came:?}");
        assert_eq!(out(&dir), "126789");
    }
}
