//! `torpor queue serve`: the daemon of one machine.

mod access;
mod ahead;
mod api;
mod by_hand;
mod compared;
pub(crate) mod config;
mod core;
mod depot;
mod description;
mod discard;
mod disk;
mod ends;
mod events;
mod follow;
mod foresee;
mod grant;
mod import;
mod keeping;
mod kept;
mod lease;
mod left;
mod link;
mod listen;
mod memory;
mod metrics;
mod objects;
mod output;
mod over;
mod page;
mod peaks;
mod plan;
mod pool;
#[cfg(test)]
mod power;
mod prepare;
pub(crate) mod record;
mod refusals;
mod retention;
mod runs;
mod signals;
mod stall;
mod stdin;
mod store;
mod submission;
mod taking;
mod threads;
mod tls;
mod transfer;
mod turns;
mod upkeep;
mod view;
mod withdrawal;

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};

pub(crate) use access::Tokens;
pub(crate) use follow::{FRAME_END, FRAME_ERR, FRAME_HELD, FRAME_OUT, FRAME_SILENCE};
pub(crate) use prepare::{LOOK, look};
pub(crate) use tls::Tls;

use crate::http::Address;
use config::Config;
use core::{Core, Queue};
use link::Run;
use record::Place;

/// What a daemon is started with.
#[derive(Debug)]
pub(crate) struct Setup {
    /// Where everything lies.
    pub data: PathBuf,
    /// Where it listens.
    pub listen: Vec<Address>,
    /// Its configuration.
    pub config: Config,
    /// Who may ask over the network.
    pub tokens: Tokens,
    /// The certificate for the network.
    pub tls: Option<Tls>,
}

/// At least this often the daemon looks what has become due.
const BEAT: Duration = Duration::from_millis(250);

/// Runs the daemon, for ever.
///
/// # Errors
/// If the data directory cannot be made, written or locked; if its database or a certificate cannot be read; if an address
/// cannot be listened at.
pub(crate) fn serve(setup: Setup) -> Result<(), String> {
    let Setup { data, listen, config, tokens, tls } = setup;
    fs::create_dir_all(data.join("jobs")).map_err(|e| format!("{}: {e}", data.display()))?;
    let data = fs::canonicalize(&data).map_err(|e| format!("{}: {e}", data.display()))?;
    let synced = crate::files::sync_dir(&data);
    synced.map_err(|e| format!("{}: {e}", data.display()))?;
    let _lock = lock(&data)?;
    let mut core = Core::open(data, config).map_err(|e| e.to_string())?;
    if let Some(tls) = &tls {
        core.pool = pool::client_config(tls).map_err(|e| e.to_string())?;
    }
    core.sweep();
    core.discard_the_rest();
    let queue = Queue::new(core);
    recover(&queue);
    queue.lock().tell_withdrawn();
    lease::keep(&queue);
    let tokens = Arc::new(tokens);
    for address in &listen {
        let found = listen::listen(address, &queue, &tokens, tls.as_ref())
            .map_err(|e| format!("listen on {address}: {e}"))?;
        // Nobody may read it.
        let _ = crate::say::line(format_args!(
            "Listening at {address}; clients find it by TORPOR_QUEUE={found}"
        ));
    }
    listen::tell_service_manager("READY=1");
    loop {
        threads::begin_what_waits();
        // Not with each change: it looks at all jobs that are over.
        queue.change(|core| core.forget_old(crate::files::now()));
        listen::tell_service_manager("WATCHDOG=1");
        let again = queue.lock().again;
        let until = again.map_or(BEAT, |again| {
            let millis = u64::try_from(again - crate::files::now()).unwrap_or(0);
            Duration::from_millis(millis.max(1)).min(BEAT)
        });
        std::thread::sleep(until);
    }
}

/// One daemon to a data directory. Held by the open file, so that it ends with the process.
fn lock(data: &Path) -> Result<File, String> {
    let path = data.join("lock");
    let say = |e: io::Error| format!("{}: {e}", path.display());
    let file = crate::files::own(&path).map_err(say)?;
    flock(&file, FlockOperation::NonBlockingLockExclusive)
        .map_err(|_| format!("{}: another daemon works with this directory", data.display()))?;
    Ok(file)
}

/// Finds the jobs of the daemon before: those whose shepherd lives go on, the others from
/// their last checkpoint.
fn recover(queue: &Arc<Queue>) {
    let mut core = queue.lock();
    core.end_dependents_of_all();
    let live: Vec<_> =
        core.jobs.values().filter(|job| job.place != Place::Ended).cloned().collect();
    let mut runs = Vec::new();
    for job in live {
        let dir = core.dir(job.id);
        let run = Run { job: job.id, run: job.run, dir };
        if job.run > 0 && (run.is_alive() || job.place.holds_slots() || job.shepherd) {
            runs.push(run);
        }
    }
    core.schedule_nothing_yet(&runs.iter().map(|run| run.job).collect::<Vec<_>>());
    drop(core);
    for run in runs {
        run.find(Arc::clone(queue));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shepherd::message::Exit;
    use crate::spec::Spec;

    /// The daemon before did not come to that, or a job that was cancelled had succeeded for it.
    #[test]
    fn what_waits_for_a_job_that_has_failed_ends_when_the_next_daemon_begins() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("jobs")).unwrap();
        let mut core = Core::open(dir.path().to_owned(), Config::default()).unwrap();
        let mut submit = |after: &[u64]| {
            let command = vec!["x".to_owned()];
            let spec = Spec { command, dir: "/".into(), after: after.to_vec(), ..Spec::default() };
            core.submit(spec, None).unwrap()
        };
        let first = submit(&[]);
        let [second, running] = [(); 2].map(|()| submit(&[first]));
        let [third, other] = [submit(&[second]), submit(&[])];
        let job = core.jobs.get_mut(&first).unwrap();
        (job.place, job.exit, job.cancelled) = (Place::Ended, Some(Exit::Code(0)), true);
        core.jobs.get_mut(&running).unwrap().place = Place::Away;
        let queue = Queue::new(core);
        recover(&queue);
        let core = queue.lock();
        let states = [second, third, running, other].map(|id| core.jobs[&id].state());
        assert_eq!(states, ["cancelled", "cancelled", "moved", "queued"]);
        let note = core.jobs[&second].note.clone().unwrap();
        assert_eq!(note, format!("job {first}, which it was to run after, was cancelled"));
    }
}
