//! Working sets: what a restored task touched first comes first the next time.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use torpor_images::proto::WorkingSetEntry;
use torpor_images::{ImageDir, kind};
use torpor_sys::process::wait;

mod keys;
mod sleeper;

use keys::age_key;
use sleeper::{criu, wait_until};

/// Where the program has its memory, and how many pages.
const BASE: u64 = 1 << 40;
const PAGES: u64 = 2048;

/// The pages that it touches first, by their numbers.
const FIRST: [u64; 9] = [2000, 1999, 7, 8, 9, 1024, 3, 2047, 0];

/// It touches some of its pages when it is told to, in their order, then all, and ends.
const PROGRAM: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

static const unsigned long first[] = { FIRST };
static volatile unsigned long *page(unsigned long number)
{
	return (void *)(BASE + number * 4096);
}

static int differs(unsigned long number)
{
	return *page(number) != number + 1;
}

static void make(const char *name)
{
	close(open(name, O_CREAT | O_WRONLY, 0600));
}

static void wait_for(const char *name)
{
	while (access(name, F_OK))
		usleep(1000);
}

int main(void)
{
	int wrong = 0;

	if (mmap((void *)BASE, PAGES * 4096, PROT_READ | PROT_WRITE,
		 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED)
		return 1;
	for (unsigned long number = 0; number < PAGES; number++)
		*page(number) = number + 1;
	make("ready");
	wait_for("gate");
	for (unsigned long i = 0; i < sizeof(first) / sizeof(*first); i++)
		wrong += differs(first[i]);
	make("touched");
	wait_for("gate2");
	for (unsigned long number = PAGES; number-- > 0;)
		wrong += differs(number);
	make(wrong ? "wrong" : "right");
}
"#;

struct Task {
    dir: tempfile::TempDir,
    pid: i32,
}

impl Task {
    #[allow(clippy::zombie_processes, reason = "it is waited for by its pid")]
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (source, program) = (dir.path().join("program.c"), dir.path().join("program"));
        let first = FIRST.map(|number| number.to_string()).join(", ");
        let defines =
            format!("#define FIRST {first}\n#define BASE {BASE}ul\n#define PAGES {PAGES}ul\n");
        fs::write(&source, defines + PROGRAM).unwrap();
        let mut compiler = Command::new("cc");
        compiler.args(["-O1", "-Wall", "-Werror", "-o"]).arg(&program).arg(&source);
        assert!(compiler.status().unwrap().success());
        let mut command = Command::new("setsid");
        command.arg(&program).current_dir(dir.path());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().unwrap();
        wait_until(|| dir.path().join("ready").exists());
        fs::create_dir(dir.path().join("images")).unwrap();
        Self { pid: i32::try_from(child.id()).unwrap(), dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn images(&self) -> PathBuf {
        self.path("images")
    }

    fn command(&self, words: &[&str], log: &str) -> Command {
        let mut command = criu(words);
        command.args(["-v4", "-o"]).arg(self.path(log)).arg("-D").arg(self.images());
        command
    }

    fn put_to_sleep(&self, args: &[&str]) {
        let mut dump = self.command(&["dump", "-t", &self.pid.to_string()], "dump.log");
        assert!(dump.args(args).status().unwrap().success(), "{}", self.log("dump.log"));
        wait(self.pid, true).unwrap();
    }

    fn restore(&self, args: &[&str]) -> bool {
        let mut restore = self.command(&["restore", "-d", "--lazy-pages"], "restore.log");
        restore.args(args).status().unwrap().success()
    }

    fn log(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    /// Lets it touch some of its pages, then all, and end.
    fn run(&self) {
        fs::write(self.path("gate"), "").unwrap();
        wait_until(|| self.path("touched").exists());
        fs::write(self.path("gate2"), "").unwrap();
        wait_until(|| self.path("right").exists() || self.path("wrong").exists());
        assert!(!self.path("wrong").exists());
        // Until it is reaped its pid is in use.
        wait_until(|| !Path::new(&format!("/proc/{}", self.pid)).exists());
        for name in ["gate", "gate2", "touched", "right"] {
            fs::remove_file(self.path(name)).unwrap();
        }
    }
}

/// The pages of the program's memory in the order in which they were touched.
fn recorded(images: &Path) -> Vec<u64> {
    let images = ImageDir::open(images).unwrap();
    let entries: Vec<WorkingSetEntry> = images.read_all(kind::WORKING_SET, 0).unwrap();
    let addresses = entries
        .iter()
        .flat_map(|entry| (0..entry.nr_pages).map(move |number| entry.vaddr + number * 4096));
    let numbers = addresses.filter(|at| (BASE..BASE + PAGES * 4096).contains(at));
    numbers.map(|at| (at - BASE) / 4096).collect()
}

#[test]
fn what_was_touched_first_comes_first() {
    let task = Task::start();
    task.put_to_sleep(&[]);
    // It ends when the program does.
    assert!(task.restore(&["--record-working-set=1000"]), "{}", task.log("restore.log"));
    task.run();
    wait_until(|| task.log("restore.log").contains("All pages are in place"));
    let log = task.log("restore.log");
    assert!(log.contains("is recorded"), "{log}");
    let pages = recorded(&task.images());
    assert_eq!(pages[..FIRST.len()], FIRST);
    // Each page is noted once.
    let mut sorted = pages.clone();
    sorted.sort_unstable();
    sorted.dedup();
    assert_eq!((sorted.len(), pages.len()), (2048, 2048));

    assert!(task.restore(&[]), "{}", task.log("restore.log"));
    let log = task.log("restore.log");
    task.run();
    wait_until(|| task.log("restore.log").contains("All pages are in place"));
    assert!(task.log("restore.log").contains("comes first"), "{log}");
}

#[test]
fn nothing_is_added_to_sealed_images() {
    let task = Task::start();
    let (key, recipient) = age_key(task.dir.path(), "key");
    task.put_to_sleep(&["--encrypt", "--recipient", &recipient]);
    let open = ["--identity", &key];
    assert!(!task.restore(&[&open[..], &["--record-working-set"]].concat()));
    let log = task.log("restore.log");
    assert!(log.contains("--record-working-set with sealed images"), "{log}");
    assert!(task.restore(&open), "{}", task.log("restore.log"));
    task.run();
}
