//! A dump whose pages are fetched by the restore: they stay in the stopped tasks until then.

use std::collections::HashMap;
use std::io::{BufReader, Read, Write};
use std::time::Duration;

use torpor_images::compress::Compression;
use torpor_images::packed::Packed;
use torpor_images::pagemap::PE_PRESENT;
use torpor_seal::transit::{SALT, Transit};
use torpor_seal::{Checkpoint, Suite};

use super::PAGE_LEN;
use super::connection::{Connection, Listener, PATIENCE};
use super::protocol::{ASK, Command, Op, YES};
use super::wire::{Manner, Outgoing, Sealing};
use crate::error::{Context, Error, Result};
use crate::memory::pages::{self, CHUNK, PageSpan, Source};
use crate::memory::vma::PAGE;
use crate::options::Options;

/// Bytes of requests that are read at once.
const REQUESTS: usize = 64 * Command::SIZE;
/// More than the id of any checkpoint has.
const MAX_ID: u32 = 256;

/// The pages that a restore can ask for, by the number of the task's pagemap.
#[derive(Debug, Default)]
pub struct Lent(HashMap<u64, (Source, Vec<PageSpan>)>);

impl Lent {
    /// Adds a run behind those before it.
    pub fn push(&mut self, id: u64, source: Source, run: PageSpan) {
        let (_, runs) = self.0.entry(id).or_insert_with(|| (source, Vec::new()));
        pages::push(runs, run);
    }
}

/// What pages can be asked of.
pub trait Stock: std::fmt::Debug + Sync {
    /// Whether there is nothing to ask for.
    fn is_empty(&self) -> bool;

    /// How many of so many pages from `address` on follow each other; 0 if the first is not there.
    ///
    /// # Errors
    /// If pages cannot be read from the images.
    fn count(&self, id: u64, address: u64, pages: u32) -> Result<u64>;

    /// Reads pages that were counted.
    ///
    /// # Errors
    /// If the task was killed; if the images do not give the pages, or not those that were sealed.
    fn read(&self, id: u64, address: u64, buffer: &mut [u8]) -> Result<()>;
}

impl Stock for Lent {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn count(&self, id: u64, address: u64, pages: u32) -> Result<u64> {
        let Some((_, runs)) = self.0.get(&id) else { return Ok(0) };
        let run = runs[..runs.partition_point(|run| run.start <= address)].last();
        let there = run.map_or(0, |run| run.end.saturating_sub(address) / PAGE);
        Ok(there.min(pages.into()))
    }

    fn read(&self, id: u64, address: u64, buffer: &mut [u8]) -> Result<()> {
        let (source, _) = self.0.get(&id).ok_or_else(not_lent)?;
        pages::read(source, &[(address, buffer.len())], buffer)
    }
}

/// What is served.
#[derive(Debug, Clone, Copy)]
pub struct Loan<'a> {
    /// The pages.
    pub lent: &'a dyn Stock,
    /// Of which checkpoint they are (`dump_criu_run_id`).
    pub id: &'a str,
    /// What it is sealed with.
    pub seal: Option<&'a Checkpoint>,
    /// How the pages are to be compressed on their way, if that was said.
    pub compress: Option<Compression>,
}

