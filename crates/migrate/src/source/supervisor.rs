//! Who starts a program again that ends: what has moved would run at both hosts then.

use torpor_kernel::cgroup::{self, Membership};
use torpor_kernel::proc;

use crate::task::Task;

/// The names of those that do for whatever they have started.
const SUPERVISORS: [&str; 6] =
    ["conmon", "containerd-shim", "runsv", "s6-supervise", "supervise", "supervisord"];
/// It does for services, and adopts others.
const SYSTEMD: &str = "systemd";

/// Who may start this process again when it ends here, in words.
pub(super) fn supervisor_of(root: &Task) -> Option<String> {
    let parent = proc::stat(root.pid).ok()?.ppid;
    let name = String::from_utf8(proc::stat(parent).ok()?.comm).ok()?;
    if name == SYSTEMD {
        return service(&cgroup::of(root.pid).ok()?).map(|unit| format!("{name} ({unit})"));
    }
    SUPERVISORS.contains(&&*name).then(|| format!("{name} (process {parent})"))
}

/// The service that a process in these groups is of.
fn service(groups: &Membership) -> Option<String> {
    let mut names = groups.values().filter_map(|path| path.file_name()?.to_str());
    names.find(|name| name.ends_with(".service")).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_is_no_service() {
        let of = |text: &str| service(&cgroup::parse(text.as_bytes()));
        let slice = "/user.slice/user-7.slice";
        assert_eq!(of("0::/system.slice/web.service\n").as_deref(), Some("web.service"));
        assert_eq!(of(&format!("0::{slice}/session-3.scope\n")), None);
        let own = format!("1:name=systemd:{slice}/user@7.service/app.slice/web.service\n0::/\n");
        assert_eq!(of(&own).as_deref(), Some("web.service"));
        assert_eq!(of("0::/\n"), None);
    }
}
