// area: files
// shows: eight children that write, sync and verify files of their own all the time
// foreign: yes
// varies: files fd
#include "zoo.h"

int main(void)
{
	pid_t pids[8];

	for (int i = 0; i < 8; i++)
		if (!(pids[i] = TRY(fork()))) {
			char name[16], out[4096], in[4096];
			int fd;

			snprintf(name, sizeof name, "writer%d", i);
			fd = TRY(open(name, O_RDWR | O_CREAT | O_TRUNC, 0600));
			snprintf(name, sizeof name, "opened%d", i);
			zoo_tell(name);
			for (uint64_t n = 0; !zoo_go(); n++) {
				off_t at = (off_t)(n % 16) * 4096;

				zoo_fill(out, sizeof out, n);
				TRY(lseek(fd, at, SEEK_SET));
				CHECK_EQ(write(fd, out, sizeof out), sizeof out);
				TRY(fdatasync(fd));
				CHECK_EQ(pread(fd, in, sizeof in, at), sizeof in);
				CHECK(memcmp(in, out, sizeof in) == 0);
				zoo_sleep_ms(2);
			}
			_exit(0);
		}
	for (int i = 0; i < 8; i++) {
		char name[16];

		snprintf(name, sizeof name, "opened%d", i);
		zoo_await(name);
	}
	zoo_ready();
	zoo_wait();
	for (int i = 0; i < 8; i++)
		CHECK_EXIT(pids[i], 0);
	zoo_pass();
}
