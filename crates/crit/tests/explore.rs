//! What `crit x` prints of a checkpoint, letter by letter as CRIU's tool does.

#![allow(clippy::unwrap_used)]

use std::fmt::Write as _;

use serde_json::{Value as Json, json};
use torpor_crit::{What, explore, explored};
use torpor_images::pagemap::{PagemapWriter, Run};
use torpor_images::proto::{
    CoreEntry, FdTypes, FdinfoEntry, FileEntry, FsEntry, MmEntry, PipeEntry, PstreeEntry,
    RegFileEntry, TaskCoreEntry, TaskKobjIdsEntry, UnixSkEntry, VmaEntry,
};
use torpor_images::{ImageDir, kind};

const ALIVE: u32 = 1;
const ZOMBIE: u32 = 6;

/// Three tasks and a zombie, with files and memory of several kinds.
fn checkpoint() -> (tempfile::TempDir, ImageDir) {
    let temp = tempfile::tempdir().unwrap();
    let dir = ImageDir::open(temp.path()).unwrap();
    let task = |pid, ppid| PstreeEntry { pid, ppid, pgid: 10, sid: 1, threads: vec![pid] };
    let tree = [task(10, 0), task(200, 10), task(30, 10), task(21, 200)];
    dir.write_all(kind::PSTREE, 0, &tree).unwrap();
    for task in &tree {
        let state = if task.pid == 30 { ZOMBIE } else { ALIVE };
        write_task(&dir, task.pid.into(), state);
    }
    dir.write_all(kind::FILES, 0, &files()).unwrap();
    (temp, dir)
}

fn write_task(dir: &ImageDir, pid: u64, task_state: u32) {
    let comm = format!("task{pid}").into_bytes();
    let tc = TaskCoreEntry { task_state, comm, ..Default::default() };
    dir.write_one(kind::CORE, pid, &CoreEntry { tc: Some(tc), ..Default::default() }).unwrap();
    if task_state == ZOMBIE {
        return;
    }
    // Every task has its own table, but for the last, which shares that of the first.
    let files_id = if pid == 21 { 10 } else { u32::try_from(pid).unwrap() };
    let ids = TaskKobjIdsEntry { files_id, ..Default::default() };
    dir.write_one(kind::IDS, pid, &ids).unwrap();
    let fs = FsEntry { cwd_id: 2, root_id: 3, umask: Some(0o22) };
    dir.write_one(kind::FS, pid, &fs).unwrap();
    if pid != 21 {
        let fd = |fd, fd_type: FdTypes, id| FdinfoEntry {
            id,
            fd,
            r#type: fd_type.into(),
            ..Default::default()
        };
        let fds = [
            fd(0, FdTypes::Reg, 1),
            fd(1, FdTypes::Pipe, 4),
            fd(2, FdTypes::Unixsk, 5),
            fd(3, FdTypes::Unixsk, 7),
            fd(100, FdTypes::Eventfd, 6),
        ];
        dir.write_all(kind::FDINFO, pid, &fds).unwrap();
    }
    let vmas = areas(pid == 10);
    dir.write_one(kind::MM, pid, &MmEntry { exe_file_id: 1, vmas, ..Default::default() }).unwrap();
    let mut pagemap = PagemapWriter::create(dir, kind::PAGEMAP, pid, 1).unwrap();
    for (page, pages, lazy) in [
        (0x400, 1, false),
        (0x401, 1, true),
        (0x500, 5, false),
        (0x505, 1, true),
        (0x600, 1, false),
    ] {
        let run = Run { vaddr: page << 12, pages, present: true, lazy, ..Default::default() };
        pagemap.push(run).unwrap();
    }
    pagemap.finish().unwrap();
}

fn areas(first: bool) -> Vec<VmaEntry> {
    let area = |start: u64, pages: u64, prot, status, pgoff, shmid| VmaEntry {
        start: start << 12,
        end: (start + pages) << 12,
        prot,
        status,
        pgoff,
        shmid,
        fd: -1,
        ..Default::default()
    };
    let mut areas = vec![
        area(0x400, 2, 5, 65, 0, 1),
        area(0x500, 4, 3, 513, 0, 0),
        area(0x504, 4, 3, 545, 0, 0),
        area(0x600, 1, 1, 129, 0x3000, 2),
        area(0x700, 1, 3, 257, 0, 77),
        area(0x701, 1, 3, 1281, 0, 78),
        area(0x702, 1, 0, 2049, 0, 79),
        area(0x7_ffff_fff0, 1, 3, 515, 0, 0),
        area(0x7_ffff_fff2, 1, 5, 521, 0, 0),
        area(0xf_ffff_ffff_f600, 1, 4, 4, 0, 0),
    ];
    if !first {
        areas.remove(4);
        areas.insert(4, area(0x700, 1, 3, 257, 0, 78));
    }
    areas
}

