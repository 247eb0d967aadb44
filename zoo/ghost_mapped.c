// area: unlinked files
// shows: unlinked files that are only mapped: one shared by two tasks, one private
// foreign: yes
#include "zoo.h"

int main(void)
{
	int a = TRY(open("shared", O_RDWR | O_CREAT, 0600)), b = TRY(open("private", O_RDWR | O_CREAT, 0600));
	char *shared, *private;
	pid_t child;

	TRY(ftruncate(a, 65536));
	TRY(ftruncate(b, 65536));
	shared = zoo_map(65536, PROT_READ | PROT_WRITE, MAP_SHARED, a);
	CHECK_EQ(pwrite(b, "below", 5, 8192), 5);
	private = zoo_map(65536, PROT_READ | PROT_WRITE, MAP_PRIVATE, b);
	private[0] = 'p';
	zoo_fill(shared, 65536, 9);
	close(a);
	close(b);
	TRY(unlink("shared"));
	TRY(unlink("private"));
	child = TRY(fork());
	if (child == 0) {
		zoo_tell("child");
		zoo_wait();
		while (shared[0] != 42)
			zoo_sleep_ms(1);
		_exit(private[0] != 'p');
	}
	zoo_await("child");
	zoo_ready();
	zoo_wait();
	CHECK(zoo_filled(shared, 65536, 9));
	CHECK_EQ(private[0], 'p');
	CHECK(memcmp(private + 8192, "below", 5) == 0);
	shared[0] = 42;
	CHECK_EXIT(child, 0);
	zoo_pass();
}
