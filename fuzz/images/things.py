"""A program that has something open of each kind, in namespaces of its own; prints "ready", then waits."""
import ctypes, fcntl, mmap, os, socket, struct, sys, tempfile, time

libc = ctypes.CDLL(None, use_errno=True)
keep = []

def ok(number, what):
    if number < 0:
        raise OSError(ctypes.get_errno(), what)
    return number

# Files: open, removed, in memory, set-uid.
keep.append(open("/etc/passwd"))
removed = open("/tmp/removed", "w+")
removed.write("x" * 10)
removed.flush()
os.chmod("/tmp/removed", 0o4755)
os.unlink("/tmp/removed")
keep.append(removed)
keep.append(os.memfd_create("memory"))
os.mkfifo("/tmp/fifo")
keep.append(os.open("/tmp/fifo", os.O_RDWR))
keep.append(os.pipe())
os.write(keep[-1][1], b"queued")
keep.append(open("/dev/null"))
# Sockets: of each family, with credentials in a queue.
tcp = socket.socket()
tcp.bind(("127.0.0.1", 8080))
tcp.listen()
udp = socket.socket(type=socket.SOCK_DGRAM)
udp.bind(("127.0.0.1", 8081))
raw = socket.socket(type=socket.SOCK_RAW, proto=socket.IPPROTO_ICMP)
packet = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM)
netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
unix = socket.socket(socket.AF_UNIX)
unix.bind("/tmp/socket")
unix.listen()
a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
b.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
a.send(b"with the sender's ids")
keep += [tcp, udp, raw, packet, netlink, unix, a, b]
# Descriptors that are told of what happens.
keep.append(ok(libc.inotify_init1(0), "inotify"))
ok(libc.inotify_add_watch(keep[-1], b"/tmp", 2), "inotify_add_watch")
keep.append(ok(libc.fanotify_init(0x200, 0), "fanotify"))
ok(libc.fanotify_mark(keep[-1], 1, ctypes.c_uint64(2), -100, b"/tmp"), "fanotify_mark")
keep.append(ok(libc.eventfd(0, 0), "eventfd"))
keep.append(os.open("/proc/self/ns/uts", os.O_RDONLY))
# Memory of a file, and shared memory.
with open("/etc/passwd") as file:
    keep.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
keep.append(mmap.mmap(-1, 4096))
if os.fork() == 0:
    if len(sys.argv) < 3:  # A user namespace with one id has no others.
        os.setgroups([5, 6])
        os.setgid(7)
        os.setuid(8)
    ok(libc.prctl(38, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
    time.sleep(1000)
    os._exit(0)
with open(sys.argv[1], "w") as file:
    file.write("ready")
time.sleep(1000)