fn files() -> Vec<FileEntry> {
    let file = |id, r#type: FdTypes| FileEntry { id, r#type: r#type.into(), ..Default::default() };
    let reg = |id, name: &str| FileEntry {
        reg: Some(RegFileEntry { id, name: name.into(), ..Default::default() }),
        ..file(id, FdTypes::Reg)
    };
    let usk = UnixSkEntry { ino: 55, peer: 56, name: b"\0name".to_vec(), ..Default::default() };
    let unnamed = UnixSkEntry { ino: 56, ..Default::default() };
    let pipe = PipeEntry { pipe_id: 44, ..Default::default() };
    vec![
        reg(1, "/bin/sleep"),
        reg(2, "/home"),
        reg(3, "/"),
        FileEntry { pipe: Some(pipe), ..file(4, FdTypes::Pipe) },
        FileEntry { usk: Some(usk), ..file(5, FdTypes::Unixsk) },
        file(6, FdTypes::Eventfd),
        FileEntry { usk: Some(unnamed), ..file(7, FdTypes::Unixsk) },
    ]
}

fn text(what: What) -> String {
    let (_temp, dir) = checkpoint();
    let mut out = vec![];
    explore(&ImageDir::open(dir.path()).unwrap(), what, &mut out).unwrap();
    String::from_utf8(out).unwrap()
}

#[test]
fn ps_shows_the_tree() {
    let expected = "    PID   PGID    SID   COMM
     10     10      1   task10
    200     10      1       task200
     21     10      1           task21
     30     10      1       task30
";
    assert_eq!(text(What::Ps), expected);
}

#[test]
fn fds_shows_the_files_of_each_live_task() {
    let mut expected = String::new();
    for pid in [10, 200, 21] {
        let files = "\t      0: /bin/sleep
\t      1: pipe[44]
\t      2: unix[55 (56) =00name]
\t      3: unix[56 (0)]
\t    100: EVENTFD.6
\t    cwd: /home
\t   root: /
";
        write!(expected, "{pid}\n{files}").unwrap();
    }
    assert_eq!(text(What::Fds), expected);
}

#[test]
fn mems_shows_the_areas_of_each_live_task() {
    let mut expected = String::new();
    for (pid, shmem) in [(10, 1), (200, 2), (21, 2)] {
        write!(
            expected,
            "{pid}
\texe                                     /bin/sleep
\t00400000-00402000                   r-x /bin/sleep
\t00500000-00504000                   rw-
\t00504000-00508000                   rw-
\t00600000-00601000                   r-- /home + 0x3000 (s)
\t00700000-00701000                   rw- shmem[{shmem}]
\t00701000-00702000                   rw- ips[2]
\t00702000-00703000                   --- packet[3]
\t7fffffff0000-7fffffff1000           rw- [stack]
\t7fffffff2000-7fffffff3000           r-x [vdso]
\tffffffffff600000-ffffffffff601000   --x [vsyscall] *
"
        )
        .unwrap();
    }
    assert_eq!(text(What::Mems), expected);
}

#[test]
fn rss_shows_where_the_pages_of_each_live_task_are() {
    let mut expected = String::new();
    let blank = format!("\t{:23}", "");
    for pid in [10, 200, 21] {
        let lines = [
            "\t400000 / 1              00400000 / 2        /bin/sleep",
            &blank,
            "\t401000 / 1              ~",
            &blank,
            "\t500000 / 5              00500000 / 4       ",
            "\t                        00504000 / 4       ",
            &blank,
            "\t505000 / 1              ~",
            &blank,
            "\t600000 / 1              00600000 / 1        /home",
            &blank,
            "",
        ];
        write!(expected, "{pid}\n{}", lines.join("\n")).unwrap();
    }
    assert_eq!(text(What::Rss), expected);
}

#[test]
fn tasks_that_are_their_own_ancestors_are_an_error() {
    let (_temp, dir) = checkpoint();
    let task = |pid, ppid| PstreeEntry { pid, ppid, ..Default::default() };
    dir.write_all(kind::PSTREE, 0, &[task(10, 0), task(200, 21), task(21, 200)]).unwrap();
    let error = explore(&ImageDir::open(dir.path()).unwrap(), What::Ps, &mut vec![]).unwrap_err();
    assert!(error.to_string().contains("own ancestors"), "{error}");
}

