/* Walks through a graph, of which each node leads to another one anywhere in memory, and counts its steps by PARTS of a
 * round in a file that has room for the count. All nodes are on the way of each round; one that is not as it was left
 * ends the program.
 *
 * The arguments are the file, the number of nodes, and after how many steps it changes one. A node is a cache line.
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define PARTS 65536ul

struct node {
	uint64_t next, changes, mark, rest[5];
};

static void fail(const char *what)
{
	perror(what);
	abort();
}

static uint64_t mixed(uint64_t number)
{
	number = (number ^ number >> 31) * 6364136223846793005ul + 1442695040888963407ul;
	return number ^ number >> 29;
}

static uint64_t mark(uint64_t at, const struct node *node)
{
	return mixed(at * 3 + mixed(node->next + mixed(node->changes)));
}

int main(int argc, char **argv)
{
	if (argc != 4)
		return 2;
	uint64_t count = strtoul(argv[2], NULL, 10), every = strtoul(argv[3], NULL, 10);
	int file = open(argv[1], O_RDWR | O_CREAT, 0644);
	if (file < 0)
		fail(argv[1]);
	struct node *nodes = mmap(NULL, count * sizeof(*nodes), PROT_READ | PROT_WRITE,
				  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (nodes == MAP_FAILED)
		fail("mmap");
	/* One way through all of them (Sattolo's algorithm). */
	for (uint64_t at = 0; at < count; at++)
		nodes[at].next = at;
	for (uint64_t at = count - 1, seed = 1; at > 0; at--) {
		seed = mixed(seed);
		uint64_t other = seed % at, next = nodes[at].next;
		nodes[at].next = nodes[other].next;
		nodes[other].next = next;
	}
	for (uint64_t at = 0; at < count; at++)
		nodes[at].mark = mark(at, nodes + at);

	uint64_t part = count > PARTS ? count / PARTS : 1;
	for (uint64_t round = 1, at = 0, steps = 0;; round++) {
		do {
			struct node *node = nodes + at;
			if (node->mark != mark(at, node))
				abort();
			if (++steps % every == 0) {
				node->changes++;
				node->mark = mark(at, node);
			}
			uint64_t parts = steps / part;
			if (steps % part == 0 && pwrite(file, &parts, sizeof(parts), 0) != sizeof(parts))
				fail("pwrite");
			at = node->next;
		} while (at);
		if (steps != round * count)
			abort();
	}
}
