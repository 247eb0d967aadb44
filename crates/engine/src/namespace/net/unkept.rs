//! What of a network namespace is not kept: it is named in a warning, and refused if everything is wanted
//! (`--strict`). IPsec is refused in any case: what it encrypts would go out in the clear.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use torpor_kernel::netlink::{Message, ROUTE, Socket, half, word};

use super::conf::NAMES;
use crate::error::{Context, Error, Result};
use crate::external::External;
use crate::namespace::NsKind;
use crate::namespace::left_out::leave_out;
use crate::options::Network;
use crate::proc;

/// What asks for states and policies of IPsec (linux/xfrm.h).
const GET_STATES: u16 = 0x12;
const GET_POLICIES: u16 = 0x15;
/// `struct tcmsg` (linux/rtnetlink.h).
const TCMSG: [u8; 20] = [0; 20];
/// `struct ndmsg` (linux/neighbour.h).
const NDMSG: [u8; 12] = [0; 12];

/// Where the kernel shows the settings of the network namespace of the thread that looks.
const SETTINGS: &str = "/proc/sys/net";
/// Of `net.ipv4`: another name of a kept one, and a secret that the kernel draws.
const OTHERWISE: [&str; 2] = ["ip_forward", "tcp_fastopen_key"];
/// What the kernel shows there and nobody sets: how many connections are tracked, and whether a program routes
/// multicast; and what it chooses by the kind of a device. To ask each file whether it can be written would take as long as to read it.
const SHOWN: [&str; 3] = ["nf_conntrack_count", "mc_forwarding", "addr_gen_mode"];

/// The settings that a new network has.
#[derive(Debug)]
pub(crate) struct FreshSettings(Settings);

impl FreshSettings {
    /// Finds them out before task `pid` is stopped, if it has a network of its own that is kept: to make one takes the
    /// kernel a moment. None if they cannot be, which is said later.
    pub(crate) fn ahead(pid: i32, external: &[External], network: &Network) -> Option<Self> {
        let inode = |pid| proc::ns_inode(pid, NsKind::Net.name()).ok();
        let its = inode(pid)?;
        let is_apart = its != inode(rustix::process::getpid().as_raw_nonzero().get())?;
        let is_kept = is_apart && !network.empty && External::network(external, its).is_none();
        let read = || std::thread::spawn(settings_of_new).join();
        is_kept.then(read)?.ok()?.ok().map(FreshSettings)
    }
}

/// Looks at the namespace of the calling thread, which task `pid` lives in. The settings of a new one are read now if
/// they are not known.
///
/// # Errors
/// Refused, if it has states or policies of IPsec, or, where everything is wanted (`strict`), anything
/// that is not kept; if the kernel does not list what it has.
pub(super) fn check(pid: i32, strict: bool, fresh: Option<&FreshSettings>) -> Result<()> {
    refuse_ipsec(pid)?;
    let leave_out = |object: &str, names: &[String]| leave_out(pid, object, names, strict);
    let mut socket = Socket::open(ROUTE)?;
    leave_out("what its network is set to by sysctl", &changed_settings(fresh)?)?;
    leave_out("the traffic control of its network (tc)", &qdiscs(&mut socket)?)?;
    leave_out("permanent neighbours in its network", &neighbours(&mut socket)?)
}

fn refuse_ipsec(pid: i32) -> Result<()> {
    if !has_ipsec() {
        return Ok(());
    }
    let mut socket = Socket::open(libc::NETLINK_XFRM)?;
    for (kind, what) in [(GET_STATES, "states"), (GET_POLICIES, "policies")] {
        if !socket.list_as_it_is(kind, &[])?.is_empty() {
            return Err(Error::refused(
                pid,
                "its network namespace",
                format!(
                    "has {what} of IPsec (ip xfrm), which are not kept: what they encrypt would go \
                     out in the clear; end who has set them, or make the namespace another's \
                     (--external net[INODE]:NAME)"
                ),
            ));
        }
    }
    Ok(())
}

