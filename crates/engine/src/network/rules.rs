//! Firewall rules that hold the network still, set by `nft` or `iptables-restore`.
//!
//! All rules are in a table (nftables) or chain (iptables) of their own, named after
//! the checkpoint, so that they can be removed as a whole by whoever knows the name: the
//! dump, the restore, or the guardian of either.

use std::fmt::Write as _;
use std::io::Write as _;
use std::process::{Command, Stdio};

use crate::error::{Context, Error, Result};
use crate::file::socket::Address;
use crate::options::NetworkLock;

/// Packets with this mark pass a lock: the restore's own. CRIU's number, so that rules
/// which know it need no change.
pub const MARK: u32 = 0xC114;

/// What a lock stops.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scope {
    /// Everything but packets with [`MARK`].
    All,
    /// The packets of these TCP connections: remote and local address.
    Connections(Vec<(Address, Address)>),
}

/// Calls of programs, each with its input.
pub type Script = Vec<(Vec<String>, String)>;

/// The program to set rules with. That is `nft` where it works, even if iptables was asked
/// for: a table of our own gets in nobody's way, while iptables leaves tables behind.
///
/// # Errors
/// If none that was asked for is installed.
pub fn choose(asked: NetworkLock) -> Result<Tool> {
    let works = |tool: &Tool| match tool {
        Tool::Nft => run(&argv(&["nft", "list", "tables"]), "").is_ok(),
        Tool::Iptables => tool.is_installed(),
    };
    let (tools, program): (&[_], _) = match asked {
        NetworkLock::Nftables => (&[Tool::Nft], "nft"),
        _ => (&[Tool::Nft, Tool::Iptables], "nft or iptables-restore"),
    };
    tools.iter().copied().find(works).ok_or_else(|| Error::Program {
        program: program.to_owned(),
        reason: "not installed; install the package nftables or iptables, or leave the network \
                 to somebody else with --network-lock skip"
            .to_owned(),
    })
}

/// Sets a lock in the network namespace of this thread, instead of `before`.
///
/// # Errors
/// If the program fails.
pub fn lock(tool: Tool, id: &str, scope: &Scope, before: Option<&Scope>) -> Result<()> {
    tool.lock(id, scope, before).iter().try_for_each(|(argv, input)| run(argv, input))
}

/// How a lock is removed.
pub fn unlocking(tool: Tool, id: &str, scope: &Scope) -> Script {
    tool.unlock(id, scope)
}

/// Removes the lock of a checkpoint from the network namespace of this thread, however
/// it was set; it need not be there.
pub fn unlock(id: &str) {
    for tool in [Tool::Iptables, Tool::Nft] {
        if tool.is_installed() && tool.is_locked(id) {
            for (argv, input) in tool.unlock(id, &Scope::All) {
                if let Err(e) = run(&argv, &input) {
                    tracing::warn!("unlocking the network: {e}");
                }
            }
        }
    }
}

/// A program that sets rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tool {
    /// `nft`.
    Nft,
    /// `iptables-restore` and `ip6tables-restore`.
    Iptables,
}

fn argv(words: &[&str]) -> Vec<String> {
    words.iter().map(|w| (*w).to_owned()).collect()
}

impl Tool {
    fn program(self) -> &'static str {
        match self {
            Tool::Nft => "nft",
            Tool::Iptables => "iptables-restore",
        }
    }

    fn is_installed(self) -> bool {
        Command::new(self.program())
            .arg("--version")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_ok()
    }

    /// Whether there is a lock of its making in the network namespace of this thread.
    pub fn is_locked(self, id: &str) -> bool {
        let ask = match self {
            Tool::Nft => argv(&["nft", "list", "table", "inet", &table(id)]),
            Tool::Iptables => argv(&["iptables", "-n", "-L", &chain(id)]),
        };
        let v6 = argv(&["ip6tables", "-n", "-L", &chain(id)]);
        run(&ask, "").is_ok() || self == Tool::Iptables && run(&v6, "").is_ok()
    }

    /// Each program replaces the rules that are there in one transaction.
    fn lock(self, id: &str, scope: &Scope, before: Option<&Scope>) -> Script {
        match self {
            Tool::Nft => {
                let [(argv, remove)] = self.unlock(id, scope).try_into().unwrap_or_default();
                vec![(argv, remove + &nft_rules(id, scope))]
            }
            Tool::Iptables => families(scope)
                .into_iter()
                .map(|v6| {
                    let again = before.is_some_and(|before| families(before).contains(&v6));
                    (restore_program(v6), iptables_rules(id, scope, v6, again))
                })
                .collect(),
        }
    }

    fn unlock(self, id: &str, scope: &Scope) -> Script {
        match self {
            Tool::Nft => {
                let name = table(id);
                // To delete what is not there is an error, to add what is there is none.
                let input = format!("add table inet {name}\ndelete table inet {name}\n");
                vec![(argv(&["nft", "-f", "-"]), input)]
            }
            Tool::Iptables => families(scope)
                .into_iter()
                .map(|v6| {
                    let name = chain(id);
                    let input = format!(
                        "*filter\n-D INPUT -j {name}\n-D OUTPUT -j {name}\n-F {name}\n\
                         -X {name}\nCOMMIT\n"
                    );
                    (restore_program(v6), input)
                })
                .collect(),
        }
    }
}

/// The name of the table; ids are hexadecimal digits and hyphens.
fn table(id: &str) -> String {
    format!("torpor-{id}")
}

/// Names of chains have 28 characters at most.
fn chain(id: &str) -> String {
    let short: String = id.chars().filter(char::is_ascii_alphanumeric).take(20).collect();
    format!("TORPOR-{short}")
}

