//! Firewall rules that hold the network still: a table of nftables, or rules that `iptables-restore` sets.
//!
//! They are those of CRIU, so that whoever restores can take away what whoever dumped has left:
//! the inventory says which [`Tool`] has set them, and the id that names them.

use std::io::Write as _;
use std::os::fd::BorrowedFd;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use torpor_policy::LockedBy;

use super::{iptables, nftables};
use crate::error::{Context, Error, Result};
use crate::file::socket::address::Address;
use crate::guardian::{Guardian, Undo, Way};
use crate::namespace::run_in;
use crate::options::NetworkLock;

pub(crate) use torpor_images::lock::MARK;

/// What a lock stops.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Scope {
    /// Everything but packets with [`MARK`].
    All,
    /// The packets of these TCP connections: remote and local address.
    Connections(Vec<(Address, Address)>),
}

/// Calls of programs, each with its input.
pub(crate) type Commands = Vec<(Vec<String>, String)>;

/// What rules are set with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tool {
    /// `iptables-restore` and `ip6tables-restore`.
    Iptables,
    /// Messages to the kernel, as `nft` sends them.
    Nft,
}

impl Tool {
    /// What an inventory calls it.
    pub(crate) fn in_inventory(self) -> LockedBy {
        match self {
            Tool::Iptables => LockedBy::Iptables,
            Tool::Nft => LockedBy::Nft,
        }
    }

    /// The tool that an inventory names.
    pub(crate) fn of_inventory(by: LockedBy) -> Option<Self> {
        [Tool::Iptables, Tool::Nft].into_iter().find(|tool| tool.in_inventory() == by)
    }

    /// Those that may have locked the network of a dump whose inventory says this: old versions
    /// do not say which.
    pub(crate) fn all_of(by: Option<LockedBy>) -> Vec<Self> {
        match by {
            Some(by) => Tool::of_inventory(by).into_iter().collect(),
            None => vec![Tool::Iptables, Tool::Nft],
        }
    }

    /// Asked once by each process: the answer depends on the host alone, and tasks may be stopped meanwhile.
    fn works(self) -> bool {
        static ANSWERS: [OnceLock<bool>; 2] = [OnceLock::new(), OnceLock::new()];
        let (question, answer) = match self {
            Tool::Iptables => (argv(&["iptables-restore", "-w", "--noflush"]), &ANSWERS[0]),
            Tool::Nft => (argv(&["nft", "list", "tables"]), &ANSWERS[1]),
        };
        *answer.get_or_init(|| run(&question, "").is_ok())
    }

    /// Whether there is a lock of its making in the network namespace of this thread.
    pub(crate) fn is_locked(self, id: &str) -> bool {
        match self {
            Tool::Iptables => iptables::is_locked(),
            Tool::Nft => nftables::is_there(&nftables::table(id)),
        }
    }
}

/// What to set rules with: what was asked for, or nftables where there is no iptables. Unasked, nftables is the first:
/// iptables leaves tables behind. It is taken only where `nft` works, with which an administrator can take rules away.
///
/// # Errors
/// If none that was asked for is installed.
pub(crate) fn choose(asked: NetworkLock) -> Result<Tool> {
    let (tools, program): (&[_], _) = match asked {
        NetworkLock::Nftables => (&[Tool::Nft], "nft"),
        NetworkLock::Iptables => (&[Tool::Iptables, Tool::Nft], "iptables-restore or nft"),
        NetworkLock::Any | NetworkLock::Skip => {
            (&[Tool::Nft, Tool::Iptables], "nft or iptables-restore")
        }
    };
    tools.iter().copied().find(|tool| tool.works()).ok_or_else(|| Error::Program {
        program: program.to_owned(),
        reason: "not installed, or this kernel lacks what it needs; install the package nftables \
                 or iptables, or leave the network to somebody else with --network-lock skip"
            .to_owned(),
    })
}

/// Sets a lock in the network namespace of this thread; `more` says that there is one of this name already,
/// which is to stop these connections as well.
///
/// # Errors
/// If the program fails; if the kernel refuses a part of the table.
pub(crate) fn lock(tool: Tool, id: &str, scope: &Scope, more: bool) -> Result<()> {
    match tool {
        Tool::Iptables => {
            iptables::lock(scope).iter().try_for_each(|(argv, input)| run(argv, input))
        }
        Tool::Nft => nftables::lock(&nftables::table(id), scope, more),
    }
}

