/* Sends and receives descriptors over Unix sockets. */
#ifndef ZOO_SCM_H
#define ZOO_SCM_H

#include <sys/socket.h>

static inline void send_fds(int sock, const int *fds, int count)
{
	char control[CMSG_SPACE(4 * sizeof(int))] = { 0 };
	struct iovec iov = { "m", 1 };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control,
			      .msg_controllen = CMSG_SPACE(count * sizeof(int)) };
	struct cmsghdr *cmsg = CMSG_FIRSTHDR(&msg);

	cmsg->cmsg_level = SOL_SOCKET;
	cmsg->cmsg_type = SCM_RIGHTS;
	cmsg->cmsg_len = CMSG_LEN(count * sizeof(int));
	memcpy(CMSG_DATA(cmsg), fds, count * sizeof(int));
	CHECK_EQ(sendmsg(sock, &msg, 0), 1);
}

static inline int recv_fds(int sock, int *fds)
{
	char control[CMSG_SPACE(4 * sizeof(int))], byte;
	struct iovec iov = { &byte, 1 };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control };
	struct cmsghdr *cmsg;
	int count;

	CHECK_EQ(recvmsg(sock, &msg, 0), 1);
	CHECK(byte == 'm' && !(msg.msg_flags & MSG_CTRUNC));
	cmsg = CMSG_FIRSTHDR(&msg);
	CHECK(cmsg && cmsg->cmsg_type == SCM_RIGHTS);
	count = (int)((cmsg->cmsg_len - CMSG_LEN(0)) / sizeof(int));
	memcpy(fds, CMSG_DATA(cmsg), count * sizeof(int));
	return count;
}

static inline void send_fd(int sock, int fd)
{
	send_fds(sock, &fd, 1);
}

static inline int recv_fd(int sock)
{
	int fds[4];

	CHECK_EQ(recv_fds(sock, fds), 1);
	return fds[0];
}

#endif