/// Whether IPv6 is concerned, for each family that is.
fn families(scope: &Scope) -> Vec<bool> {
    match scope {
        Scope::All if std::path::Path::new("/proc/sys/net/ipv6").exists() => vec![false, true],
        Scope::All => vec![false],
        Scope::Connections(all) => [false, true]
            .into_iter()
            .filter(|v6| all.iter().any(|(remote, _)| remote.is_v6() == *v6))
            .collect(),
    }
}

fn restore_program(v6: bool) -> Vec<String> {
    argv(&[if v6 { "ip6tables-restore" } else { "iptables-restore" }, "-w", "--noflush"])
}

fn nft_rules(id: &str, scope: &Scope) -> String {
    let policy = if *scope == Scope::All { "drop" } else { "accept" };
    let mut sets = String::new();
    let (mut input, mut output) = (String::new(), String::new());
    if let Scope::Connections(all) = scope {
        for (v6, name, family, kind) in [(false, "v4", "ip", "ipv4"), (true, "v6", "ip6", "ipv6")] {
            let elements: Vec<String> = all
                .iter()
                .filter(|(remote, _)| remote.is_v6() == v6)
                .map(|(r, l)| format!("{} . {} . {} . {}", r.ip(), r.port, l.ip(), l.port))
                .collect();
            if elements.is_empty() {
                continue;
            }
            let _ = writeln!(
                sets,
                " set {name} {{ type {kind}_addr . inet_service . {kind}_addr . inet_service; \
                 elements = {{ {} }}; }}",
                elements.join(", ")
            );
            let _ = writeln!(
                input,
                "  {family} saddr . tcp sport . {family} daddr . tcp dport @{name} drop"
            );
            let _ = writeln!(
                output,
                "  {family} daddr . tcp dport . {family} saddr . tcp sport @{name} drop"
            );
        }
    }
    let chain = |hook: &str, rules: &str| {
        format!(
            " chain {hook} {{\n  type filter hook {hook} priority -300; policy {policy};\n  \
             meta mark {MARK:#x} accept\n{rules} }}\n"
        )
    };
    let chains = chain("input", &input) + &chain("output", &output);
    format!("table inet {} {{\n{sets}{chains}}}\n", table(id))
}

/// To declare a chain that is there (`again`) empties it; it is called already.
fn iptables_rules(id: &str, scope: &Scope, v6: bool, again: bool) -> String {
    let name = chain(id);
    let mut rules = format!("*filter\n:{name} - [0:0]\n");
    let _ = writeln!(rules, "-A {name} -m mark --mark {MARK:#x} -j ACCEPT");
    match scope {
        Scope::All => {
            let _ = writeln!(rules, "-A {name} -j DROP");
        }
        Scope::Connections(all) => {
            for (remote, local) in all.iter().filter(|(remote, _)| remote.is_v6() == v6) {
                for (from, to) in [(remote, local), (local, remote)] {
                    let _ = writeln!(
                        rules,
                        "-A {name} -p tcp -s {} --sport {} -d {} --dport {} -j DROP",
                        from.ip(),
                        from.port,
                        to.ip(),
                        to.port
                    );
                }
            }
        }
    }
    if !again {
        let _ = write!(rules, "-I INPUT 1 -j {name}\n-I OUTPUT 1 -j {name}\n");
    }
    rules + "COMMIT\n"
}

/// Runs a program with an input.
///
/// # Errors
/// If it is not there, or fails.
pub fn run(argv: &[String], input: &str) -> Result<()> {
    let Some((program, arguments)) = argv.split_first() else { return Ok(()) };
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context(|| format!("start {program}"))?;
    if let Some(mut stdin) = child.stdin.take() {
        // What it says when it does not read all tells more.
        let _ = stdin.write_all(input.as_bytes());
    }
    let output = child.wait_with_output().context(|| format!("wait for {program}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let last = said.lines().rfind(|l| !l.trim().is_empty()).unwrap_or_default();
    Err(Error::Program { program: argv.join(" "), reason: format!("{}: {last}", output.status) })
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;

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

    /// Whether the two ends of a connection reach each other.
    fn is_open(from: &TcpStream, to: &TcpStream) -> bool {
        rustix::io::write(from, b"x").unwrap();
        // Over the loopback device, what arrives has arrived when the call returns.
        to.set_nonblocking(true).unwrap();
        rustix::io::read(to, &mut [0u8; 16]).is_ok()
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
                    lock(tool, id, &scope, None).unwrap();
                    assert!(!is_open(&locked, &server));
                    assert!(!is_open(&server, &locked));
                    assert!(is_open(&free, &other));
                    // One more.
                    let both = Scope::Connections(vec![ends(&locked), ends(&free)]);
                    lock(tool, id, &both, Some(&scope)).unwrap();
                    assert!(!is_open(&free, &other) && !is_open(&locked, &server));
                    unlock(id);
                    unlock(id);
                    // What was lost is sent again.
                    for socket in [&server, &other] {
                        socket.set_nonblocking(false).unwrap();
                        assert_eq!(rustix::io::read(socket, &mut [0u8; 1]).unwrap(), 1);
                    }
                    lock(tool, id, &scope, None).unwrap();
                    for (argv, input) in unlocking(tool, id, &scope) {
                        run(&argv, &input).unwrap();
                    }
                    assert!(!tool.is_locked(id));
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
                lock(tool, "a11", &Scope::All, None).unwrap();
                assert!(client.send(b"x").is_err() || server.recv(&mut [0; 4]).is_err());
                mark(MARK);
                client.send(b"marked").unwrap();
                assert_eq!(server.recv(&mut [0; 16]).unwrap(), 6);
                unlock("a11");
                mark(0);
                client.send(b"free").unwrap();
                assert_eq!(server.recv(&mut [0; 16]).unwrap(), 4);
            });
        }
    }
}