/// How rules are taken away again by whoever does not know more than this.
#[derive(Debug, Clone)]
pub(crate) enum Removal {
    /// By programs.
    Programs(Commands),
    /// They are a table of nftables with this name.
    Table(String),
}

impl Removal {
    /// How a lock is removed.
    pub(crate) fn of_lock(tool: Tool, id: &str, scope: &Scope) -> Self {
        match tool {
            Tool::Iptables => Removal::Programs(iptables::unlock(scope)),
            Tool::Nft => Removal::Table(nftables::table(id)),
        }
    }

    /// Takes the rules away from the network namespace of this thread.
    ///
    /// # Errors
    /// If a program is missing or fails; if the kernel refuses to remove the table.
    pub(crate) fn run(&self) -> Result<()> {
        match self {
            Removal::Programs(script) => {
                script.iter().try_for_each(|(argv, input)| run(argv, input))
            }
            Removal::Table(name) => nftables::remove(name),
        }
    }

    /// From now on the guardian takes them away from this network namespace, by its descriptor: the tasks
    /// that live there may have ended by then.
    ///
    /// # Errors
    /// If the guardian is gone.
    pub(crate) fn watch(
        &self,
        guardian: &Guardian,
        space: u64,
        netns: BorrowedFd<'_>,
    ) -> Result<()> {
        self.undos(space).iter().try_for_each(|undo| guardian.watch_file(undo, netns))
    }

    /// How the guardian takes them away from the network namespace with the inode number `space`.
    pub(crate) fn undos(&self, space: u64) -> Vec<Undo> {
        let space = space.to_string();
        match self {
            Removal::Programs(script) => {
                let undo = |(argv, input): &(Vec<String>, String)| {
                    RULES.undo([&[space.clone(), input.clone()], argv.as_slice()].concat())
                };
                script.iter().map(undo).collect()
            }
            Removal::Table(name) => vec![TABLE.undo(vec![space, name.clone()])],
        }
    }
}

/// Removes from the network namespace of this thread what is there of a lock.
///
/// # Errors
/// If the program fails.
pub(crate) fn unlock(tool: Tool, id: &str, scope: &Scope) -> Result<()> {
    match tool {
        Tool::Iptables => iptables::remove(scope),
        Tool::Nft if tool.is_locked(id) => nftables::remove(&nftables::table(id)),
        Tool::Nft => Ok(()),
    }
}

/// Removes a lock that an old version of Torpor has set: a table or a chain of its name.
pub(crate) fn unlock_old(id: &str) {
    let table = format!("torpor-{id}");
    let short: String = id.chars().filter(char::is_ascii_alphanumeric).take(20).collect();
    let chain = format!("TORPOR-{short}");
    if nftables::is_there(&table) {
        warn(nftables::remove(&table));
    }
    for (list, restore) in [("iptables", "iptables-restore"), ("ip6tables", "ip6tables-restore")] {
        if run(&argv(&[list, "-w", "-n", "-L", &chain]), "").is_ok() {
            let input = format!(
                "*filter\n-D INPUT -j {chain}\n-D OUTPUT -j {chain}\n-F {chain}\n-X {chain}\nCOMMIT\n"
            );
            warn(run(&argv(&[restore, "-w", "--noflush"]), &input));
        }
    }
}

fn warn(done: Result<()>) {
    if let Err(e) = done {
        tracing::warn!("unlocking the network: {e}");
    }
}

/// The words of a command.
pub(super) fn argv(words: &[&str]) -> Vec<String> {
    words.iter().map(|w| (*w).to_owned()).collect()
}

/// A program that is to be run in a network namespace: its inode number, input, words.
pub(crate) static RULES: Way = Way {
    has_file: true,
    ..Way::new("run", |words, netns| {
        let (input, argv) = (words.text(1)?, words.rest(2));
        run_in(&[known(netns)?], || run(argv, input))
    })
};

