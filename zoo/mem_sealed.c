// area: memory
// shows: sealed mappings (mseal) stay so: those that can be written or only read, of a file, shared, locked, and the
//   vDSO; a child has its parent's, and one that it has sealed itself
// foreign: no CRIU's images do not have seals of mappings
#include "zoo.h"
#include <sys/auxv.h>

#ifndef SYS_mseal
#define SYS_mseal 462
#endif

enum { PAGE = 4096, SIZE = 16 * PAGE };

static char *map(int flags, int fd)
{
	return zoo_map(SIZE, PROT_READ | PROT_WRITE, flags, fd);
}

static void seal(char *area)
{
	if (syscall(SYS_mseal, area, (size_t)SIZE, 0ul) < 0) {
		if (errno == ENOSYS)
			zoo_skip("no mseal");
		CHECK(false);
	}
}

/* Nothing of a sealed mapping can be changed; only reading it or writing to it goes on. */
static void check_sealed(char *area)
{
	char *other = zoo_map(SIZE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1);

	CHECK(munmap(area + PAGE, PAGE) < 0 && errno == EPERM);
	CHECK(mprotect(area, PAGE, PROT_NONE) < 0 && errno == EPERM);
	CHECK(mremap(area, SIZE, SIZE, MREMAP_MAYMOVE | MREMAP_FIXED, other) == MAP_FAILED && errno == EPERM);
	CHECK(mmap(area, SIZE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED &&
	      errno == EPERM);
	TRY(munmap(other, SIZE));
}

/* The vDSO: a program can seal what the kernel has mapped, too. */
static void seal_kernels(void)
{
	unsigned long start, end;
	char *line = strstr(zoo_slurp("/proc/self/maps"), "[vdso]");

	CHECK(line != NULL);
	while (line[-1] != '\n')
		line--;
	CHECK(sscanf(line, "%lx-%lx", &start, &end) == 2);
	TRY(syscall(SYS_mseal, start, end - start, 0ul));
}

static void check_kernels(void)
{
	char *start = (char *)getauxval(AT_SYSINFO_EHDR);

	CHECK(mprotect(start, PAGE, PROT_READ) < 0 && errno == EPERM);
}

int main(void)
{
	int file = TRY(open("sealed", O_RDWR | O_CREAT, 0600));
	int anonymous = MAP_PRIVATE | MAP_ANONYMOUS;
	char *written = map(anonymous, -1), *readable = map(anonymous, -1), *locked = map(anonymous, -1);
	char *childs = map(anonymous, -1), *plain = map(anonymous, -1), *shared = map(MAP_SHARED | MAP_ANONYMOUS, -1);
	char *of_file;
	pid_t child;

	TRY(ftruncate(file, SIZE));
	of_file = map(MAP_PRIVATE, file);
	zoo_fill(written, SIZE, 1);
	zoo_fill(readable, SIZE, 2);
	zoo_fill(of_file, SIZE / 2, 3);
	zoo_fill(shared, SIZE, 4);
	zoo_fill(childs, SIZE, 5);
	zoo_fill(plain, SIZE, 6);
	TRY(mlock(locked, SIZE));
	TRY(mprotect(readable, SIZE, PROT_READ));
	seal(written);
	seal(readable);
	seal(of_file);
	seal(shared);
	seal(locked);
	seal_kernels();
	child = TRY(fork());
	if (child == 0) {
		seal(childs);
		zoo_tell("child");
		zoo_wait();
		check_kernels();
		check_sealed(written);
		check_sealed(childs);
		CHECK(zoo_filled(childs, SIZE, 5));
		_exit(0);
	}
	zoo_await("child");
	zoo_ready();
	zoo_wait();
	check_kernels();
	check_sealed(written);
	check_sealed(readable);
	check_sealed(of_file);
	check_sealed(shared);
	check_sealed(locked);
	/* What is sealed and cannot be written cannot be emptied either. */
	CHECK(madvise(readable, SIZE, MADV_DONTNEED) < 0 && errno == EPERM);
	CHECK(zoo_filled(written, SIZE, 1) && zoo_filled(readable, SIZE, 2) && zoo_filled(shared, SIZE, 4));
	CHECK(zoo_filled(of_file, SIZE / 2, 3));
	zoo_fill(written, SIZE, 7);
	/* The others are as free as they were. */
	TRY(mprotect(childs, SIZE, PROT_READ));
	CHECK(zoo_filled(childs, SIZE, 5) && zoo_filled(plain, SIZE, 6));
	TRY(munmap(childs, SIZE));
	TRY(munmap(plain, SIZE));
	CHECK_EXIT(child, 0);
	zoo_pass();
}
