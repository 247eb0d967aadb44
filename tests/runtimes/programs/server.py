"""A counter server with a thread for each connection and two background threads.

Each line on a connection is a number; the answer is the sum of the numbers on this connection and
how far the background threads have counted together.
"""

import hashlib
import socketserver
import sys
import threading
import time


class Background:
    """Threads that count, and check what they keep."""

    def __init__(self):
        self.lock = threading.Lock()
        self.count = 0
        self.ballast = {n: hashlib.sha256(str(n).encode()).digest() for n in range(20000)}
        for n in range(2):
            threading.Thread(target=self.work, name=f"background-{n}", daemon=True).start()

    def work(self):
        n = 0
        while True:
            assert self.ballast[n] == hashlib.sha256(str(n).encode()).digest()
            n = (n + 1) % len(self.ballast)
            with self.lock:
                self.count += 1
            if n % 100 == 0:
                time.sleep(0.001)


class Handler(socketserver.StreamRequestHandler):
    """One connection."""

    def handle(self):
        total = 0
        for line in self.rfile:
            total += int(line)
            self.wfile.write(b"%d %d\n" % (total, background.count))


class Server(socketserver.ThreadingTCPServer):
    """The server."""

    allow_reuse_address = True
    daemon_threads = True


background = Background()
Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