#[test]
fn control_characters_do_not_reach_the_terminal() {
    let (_temp, dir) = checkpoint();
    let tc = TaskCoreEntry { comm: b"\x1b[2J\xff".to_vec(), ..Default::default() };
    let core = CoreEntry { tc: Some(tc), ..Default::default() };
    dir.write_one(kind::CORE, 10, &core).unwrap();
    let mut out = vec![];
    explore(&ImageDir::open(dir.path()).unwrap(), What::Ps, &mut out).unwrap();
    assert!(String::from_utf8(out).unwrap().contains("   \\u{1b}[2J\u{fffd}\n"));
}

/// What programs get of the first task.
fn first(what: What) -> Json {
    let (_temp, dir) = checkpoint();
    let mut all = explored(&dir, what).unwrap();
    let tasks = all["tasks"].as_array_mut().unwrap();
    assert_eq!(tasks.len(), if what == What::Ps { 4 } else { 3 });
    tasks.remove(0)
}

#[test]
fn programs_get_the_same_as_objects() {
    let task = json!({
        "pid": 10, "ppid": 0, "pgid": 10, "sid": 1, "threads": [10], "comm": "task10",
    });
    assert_eq!(first(What::Ps), task);

    let fds = first(What::Fds);
    let (cwd, root) = (&fds["cwd"], &fds["root"]);
    assert_eq!((&fds["pid"], cwd, root), (&json!(10), &json!("/home"), &json!("/")));
    assert_eq!(fds["fds"][2], json!({ "fd": 2, "name": "unix[55 (56) =00name]" }));

    let mems = first(What::Mems);
    assert_eq!((&mems["exe"], mems["areas"].as_array().unwrap().len()), (&json!("/bin/sleep"), 10));
    let of_file = json!({
        "start": "0x600000", "end": "0x601000", "protection": "r--", "name": "/home",
        "offset": "0x3000", "shared": true,
    });
    assert_eq!(mems["areas"][3], of_file);
    let own = json!({
        "start": "0x500000", "end": "0x504000", "protection": "rw-", "name": null,
        "offset": null, "shared": false,
    });
    assert_eq!(mems["areas"][1], own);
    assert_eq!(mems["areas"][9]["end"], "0xffffffffff601000");

    let rss = first(What::Rss);
    assert_eq!(rss["pages"].as_array().unwrap().len(), 5);
    let run = json!({
        "start": "0x500000", "count": 5, "continues": false,
        "areas": [
            { "start": "0x500000", "pages": 4, "name": null },
            { "start": "0x504000", "pages": 4, "name": null },
        ],
    });
    assert_eq!(rss["pages"][2], run);
    assert_eq!(rss["pages"][3]["continues"], true);
}

/// JSON can hold what a terminal would obey.
#[test]
fn programs_get_names_as_they_are() {
    let (_temp, dir) = checkpoint();
    let reg = RegFileEntry { id: 1, name: b"/a\nb".to_vec(), ..Default::default() };
    let file = FileEntry { id: 1, reg: Some(reg), ..Default::default() };
    dir.write_all(kind::FILES, 0, &[file]).unwrap();
    let all = explored(&dir, What::Fds).unwrap();
    assert_eq!(all["tasks"][0]["fds"][0]["name"], "/a\nb");
    let mut out = vec![];
    explore(&dir, What::Fds, &mut out).unwrap();
    assert!(String::from_utf8(out).unwrap().contains("/a\\nb\n"));
}

/// An abstract name may be anything: a line of it could pass for another descriptor.
#[test]
fn the_name_of_a_socket_is_one_line() {
    let (_temp, dir) = checkpoint();
    let name = b"\0a\n\t      0: /bin/sh\rb".to_vec();
    let usk = UnixSkEntry { ino: 57, name, ..Default::default() };
    let file = FileEntry { id: 5, usk: Some(usk), ..Default::default() };
    dir.write_all(kind::FILES, 0, &[file]).unwrap();
    let mut out = vec![];
    explore(&dir, What::Fds, &mut out).unwrap();
    let out = String::from_utf8(out).unwrap();
    assert!(out.contains("unix[57 (0) =00a\\n\\t      0: /bin/sh\\rb]\n"), "{out:?}");
}
