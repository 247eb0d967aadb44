//! Traces in the Standard Workload Format, as the Parallel Workloads Archive has them: real days of real
//! machines, to try rules on.
//!
//! A trace is a text with a line for each job, of 18 numbers (-1: nobody knows), and lines that begin with
//! a semicolon. Of the numbers these are used:
//!
//! | field | what it is | here |
//! |---|---|---|
//! | 2 | submit time, in seconds | when the job is submitted |
//! | 4 | run time, in seconds | its work; a job that has not run is left out |
//! | 5, or else 8 | processors it had, or asked for | its slots |
//! | 7, or else 10 | memory it used, or asked for, in KiB for each processor | its memory |
//! | 9 | time it asked for, in seconds | its estimate |
//! | 12, 13 | user and group | its owner, `user-N`, and its project, `group-N` |
//! | 15 | queue: by convention 0 is for interactive jobs | its class |
//!
//! What a trace says of waiting, of ends and of jobs before jobs (fields 3, 6, 11, 14, 16, 17, 18) is what
//! its own scheduler has made of it, and not used.

use std::io::{self, BufRead, Read};

use super::Task;
use crate::scheduler::Millis;

/// No line is longer, in bytes.
const MAX_LINE: u64 = 4096;
/// No trace has more jobs.
const MAX_JOBS: usize = 1_000_000;
/// No number of seconds is larger: a century.
const MAX_SECONDS: i64 = 100 * 366 * 86_400;
/// No job has more processors.
const MAX_SLOTS: i64 = 1 << 24;
/// Jobs that say nothing about their memory have so many bytes for each processor.
const MEMORY: u64 = 64 << 20;
/// A job that is to take no longer than this is a short one, in seconds.
const SHORT: i64 = 600;
/// Fields of a line.
const FIELDS: usize = 18;

/// A trace.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Trace {
    /// Its jobs, in the order of the lines.
    pub tasks: Vec<Task>,
    /// Processors of the machine, as its head says (`MaxProcs`, or else `MaxNodes`).
    pub slots: Option<u32>,
    /// Jobs that were left out: they never ran, or nobody knows for how long or on how many processors.
    pub left_out: u64,
}

/// A line that is not one of a trace.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// It cannot be read.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// Its number, and what is wrong with it.
    #[error("line {0}: {1}")]
    Line(usize, String),
}

/// Reads a trace; of its jobs at most `most`. Queues have the classes that `class` says, and those for which
/// it says nothing: `interactive` is queue 0, `short` a job that asks for ten minutes at most, else `long`.
///
/// # Errors
/// If it cannot be read, or a line is no line of a trace: its number and field.
pub fn read(
    from: &mut dyn BufRead,
    most: usize,
    class: &dyn Fn(i64) -> Option<String>,
) -> Result<Trace, TraceError> {
    let mut trace = Trace::default();
    let mut nodes = None;
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        let wrong = |why: String| TraceError::Line(number, why);
        let read = Read::take(&mut *from, MAX_LINE).read_until(b'\n', &mut line)?;
        if read == 0 || trace.tasks.len() >= most.min(MAX_JOBS) {
            break;
        }
        if read as u64 == MAX_LINE && line.last() != Some(&b'\n') {
            return Err(wrong(format!("it is longer than {MAX_LINE} bytes")));
        }
        let text = String::from_utf8_lossy(&line);
        let text = text.trim();
        if let Some(comment) = text.strip_prefix(';') {
            trace.slots = trace.slots.or_else(|| named(comment, "MaxProcs"));
            nodes = nodes.or_else(|| named(comment, "MaxNodes"));
        } else if !text.is_empty() {
            match task(&fields(text).map_err(wrong)?, class) {
                Some(task) => trace.tasks.push(task),
                None => trace.left_out += 1,
            }
        }
    }
    trace.slots = trace.slots.or(nodes);
    Ok(trace)
}

/// The value of a line of the head, `NAME: N`, if it is that one.
fn named(comment: &str, name: &str) -> Option<u32> {
    let (key, value) = comment.split_once(':')?;
    let value = value.split_whitespace().next().filter(|_| key.trim() == name)?;
    value.parse().ok().filter(|&slots| slots > 0 && i64::from(slots) <= MAX_SLOTS)
}

/// The numbers of a line. Some traces have fractions, which are cut off.
fn fields(text: &str) -> Result<[i64; FIELDS], String> {
    let mut found = [-1; FIELDS];
    let mut count = 0;
    for word in text.split_whitespace() {
        let field =
            found.get_mut(count).ok_or_else(|| format!("it has more than {FIELDS} fields"))?;
        count += 1;
        let whole = word.split_once('.').map_or(word, |(whole, part)| match part {
            part if part.bytes().all(|byte| byte.is_ascii_digit()) => whole,
            _ => word,
        });
        *field = whole.parse().map_err(|_| {
            let shown: String = word.chars().take(40).collect();
            format!("field {count} is no number: {shown:?}")
        })?;
    }
    if count == FIELDS {
        Ok(found)
    } else {
        Err(format!("it has {count} fields, and not {FIELDS}"))
    }
}