impl Loan<'_> {
    /// Answers a restore, whose `first` command was read already, until it has all pages.
    ///
    /// # Errors
    /// If the connection ends or the restore says that it has failed; if it breaks the protocol, or says that it has all and has
    /// asked for nothing; if pages cannot be read.
    pub fn serve(self, mut connection: Connection, first: Command) -> Result<Returned> {
        let mut outgoing = match connection.knows() {
            true => Outgoing::new(self.manner(&connection)),
            false => Outgoing::new(Manner::Plain),
        };
        let mut buffer = vec![0; CHUNK];
        let mut requests = BufReader::with_capacity(REQUESTS, &mut connection);
        let mut transit = None;
        // A word of anybody's is not to end the tasks.
        let mut knows_images = self.lent.is_empty();
        let mut command = first;
        loop {
            match command.op {
                Op::Parent if command.object == Some(ASK) => {
                    let said = requests.get_mut().write_all(&YES.to_le_bytes());
                    said.context(|| "answer the restore".to_owned())?;
                    outgoing = Outgoing::new(self.manner(requests.get_ref()));
                }
                Op::Greet => {
                    transit = self.greet(&command, &mut requests)?;
                    knows_images = true;
                    // It may be stopped for as long as it likes.
                    requests.get_ref().give_up_after(None)?;
                }
                Op::Get if self.seal.is_some() && transit.is_none() => {
                    return Err(wrong("nothing that shows it to restore sealed images"));
                }
                Op::Get => {
                    let way = (&mut outgoing, transit.as_mut(), &mut **requests.get_mut());
                    lend(self.lent, &command, way, &mut buffer)?;
                    knows_images = true;
                }
                Op::Close if !knows_images => {
                    return Err(wrong("that it has all pages, and has asked for none"));
                }
                Op::Close => return Ok(Returned { packed: outgoing.packed(), connection }),
                Op::Abandon => {
                    return Err(Error::Peer("the restore on the other end has failed".to_owned()));
                }
                _ => return Err(wrong("what only a dump sends")),
            }
            if requests.buffer().is_empty() {
                requests.get_mut().flush().context(|| "send pages".to_owned())?;
            }
            command = Command::receive(&mut requests)?;
        }
    }

    /// How pages go to a restore that is Torpor's. What is secret is compressed only for a restore
    /// that asks for it: how well it compresses shows something of it.
    fn manner(&self, to: &Connection) -> Manner {
        match self.compress {
            Some(how) => Manner::Packed(how),
            None if self.seal.is_none() => to.manner(),
            None => Manner::Plain,
        }
    }

    /// Answers a restore that says which checkpoint it has. Returns what seals its pages.
    fn greet(
        &self,
        command: &Command,
        from: &mut BufReader<&mut Connection>,
    ) -> Result<Option<Transit>> {
        if command.pages > MAX_ID {
            return Err(wrong("more than the id of a checkpoint"));
        }
        let mut id = Vec::new();
        let mut said = from.by_ref().take(command.pages.into());
        said.read_to_end(&mut id).context(|| "which checkpoint the restore has".to_owned())?;
        let is_ours = id == self.id.as_bytes();
        let seal = self.seal.filter(|_| is_ours).map(|seal| seal.send_pages(PAGE_LEN));
        let (transit, salt) = seal.transpose()?.unzip();
        let status: i32 = if is_ours { 0 } else { -1 };
        let salt = salt.unwrap_or([0; SALT]);
        let to = from.get_mut();
        let said = to.write_all(&status.to_le_bytes()).and_then(|()| to.write_all(&salt));
        said.and_then(|()| to.flush()).context(|| "answer the restore".to_owned())?;
        match is_ours {
            true => Ok(transit),
            false => {
                Err(Error::Protocol("the restore on the other end has other images".to_owned()))
            }
        }
    }
}

/// Listens for the restore's pager.
#[derive(Debug)]
pub struct Lender<'a> {
    listener: Listener<'a>,
}

impl<'a> Lender<'a> {
    /// Takes the address if the dump is to be lazy. Nobody is to think that it can be restored
    /// before all images are there: until then clients are refused.
    ///
    /// # Errors
    /// What a lazy dump cannot be besides; an address that is none of this host's.
    pub fn prepare(opts: &'a Options) -> Result<Option<Self>> {
        if !opts.memory.lazy {
            return Ok(None);
        }
        if opts.stop.leave_running || opts.leave_stopped {
            let what = "--lazy-pages of a dump that leaves the tasks, which would then run twice";
            return Err(Error::Unsupported(what.to_owned()));
        }
        let suite = opts.trust.seal.as_ref().map(|seal| seal.suite);
        if let Some(suite @ Suite::Aes256XtsHmacSha256) = suite {
            // The other pages would have to be restored at once.
            return Err(Error::Unsupported(format!("--lazy-pages with the suite {suite}")));
        }
        let Some(server) = &opts.memory.page_server else {
            let what = "--lazy-pages needs a --port, for the restore to fetch the pages from";
            return Err(Error::Usage(what.to_owned()));
        };
        Ok(Some(Lender { listener: Listener::bind(server)? }))
    }

