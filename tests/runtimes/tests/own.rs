//! Images that this host has made: what they get, and what ends their being its own.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use torpor_images::pagemap::{Pagemap, PagemapWriter};
use torpor_images::{ImageDir, kind};
use torpor_runtimes_tests::command::{Run, command};
use torpor_runtimes_tests::runc::{Bundle, Container, cgroup_left};
use torpor_runtimes_tests::scratch::Scratch;

use crate::counting::{COUNT, goes_on};
use crate::images::Images;

/// A way to change images.
type Row = (&'static str, fn(&Images));

/// What makes images somebody's.
const CHANGES: [Row; 10] = [
    ("a byte of a page", |images| {
        images.bytes("pages-1.img", |pages| pages[4096 + 5] ^= 1);
    }),
    ("the last byte of all pages", |images| {
        images.bytes("pages-1.img", |pages| *pages.last_mut().unwrap() ^= 0x80);
    }),
    // As if it had been found in newer images.
    ("a page of zeros", |images| {
        images.bytes("pages-1.img", |pages| {
            let page = pages.chunks_mut(4096).find(|page| page.iter().any(|&byte| byte != 0));
            page.unwrap().fill(0);
        });
    }),
    ("pages at another address", |images| {
        let root: u64 = images.tasks()[0].into();
        let dir = ImageDir::open(&images.path).unwrap();
        let mut map = Pagemap::read(&dir, kind::PAGEMAP, root).unwrap();
        map.runs.last_mut().unwrap().vaddr += 4096;
        let mut changed = PagemapWriter::create(&dir, kind::PAGEMAP, root, map.pages_id).unwrap();
        map.runs.iter().for_each(|run| changed.push(*run).unwrap());
        changed.finish().unwrap();
    }),
    ("pages in each other's place", |images| {
        images.bytes("pages-1.img", |pages| {
            let (first, rest) = pages.split_at_mut(4096);
            first.swap_with_slice(rest.last_chunk_mut::<4096>().unwrap());
        });
    }),
    ("a name of a task", |images| {
        let root = images.tasks()[0];
        images.core(root, |core| core.tc.as_mut().unwrap().comm = "other".into());
    }),
    ("capabilities of a task", |images| {
        let root = images.tasks()[0];
        images.core(root, |core| {
            let thread = core.thread_core.as_mut().unwrap();
            // All of the first 32.
            thread.creds.as_mut().unwrap().cap_bnd[0] = u32::MAX;
        });
    }),
    ("a user of a task", |images| {
        let root = images.tasks()[0];
        images.core(root, |core| {
            core.thread_core.as_mut().unwrap().creds.as_mut().unwrap().uid = 4711;
        });
    }),
    ("a position in a file", |images| {
        images.files(|files| {
            let file = files.iter_mut().find_map(|file| file.reg.as_mut()).unwrap();
            file.pos += 1;
        });
    }),
    ("an image that was added", |images| {
        let root: u64 = images.tasks()[0].into();
        fs::copy(images.path.join(kind::FS.file_name(root)), images.path.join("fs-9999.img"))
            .unwrap();
    }),
];

/// The images are this host's, of a container that was given more than the one that is restored.
#[test]
fn own_images_get_what_the_bundle_gives() {
    let scratch = Scratch::new("edits-own");
    let policy = scratch.join("policy.toml");
    fs::write(&policy, "").unwrap();
    let (key, file) = (scratch.join("host.key"), policy.display());
    scratch.configure(&format!("host-key {}\npolicy {file}\n", key.display()));
    let bundle = Bundle::new(&scratch, &[], &["sh", "-c", COUNT]).configure(|config| {
        for set in ["bounding", "permitted", "effective"] {
            let set = config["process"]["capabilities"][set].as_array_mut().unwrap();
            set.push(json!("CAP_SYS_ADMIN"));
        }
    });
    let mut container = Container::start(&scratch, &bundle);
    goes_on(&bundle.file("count"));
    container.checkpoint(&[]);
    let torpor = fs::read_link(scratch.criu()).unwrap();
    let audit = |file: &Path| {
        let mut call = command(torpor.to_str().unwrap(), &["image", "audit", "--json"]);
        let key = scratch.join("host.key");
        call.arg(file).arg("--host-key").arg(key).finish().stdout
    };
    let said: Value = serde_json::from_str(&audit(&scratch.join("images"))).unwrap();
    assert_eq!(said["made_here"], json!(true), "{said}");

    let file = scratch.join("bundle/config.json");
    let wide = fs::read_to_string(&file).unwrap();
    let mut narrow: Value = serde_json::from_str(&wide).unwrap();
    for set in ["bounding", "permitted", "effective"] {
        narrow["process"]["capabilities"][set].as_array_mut().unwrap().pop();
    }
    fs::write(&file, narrow.to_string()).unwrap();
    container.restore_call(&[]).args(["--detach", container.id()]).fail();
    let log = fs::read_to_string(scratch.join("work/restore.log")).unwrap();
    assert!(log.contains("CAP_SYS_ADMIN (own.capabilities.allow)"), "{log}");
    assert!(!cgroup_left(container.id()), "a cgroup is left");

    // A user who trusts his own images gives them more than the bundle does, and others not.
    fs::write(&policy, "own.capabilities.allow = 'all'\n").unwrap();
    let (images, whole) = (scratch.join("images"), scratch.join("whole"));
    fs::rename(&images, &whole).unwrap();
    for (what, change) in CHANGES {
        command("cp", &["-a"]).arg(&whole).arg(&images).succeed();
        change(&Images::of(&scratch));
        let said = audit(&images);
        let said: Value = serde_json::from_str(&said).expect(what);
        assert_eq!(said["made_here"], json!(false), "{what}: {said}");
        fs::remove_file(scratch.join("work/restore.log")).unwrap();
        container.restore_call(&[]).args(["--detach", container.id()]).fail();
        let log = fs::read_to_string(scratch.join("work/restore.log")).unwrap();
        assert!(log.contains("(foreign.capabilities.allow)"), "{what}: {log}");
        assert!(!cgroup_left(container.id()), "{what}: a cgroup is left");
        container.runc("state").arg(container.id()).fail();
        fs::remove_dir_all(&images).unwrap();
    }
    fs::rename(&whole, &images).unwrap();
    container.restore(&[]);
    goes_on(&bundle.file("count"));
}
