//! `--dry-run`: what would be refused, and how long it would take. Nothing moves.
//!
//! The engine dumps the tree as for post-copy, all but its pages, and is told no when the images
//! are complete: the tasks are stopped for as long as that takes, and go on.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use torpor_worker::{Event, Worker, printable};

use super::estimate::{Unprepared, kind, restore_after, saving};
use super::files::{trees, volumes};
use super::link::{Link, MIN_COMPARED};
use super::round::{STORE, written_pages};
use super::sample::Writes;
use super::{
    Plan, compares_files, find_root, in_own_users, is_shell_job, judge, subject, warn, work_dir,
};
use crate::engine::{self, PAGES, POST_DUMP, WORK, over_pages, repeat};
use crate::error::{Context, Error, Result};
use crate::experience::{Experience, Factors, Lesson};
use crate::files::Mirror;
use crate::forecast::{FILL, Forecast, Measured, Wish, float, seconds};
use crate::host::Host;
use crate::record::{Side, has_been, look, make_private, new_id};
use crate::report::{megabytes, millis};
use crate::runtime::{self, Call};
use crate::shape::Shape;
use crate::task;
use crate::wire::message::Begin;
use crate::work::WorkDir;

/// How long the link is measured.
const MEASURING: Duration = Duration::from_millis(250);
const PAGE: u64 = 4096;

/// What came of it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Rehearsal {
    mode: String,
    /// What would keep the tree here, in words.
    pub refused: Vec<String>,
    measured: Option<(Measured, Forecast)>,
    /// How many earlier migrations the estimate learns from.
    learned_from: usize,
}

/// What the engine says of the tree.
struct Checked {
    pages: u64,
    freeze: Duration,
    /// Whether large images would be compared with those of an earlier round.
    compares: bool,
    /// Bytes of images that are no pages, of those that are large and of the others.
    large: u64,
    small: u64,
}

/// Finds out what a migration would be like.
///
/// # Errors
/// If there is no such tree; what keeps this from finding out anything.
pub(crate) fn rehearse(plan: &Plan) -> Result<Rehearsal> {
    let root = find_root(plan.pid)?;
    warn(plan, &root)?;
    let (shell_job, kind) = (is_shell_job(&root)?, kind(plan)?);
    let id = new_id()?;
    let begin = Begin {
        id: id.clone(),
        host: Host::this(),
        subject: subject(plan, &root, shell_job)?,
        build_after: 0,
        is_lazy: plan.mode.is_lazy(),
        ignore_cpu: plan.ignore_cpu,
        with_rootfs: plan.with_rootfs,
        volumes: volumes(plan)?,
        connections: plan.connections,
        patience: plan.patience,
    };
    let mut refused = Vec::new();
    let mut note = |error: &Error| {
        let hint = error.hint().map_or(String::new(), |hint| format!(" (hint: {hint})"));
        refused.push(format!("{error}{hint}"));
    };
    if let Err(error) = judge(plan).and_then(|()| is_new(plan)) {
        note(&error);
    }
    let mut link = match Link::rehearse(&plan.to, begin) {
        Ok(link) => Some(link),
        Err(error) => {
            note(&error);
            None
        }
    };
    let work = WorkDir::create(work_dir(plan, &id))?;
    let kept = work.path().join("kept");
    make_private(&work.path().join("1"))?;
    make_private(&kept)?;
    let checked = match check(plan, &work, shell_job) {
        Ok(checked) => Some(checked),
        Err(error) => {
            note(&error);
            None
        }
    };
    let mut speed = None;
    if let Some(link) = &mut link {
        if checked.is_some() {
            match link.send_images(&kept, 1, None).and_then(|_| link.arrived(1)) {
                Ok(()) => {}
                Err(error @ Error::Refused { .. }) => note(&error),
                Err(error) => return Err(error),
            }
        }
        speed = Some(link.measure(MEASURING, None)?);
        link.part()?;
    }
    let lesson = Experience::of(&plan.state_dir).lesson(&kind);
    let measured = match (checked, speed) {
        (Some(checked), Some(speed)) => Some(forecast(plan, &checked, speed, lesson)?),
        _ => None,
    };
    let learned_from = lesson.map_or(0, |lesson| lesson.of);
    let mode = plan.mode.name().to_owned();
    Ok(Rehearsal { mode, refused, measured, learned_from })
}

/// Whether no migration has had the number that was chosen for this one.
fn is_new(plan: &Plan) -> Result<()> {
    let Some(id) = &plan.id else { return Ok(()) };
    look(&plan.state_dir, Side::Source, id)?.map_or(Ok(()), |_| Err(has_been(id)))
}