/// The job of a line, if it is known what it was.
fn task(fields: &[i64; FIELDS], class: &dyn Fn(i64) -> Option<String>) -> Option<Task> {
    // As the format counts them, from 1 on.
    let field = |number: usize| fields[number - 1];
    let known = |number: usize| Some(field(number)).filter(|&value| value > 0);
    let seconds = |value: i64| Some(value).filter(|value| (0..=MAX_SECONDS).contains(value));
    let millis = |seconds: i64| -> Millis { seconds * 1000 };
    let at = seconds(field(2))?;
    let work = known(4).and_then(seconds)?;
    let slots = known(5).or(known(8)).filter(|&slots| slots <= MAX_SLOTS)?;
    let estimate = known(9).and_then(seconds);
    let kib = known(7).or(known(10)).and_then(|kib| u64::try_from(kib).ok());
    let each = kib.map_or(MEMORY, |kib| kib.saturating_mul(1024));
    let queue = field(15);
    let usual = match queue {
        0 => "interactive",
        _ if estimate.unwrap_or(work) <= SHORT => "short",
        _ => "long",
    };
    Some(Task {
        at: millis(at),
        work: millis(work),
        class: class(queue).unwrap_or_else(|| usual.to_owned()),
        owner: format!("user-{}", field(12)),
        project: format!("group-{}", field(13)),
        slots: u32::try_from(slots).ok()?,
        memory: each.saturating_mul(u64::try_from(slots).ok()?),
        estimate: estimate.map(millis),
        ..Task::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the archive has them.
    const SAMPLE: &str = "; Version: 2.2\n; MaxNodes: 64\n;   MaxProcs:  128 (two each)\n\n\
        \t1 0 10 3600 16 -1 2048 16 7200 -1 1 3 4 5 1 -1 -1 -1\n\
        2 30 -1 60.5 -1 -1 -1 2 300 1024 1 3 4 5 1 -1 -1 -1\r\n\
        3 40 -1 60 1 -1 -1 1 -1 -1 1 7 -1 5 0 -1 -1 -1\n\
        4 50 -1 -1 1 -1 -1 1 300 -1 5 3 4 5 1 -1 -1 -1\n";

    fn of(text: &str) -> Result<Trace, String> {
        read(&mut text.as_bytes(), usize::MAX, &|_| None).map_err(|e| e.to_string())
    }

    #[test]
    fn fields_are_what_the_format_says() {
        let trace = of(SAMPLE).unwrap();
        assert_eq!((trace.slots, trace.left_out, trace.tasks.len()), (Some(128), 1, 3));
        let first = Task {
            at: 0,
            work: 3_600_000,
            class: "long".to_owned(),
            owner: "user-3".to_owned(),
            project: "group-4".to_owned(),
            slots: 16,
            memory: 32 << 20,
            estimate: Some(7_200_000),
            ..Task::default()
        };
        assert_eq!(trace.tasks[0], first);
        let of = |index: usize| {
            let task = &trace.tasks[index];
            (task.at, task.work, task.class.as_str(), task.slots, task.memory, task.estimate)
        };
        assert_eq!(of(1), (30_000, 60_000, "short", 2, 2 << 20, Some(300_000)));
        assert_eq!(of(2), (40_000, 60_000, "interactive", 1, MEMORY, None));
    }

    #[test]
    fn queues_have_the_classes_that_are_asked_for() {
        let class = |queue: i64| (queue == 1).then(|| "batch".to_owned());
        let trace = read(&mut SAMPLE.as_bytes(), 2, &class).unwrap();
        let classes: Vec<&str> = trace.tasks.iter().map(|task| task.class.as_str()).collect();
        assert_eq!(classes, ["batch", "batch"]);
    }

    #[test]
    fn what_is_no_trace_is_refused_by_line_and_field() {
        let long = "1 ".repeat(3000);
        for (text, word) in [
            ("1 2 3\n", "line 1: it has 3 fields"),
            (
                "; x\n1 2 x 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18\n",
                "line 2: field 3 is no number: \"x\"",
            ),
            ("1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19\n", "more than 18"),
            ("1 2 1e9 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18\n", "field 3"),
            ("1 2 .x 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18\n", "field 3"),
            ("99999999999999999999 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18\n", "field 1"),
            (long.as_str(), "longer than"),
        ] {
            let found = of(text).unwrap_err();
            assert!(found.contains(word), "{text:?}: {found}");
        }
    }

    #[test]
    fn what_no_machine_has_seen_is_left_out() {
        let line = |at: &str, work: &str, slots: &str| {
            format!("1 {at} 0 {work} {slots} 0 0 0 0 0 1 1 1 1 1 1 0 0\n")
        };
        let huge = i64::MAX.to_string();
        for (at, work, slots) in [
            (huge.as_str(), "1", "1"),
            ("-5", "1", "1"),
            ("1", huge.as_str(), "1"),
            ("1", "1", huge.as_str()),
        ] {
            let trace = of(&line(at, work, slots)).unwrap();
            assert_eq!((trace.left_out, trace.tasks.len()), (1, 0), "{at} {work} {slots}");
        }
        let memory = format!("1 1 0 1 2 0 {huge} 0 0 0 1 1 1 1 1 1 0 0\n");
        assert_eq!(of(&memory).unwrap().tasks[0].memory, u64::MAX);
    }
}