/// Whether this kernel has netlink for IPsec by now: a socket of it would have it load the module.
fn has_ipsec() -> bool {
    let sockets = std::fs::read_to_string("/proc/thread-self/net/netlink").unwrap_or_default();
    let family = |line: &str| line.split_whitespace().nth(1).and_then(|f| f.parse::<i32>().ok());
    sockets.lines().any(|line| family(line) == Some(libc::NETLINK_XFRM))
}

/// The kinds of what somebody has set for queues of devices: what the kernel sets has no handle.
fn qdiscs(socket: &mut Socket) -> Result<Vec<String>> {
    let all = socket.list_as_it_is(libc::RTM_GETQDISC, &TCMSG)?;
    let given = all.iter().filter(|qdisc| word(qdisc.body(), 8).is_some_and(|handle| handle != 0));
    let kind = |qdisc: &Message| {
        qdisc.attributes(TCMSG.len()).text(libc::TCA_KIND).unwrap_or("?").to_owned()
    };
    Ok(given.map(kind).collect())
}

/// How many neighbours somebody has set for good.
fn neighbours(socket: &mut Socket) -> Result<Vec<String>> {
    let all = socket.list_as_it_is(libc::RTM_GETNEIGH, &NDMSG)?;
    let is_permanent =
        |body: &[u8]| half(body, 8).is_some_and(|state| state & libc::NUD_PERMANENT != 0);
    let count = all.iter().filter(|neighbour| is_permanent(neighbour.body())).count();
    Ok((count > 0).then(|| count.to_string()).into_iter().collect())
}

/// Settings by their names, as paths.
type Settings = BTreeMap<String, String>;

/// The names of the settings that are not kept, and are not what a new namespace has.
fn changed_settings(fresh: Option<&FreshSettings>) -> Result<Vec<String>> {
    let read = || settings().context(|| format!("read the settings in {SETTINGS}"));
    if let Some(FreshSettings(fresh)) = fresh {
        return Ok(other_than(fresh, read()?));
    }
    let (own, fresh) = std::thread::scope(|scope| {
        let fresh = scope.spawn(settings_of_new);
        (read(), fresh.join())
    });
    match fresh.unwrap_or_else(|_| Err(io::ErrorKind::Other.into())) {
        Ok(fresh) => Ok(other_than(&fresh, own?)),
        Err(error) => {
            tracing::warn!("which settings of a network are not kept cannot be told: {error}");
            Ok(Vec::new())
        }
    }
}

/// The names of those that a new namespace has other values of.
fn other_than(fresh: &Settings, own: Settings) -> Vec<String> {
    let changed = own.into_iter().filter(|(name, value)| {
        let new = fresh.get(name).or_else(|| fresh.get(&of_new_device(name)?));
        new.is_some_and(|new| new != value)
    });
    changed.map(|(name, _)| format!("net.{}", name.replace('/', "."))).collect()
}

/// Those that a new namespace has.
///
/// # Errors
/// If this program may not make one.
fn settings_of_new() -> io::Result<Settings> {
    torpor_sys::ns::unshare_namespaces(libc::CLONE_NEWNET)?;
    settings()
}

/// What a setting of a device begins with. How neighbours are looked for without a device is shown in the first
/// namespace alone; the loopback has the same in a new one.
fn of_new_device(name: &str) -> Option<String> {
    match name.split('/').collect::<Vec<_>>()[..] {
        [family, "conf", _, name] => Some(format!("{family}/conf/default/{name}")),
        [family, "neigh", _, name] => Some(format!("{family}/neigh/lo/{name}")),
        _ => None,
    }
}

/// Those that are not kept, of the calling thread's namespace.
fn settings() -> io::Result<Settings> {
    let mut found = Settings::new();
    read(Path::new(SETTINGS), "", &mut found)?;
    Ok(found)
}

fn read(directory: &Path, above: &str, found: &mut Settings) -> io::Result<()> {
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        let name = format!("{above}{}", entry.file_name().to_string_lossy());
        if entry.file_type()?.is_dir() {
            read(&entry.path(), &format!("{name}/"), found)?;
        } else if !is_kept(&name) {
            // What only can be written has no value.
            let value = std::fs::read_to_string(entry.path());
            found.extend(value.ok().map(|value| (name, value)));
        }
    }
    Ok(())
}

