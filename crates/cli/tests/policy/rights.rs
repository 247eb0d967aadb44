//! The rights of a restore: what it sets for tasks with them, and which it gives up.

use std::fs;

use rustix::process::{Pid, Signal, kill_process};
use torpor_images::proto::{CoreEntry, FileEntry, FownEntry, TaskCoreEntry, ThreadCoreEntry};
use torpor_images::{ImageDir, kind};
use torpor_policy::Capabilities;

use super::sleeper::write_script;
use super::{Asleep, torpor};

/// What a restore would set for tasks with its own rights, in the name of others or before others.
#[test]
fn what_is_set_with_the_rights_of_the_restore() {
    let task = Asleep::new(&["--uts"], "exec 7>/dev/null");
    let root = task.root();
    let images = ImageDir::open(task.images()).unwrap();
    let whole: CoreEntry = images.read_one(kind::CORE, root.into()).unwrap();
    let of_task = |text: &str| format!("core-{root}.img: task {root}: {text}");
    let changed = |change: fn(&mut TaskCoreEntry, &mut ThreadCoreEntry)| {
        let mut core = whole.clone();
        change(core.tc.as_mut().unwrap(), core.thread_core.as_mut().unwrap());
        images.write_one(kind::CORE, root.into(), &core).unwrap();
    };
    changed(|tc, _| tc.loginuid = Some(4711));
    task.denied(&["users.login=false"], &[&of_task("logged in as user id 4711"), "(users.login)"]);
    task.allowed(&["users.login=true"]);
    changed(|_, thread| thread.torpor_ioprio = Some(1 << 13 | 4));
    task.denied(&["scheduling.allow=false"], &[&of_task("scheduling: priority 0x2004 for I/O")]);
    task.allowed(&["scheduling.allow=true"]);
    changed(|_, thread| thread.torpor_io_flusher = Some(true));
    task.denied(&["limits.raise=false"], &[&of_task("PR_SET_IO_FLUSHER of 1")]);
    changed(|_, _| {});
    let mut files: Vec<FileEntry> = images.read_all(kind::FILES, 0).unwrap();
    let reg = files.iter_mut().find_map(|entry| entry.reg.as_mut()).unwrap();
    reg.fown = FownEntry { pid: root, euid: 4712, ..FownEntry::default() };
    images.write_all(kind::FILES, 0, &files).unwrap();
    task.denied(&["users.allow=['0']"], &["files.img: user id 4712"]);
    task.allowed(&["users.allow=['0', '4712']"]);
}

/// What the restoring program may do while it restores tasks that may do little.
#[test]
fn a_restore_gives_up_what_it_does_not_need() {
    const GONE: &str = "sys_module,sys_rawio,sys_boot,mac_admin,mknod";
    let bounding = format!("--bounding-set=-{}", GONE.replace(',', ",-"));
    let narrow = Asleep::new(&["--uts", "setpriv", &bounding], "");
    let wide = Asleep::new(&["--uts"], "");
    let sets = |task: &Asleep| {
        let (said, script) = (task.dir.path().join("said"), task.dir.path().join("script"));
        // Between them is a shell.
        let text = format!(
            "#!/bin/sh\n[ $CRTOOLS_SCRIPT_ACTION != post-restore ] && exit
            parent=$(sed -n 's/^PPid://p' /proc/$PPID/status)
            cat /proc/$((parent))/status >{}\n",
            said.display()
        );
        write_script(&script, &text);
        let root = task.root();
        let images = task.images();
        let args = ["restore", "-d", "--host-key", &task.key(), "--action-script"];
        let end = torpor(&args).arg(&script).arg("-D").arg(&images).output().unwrap();
        assert!(end.status.success(), "{}", crate::said(&end));
        let of_task = fs::read_to_string(format!("/proc/{root}/status")).unwrap();
        kill_process(Pid::from_raw(root.cast_signed()).unwrap(), Signal::KILL).unwrap();
        (fs::read_to_string(said).unwrap(), of_task)
    };
    let set = |status: &str, name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        Capabilities(u64::from_str_radix(line.trim_start_matches(':').trim(), 16).unwrap())
    };
    let gone = Capabilities::parse(GONE.split(',')).unwrap();
    let own = set(&fs::read_to_string("/proc/self/status").unwrap(), "CapPrm");
    let (supervisor, task) = sets(&narrow);
    for name in ["CapPrm", "CapEff", "CapInh"] {
        let kept = set(&supervisor, name);
        assert_eq!(kept.without(gone), kept, "{name}: {supervisor}");
    }
    assert_eq!(set(&task, "CapBnd"), own.without(gone), "{task}");
    // It has to give to the tasks what is theirs.
    let (supervisor, task) = sets(&wide);
    assert_eq!(set(&supervisor, "CapEff"), own, "{supervisor}");
    assert_eq!(set(&task, "CapEff"), own, "{task}");
}
