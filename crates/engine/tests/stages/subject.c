/* A family that changes its memory all the time, and knows at any moment what is in it.
 *
 * usage: subject LOG MODE
 *
 * Each process has regions of memory, and a number for each page of them that stands at its
 * beginning and at its end. It writes pages, gives them back, protects them, and replaces,
 * grows and moves whole regions, and compares everything every now and then. How often it did
 * is in LOG, 16 bytes for each process: that number, and that of what was wrong.
 *
 * MODE is a list of letters: `f` children that share pages with their parent, `t` threads that
 * begin late, `s` shared memory, `b` children that are born and end all the time, `q` much memory
 * that is written once, `m` files in memory, at LOG.memory, that come, change and go, `c` a server of port 7777 with one
 * connection, `n` which is in a network of the first child's own, `j` memory that a child has parted and joins again.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, REGIONS = 12, MOST = 512, FILED = 16, QUIET = 16 << 10, FILES = 24, DIRS = 4, FAR = 1 << 20 };
/* Of what children part and join: all pages of the one, and at first; all pages of the other. */
enum { GROWS = 1 << 16, GROWN = 1024, JOINED = 128 };

struct region {
    char *at;
    int pages;
    int prot;
    uint64_t known[MOST];
};

static struct region regions[REGIONS];
static uint64_t random_state, written;
static int log_file, slot;
static struct { uint64_t checks, wrong; } result;
static uint64_t *shared, shared_known;
static volatile int threads_run;
static char memory[4096];
static uint64_t files_known[FILES]; /* what is at both ends of a file; 0: it is not there */
static const char *mapped;
static int listener = -1, connection = -1;
/* Where the kernel puts nothing by itself. */
static char *const growing = (char *)(1ul << 40), *const joined = (char *)(2ul << 40);
static size_t grown = GROWN;

static uint64_t below(uint64_t limit)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (random_state >> 11) % limit;
}

static void die(const char *what)
{
    perror(what);
    result.wrong++;
    pwrite(log_file, &result, sizeof result, slot * sizeof result);
    _exit(1);
}

