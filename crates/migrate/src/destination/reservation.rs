//! What an agent makes for a migration before it may come, and takes away after it.

use std::os::fd::OwnedFd;
use std::sync::mpsc::{self, Receiver};

use torpor_kernel::tree::{self, Tree};

use super::coming::{self, Claim};
use super::joining::{Joined, Set, Waiting};
use super::{Agent, audit, volume};
use crate::error::{Context, Error, Result};
use crate::files::Replica;
use crate::host::{self, Host};
use crate::origin::Origin;
use crate::record::{Ledger, Phase, Record, Side, all, new_id};
use crate::runtime::{self, Base};
use crate::task::{self, Task};
use crate::wire::carrier::Carrier;
use crate::wire::message::{Begin, Subject};
use crate::wire::spread::MAX_CONNECTIONS;
use crate::work::{self, WorkDir};

/// Names of hosts are no longer (uname(2)).
const MAX_NAME: usize = 64;

/// Whether something may come, as far as it can be told from what announces it.
///
/// # Errors
/// If the processor, the container, its image or a volume does not suit this host; if this agent is part of what would come, or the
/// container is here already; if the directory of its images would have too long a name.
pub(super) fn judge_arrival(
    agent: &Agent,
    begin: &Begin,
    here: &Host,
    origin: &Origin,
) -> Result<()> {
    if !begin.ignore_cpu {
        begin.host.can_move_to(here)?;
    }
    if !(1..=MAX_CONNECTIONS).contains(&begin.connections) {
        return Err(Error::refused(format!(
            "pages over {} connections: 1 to {MAX_CONNECTIONS} are possible",
            begin.connections
        )));
    }
    judge_place(begin, here)?;
    let container = agent.settings.container(&begin.subject);
    if container.is_some() || begin.build_after > 0 {
        work::check_length(&agent.settings.work_dir.join(&begin.id))?;
    }
    let Some(container) = container else {
        return match begin.volumes.first() {
            Some(_) => Err(Error::Protocol("volumes of no container".to_owned())),
            None => Ok(()),
        };
    };
    container.check()?;
    coming::count(begin)?;
    let records = match begin.volumes.is_empty() {
        true => Vec::new(),
        false => all(&agent.settings.state_dir, Side::Destination)?,
    };
    for path in &begin.volumes {
        volume::judge(path, &agent.settings.allow_volumes)?;
        volume::judge_former(path, origin, &records)?;
    }
    if container.state()?.is_some() {
        return Err(Error::refused(format!("there is a container {} here", container.id)));
    }
    match &begin.subject {
        Subject::Container { config, .. } => {
            runtime::judge(&container, config, agent.settings.terms(begin.with_rootfs))
        }
        Subject::Tree { .. } => Ok(()),
    }
}

/// Whether this agent is there while what moves is stopped.
fn judge_place(begin: &Begin, here: &Host) -> Result<()> {
    let Subject::Tree { pid, .. } = begin.subject else { return Ok(()) };
    // Elsewhere others have these process ids.
    let is_here = (&begin.host.boot, begin.host.pids) == (&here.boot, here.pids);
    if is_here && task::tree(pid)?.contains(&Task::this()?) {
        return Err(Error::refused_with(
            format!(
                "process {pid} cannot move: its tree has the agent in it that it would move to"
            ),
            "start an agent outside of that tree, as in another shell",
        ));
    }
    Ok(())
}

/// What is made for a migration before it is told that it may come.
pub(super) struct Reservation<'a> {
    pub agent: &'a Agent,
    pub begin: Begin,
    pub token: String,
    pub joined: Receiver<Joined>,
    pub ledger: Ledger,
    pub work: WorkDir,
    /// What it is restored with, if it is a container.
    pub base: Option<Base>,
    /// Trees of files that come along: its root file system, its volumes.
    pub trees: Vec<Replica>,
    _claim: Claim<'a>,
}

