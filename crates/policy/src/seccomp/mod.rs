//! What limits the system calls of a thread: read of its image once, judged, and given to the thread.
//!
//! Images have each filter once, with the number of the one that was installed before it, and a
//! thread knows its newest. Here a thread has all of its filters.

mod filter;
mod numbers;
mod profile;
mod walk;

use std::sync::Arc;

use torpor_images::proto::{CoreEntry, SeccompEntry, SeccompFilter, SeccompMode};
use torpor_images::{ImageDir, kind};

pub use filter::{Filter, INSTRUCTION};
pub(crate) use profile::{GivenCalls, Profile};

use crate::error::{Error, Result};
use crate::request::Ask;

/// The most instructions that the kernel takes of one filter, and of all filters of a thread
/// (`MAX_INSNS_PER_PATH` of kernel/seccomp.c); each filter counts for some more.
const MAX_OF_ONE: usize = libc::BPF_MAXINSNS as usize;
const MAX_OF_ALL: usize = 1 << 15;
const MORE: usize = 4;

/// What limits the system calls of a thread.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Seccomp {
    /// Nothing.
    #[default]
    Free,
    /// It may read, write, return from a handler and end.
    Strict,
    /// Filters, the oldest first. Threads that share one have the same here.
    Filtered(Vec<Arc<Filter>>),
}

impl Seccomp {
    /// Its mode in images and in `/proc/PID/status`.
    #[must_use]
    pub fn mode(&self) -> SeccompMode {
        match self {
            Seccomp::Free => SeccompMode::Disabled,
            Seccomp::Strict => SeccompMode::Strict,
            Seccomp::Filtered(_) => SeccompMode::Filter,
        }
    }

    /// Its filters, the oldest first.
    #[must_use]
    pub fn filters(&self) -> &[Arc<Filter>] {
        match self {
            Seccomp::Filtered(filters) => filters,
            _ => &[],
        }
    }

    /// What is judged of it.
    #[must_use]
    pub fn ask(&self) -> Ask {
        Ask::Seccomp(*self != Seccomp::Free)
    }
}

/// All filters of a tree, by their numbers.
#[derive(Debug, Default)]
pub struct Filters(Vec<(Option<u32>, Arc<Filter>)>);

impl Filters {
    /// Reads them.
    ///
    /// # Errors
    /// Damaged images; a filter of a length that the kernel does not take.
    pub fn read(images: &ImageDir) -> Result<Self> {
        let entry: SeccompEntry = images.read_opt(kind::SECCOMP, 0)?.unwrap_or_default();
        let filter = |SeccompFilter { filter: program, prev, flags }| {
            let len = program.len();
            if len == 0 || len % INSTRUCTION != 0 || len > MAX_OF_ONE * INSTRUCTION {
                return Err(invalid(format!("a filter of {len} bytes")));
            }
            Ok((prev, Arc::new(Filter { program, flags: flags.unwrap_or_default() })))
        };
        entry.seccomp_filters.into_iter().map(filter).collect::<Result<_>>().map(Filters)
    }

    /// Takes what limits the `threads` of a process, the leader first, out of their images, so that
    /// nobody reads it there again.
    ///
    /// # Errors
    /// A mode or a filter that does not exist; more filters than the kernel takes.
    pub fn take(&self, threads: &[u32], cores: &mut [CoreEntry]) -> Result<Vec<Seccomp>> {
        // Older images have it for the process only.
        let process = cores.first_mut().and_then(|leader| leader.tc.as_mut());
        let process = process.map(|tc| (tc.old_seccomp_mode.take(), tc.old_seccomp_filter.take()));
        let of_thread = |(&thread, core): (&u32, &mut CoreEntry)| {
            let own = core.thread_core.as_mut();
            let own = own.map(|core| (core.seccomp_mode.take(), core.seccomp_filter.take()));
            let wanted = own.filter(|(mode, _)| mode.is_some()).or(process);
            let (mode, newest) = wanted.unwrap_or_default();
            self.seccomp(thread, mode.unwrap_or_default(), newest)
        };
        threads.iter().zip(cores).map(of_thread).collect()
    }

    fn seccomp(&self, thread: u32, mode: i32, newest: Option<u32>) -> Result<Seccomp> {
        let image = || kind::CORE.file_name(thread.into());
        let invalid = |reason| Error::Invalid { image: image(), reason };
        match (SeccompMode::try_from(mode), newest) {
            (Ok(SeccompMode::Disabled), _) => Ok(Seccomp::Free),
            (Ok(SeccompMode::Strict), _) => Ok(Seccomp::Strict),
            (Ok(SeccompMode::Filter), Some(newest)) => {
                self.down_from(newest).map(Seccomp::Filtered)
            }
            (Ok(SeccompMode::Filter), None) => {
                Err(invalid("seccomp filters without a number".to_owned()))
            }
            (Err(_), _) => Err(invalid(format!("seccomp mode {mode}"))),
        }
    }