/// Whether the images have a setting, or what it follows from.
fn is_kept(name: &str) -> bool {
    match name.split('/').collect::<Vec<_>>()[..] {
        [.., name] if SHOWN.contains(&name) => true,
        ["ipv4", "conf", _, name] => NAMES.v4.contains(&name),
        ["ipv6", "conf", _, name] => NAMES.v6.contains(&name),
        ["ipv4", name] => NAMES.ipv4.contains(&name) || OTHERWISE.contains(&name),
        ["unix", name] => NAMES.unix.contains(&name),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::fd::{AsFd, OwnedFd};

    use super::super::run_in;
    use super::*;
    use crate::namespace::testing::fresh;

    fn refusal(space: &OwnedFd, strict: bool) -> String {
        let known = std::thread::spawn(settings_of_new).join().unwrap().unwrap();
        let known = refusal_by(space, strict, Some(&FreshSettings(known)));
        assert_eq!(known, refusal_by(space, strict, None));
        known
    }

    fn refusal_by(space: &OwnedFd, strict: bool, fresh: Option<&FreshSettings>) -> String {
        let check = || Ok(check(7, strict, fresh));
        run_in(&[space.as_fd()], check).unwrap().map_or_else(|e| e.to_string(), |()| String::new())
    }

    fn shell(space: &OwnedFd, script: &str) {
        let run = || Ok(std::process::Command::new("sh").args(["-ec", script]).status().unwrap());
        assert!(run_in(&[space.as_fd()], run).unwrap().success(), "{script}");
    }

    #[test]
    fn a_new_network_has_nothing_to_lose() {
        let space = fresh(NsKind::Net);
        assert_eq!(refusal(&space, true), "");
        shell(
            &space,
            "ip link set lo up; ip link add one type veth peer name two; ip link set one up",
        );
        assert_eq!(refusal(&space, true), "");
    }

    #[test]
    fn settings_are_lost_by_name() {
        let space = fresh(NsKind::Net);
        shell(
            &space,
            "ip link add one type veth peer name two; cd /proc/sys/net
             echo 99 >core/somaxconn; echo 0 >ipv4/ip_unprivileged_port_start
             echo 3 >ipv4/neigh/lo/app_solicit; echo 5 >ipv4/neigh/one/app_solicit
             # Kept, so not lost:
             echo 3 >ipv4/conf/lo/arp_ignore; echo 1 >ipv4/ip_forward; echo 77 >unix/max_dgram_qlen",
        );
        let names = "net.core.somaxconn, net.ipv4.ip_unprivileged_port_start, \
                     net.ipv4.neigh.lo.app_solicit, net.ipv4.neigh.one.app_solicit";
        assert!(refusal(&space, true).contains(names), "{}", refusal(&space, true));
        assert_eq!(refusal(&space, false), "");
    }

    #[test]
    fn traffic_control_and_neighbours_are_lost_by_name() {
        let space = fresh(NsKind::Net);
        shell(&space, "ip link add one type veth peer name two; ip link set one up");
        shell(&space, "tc qdisc add dev one root tbf rate 1mbit burst 10k latency 50ms");
        assert!(refusal(&space, true).contains("traffic control of its network (tc) (tbf)"));
        assert_eq!(refusal(&space, false), "");
        let space = fresh(NsKind::Net);
        shell(&space, "ip link add one type veth peer name two; ip link set one up");
        shell(&space, "ip neigh add 10.0.0.2 lladdr 02:00:00:00:00:01 dev one nud permanent");
        assert!(refusal(&space, true).contains("permanent neighbours in its network (1)"));
        assert_eq!(refusal(&space, false), "");
    }

    #[test]
    fn ipsec_is_refused() {
        let space = fresh(NsKind::Net);
        shell(&space, "ip xfrm policy add src 10.0.0.1 dst 10.0.0.2 dir out");
        let refusal = refusal(&space, false);
        assert!(refusal.contains("has policies of IPsec"), "{refusal}");
    }
}