/// What was found out about the tree and the link, and what earlier migrations say about the rest: how long rounds
/// take if the link lets them, and by how much the parts of the pause were longer or shorter. Without these, a tree is made as fast as it is
/// read, and slower for files in memory.
fn forecast(
    plan: &Plan,
    checked: &Checked,
    speed: u64,
    lesson: Option<Lesson>,
) -> Result<(Measured, Forecast)> {
    let tasks = task::tree(plan.pid)?;
    let writes = Writes::sample(&tasks)?;
    // What the estimate of a migration without rounds begins with, which that factor is of.
    let longer = lesson.filter(|_| !plan.mode.has_rounds()).map(|lesson| lesson.factors.restore);
    let shape = Shape { stores_files: checked.compares, ..Shape::of(&tasks) };
    let restore = match longer {
        Some(times) => Unprepared::of(plan.pid, &shape).restore.mul_f64(times),
        None => restore_after(checked.freeze, &shape),
    };
    let (pace, compares) = (lesson.and_then(|it| it.pace), checked.compares);
    let start = Instant::now();
    let trees = trees(plan)?;
    let files = trees.iter().map(|tree| Mirror::new(tree)?.bytes()).sum::<Result<u64>>()?;
    let measured = Measured {
        memory: checked.pages * PAGE,
        state: if compares { checked.small } else { checked.small + checked.large },
        compared: if compares { checked.large } else { 0 },
        archived: if compares { shape.files_in_memory } else { 0 },
        writes: writes.rate(),
        link: pace.map_or(float(speed), |pace| pace.rate.min(float(speed))),
        freeze: checked.freeze,
        saving: saving(checked.freeze, &shape),
        restore,
        fill: FILL / longer.unwrap_or(1.0),
        files,
        scan: if trees.is_empty() { Duration::ZERO } else { start.elapsed() },
        last: lesson.and_then(|it| it.last),
        each: pace.map_or(checked.freeze, |pace| seconds(pace.each)),
    };
    let wish = Wish {
        mode: plan.mode,
        bandwidth: plan.bandwidth,
        max_downtime: plan.max_downtime,
        max_rounds: plan.max_rounds,
    };
    let plain = Forecast::new(&measured, wish, |time| writes.within(time));
    let forecast = match lesson.and_then(|it| it.rehearsed) {
        Some(factors) => corrected(plain, factors),
        None => plain,
    };
    Ok((measured, forecast))
}

/// A forecast, corrected by how far rehearsals of earlier migrations would have been off.
fn corrected(plain: Forecast, factors: Factors) -> Forecast {
    let pause = factors.correct(&plain.pause);
    Forecast {
        total: (plain.total + pause.total()).saturating_sub(plain.pause.total()),
        pause,
        ..plain
    }
}

/// Has the engine look at all of the tree, and say what it would refuse.
fn check(plan: &Plan, work: &WorkDir, shell_job: bool) -> Result<Checked> {
    // The kernel needs the pages of tasks in user namespaces: these are copied instead.
    let copies = in_own_users(plan.pid)?.is_some();
    let (near, _far) = UnixStream::pair().context(|| "socketpair".to_owned())?;
    let pages = (!copies).then(|| OwnedFd::from(near));
    let mut fds = vec![(WORK, work.as_fd())];
    fds.extend(pages.iter().map(|pages| (PAGES, pages.as_fd())));
    let work = work.path();
    let mut options = match copies {
        true => vec!["--leave-running".to_owned(), "--cow".to_owned()],
        false => vec!["--lazy-pages".to_owned()],
    };
    let compares = compares_files(plan)?;
    options.extend(compares.then(|| STORE.to_owned()));
    options.extend(plan.dump_options.iter().cloned());
    let mut worker = match &plan.container {
        Some(container) => {
            let (dir, logs) = (work.join("1").display().to_string(), work.display().to_string());
            let named = ["--image-path", &dir, "--work-path", &logs].map(str::to_owned);
            let common = container.words().iter().map(|&word| word.to_owned());
            let words = named.into_iter().chain(common).collect();
            let call = Call::new(&container.inner(), "checkpoint", words, options);
            runtime::start(&call, work, &[POST_DUMP], &fds)?
        }
        None => {
            let pid = plan.pid.to_string();
            let words = ["dump", "--tree", &pid, "--images-dir", "1", "--tcp-established"];
            let mut args: Vec<String> = words.map(str::to_owned).to_vec();
            args.push("--file-locks".to_owned());
            args.extend(pages.iter().flat_map(|_| over_pages()));
            args.extend(shell_job.then(|| "--shell-job".to_owned()));
            args.extend(options);
            engine::start(args, work, &[POST_DUMP], &fds)?
        }
    };
    let freeze = until_dumped(&mut worker)?;
    let images = work.join("1");
    let statistics = if plan.container.is_some() { work } else { images.as_path() };
    let pages = written_pages(statistics);
    let (large, small) = keep(&images, &work.join("kept"))?;
    worker.answer(false)?;
    // It says that somebody said no.
    let _ = engine::finish("dump", worker);
    Ok(Checked { pages, freeze, compares, large, small })
}

