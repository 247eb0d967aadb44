//! Hooks that ask the client.

use std::os::fd::AsFd;

use torpor_engine::{Error, Event, External, Hooks, Result};
use torpor_images::proto::{CriuNotify, CriuReq, CriuReqType, CriuResp};

use super::socket::Connection;
use crate::failure::Failure;
use crate::hooks::Actions;

/// What a client is asked when the tree is stopped: which of its files does it keep?
const QUERY_EXTERNAL: &str = "query-ext-files";

/// Action scripts first, then the client, if it wants to be told (`notify_scripts`).
#[derive(Debug)]
pub struct RpcHooks<'a> {
    connection: &'a Connection,
    notify: bool,
    actions: Actions,
}

impl<'a> RpcHooks<'a> {
    /// Hooks for the client of `connection`.
    #[must_use]
    pub fn new(connection: &'a Connection, notify: bool, actions: Actions) -> Self {
        Self { connection, notify, actions }
    }

    /// Tells the client and waits until it says that it is done.
    fn ask(
        &self,
        script: &str,
        pid: Option<i32>,
        event: Option<&Event>,
    ) -> std::result::Result<CriuReq, Failure> {
        let mut response = CriuResp { success: true, ..Default::default() };
        response.set_type(CriuReqType::Notify);
        response.notify = Some(CriuNotify { script: Some(script.to_owned()), pid });
        let fd = match event {
            Some(Event::OrphanPtsMaster(fd)) => Some(fd.as_fd()),
            _ => None,
        };
        self.connection.send(&response, fd)?;
        let answer = self
            .connection
            .receive()?
            .ok_or_else(|| Failure::new(libc::ECONNRESET, "the client has gone"))?;
        if answer.r#type != i32::from(CriuReqType::Notify) {
            return Err(Failure::invalid("the client sent another request instead of an answer"));
        }
        if !answer.notify_success() {
            return Err(Failure::new(libc::ECANCELED, "the client reports a failure"));
        }
        Ok(answer)
    }
}

/// An error of the client's at a stage.
fn failed(script: &str) -> impl Fn(Failure) -> Error {
    move |failure| Error::Hook(format!("notification {script}: {failure}"))
}

impl Hooks for RpcHooks<'_> {
    fn notify(&mut self, event: Event) -> Result<()> {
        let (script, pid) = (event.name(), event.pid());
        if self.notify {
            self.ask(script, pid, Some(&event)).map_err(failed(script))?;
        }
        self.actions.notify(event)
    }

    fn query_external(&mut self) -> Result<Vec<External>> {
        // Clients that do not know the question answer it like any other, with success.
        if !self.notify {
            return Ok(Vec::new());
        }
        let answer = self.ask(QUERY_EXTERNAL, None, None).map_err(failed(QUERY_EXTERNAL))?;
        let Some(opts) = answer.opts else { return Ok(Vec::new()) };
        let named = opts.external.iter().map(|text| {
            text.parse().map_err(|e| Error::Hook(format!("notification {QUERY_EXTERNAL}: {e}")))
        });
        let sockets =
            opts.unix_sk_ino.iter().map(|sk| Ok(External::Unix { inode: sk.inode.into() }));
        named.chain(sockets).collect()
    }

    fn progress(&mut self, done: u64, total: u64) {
        self.actions.progress(done, total);
    }
}
