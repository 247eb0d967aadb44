//! Hooks that ask the client.

use std::os::fd::AsFd;

use torpor_engine::{Error, Event, External, Hooks, Result};
use torpor_images::proto::{CriuNotify, CriuReq, CriuReqType, CriuResp};

use super::socket::Connection;
use crate::failure::Failure;
use crate::hooks::Actions;

/// What a client is asked when the tree is stopped: which of its files does it keep?
const QUERY_EXTERNAL: &str = "query-ext-files";

/// The client, if it wants to be told (`notify_scripts`), then action scripts.
#[derive(Debug)]
pub(super) struct RpcHooks<'a> {
    connection: &'a Connection,
    notify: bool,
    actions: Actions,
}

impl<'a> RpcHooks<'a> {
    /// Hooks for the client of `connection`.
    #[must_use]
    pub(super) fn new(connection: &'a Connection, notify: bool, actions: Actions) -> Self {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Settings;
    use prost::Message;
    use rustix::net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags,
        SocketFlags, SocketType, recvmsg, send, socketpair,
    };
    use std::io::IoSliceMut;
    use std::mem::MaybeUninit;
    use std::os::fd::OwnedFd;
    use std::thread::{self, JoinHandle};

    /// What the client was told: the stage, the pid, and a descriptor if one came.
    type Told = (String, Option<i32>, Option<OwnedFd>);

    fn receive(socket: &OwnedFd) -> Option<Told> {
        let mut packet = [0; 4096];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut packet)];
        let len = recvmsg(socket, &mut parts, &mut control, RecvFlags::empty()).unwrap().bytes;
        let fd = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        });
        if len == 0 {
            return None;
        }
        let response = CriuResp::decode(&packet[..len]).unwrap();
        assert!(response.success && response.r#type == i32::from(CriuReqType::Notify));
        let notify = response.notify.unwrap();
        Some((notify.script.unwrap(), notify.pid, fd))
    }

    /// A client that gives these answers, one after the other, and then leaves.
    fn client(socket: OwnedFd, answers: Vec<CriuReq>) -> JoinHandle<Vec<Told>> {
        thread::spawn(move || {
            let mut told = Vec::new();
            for answer in answers {
                told.extend(receive(&socket));
                send(&socket, &answer.encode_to_vec(), SendFlags::NOSIGNAL).unwrap();
            }
            told
        })
    }

    fn answer(success: bool) -> CriuReq {
        let mut request = CriuReq { notify_success: Some(success), ..Default::default() };
        request.set_type(CriuReqType::Notify);
        request
    }

    fn pair() -> (Connection, OwnedFd) {
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        let (own, other) = socketpair(AddressFamily::UNIX, kind, flags, None).unwrap();
        (Connection::new(own).unwrap(), other)
    }

    fn hooks(connection: &Connection) -> RpcHooks<'_> {
        RpcHooks::new(connection, true, Actions::new(&Settings::default(), false))
    }

    #[test]
    fn the_client_is_told_in_order() {
        let (connection, other) = pair();
        let told = client(other, vec![answer(true); 4]);
        let mut hooks = hooks(&connection);
        hooks.notify(Event::PreRestore).unwrap();
        hooks.notify(Event::SetupNamespaces { pid: 77 }).unwrap();
        let pipe = rustix::pipe::pipe().unwrap();
        hooks.notify(Event::OrphanPtsMaster(pipe.1)).unwrap();
        hooks.notify(Event::PostRestore { pid: 77 }).unwrap();
        let told = told.join().unwrap();
        let names: Vec<_> = told.iter().map(|(name, pid, _)| (name.as_str(), *pid)).collect();
        assert_eq!(
            names,
            [
                ("pre-restore", None),
                ("setup-namespaces", Some(77)),
                ("orphan-pts-master", None),
                ("post-restore", Some(77))
            ]
        );
        // The descriptor that came is the one that was given.
        rustix::io::write(told[2].2.as_ref().unwrap(), b"x").unwrap();
        let mut byte = [0];
        rustix::io::read(&pipe.0, &mut byte).unwrap();
        assert_eq!(byte, *b"x");
    }

    #[test]
    fn a_client_that_fails_stops_the_work() {
        let wrong = CriuReq::default();
        for (answers, reason) in [
            (vec![answer(false)], "notification pre-dump: the client reports a failure"),
            (vec![wrong], "notification pre-dump: the client sent another request"),
            (vec![], "notification pre-dump: "),
        ] {
            let (connection, other) = pair();
            let client = client(other, answers);
            let error = hooks(&connection).notify(Event::PreDump).unwrap_err().to_string();
            assert!(error.starts_with(reason), "{error}");
            client.join().unwrap();
        }
    }

    #[test]
    fn the_client_can_name_its_own_files() {
        let (connection, other) = pair();
        let mut with = answer(true);
        let external = vec!["file[1f:2a]".to_owned()];
        let unix_sk_ino = vec![torpor_images::proto::UnixSk { inode: 7 }];
        with.opts =
            Some(torpor_images::proto::CriuOpts { external, unix_sk_ino, ..Default::default() });
        let told = client(other, vec![with]);
        let named = hooks(&connection).query_external().unwrap();
        let named: Vec<String> = named.iter().map(ToString::to_string).collect();
        assert_eq!(named, ["file[1f:2a]", "unix[7]"]);
        assert_eq!(told.join().unwrap()[0].0, QUERY_EXTERNAL);
    }

    #[test]
    fn who_does_not_want_to_know_is_not_asked() {
        let (connection, other) = pair();
        let actions = Actions::new(&Settings::default(), false);
        let mut hooks = RpcHooks::new(&connection, false, actions);
        hooks.notify(Event::PreDump).unwrap();
        assert!(hooks.query_external().unwrap().is_empty());
        drop(connection);
        assert!(receive(&other).is_none());
    }
}