    /// Begins to listen.
    ///
    /// # Errors
    /// If another program does so at that port by now.
    pub fn listen(&self) -> Result<()> {
        self.listener.listen()
    }

    /// Where it listens.
    pub fn port(&self) -> Option<u16> {
        self.listener.port()
    }

    /// Serves the first that asks for something until it has all pages: whoever connects and says nothing, or has no
    /// right certificate, keeps no restore waiting. It does not go on before [`Returned::answer`].
    ///
    /// # Errors
    /// If no restore can connect; as [`Loan::serve`], also if the tasks were killed meanwhile; if the first does not show which
    /// images it restores, and is silent for ten minutes.
    pub fn serve(self, loan: Loan<'_>) -> Result<Returned> {
        self.serve_within(loan, PATIENCE)
    }

    /// The same, for one that may be silent for `patience`.
    pub(super) fn serve_within(self, loan: Loan<'_>, patience: Duration) -> Result<Returned> {
        let (connection, first) = self.listener.accept_first()?;
        connection.give_up_after(Some(patience))?;
        loan.serve(connection, first)
    }
}

/// A restore that has all pages.
#[derive(Debug)]
#[must_use = "the other end waits for an answer"]
pub struct Returned {
    connection: Connection,
    /// What was compressed on its way.
    pub packed: Option<Packed>,
}

impl Returned {
    /// Tells it whether the tasks are its own now: they are no more here.
    pub fn answer(mut self, gone: bool) {
        let status: i32 = if gone { 0 } else { -1 };
        let told = self.connection.write_all(&status.to_le_bytes());
        if let Err(error) = told.and_then(|()| self.connection.flush()) {
            tracing::warn!("answer the restore: {error}");
        }
    }
}

fn lend(
    lent: &dyn Stock,
    asked: &Command,
    (outgoing, mut transit, to): (&mut Outgoing, Option<&mut Transit>, &mut Connection),
    buffer: &mut [u8],
) -> Result<()> {
    let id = asked.object.map_or(0, |object| object.id);
    // The tags of sealed pages come behind all of them.
    let most = if transit.is_some() { (CHUNK / PAGE_LEN) as u64 } else { u64::MAX };
    let count = match asked.vaddr.is_multiple_of(PAGE) {
        true => lent.count(id, asked.vaddr, asked.pages)?.min(most),
        false => 0,
    };
    if count == 0 {
        return Err(not_lent());
    }
    let pages = u32::try_from(count).unwrap_or(asked.pages);
    let flags = PE_PRESENT | outgoing.flags();
    let answer = Command { op: Op::Given, flags, pages, ..*asked };
    answer.send(to).context(|| "answer the restore".to_owned())?;
    let (mut at, end) = (asked.vaddr, asked.vaddr + count * PAGE);
    while at < end {
        let len = usize::try_from(end - at).unwrap_or(CHUNK).min(CHUNK);
        lent.read(id, at, &mut buffer[..len])?;
        let seal = transit.as_deref_mut();
        let seal = seal.map(|transit| Sealing { transit, owner: id, address: at });
        outgoing.send(&mut buffer[..len], seal, to)?;
        at += len as u64;
    }
    Ok(())
}

fn not_lent() -> Error {
    wrong("a request for pages that are not lent")
}

fn wrong(what: &str) -> Error {
    Error::invalid("page server", format!("the client sent {what}"))
}
