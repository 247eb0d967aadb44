//! Real tools are preempted at points of their work, drawn by a seed, and end with the right result.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use common::{Daemon, PATIENCE, long};
use torpor_tests::random::Random;

/// Longer than anything computes, as long as others leave it no processor.
const AT_LENGTH: Duration = PATIENCE.saturating_mul(10);

/// How often each tool gives way.
const TIMES: usize = 10;

/// Preempts a job at ten points of its work, lets it end ([`Daemon::may_end`]), and returns how it is then. `done` tells how
/// much of its work it has done, `all` how much there is: before three quarters of that it must not end.
fn preempt_at_random(
    daemon: &Daemon,
    id: u64,
    all: usize,
    done: impl Fn() -> usize,
) -> serde_json::Value {
    let random = Random::printed();
    let mut points: Vec<usize> = (0..TIMES).map(|_| random.place(all * 2 / 3)).collect();
    points.sort_unstable();
    for point in points {
        let begun = Instant::now();
        while done() <= point {
            let is_alive = daemon.job(id)["exit"].is_null() && begun.elapsed() < AT_LENGTH;
            assert!(is_alive, "it does not go on: {}\n{}", daemon.show(id), daemon.output(id));
            std::thread::sleep(Duration::from_millis(5));
        }
        daemon.ok(&["preempt", &id.to_string(), "--means", "checkpoint"]);
        daemon.ok(&["resume", &id.to_string()]);
        daemon.wait_for(id, "running");
    }
    daemon.let_end();
    let begun = Instant::now();
    loop {
        let job = daemon.job(id);
        if !job["exit"].is_null() {
            assert_eq!(job["preemptions"], TIMES, "{}", daemon.show(id));
            println!("{} ms overhead", daemon.show(id)["overhead_ms"]);
            return job;
        }
        assert!(begun.elapsed() < AT_LENGTH, "the job does not end: {}", daemon.show(id));
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn there(program: &str) -> bool {
    let found = Command::new("sh").args(["-c", &format!("command -v {program}")]).output();
    let found = found.is_ok_and(|output| output.status.success());
    if !found {
        println!("left out: a job of {program} (it is not there)");
    }
    found
}

fn compile(dir: &Path, name: &str, source: &str, flags: &[&str]) -> PathBuf {
    let (text, program) = (dir.join(format!("{name}.c")), dir.join(name));
    std::fs::write(&text, source).unwrap();
    let made =
        Command::new("gcc").args(["-O1", "-g", "-o"]).arg(&program).arg(&text).args(flags).status();
    assert!(made.unwrap().success());
    program
}

/// A program that computes for a while, on memory, and prints a sum. It does the last quarter when a file is there.
const SUM: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
int main(int argc, char **argv) {
    long rounds = atol(argv[1]), n = 1 << 16;
    unsigned *a = calloc(n, sizeof *a), sum = 0;
    for (long r = 0; r < rounds; r++) {
        for (long i = 0; i < n; i++) a[i] = a[i] * 1103515245u + i + r;
        if (r % 100 == 0) { printf("%ld\n", r); fflush(stdout); }
        while (r == rounds / 4 * 3 && access(argv[2], F_OK)) usleep(20000);
    }
    for (long i = 0; i < n; i++) sum ^= a[i];
    printf("sum %u\n", sum);
    free(a);
    return 3;
}
"#;

/// Runs a command alone and as a job that is preempted; both must say the same. Its last word is the file that lets
/// it end.
fn same_as_alone(name: &str, command: &[&str]) {
    let daemon = Daemon::start(&[]);
    let may_end = daemon.may_end();
    let command = [command, &[may_end.to_str().unwrap()]].concat();
    daemon.let_end();
    let alone = Command::new(command[0]).args(&command[1..]).output().unwrap();
    std::fs::remove_file(&may_end).unwrap();
    let said = String::from_utf8(alone.stdout).unwrap();
    let id = daemon.submit(&["--class", "batch", "--kind", name], &command);
    let lines = || daemon.output(id).lines().count();
    let job = preempt_at_random(&daemon, id, said.lines().count(), lines);
    assert_eq!(job["exit"].as_i64().unwrap(), i64::from(alone.status.code().unwrap()), "{name}");
    assert_eq!(daemon.output(id), said, "{name}");
}

#[test]
fn address_sanitizer() {
    let dir = tempfile::tempdir().unwrap();
    let program = compile(dir.path(), "asan", SUM, &["-fsanitize=address"]);
    same_as_alone("address sanitizer", &[program.to_str().unwrap(), "20000"]);
}

#[test]
fn thread_sanitizer() {
    let dir = tempfile::tempdir().unwrap();
    let source = SUM
        .replace(
            "int main",
            "#include <pthread.h>\nstatic void *idle(void *p) { return p; }\nint main",
        )
        .replace(
            "if (r % 100 == 0) {",
            "if (r % 100 == 0) { pthread_t t; pthread_create(&t, 0, idle, 0); pthread_join(t, 0);",
        );
    let program = compile(dir.path(), "tsan", &source, &["-fsanitize=thread"]);
    // The randomization of addresses of this kernel is more than it can take.
    let command = ["setarch", "-R", program.to_str().unwrap(), "4000"];
    same_as_alone("thread sanitizer", &command);
}

#[test]
fn an_emulator_boots_linux() {
    if !long("an_emulator_boots_linux") || !there("qemu-system-x86_64") {
        return;
    }
    let Some(kernel) = std::env::var_os("TORPOR_TEST_KERNEL") else {
        println!("an_emulator_boots_linux: left out, set TORPOR_TEST_KERNEL to a vmlinuz");
        return;
    };
    let daemon = Daemon::start(&[]);
    // Without a root file system it panics in the end, which ends the machine.
    let append = "console=ttyS0 panic=-1";
    let id = daemon.submit(
        &["--class", "batch"],
        &[
            "qemu-system-x86_64",
            "-accel",
            "tcg",
            "-m",
            "256",
            "-nographic",
            "-no-reboot",
            "-nodefaults",
            "-serial",
            "stdio",
            "-kernel",
            kernel.to_str().unwrap(),
            "-append",
            append,
        ],
    );
    daemon.wait_for_output(id, "Linux version");
    // Until it panics for want of a root file system it says much more than that.
    let lines = || daemon.output(id).lines().count();
    let job = preempt_at_random(&daemon, id, 200, lines);
    assert_eq!(job["exit"], 0, "{}", daemon.show(id));
    let output = daemon.output(id);
    assert_eq!(output.matches("Linux version").count(), 1);
    assert!(output.contains("Unable to mount root fs"), "{output}");
}

#[test]
fn valgrind() {
    if !there("valgrind") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let program = compile(dir.path(), "grind", &SUM.replace("r % 100", "r % 10"), &[]);
    let command = ["valgrind", "-q", "--error-exitcode=9", program.to_str().unwrap(), "600"];
    same_as_alone("valgrind", &command);
}

#[test]
fn a_parallel_build() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(&[]);
    let rule = format!(
        ".PHONY: all\nall: $(addsuffix .o,$(shell seq 1 40))\n%.o:\n\t@until [ $* -le 30 ] || [ -e {} ]; do sleep 0.1; done; \
         printf 'int f%s(void){{return %s;}}' $* $* | gcc -x c -c -o $@ - && sleep 0.5\n",
        daemon.may_end().display()
    );
    std::fs::write(dir.path().join("Makefile"), rule).unwrap();
    let id = daemon.submit(&["--dir", dir.path().to_str().unwrap()], &["make", "-j3"]);
    let objects = || {
        let files = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path());
        files.filter(|path| path.extension().is_some_and(|kind| kind == "o")).count()
    };
    let job = preempt_at_random(&daemon, id, 40, objects);
    assert_eq!(job["exit"], 0, "{}", daemon.show(id));
    assert_eq!(objects(), 40);
}