impl<'a> Reservation<'a> {
    /// Judges it, and makes it.
    ///
    /// # Errors
    /// If this host, the policy or the runtime refuses what comes; if the ledger or the directories cannot be made. Nothing
    /// is left of it then.
    pub(super) fn new(agent: &'a Agent, begin: Begin, origin: Origin) -> Result<Self> {
        let here = Host::this();
        let container = agent.settings.container(&begin.subject);
        let record = Record {
            id: begin.id.clone(),
            epoch: 0,
            phase: Phase::Preparing,
            subject: begin.subject.to_string(),
            peer: begin.host.name.chars().take(MAX_NAME).collect(),
            boot: host::boot(),
            pids: here.pids,
            owner: Some(Task::this()?),
            watch: None,
            worker: None,
            is_held: false,
            tasks: Vec::new(),
            container: container.clone(),
            bundle: None,
            work: Some(agent.settings.work_dir.join(&begin.id)),
            volumes: Vec::new(),
            made: Vec::new(),
            born: Vec::new(),
            agent: None,
            origin: Some(origin.clone()),
            stopped: Vec::new(),
            is_lazy: begin.is_lazy,
            script: None,
        };
        let claim = agent.coming.claim(&begin)?;
        judge_arrival(agent, &begin, &here, &origin)?;
        let token = new_id()?;
        let mut ledger = Ledger::create(&agent.settings.state_dir, Side::Destination, record)?;
        let work = WorkDir::create(agent.settings.work_dir.join(&begin.id));
        let work = work.inspect_err(|_| ledger.conclude(Phase::Stayed))?;
        // The next round begins when this one is there.
        let (rounds, joined) = mpsc::sync_channel(1);
        let (id, connections) = (begin.id.clone(), begin.connections);
        let set = Set::default();
        let waiting = Waiting { id, origin, rounds, carrier: None, connections, set };
        agent.joining().insert(token.clone(), waiting);
        let (base, trees) = (None, Vec::new());
        let mut place =
            Self { agent, begin, token, joined, ledger, work, base, trees, _claim: claim };
        if let Err(error) = place.make_base().and_then(|()| place.make_volumes()) {
            volume::remove_all(place.ledger.record(), &agent.settings);
            if let (Some(Base::Bundle(_)), Some(container)) = (&place.base, container) {
                let id = &place.begin.id;
                runtime::remove_bundle(&agent.settings.bundles(), &container.id, id);
            }
            place.ledger.conclude(Phase::Stayed);
            return Err(error);
        }
        Ok(place)
    }

    fn make_base(&mut self) -> Result<()> {
        let settings = &self.agent.settings;
        if let (Subject::Container { config, .. }, Some(container)) =
            (&self.begin.subject, settings.container(&self.begin.subject))
        {
            let rootfs = self.begin.with_rootfs;
            let terms = settings.terms(rootfs);
            let (bundles, migration) = (settings.bundles(), &self.begin.id);
            let base = runtime::make_base(&bundles, &container, config, terms, migration)?;
            if let (true, Base::Bundle(bundle)) = (rootfs, &base) {
                let root = runtime::own_root(bundle);
                let tree = Tree::at(&root).context(|| root.display().to_string())?;
                self.trees.push(Replica::new(tree));
            }
            let demand = match self.base.insert(base) {
                Base::Bundle(bundle) => bundle.clone(),
                Base::Podman(..) => runtime::make_demand(&self.work.path().join("demand"), config)?,
            };
            audit::configuration(settings, &demand, container.runtime)?;
        }
        Ok(())
    }

    fn make_volumes(&mut self) -> Result<()> {
        for path in self.begin.volumes.clone() {
            let dir = volume::make(&path, &self.agent.settings.allow_volumes)?;
            let meta = tree::metadata(&dir).context(|| path.display().to_string())?;
            self.ledger.advance(Phase::Preparing, |record| {
                record.volumes.push(path.clone());
                record.made.push(tree::id(&meta));
                record.born.push(meta.created().ok());
            })?;
            let is_private = volume::is_private(&dir);
            let mut tree = Replica::new(Tree::of(dir));
            if !is_private {
                tree.share()?;
            }
            self.trees.push(tree);
        }
        Ok(())
    }

    /// What carries pages that are fetched later: its end for whoever fetches them. It begins with
    /// a connection, and gets others when that is lost.
    ///
    /// # Errors
    /// If there are no more descriptors.
    pub(super) fn carry(&self, first: OwnedFd) -> Result<OwnedFd> {
        let (carrier, ours) = Carrier::start(None)?;
        carrier.attach(first);
        if let Some(waiting) = self.agent.joining().get_mut(&self.token) {
            waiting.carrier = Some(carrier);
        }
        Ok(ours)
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        let waiting = self.agent.joining().remove(&self.token);
        if let Some(carrier) = waiting.and_then(|waiting| waiting.carrier) {
            carrier.give_up();
        }
    }
}