static void make(struct region *r, int pages)
{
    r->pages = pages;
    r->prot = PROT_READ | PROT_WRITE;
    r->at = mmap(NULL, (size_t)pages * PAGE, r->prot, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (r->at == MAP_FAILED)
        die("mmap");
    memset(r->known, 0, sizeof r->known);
}

static void protect(struct region *r, int prot)
{
    if (r->prot != prot && mprotect(r->at, (size_t)r->pages * PAGE, prot))
        die("mprotect");
    r->prot = prot;
}

static void put(struct region *r, int page)
{
    uint64_t *words = (uint64_t *)(r->at + (size_t)page * PAGE);
    protect(r, PROT_READ | PROT_WRITE);
    r->known[page] = ++written;
    words[0] = written;
    words[PAGE / 8 - 1] = written;
}

static void name_file(char *name, size_t size, int file, const char *more)
{
    snprintf(name, size, "%s/%d/%d%s", memory, file % DIRS, file, more);
}

/* A file comes, changes, goes, or is replaced. */
static void change_file(void)
{
    char name[8192], other[8192];
    int file = (int)below(FILES), how = (int)below(4);
    name_file(name, sizeof name, file, "");
    snprintf(other, sizeof other, "%s/%d", memory, file % DIRS);
    mkdir(other, 0700);
    name_file(other, sizeof other, file, how == 1 ? ".new" : "");
    if (how == 0) {
        files_known[file] = 0;
        unlink(name);
        *strrchr(other, '/') = 0;
        rmdir(other); /* if that was the last one there */
        return;
    }
    int fd = open(other, O_RDWR | O_CREAT | (how == 2 ? O_TRUNC : 0), 0600);
    uint64_t end = FAR + below(FAR);
    files_known[file] = ++written;
    if (fd < 0 || ftruncate(fd, 8) || pwrite(fd, &written, 8, 0) != 8 || pwrite(fd, &written, 8, end) != 8)
        die(other);
    if (how == 3 && fchmod(fd, 0400 + (int)below(0400)))
        die(other);
    close(fd);
    if (how == 1 && rename(other, name))
        die(name);
}

static void check_files(void)
{
    for (int file = 0; file < FILES; file++) {
        char name[8192];
        uint64_t ends[2] = { 0, 0 };
        name_file(name, sizeof name, file, "");
        int fd = open(name, O_RDONLY);
        if (fd >= 0) {
            struct stat stat;
            fstat(fd, &stat);
            pread(fd, &ends[0], 8, 0);
            pread(fd, &ends[1], 8, stat.st_size - 8);
            close(fd);
        }
        if (ends[0] != files_known[file] || ends[1] != files_known[file]) {
            fprintf(stderr, "%s: %llu and %llu, not %llu\n", name, (unsigned long long)ends[0],
                    (unsigned long long)ends[1], (unsigned long long)files_known[file]);
            result.wrong++;
        }
    }
    for (int i = 0; i < PAGE; i++)
        if (mapped[i] != 'x') {
            fprintf(stderr, "what is mapped is something else\n");
            result.wrong++;
            break;
        }
}

/* One of the files stays as it is, and is mapped. */
static void make_files(const char *log)
{
    char name[8192], page[PAGE];
    snprintf(memory, sizeof memory, "%s.memory", log);
    if (mkdir(memory, 0700) || mount("tmpfs", memory, "tmpfs", 0, ""))
        die(memory);
    snprintf(name, sizeof name, "%s/mapped", memory);
    memset(page, 'x', sizeof page);
    int fd = open(name, O_RDWR | O_CREAT, 0600);
    if (fd < 0 || write(fd, page, sizeof page) != sizeof page)
        die(name);
    mapped = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE, fd, 0);
    if (mapped == MAP_FAILED)
        die(name);
    close(fd);
}

static void step(void)
{
    struct region *r = &regions[below(REGIONS)];
    int page = (int)below((uint64_t)r->pages);
    switch (below(400)) {
    case 0: /* replaced */
        munmap(r->at, (size_t)r->pages * PAGE);
        make(r, 1 + (int)below(MOST));
        break;
    case 1: /* grown or shrunk, perhaps moved */
    case 2: {
        int pages = 1 + (int)below(MOST);
        protect(r, PROT_READ | PROT_WRITE);
        r->at = mremap(r->at, (size_t)r->pages * PAGE, (size_t)pages * PAGE, MREMAP_MAYMOVE);
        if (r->at == MAP_FAILED)
            die("mremap");
        for (int i = r->pages; i < pages; i++)
            r->known[i] = 0;
        r->pages = pages;
        break;
    }
    case 3:
    case 4: /* pages are given back */
    case 5: {
        int count = 1 + (int)below((uint64_t)(r->pages - page));
        madvise(r->at + (size_t)page * PAGE, (size_t)count * PAGE, MADV_DONTNEED);
        for (int i = page; i < page + count; i++)
            r->known[i] = 0;
        break;
    }
    case 6:
        protect(r, PROT_READ);
        break;
    case 7: /* half of it cannot be written for a while: the mapping is split */
        protect(r, PROT_READ | PROT_WRITE);
        mprotect(r->at, (size_t)(r->pages / 2) * PAGE, PROT_READ);
        r->prot = -1;
        break;
    case 8:
        if (shared)
            shared[below(FILED) * (PAGE / 8)]++, shared_known++;
        break;
    default:
        put(r, page);
    }
}

/* Each page of a mapping has its number. */
static void number(char *at, size_t from, size_t to)
{
    for (size_t page = from; page < to; page++)
        *(uint64_t *)(at + page * PAGE) = page + 1;
}