#[test]
fn a_python_suite() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(&[]);
    let suite = format!(
        "import os, time, unittest\nclass Tests(unittest.TestCase):\n    pass\ndef last(self):\n    \
         while not os.path.exists('{}'):\n        time.sleep(0.02)\nfor i in range(60):\n    test = last if i == 45 else \
         lambda self: time.sleep(0.2)\n    setattr(Tests, f'test_{{i:02}}', test)\nunittest.main(verbosity=2)\n",
        daemon.may_end().display()
    );
    let path = dir.path().join("suite.py");
    std::fs::write(&path, suite).unwrap();
    let id = daemon.submit(&[], &["sh", "-c", "exec python3 $0 2>&1", path.to_str().unwrap()]);
    let lines = || daemon.output(id).lines().count();
    let job = preempt_at_random(&daemon, id, 60, lines);
    assert_eq!(job["exit"], 0);
    assert!(daemon.output(id).contains("Ran 60 tests"), "{}", daemon.output(id));
}

/// The suite of the benchmark: a line for each of its tests.
const JAVA: &str = include_str!("../../../bench/src/queue/Suite.java");

#[test]
fn a_java_suite() {
    if !long("a_java_suite") || !there("java") || !there("javac") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("Suite.java");
    std::fs::write(&path, JAVA).unwrap();
    assert!(Command::new("javac").arg(&path).status().unwrap().success());
    let class = dir.path().to_str().unwrap();
    same_as_alone("java", &["java", "-XX:-UsePerfData", "-cp", class, "Suite", "80"]);
}