/// A table of nftables that is to be removed from a network namespace: its inode number, name.
pub(crate) static TABLE: Way = Way {
    has_file: true,
    ..Way::new("table", |words, netns| {
        let name = words.text(1)?;
        run_in(&[known(netns)?], || nftables::remove(name))
    })
};

/// The namespace, without which rules of our own network would be taken away.
fn known(netns: Option<BorrowedFd<'_>>) -> Result<BorrowedFd<'_>> {
    netns.ok_or_else(|| Error::invalid("the guardian's list", "rules without a network namespace"))
}

/// Runs a program with an input.
///
/// # Errors
/// If there is no such program, or it ends with another status than 0: what it has said comes along.
pub(crate) fn run(argv: &[String], input: &str) -> Result<()> {
    call(argv, input).map(drop)
}

/// What a program prints.
///
/// # Errors
/// As [`run`].
pub(super) fn output(argv: &[String]) -> Result<String> {
    call(argv, "").map(|output| String::from_utf8_lossy(&output).into_owned())
}

fn call(argv: &[String], input: &str) -> Result<Vec<u8>> {
    let Some((program, arguments)) = argv.split_first() else { return Ok(Vec::new()) };
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context(|| format!("start {program}"))?;
    if let Some(mut stdin) = child.stdin.take() {
        // What it says when it does not read all tells more.
        let _ = stdin.write_all(input.as_bytes());
    }
    let output = child.wait_with_output().context(|| format!("wait for {program}"))?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let last = said.lines().rfind(|l| !l.trim().is_empty()).unwrap_or_default();
    Err(Error::Program { program: argv.join(" "), reason: format!("{}: {last}", output.status) })
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;
    use std::sync::atomic::{AtomicU8, Ordering};
    use std::time::Duration;

    use super::*;
    use crate::file::socket::testing::in_netns;
    use torpor_sys::socket;

    fn address(bytes: Vec<u8>) -> Address {
        Address::parse(&bytes).unwrap()
    }

    fn ends(client: &TcpStream) -> (Address, Address) {
        (
            address(socket::peer_address(client.as_fd()).unwrap()),
            address(socket::local_address(client.as_fd()).unwrap()),
        )
    }

    /// What one end of a connection reads within the time that the socket has to wait.
    fn arrives(from: &TcpStream, to: &TcpStream, wait: Duration) -> bool {
        // No two calls send the same, and what was stopped before may arrive with it.
        static NEXT: AtomicU8 = AtomicU8::new(0);
        let sent = NEXT.fetch_add(1, Ordering::Relaxed);
        rustix::io::write(from, &[sent]).unwrap();
        to.set_read_timeout(Some(wait)).unwrap();
        let mut read = [0; 16];
        while let Ok(len @ 1..) = rustix::io::read(to, &mut read) {
            if read[..len].contains(&sent) {
                return true;
            }
        }
        false
    }

    /// Whether one end of a connection reaches the other: what was stopped before is sent again
    /// first, and each attempt in vain doubled the time until the next.
    fn is_open(from: &TcpStream, to: &TcpStream) -> bool {
        arrives(from, to, Duration::from_secs(60))
    }

    /// Whether one end of a connection does not reach the other: over the loopback device, what
    /// passes is there at once.
    fn is_cut(from: &TcpStream, to: &TcpStream) -> bool {
        !arrives(from, to, Duration::from_millis(20))
    }

    #[test]
    fn connections_are_locked_and_unlocked() {
        for tool in [Tool::Nft, Tool::Iptables] {
            in_netns(|| {
                for listen in ["127.0.0.1:0", "[::1]:0"] {
                    let listener = TcpListener::bind(listen).unwrap();
                    let connect = || {
                        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
                        (client, listener.accept().unwrap().0)
                    };
                    let (locked, server) = connect();
                    let (free, other) = connect();
                    let id = "0123-abcd-sockets-test-0123456789";
                    let scope = Scope::Connections(vec![ends(&locked)]);
                    lock(tool, id, &scope, false).unwrap();
                    assert!(is_cut(&locked, &server));
                    assert!(is_cut(&server, &locked));
                    assert!(is_open(&free, &other));
                    // One more.
                    let more = Scope::Connections(vec![ends(&free)]);
                    lock(tool, id, &more, true).unwrap();
                    assert!(is_cut(&free, &other) && is_cut(&locked, &server));
                    let both = Scope::Connections(vec![ends(&locked), ends(&free)]);
                    unlock(tool, id, &both).unwrap();
                    unlock(tool, id, &both).unwrap();
                    assert!(is_open(&locked, &server) && is_open(&free, &other));
                    lock(tool, id, &scope, false).unwrap();
                    Removal::of_lock(tool, id, &scope).run().unwrap();
                    assert!(is_open(&locked, &server));
                    // As the guardian does, wherever it is, if nobody else lives in there any more.
                    lock(tool, id, &scope, false).unwrap();
                    let netns = std::fs::File::open("/proc/thread-self/ns/net").unwrap();
                    for undo in Removal::of_lock(tool, id, &scope).undos(0) {
                        undo.perform(None).unwrap_err();
                        undo.perform(Some(netns.as_fd())).unwrap();
                    }
                    assert!(is_open(&locked, &server));
                }
            });
        }
    }

    #[test]
    fn a_method_says_what_is_unlocked() {
        assert_eq!(Tool::all_of(Some(LockedBy::Iptables)), [Tool::Iptables]);
        assert_eq!(Tool::all_of(Some(LockedBy::Nft)), [Tool::Nft]);
        assert_eq!(Tool::all_of(Some(LockedBy::Nothing)), []);
        assert_eq!(Tool::all_of(None), [Tool::Iptables, Tool::Nft]);
    }

    #[test]
    fn locks_of_old_versions_are_removed() {
        let id = "0123-abcd-sockets-test-0123456789";
        let table = format!(
            "table inet torpor-{id} {{\nchain input {{\n\
             type filter hook input priority 0; policy drop;\n}}\n}}\n"
        );
        let chain = "TORPOR-0123abcdsocketstest0";
        let rules = format!(
            "*filter\n:{chain} - [0:0]\n-A INPUT -j {chain}\n-A OUTPUT -j {chain}\n\
             -A {chain} -j DROP\nCOMMIT\n"
        );
        let nft = [(argv(&["nft", "-f", "-"]), table)];
        let names = ["iptables-restore", "ip6tables-restore"];
        let iptables = names.map(|name| (argv(&[name, "-w", "--noflush"]), rules.clone()));
        for script in [&nft[..], &iptables[..]] {
            in_netns(|| {
                for listen in ["127.0.0.1:0", "[::1]:0"] {
                    let listener = TcpListener::bind(listen).unwrap();
                    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
                    let (server, _) = listener.accept().unwrap();
                    script.iter().for_each(|(argv, input)| run(argv, input).unwrap());
                    assert!(is_cut(&client, &server));
                    unlock_old("another");
                    assert!(is_cut(&client, &server));
                    unlock_old(id);
                    assert!(is_open(&client, &server));
                }
            });
        }
    }

    #[test]
    fn marked_packets_pass_a_locked_namespace() {
        for tool in [Tool::Nft, Tool::Iptables] {
            in_netns(|| {
                let server = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
                server.set_nonblocking(true).unwrap();
                let client = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
                client.connect(server.local_addr().unwrap()).unwrap();
                let mark = |mark: u32| {
                    let fd = client.as_fd();
                    socket::set_int(fd, libc::SOL_SOCKET, libc::SO_MARK, mark.cast_signed())
                        .unwrap();
                };
                lock(tool, "a11", &Scope::All, false).unwrap();
                assert!(tool.is_locked("a11"));
                assert!(client.send(b"x").is_err() || server.recv(&mut [0; 4]).is_err());
                // What is not stopped may take a moment.
                server.set_nonblocking(false).unwrap();
                server.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
                mark(MARK);
                client.send(b"marked").unwrap();
                assert_eq!(server.recv(&mut [0; 16]).unwrap(), 6);
                unlock(tool, "a11", &Scope::All).unwrap();
                assert!(!tool.is_locked("a11"));
                mark(0);
                client.send(b"free").unwrap();
                assert_eq!(server.recv(&mut [0; 16]).unwrap(), 4);
            });
        }
    }
}
