/* TCP segments with signatures (RFC 2385). */
#ifndef ZOO_SIGNED_H
#define ZOO_SIGNED_H

/* What SOCKET sends to the address of PEER, and takes from there, is signed. */
static inline void signed_by(int socket, const union tcp_name *peer)
{
	static const char key[] = "secret";
	struct tcp_md5sig md5 = { .tcpm_keylen = sizeof key - 1 };

	memcpy(&md5.tcpm_addr, peer, sizeof *peer);
	memcpy(md5.tcpm_key, key, sizeof key - 1);
	TRY(setsockopt(socket, IPPROTO_TCP, TCP_MD5SIG, &md5, sizeof md5));
}

#endif