#[test]
fn afl() {
    if !long("afl") || !there("afl-fuzz") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    // How often it runs is how far the work is.
    let runs = dir.path().join("runs");
    let source = "#include <fcntl.h>\n#include <unistd.h>\n#include <stdlib.h>\nint main(void) { char b[8] = {0}; \
                  int runs = open(RUNS, O_WRONLY | O_APPEND | O_CREAT, 0600); write(runs, b, 1); close(runs); \
                  if (read(0, b, 7) > 3 && b[0] == 'q' && b[1] == 'u') { if (b[2] == 'e') abort(); } return 0; }";
    let text = dir.path().join("target.c");
    std::fs::write(&text, source).unwrap();
    let program = dir.path().join("target");
    let made = Command::new("afl-cc")
        .arg(format!("-DRUNS={runs:?}"))
        .arg("-o")
        .arg(&program)
        .arg(&text)
        .output()
        .unwrap();
    assert!(made.status.success());
    std::fs::create_dir(dir.path().join("in")).unwrap();
    std::fs::write(dir.path().join("in/seed"), "quiet").unwrap();
    let daemon = Daemon::start(&[]);
    // It ends well when it is told to: when it may, and has found what there is.
    let fuzz = "afl-fuzz -i $0/in -o $0/out -- $0/target & \
                until [ -e $1 ] && ls $0/out/default/crashes/id* >/dev/null 2>&1; do sleep 0.1; done; kill $!; wait $!";
    let (place, may_end) = (dir.path().to_str().unwrap(), daemon.may_end());
    let settings = ["AFL_SKIP_CPUFREQ", "AFL_NO_UI", "AFL_I_DONT_CARE_ABOUT_MISSING_CRASHES"];
    let settings = settings.map(|name| format!("{name}=1"));
    let settings = settings.iter().flat_map(|setting| ["--env", setting]);
    let id = daemon.submit(
        &["--class", "batch"].into_iter().chain(settings).collect::<Vec<_>>(),
        &["sh", "-c", fuzz, place, may_end.to_str().unwrap()],
    );
    let done = || std::fs::metadata(&runs).map_or(0, |file| usize::try_from(file.len()).unwrap());
    let job = preempt_at_random(&daemon, id, 5000, done);
    assert_eq!(job["exit"], 0, "{}\n{}", daemon.show(id), daemon.output(id));
    let stats = std::fs::read_to_string(dir.path().join("out/default/fuzzer_stats")).unwrap();
    let crashes = stats.lines().find(|line| line.starts_with("saved_crashes")).unwrap();
    assert!(!crashes.trim_end().ends_with(": 0"), "{stats}");
}

/// For libFuzzer: finds nothing, tells each 4,000 runs how far it is, and does the last quarter when a file is there.
const FUZZ: &str = r#"
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <unistd.h>
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static volatile unsigned found;
    static unsigned long runs;
    if (size > 2 && data[0] == 'q' && data[1] == 'u' && data[2] == 'e') found++;
    if (++runs % 4000 == 0) {
        int file = open(RUNS, O_WRONLY | O_APPEND | O_CREAT, 0600);
        if (write(file, "", 1) != 1) return -1;
        close(file);
    }
    while (runs == 6000000 && access(MAY_END, F_OK)) usleep(20000);
    return 0;
}
"#;

#[test]
fn libfuzzer() {
    if !long("libfuzzer") || !there("clang") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (text, program) = (dir.path().join("fuzz.c"), dir.path().join("fuzz"));
    let runs = dir.path().join("runs");
    std::fs::write(&text, FUZZ).unwrap();
    let daemon = Daemon::start(&[]);
    let mut clang = Command::new("clang");
    clang.args(["-O1", "-g", "-fsanitize=fuzzer"]).arg(format!("-DRUNS={runs:?}"));
    clang.arg(format!("-DMAY_END={:?}", daemon.may_end()));
    let made = clang.arg("-o").arg(&program).arg(&text).output().unwrap();
    assert!(made.status.success(), "{}", common::shown(&made));
    let fuzz = format!("exec {} -runs=8000000 2>&1", program.display());
    let id = daemon.submit(&["--class", "batch"], &["sh", "-c", &fuzz]);
    let done = || std::fs::metadata(&runs).map_or(0, |file| usize::try_from(file.len()).unwrap());
    let job = preempt_at_random(&daemon, id, 2000, done);
    assert_eq!(job["exit"], 0, "{}\n{}", daemon.show(id), daemon.output(id));
    assert_eq!(done(), 2000);
    assert_eq!(daemon.output(id).matches("Done 8000000 runs").count(), 1, "{}", daemon.output(id));
}