/// For how long the tasks have been stopped when their images are complete.
fn until_dumped(worker: &mut Worker) -> Result<Duration> {
    let mut start = Instant::now();
    loop {
        match worker.next_event()? {
            Event::Point { held: true, .. } => return Ok(start.elapsed()),
            Event::Point { name, .. } if name == "pre-dump" => start = Instant::now(),
            Event::Ended(outcome) => {
                engine::judge("dump", outcome)?;
                return Err(Error::refused("dump: it did not wait"));
            }
            event => repeat(&event),
        }
    }
}

/// Keeps images, for the engine takes them back when it is told no. How many bytes those have that are
/// no pages: the large ones, and the others.
fn keep(images: &Path, kept: &Path) -> Result<(u64, u64)> {
    let listed = || images.display().to_string();
    let (mut large, mut small) = (0, 0);
    for entry in std::fs::read_dir(images).context(listed)? {
        let entry = entry.context(listed)?;
        let len = entry.metadata().context(listed)?.len();
        std::fs::hard_link(entry.path(), kept.join(entry.file_name())).context(listed)?;
        match entry.file_name().to_string_lossy().starts_with("pages-") {
            true => {}
            false if len >= MIN_COMPARED => large += len,
            false => small += len,
        }
    }
    Ok((large, small))
}

impl Rehearsal {
    /// For programs.
    #[must_use]
    pub(crate) fn json(&self) -> Value {
        let mut all = json!({ "mode": self.mode, "refused": self.refused });
        if let Some((measured, forecast)) = &self.measured {
            all["memory_bytes"] = json!(measured.memory);
            all["state_bytes"] = json!(measured.state + measured.compared);
            all["written_bytes_per_s"] = json!(measured.writes.round());
            all["link_bytes_per_s"] = json!(measured.link.round());
            all["stopped_ms"] = json!(millis(measured.freeze));
            if measured.files > 0 {
                all["files_bytes"] = json!(measured.files);
            }
            all["estimate"] = forecast.json();
            all["estimate"]["learned_from"] = self.learned_from.into();
        }
        all
    }

    /// For people.
    #[must_use]
    pub(crate) fn text(&self) -> String {
        // A list has a line for each, which begins with two spaces. All else may be a word of the other host's.
        let told = |why: &String| {
            let parts: Vec<String> = why.split("\n  ").map(printable).collect();
            format!("Refused: {}", parts.join("\n  "))
        };
        let mut lines: Vec<String> = self.refused.iter().map(told).collect();
        if self.refused.is_empty() {
            lines.push("Nothing keeps it here.".to_owned());
        }
        if let Some((measured, forecast)) = &self.measured {
            lines.push(format!(
                "{:.1} MB of memory, of which {:.1} MB/s are written, {:.1} MB of files; pages go at \
                 {:.0} MB/s.",
                megabytes(measured.memory),
                measured.writes / 1e6,
                megabytes(measured.files),
                measured.link / 1e6,
            ));
            lines.push(format!(
                "{}: {} rounds in {:.1} s, stopped for about {:.0} ms (freeze {:.1}, transfer {:.1}, \
                 restore {:.1}).",
                self.mode,
                forecast.rounds,
                forecast.total.as_secs_f64(),
                millis(forecast.pause.total()),
                millis(forecast.pause.freeze),
                millis(forecast.pause.transfer),
                millis(forecast.pause.restore),
            ));
        }
        lines.join("\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// It may be the words of another host.
    #[test]
    fn a_terminal_does_nothing_by_what_keeps_it_here() {
        let refused = vec!["two:\n  one\x1b[2J\n  other\n".to_owned()];
        let text = Rehearsal { refused, ..Rehearsal::default() }.text();
        assert_eq!(text, "Refused: two:\n  one\u{fffd}[2J\n  other\u{fffd}");
    }
}
