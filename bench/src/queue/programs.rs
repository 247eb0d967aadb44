//! Programs that are jobs of the benchmark.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// Computes on memory (`argv[2]` MiB, or a quarter of one) for `argv[1]` seconds of running, and then checks
/// itself: what each round does can be done again. A line a second; ends with 3. How long it runs does not
/// depend on what else does, nor on how long a round takes; the time for which it is away does not count.
pub const COMPUTE: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}
int main(int argc, char **argv) {
    unsigned n = argc > 2 ? atol(argv[2]) << 18 : 1 << 16, rounds = 0;
    unsigned *a = calloc(n, sizeof *a);
    double ran = 0, last = seconds();
    long lines = 0;
    while (lines < atol(argv[1])) {
        for (unsigned i = 0; i < n; i++) {
            a[i] = a[i] * 1103515245u + i + rounds;
            if (i % 65536) continue;
            double now = seconds();
            ran += now - last < 0.1 ? now - last : 0.1;
            last = now;
            if ((long)ran > lines) { lines = ran; printf("%ld\n", lines); fflush(stdout); }
        }
        rounds++;
    }
    for (unsigned i = 0; i < n; i += 4096) {
        unsigned value = 0;
        for (unsigned r = 0; r < rounds; r++) value = value * 1103515245u + i + r;
        if (value != a[i]) { printf("wrong at %u\n", i); return 1; }
    }
    printf("right\n");
    free(a);
    return 3;
}
"#;

/// Brings in its own memory through userfaultfd for `argv[1]` seconds of work, and checks each page.
pub const FAULTS: &str = r#"
#define _GNU_SOURCE
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
static int uffd;
static char *base;
static void *serve(void *unused) {
    static char page[4096] __attribute__((aligned(4096)));
    struct uffd_msg message;
    while (read(uffd, &message, sizeof message) == sizeof message) {
        unsigned long at = message.arg.pagefault.address & ~4095ul;
        memset(page, (int)((at - (unsigned long)base) / 4096 % 251), sizeof page);
        struct uffdio_copy copy = { .dst = at, .src = (unsigned long)page, .len = 4096 };
        ioctl(uffd, UFFDIO_COPY, &copy);
    }
    return unused;
}
int main(int argc, char **argv) {
    long pages = atol(argv[1]) * 100;
    struct uffdio_api api = { .api = UFFD_API };
    uffd = syscall(SYS_userfaultfd, 02000000);
    base = mmap(0, pages * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct uffdio_register all = { .range = { (unsigned long)base, pages * 4096 }, .mode = UFFDIO_REGISTER_MODE_MISSING };
    if (uffd < 0 || ioctl(uffd, UFFDIO_API, &api) || ioctl(uffd, UFFDIO_REGISTER, &all)) return perror("userfaultfd"), 9;
    pthread_t thread;
    pthread_create(&thread, 0, serve, 0);
    for (long i = 0; i < pages; i++) {
        if ((unsigned char)base[i * 4096] != i % 251) return printf("wrong at %ld\n", i), 1;
        usleep(10000);
    }
    printf("right\n");
    return 3;
}
"#;

/// For libFuzzer: finds nothing, and counts.
pub const FUZZ: &str = r#"
#include <stddef.h>
#include <stdint.h>
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static volatile unsigned found;
    if (size > 2 && data[0] == 'q' && data[1] == 'u' && data[2] == 'e') found++;
    return 0;
}
"#;

/// For AFL++: crashes if its input begins with `que`.
pub const TARGET: &str = r#"
#include <stdlib.h>
#include <unistd.h>
int main(void) {
    char b[8] = {0};
    if (read(0, b, 7) > 3 && b[0] == 'q' && b[1] == 'u' && b[2] == 'e') abort();
    return 0;
}
"#;

/// Runs `argv[1]` tests of a tenth of a second of computing.
pub const SUITE: &str = "
import sys, time, unittest
class Tests(unittest.TestCase):
    pass
def compute(self):
    begun, n = time.monotonic(), 0
    while time.monotonic() - begun < 0.1:
        n += 1
    self.assertGreater(n, 0)
for i in range(int(sys.argv.pop(1))):
    setattr(Tests, f'test_{i:04}', compute)
unittest.main(verbosity=0)
";

/// Runs `args[0]` tests, each of which sorts and compares. The tests of the queue run it, too.
pub const JAVA: &str = include_str!("Suite.java");

/// The first program of the emulated machine: counts seconds, which are the machine's own.
pub const INIT: &str = "#!/bin/busybox sh
/bin/busybox mkdir -p /proc; /bin/busybox mount -t proc proc /proc
read -r words </proc/cmdline
i=0
while [ $i -lt ${words##*seconds=} ]; do i=$((i+1)); echo count $i; /bin/busybox sleep 1; done
echo counted
/bin/busybox poweroff -f
";

/// Works `argv[1]` units of a fixed computation while it holds `argv[2]` MiB, and prints how many.
pub const UNITS: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
int main(int argc, char **argv) {
    long units = atol(argv[1]), size = atol(argv[2]) << 20;
    char *memory = malloc(size + 1);
    memset(memory, 7, size + 1);
    volatile unsigned x = 1;
    for (long u = 0; u < units; u++) {
        for (long i = 0; i < 2000000; i++) x = x * 1103515245u + 12345u;
        memory[size ? (u * 4096) % size : 0] = (char)x;
    }
    printf("%ld\n", units);
    return 0;
}
"#;

/// Holds `argv[2]` MiB, says so, and writes a page each millisecond until a file is there.
pub const VICTIM: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int main(int argc, char **argv) {
    size_t size = atol(argv[2]) << 20;
    char *memory = malloc(size);
    for (size_t i = 0; i < size; i += 8) *(size_t *)(memory + i) = i * 2654435761u;
    printf("ready\n");
    fflush(stdout);
    for (size_t i = 0; access(argv[1], F_OK); i++) { memory[i * 4096 % size] = 1; usleep(1000); }
    return 0;
}
"#;

/// Writes `source` and compiles it.
pub fn compile(dir: &Path, name: &str, source: &str, compiler: &[&str]) -> Result<PathBuf> {
    let (text, program) = (dir.join(format!("{name}.c")), dir.join(name));
    std::fs::write(&text, source)?;
    let mut command = Command::new(compiler[0]);
    command.args(&compiler[1..]).args(["-O1", "-g", "-pthread", "-o"]).arg(&program).arg(&text);
    let output = command.output().context(compiler[0].to_owned())?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(program)
}