/// Brings in its own memory through userfaultfd, checks each page, and tells how far it is.
const FAULTS: &str = r#"
#define _GNU_SOURCE
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
enum { PAGES = 1000, SIZE = 4096 };
static int uffd;
static char *base;
static void *serve(void *unused) {
    static char page[SIZE] __attribute__((aligned(SIZE)));
    struct uffd_msg message;
    while (read(uffd, &message, sizeof message) == sizeof message) {
        unsigned long at = message.arg.pagefault.address & ~(SIZE - 1ul);
        memset(page, (at - (unsigned long)base) / SIZE % 251, SIZE);
        struct uffdio_copy copy = { .dst = at, .src = (unsigned long)page, .len = SIZE };
        ioctl(uffd, UFFDIO_COPY, &copy);
    }
    return unused;
}
int main(int argc, char **argv) {
    struct uffdio_api api = { .api = UFFD_API };
    uffd = syscall(SYS_userfaultfd, 02000000);
    base = mmap(0, PAGES * SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct uffdio_register all = {
        .range = { (unsigned long)base, PAGES * SIZE }, .mode = UFFDIO_REGISTER_MODE_MISSING
    };
    if (uffd < 0 || ioctl(uffd, UFFDIO_API, &api) || ioctl(uffd, UFFDIO_REGISTER, &all))
        return perror("userfaultfd"), 9;
    pthread_t thread;
    pthread_create(&thread, 0, serve, 0);
    for (int i = 0; i < PAGES; i++) {
        if ((unsigned char)base[i * SIZE] != i % 251) return printf("wrong at %d\n", i), 1;
        if (i % 20 == 0) { printf("%d\n", i); fflush(stdout); }
        while (i == PAGES / 4 * 3 && access(argv[argc - 1], F_OK)) usleep(20000);
        usleep(5000);
    }
    printf("right\n");
    return 3;
}
"#;

#[test]
fn a_program_that_brings_in_its_own_memory() {
    if !long("a_program_that_brings_in_its_own_memory") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let program = compile(dir.path(), "faults", FAULTS, &["-pthread"]);
    same_as_alone("userfaultfd", &[program.to_str().unwrap()]);
}

/// So many tenths of a second a page computes.
const TENTHS: usize = 300;

/// A page counts them, and is printed as it is in the end.
#[test]
fn a_browser_test() {
    if !long("a_browser_test") || !common::browser::is_there("a_browser_test") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let page = format!(
        "<p id=said>begun</p><script>let n = 0, x = 1; while (n < {TENTHS}) {{ const end = performance.now() + 100; \
         while (performance.now() < end) x = (x * 1103515245 + 12345) % 4294967296; n++; }} \
         said.textContent = 'counted ' + n</script>"
    );
    std::fs::write(dir.path().join("page.html"), page).unwrap();
    let browse = "exec chromium --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --user-data-dir=$0/profile \
                  --dump-dom file://$0/page.html 2>/dev/null";
    let daemon = Daemon::start(&[]);
    let id =
        daemon.submit(&["--class", "batch"], &["sh", "-c", browse, dir.path().to_str().unwrap()]);
    // What it is away costs it one of its tenths at most: it is not done before it has run for so long.
    let done = || usize::try_from(daemon.show(id)["ran_ms"].as_u64().unwrap() / 100).unwrap();
    let job = preempt_at_random(&daemon, id, TENTHS, done);
    assert_eq!(job["exit"], 0, "{}", daemon.show(id));
    assert!(daemon.output(id).contains(&format!("counted {TENTHS}")), "{}", daemon.output(id));
}

/// A long job of 2 GiB makes room: measured, and printed.
#[test]
fn a_victim_of_two_gib() {
    if !long("a_victim_of_two_gib") {
        return;
    }
    let script = "import time\nx = bytearray(b'abcdefgh') * (256 << 20)\nprint('ready', flush=True)\n\
                  for i in range(1500):\n    x[i << 20] = 1\n    time.sleep(0.02)\nprint(sum(x[i << 20] for i in range(1500)))";
    for means in ["stop", "checkpoint"] {
        let daemon = Daemon::start(&["--slots", "1", "--means", means]);
        let id = daemon.submit(&["--class", "batch"], &["python3", "-c", script]);
        daemon.wait_for_output(id, "ready");
        daemon.ok(&["preempt", "1", "--means", means]);
        daemon.ok(&["resume", "1"]);
        daemon.wait_for(id, "done");
        assert!(daemon.output(id).ends_with("1500\n"));
        println!("{means}: {}", daemon.ok(&["show", "--why", "1"]));
    }
}
