// area: files
// shows: logs that others added to while the program was away: open to append, to read back, to name
// foreign: yes
// grows: log
#include "zoo.h"

/* In mode "none" nobody is away. */
static const char *meanwhile(const char *text)
{
	return strstr(text, "meanwhile\n") ? "meanwhile\n" : "";
}

int main(void)
{
	int append = TRY(open("log", O_WRONLY | O_CREAT | O_APPEND, 0600));
	int both = TRY(open("log", O_RDWR | O_APPEND)), reader, path;
	char text[64] = "", expected[64];

	CHECK_EQ(write(append, "one\n", 4), 4);
	reader = TRY(open("log", O_RDONLY));
	TRY(lseek(reader, 4, SEEK_SET));
	path = TRY(open("log", O_PATH));
	zoo_ready();
	zoo_wait();
	CHECK_EQ(write(append, "two\n", 4), 4);
	CHECK_EQ(write(both, "three\n", 6), 6);
	CHECK(read(reader, text, sizeof text - 1) > 0);
	snprintf(expected, sizeof expected, "%stwo\nthree\n", meanwhile(text));
	CHECK(!strcmp(text, expected));
	CHECK(pread(both, text, 4, 0) == 4 && !memcmp(text, "one\n", 4));
	CHECK_EQ(fcntl(path, F_GETFL) & O_PATH, O_PATH);
	CHECK_EQ(fcntl(append, F_GETFL) & (O_ACCMODE | O_APPEND), O_WRONLY | O_APPEND);
	zoo_pass();
}
