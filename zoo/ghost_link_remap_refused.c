// area: unlinked files
// shows: a file whose opened name was removed and whose other name remains is refused without --link-remap
// expect: refused "link-remap"
#include "zoo.h"

int main(void)
{
	int fd = TRY(open("one", O_RDWR | O_CREAT, 0600));
	struct stat st;

	TRY(link("one", "two"));
	TRY(unlink("one"));
	zoo_ready();
	zoo_wait();
	TRY(fstat(fd, &st));
	CHECK_EQ(st.st_nlink, 1);
	zoo_pass();
}