    /// A filter and those below it, the oldest first.
    fn down_from(&self, newest: u32) -> Result<Vec<Arc<Filter>>> {
        let (mut all, mut instructions, mut next) = (vec![], 0, Some(newest));
        while let Some(number) = next {
            let found = usize::try_from(number).ok().and_then(|at| self.0.get(at));
            let (below, filter) =
                found.ok_or_else(|| invalid(format!("there is no filter {number}")))?;
            instructions += filter.program.len() / INSTRUCTION + MORE;
            // Filters in a circle have no end.
            if instructions > MAX_OF_ALL + MORE {
                let reason =
                    format!("filter {newest} and those below it are more than a thread has");
                return Err(invalid(reason));
            }
            all.push(Arc::clone(filter));
            next = *below;
        }
        all.reverse();
        Ok(all)
    }
}

fn invalid(reason: String) -> Error {
    Error::Invalid { image: kind::SECCOMP.file_name(0), reason }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use torpor_images::proto::{TaskCoreEntry, ThreadCoreEntry};

    use super::*;

    /// Filters of one instruction, each on top of another.
    fn filters(below: &[Option<u32>]) -> Filters {
        let filter = |flags| Arc::new(Filter { program: vec![0; INSTRUCTION], flags });
        Filters((0..).zip(below).map(|(number, below)| (*below, filter(number))).collect())
    }

    fn numbers(seccomp: &Seccomp) -> Vec<u32> {
        seccomp.filters().iter().map(|filter| filter.flags).collect()
    }

    fn thread(mode: Option<SeccompMode>, filter: Option<u32>) -> CoreEntry {
        let mode = mode.map(Into::into);
        let core =
            ThreadCoreEntry { seccomp_mode: mode, seccomp_filter: filter, ..Default::default() };
        CoreEntry { thread_core: Some(core), ..CoreEntry::default() }
    }

    #[test]
    fn threads_have_their_own_or_that_of_the_process() {
        let filters = filters(&[None, Some(0), Some(0)]);
        let mut leader = thread(None, None);
        leader.tc = Some(TaskCoreEntry {
            old_seccomp_mode: Some(SeccompMode::Filter.into()),
            old_seccomp_filter: Some(1),
            ..TaskCoreEntry::default()
        });
        let mut cores = [
            leader,
            thread(Some(SeccompMode::Filter), Some(2)),
            thread(Some(SeccompMode::Strict), None),
            thread(Some(SeccompMode::Disabled), Some(1)),
        ];
        let found = filters.take(&[1, 2, 3, 4], &mut cores).unwrap();
        assert_eq!(
            found.iter().map(numbers).collect::<Vec<_>>(),
            [vec![0, 1], vec![0, 2], vec![], vec![]]
        );
        assert_eq!(found[2..], [Seccomp::Strict, Seccomp::Free]);
        assert!(Arc::ptr_eq(&found[0].filters()[0], &found[1].filters()[0]));
        let asked: Vec<Ask> = found.iter().map(Seccomp::ask).collect();
        assert_eq!(asked, [true, true, true, false].map(Ask::Seccomp));
        // Nobody reads it again.
        assert_eq!(filters.take(&[1, 2, 3, 4], &mut cores).unwrap(), vec![Seccomp::Free; 4]);
    }

    #[test]
    fn filters_that_cannot_be_are_refused() {
        let filters = filters(&[Some(1), Some(0), Some(9)]);
        for (mode, filter, why) in [
            (SeccompMode::Filter as i32, Some(0), "more than a thread has"),
            (SeccompMode::Filter as i32, Some(2), "seccomp.img: there is no filter 9"),
            (SeccompMode::Filter as i32, Some(7), "seccomp.img: there is no filter 7"),
            (SeccompMode::Filter as i32, None, "core-5.img: seccomp filters without a number"),
            (7, Some(0), "core-5.img: seccomp mode 7"),
        ] {
            let error = filters.seccomp(5, mode, filter).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn lengths_are_those_of_the_kernel() {
        let dir = tempfile::tempdir().unwrap();
        let images = ImageDir::open(dir.path()).unwrap();
        let read = |len| {
            let filter = SeccompFilter { filter: vec![0; len], prev: None, flags: None };
            let entry = SeccompEntry { seccomp_filters: vec![filter] };
            images.write_one(kind::SECCOMP, 0, &entry).unwrap();
            Filters::read(&images)
        };
        assert!(read(INSTRUCTION).is_ok() && read(INSTRUCTION * MAX_OF_ONE).is_ok());
        for len in [0, 7, INSTRUCTION * (MAX_OF_ONE + 1)] {
            let error = read(len).unwrap_err().to_string();
            assert_eq!(error, format!("seccomp.img: a filter of {len} bytes"));
        }
    }
}