static int is_numbered(const char *at, size_t pages)
{
    for (size_t page = 0; page < pages; page++)
        if (*(uint64_t *)(at + page * PAGE) != page + 1)
            return 0;
    return 1;
}

static void make_at(char *at, size_t pages)
{
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
    if (mmap(at, pages * PAGE, PROT_READ | PROT_WRITE, flags, -1, 0) != at)
        die("mmap");
}

/* What a child has from its parent grows at its end, and stays one mapping, half of which cannot be written for a while. */
static void grow(void)
{
    size_t size = grown * PAGE;
    if (grown == GROWS)
        return;
    if (mprotect(growing, size, PROT_READ | PROT_WRITE))
        die("mprotect of what grows");
    if (mremap(growing, size, size + PAGE, 0) == MAP_FAILED)
        die("mremap of what grows");
    grown++;
    number(growing, grown - 1, grown);
    if (!is_numbered(growing, grown)) {
        fprintf(stderr, "process %d: what grows is not what it was\n", slot);
        result.wrong++;
    }
    if (mprotect(growing, grown / 2 * PAGE, PROT_READ))
        die("mprotect of what grows");
}

/* Parts what it has from its parent, and moves the whole of it when it is told to. */
static void part_and_join(const sigset_t *told)
{
    size_t size = JOINED * PAGE;
    int signal;
    if (mprotect(joined, size / 2, PROT_READ))
        _exit(1);
    sigwait(told, &signal);
    if (mprotect(joined, size, PROT_READ | PROT_WRITE))
        _exit(1);
    char *moved = mremap(joined, size, 2 * size, MREMAP_MAYMOVE);
    if (moved == MAP_FAILED)
        _exit(2);
    _exit(is_numbered(moved, JOINED) ? 0 : 3);
}

/* Tells the child to join what it has parted, and bears another one. The parent keeps but a half of it. */
static void bear(void)
{
    static pid_t child;
    sigset_t told;
    int status;
    sigemptyset(&told);
    sigaddset(&told, SIGUSR1);
    sigprocmask(SIG_BLOCK, &told, NULL);
    if (child) {
        kill(child, SIGUSR1);
        if (waitpid(child, &status, 0) != child || status) {
            fprintf(stderr, "what a child has parted does not join: %#x\n", status);
            result.wrong++;
        }
        munmap(joined, JOINED * PAGE);
    }
    make_at(joined, JOINED);
    number(joined, 0, JOINED);
    child = fork();
    if (child < 0)
        die("fork");
    if (child == 0)
        part_and_join(&told);
    munmap(joined + JOINED / 2 * PAGE, JOINED / 2 * PAGE);
}

static void serve(const char *mode)
{
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(7777) };
    int is_nested = strchr(mode, 'n') != NULL;
    if (is_nested && slot == 1 && unshare(CLONE_NEWNET))
        die("unshare");
    if (slot != is_nested)
        return;
    listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 1))
        die("listen");
}

/* A connection is there until somebody ends it. */
static void check_connection(void)
{
    char byte;
    if (connection < 0)
        connection = accept(listener, NULL, NULL);
    else if (recv(connection, &byte, 1, MSG_DONTWAIT) != -1 || errno != EAGAIN)
        die("connection");
}

static void check(void)
{
    for (int i = 0; i < REGIONS; i++) {
        struct region *r = &regions[i];
        for (int page = 0; page < r->pages; page++) {
            uint64_t *words = (uint64_t *)(r->at + (size_t)page * PAGE);
            if (words[0] != r->known[page] || words[PAGE / 8 - 1] != r->known[page]
                || words[PAGE / 16] != 0) {
                fprintf(stderr, "process %d, region %d at %p, page %d: %llu and %llu, not %llu\n",
                        slot, i, (void *)r->at, page, (unsigned long long)words[0],
                        (unsigned long long)words[PAGE / 8 - 1],
                        (unsigned long long)r->known[page]);
                result.wrong++;
            }
        }
    }
    if (shared) {
        uint64_t sum = 0;
        for (int i = 0; i < FILED; i++)
            sum += shared[i * (PAGE / 8)];
        if (sum != shared_known) {
            fprintf(stderr, "process %d: shared memory\n", slot);
            result.wrong++;
        }
    }
    if (mapped)
        check_files();
    if (listener >= 0)
        check_connection();
    result.checks++;
    pwrite(log_file, &result, sizeof result, slot * sizeof result);
}

