//! What a source asks before it moves anything: whether it could come here, and how fast.

use std::path::{Path, PathBuf};

use super::reservation::judge_arrival;
use super::round::Incoming;
use super::{Agent, audit, refusal};
use crate::error::{Error, Result};
use crate::host::Host;
use crate::origin::Origin;
use crate::record::new_id;
use crate::runtime::{self, Runtime};
use crate::wire::frame::{Line, MAX_FRAME};
use crate::wire::message::{Begin, Reply, Request, Subject};
use crate::work::WorkDir;

/// Answers until the source has no more questions.
///
/// # Errors
/// If the link is down, or the source breaks the protocol.
pub(super) fn run(agent: &Agent, mut line: Line, begin: &Begin, origin: &Origin) -> Result<()> {
    let here = Host::this();
    // The number is the source's, and nothing here is named by it.
    let work = WorkDir::create(agent.settings.work_dir.join(new_id()?))?;
    let images = work.path().join("1");
    let may_come = judge_arrival(agent, begin, &here, origin);
    let bundle = match may_come.and_then(|()| bundle(agent, begin, work.path())) {
        Ok(bundle) => bundle,
        Err(error) => return line.say(&refusal(&error)),
    };
    let identity = agent.identity.clone();
    line.say(&Reply::Ready { token: String::new(), host: here, agent: identity })?;
    let mut round = Incoming::without_pages(images.clone())?;
    loop {
        match line.hear()? {
            Request::File { name, len, since } => {
                round.receive(&mut line, &name, len, since)?;
            }
            Request::Files { files } => round.receive_together(&mut line, &files)?,
            Request::End { number: 1 } => {
                let reply = match audit::images(&agent.settings, &images, bundle.as_deref()) {
                    Ok(()) => Reply::Arrived { number: 1 },
                    Err(error) => refusal(&error),
                };
                line.say(&reply)?;
            }
            Request::Measure { len } => measure(&mut line, len)?,
            Request::Abort { .. } => return Ok(()),
            request => return Err(Error::Protocol(format!("it says {request:?} out of turn"))),
        }
    }
}

/// The bundle that a container would get.
fn bundle(agent: &Agent, begin: &Begin, work: &Path) -> Result<Option<PathBuf>> {
    let (Subject::Container { config, .. }, Some(container)) =
        (&begin.subject, agent.settings.container(&begin.subject))
    else {
        return Ok(None);
    };
    let terms = agent.settings.terms(begin.with_rootfs);
    let bundle = runtime::make_sketch(&work.join("bundles"), &container, config, terms)?;
    let demand = match container.runtime {
        Runtime::Runc => bundle.clone(),
        Runtime::Podman => runtime::make_demand(&work.join("demand"), config)?,
    };
    audit::configuration(&agent.settings, &demand, container.runtime)?;
    Ok(Some(bundle))
}

/// Takes bytes, and forgets them.
///
/// # Errors
/// If the link is down, or brings more than was said.
pub(super) fn measure(line: &mut Line, len: u64) -> Result<()> {
    let mut left = len;
    while left > 0 {
        let piece = line.receive_data()?.len() as u64;
        if piece == 0 || piece > left || piece > MAX_FRAME as u64 {
            return Err(Error::Protocol(format!("{piece} bytes of {left}")));
        }
        left -= piece;
    }
    line.say(&Reply::Measured)
}