static void *thread(void *unused)
{
    (void)unused;
    threads_run++;
    for (;;)
        usleep(1000);
    return NULL;
}

static void live(const char *mode)
{
    struct timespec before, now;
    random_state = 0x9e3779b97f4a7c15ull * (uint64_t)(slot + 1);
    if (strchr(mode, 's')) {
        shared = mmap(NULL, FILED * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (shared == MAP_FAILED)
            die("mmap");
    }
    if (strchr(mode, 'c'))
        serve(mode);
    clock_gettime(CLOCK_MONOTONIC, &before);
    for (unsigned round = 0;; round++) {
        for (int i = 0; i < 300; i++)
            step();
        for (int i = 0; mapped && i < 4; i++)
            change_file();
        if (strchr(mode, 'j') && round % 4 == 0)
            slot ? grow() : bear();
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (now.tv_sec < before.tv_sec || (now.tv_sec == before.tv_sec && now.tv_nsec < before.tv_nsec)) {
            fprintf(stderr, "process %d: the clock went back\n", slot);
            result.wrong++;
        }
        before = now;
        check();
        usleep(2000);
        if (strchr(mode, 't') && round % 8 == 7 && threads_run < 6) {
            pthread_t id;
            if (pthread_create(&id, NULL, thread, NULL))
                die("pthread_create");
        }
        if (strchr(mode, 'b') && slot == 0) {
            static pid_t child;
            if (child && round % 4 == 0) {
                waitpid(child, NULL, 0);
                child = 0;
            } else if (!child) {
                child = fork();
                if (child == 0) {
                    for (int i = 0; i < 8; i++) {
                        slot = 9;
                        check();
                        usleep(3000);
                    }
                    _exit(0);
                }
            }
        }
    }
}

int main(int argc, char **argv)
{
    if (argc != 3)
        return 2;
    /* All files are its own namespaces'. */
    close_range(0, 1, 0);
    open("/dev/null", O_RDONLY);
    open("/dev/null", O_WRONLY);
    log_file = open(argv[1], O_WRONLY);
    if (log_file < 0)
        die(argv[1]);
    char name[4096];
    snprintf(name, sizeof name, "%s.errors", argv[1]);
    if (dup2(open(name, O_WRONLY | O_CREAT | O_APPEND, 0600), 2) < 0)
        die(name);
    close_range(4, ~0u, 0);
    random_state = 1;
    for (int i = 0; i < REGIONS; i++) {
        make(&regions[i], 64 + (int)below(MOST - 64));
        for (int page = 0; page < regions[i].pages; page += 2)
            put(&regions[i], page);
    }
    if (strchr(argv[2], 'q')) {
        char *quiet = mmap(NULL, QUIET * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (quiet == MAP_FAILED)
            die("mmap");
        for (size_t page = 0; page < QUIET; page++)
            quiet[page * PAGE] = 1;
    }
    if (strchr(argv[2], 'm'))
        make_files(argv[1]);
    if (strchr(argv[2], 'j')) {
        make_at(growing, GROWS);
        number(growing, 0, GROWN);
    }
    if (strchr(argv[2], 'f'))
        for (int i = 1; i <= 3; i++)
            if (fork() == 0) {
                slot = i;
                break;
            }
    if (strchr(argv[2], 'j') && slot > 0)
        munmap(growing + GROWN * PAGE, (size_t)(GROWS - GROWN) * PAGE);
    live(argv[2]);
}
