# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Connections whose packets are dropped while both programs live, until the kernel of one end gives them up: prints
what each end is told. `halfopen.py NAMESPACE DEVICE ADDRESS` names the other end's; both ends are in this process. The
first lines are the same for TCP alone; after them comes what crossed the cut."""

import ctypes, errno, os, select, socket, subprocess, sys, threading, time

namespace, device, host = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
PORT, PATIENCE = 6000, 1500
IN, OUT, RDHUP, ERR, HUP = select.POLLIN, select.POLLOUT, select.POLLRDHUP, select.POLLERR, select.POLLHUP


def inside(path, call):
    """Returns the result of `call` in another network namespace; sockets stay in the one where they were made."""
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    for where in (os.open(path, os.O_RDONLY), own):
        if where == own:
            made = call()
        assert libc.setns(where, 0) == 0, os.strerror(ctypes.get_errno())
        os.close(where)
    return made


listener = inside(f"/run/netns/{namespace}", lambda: socket.create_server(("0.0.0.0", PORT), backlog=64))


def impatient(end):
    """Makes its kernel give up after a moment without answers, whether there are packets to be answered or not."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("KEEPIDLE", 1), ("KEEPINTVL", 1), ("KEEPCNT", 2), ("USER_TIMEOUT", PATIENCE)):
        end.setsockopt(socket.IPPROTO_TCP, getattr(socket, "TCP_" + name), value)


def pair():
    """Returns two ends that have talked; the first is in this namespace, and impatient."""
    a = socket.create_connection((host, PORT))
    b, _ = listener.accept()
    for _ in range(40):
        for x, y in ((a, b), (b, a)):
            x.sendall(b"w" * 500)
            assert y.recv(500, socket.MSG_WAITALL)
    impatient(a)
    return a, b


def error(call, *arguments):
    try:
        return call(*arguments)
    except OSError as e:
        # Which of these errors it is depends on the routes meanwhile.
        gone = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
        return "gone" if e.errno in gone else errno.errorcode.get(e.errno, "late")


def failed(end):
    return "gone" if end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) else "nothing"


def names(events):
    return [name for name in ("IN", "OUT", "RDHUP", "ERR", "HUP") if events & globals()[name]]


def fill(end):
    """Fills the connection until it stays full: the kernel makes room gradually, and a ring that stays full is left for
    the buffers of TCP (S-16)."""
    end.setblocking(False)
    room = True
    while room:
        error(end.send, b"x" * 100000)
        room = select.select([], [end], [], 1)[1]
    end.setblocking(True)


def after(a):
    """Returns the lasting results of a connection that was given up."""
    return error(a.recv, 9), error(a.send, b"x"), error(a.recv, 9), error(a.send, b"x")


def reads(a, b):
    ready.wait()
    return error(a.recv, 9), *after(a), failed(a)


def reads_all(a, b):
    """Has a part of what it wants."""
    b.sendall(b"some")
    ready.wait()
    return error(a.recv, 9, socket.MSG_WAITALL), error(a.recv, 9), *after(a)


def polls(a, b, events=IN | RDHUP):
    poll = select.poll()
    poll.register(a, events)
    ready.wait()
    found = [names(e) for _, e in poll.poll(30000)]
    return found, failed(a), [names(e) for _, e in poll.poll(0)], *after(a)


def selects(a, b):
    ready.wait()
    found = [len(x) for x in select.select([a], [], [], 30)]
    return found, error(a.send, b"x"), *after(a)


def epolls(a, b, mode=0, events=select.EPOLLIN | select.EPOLLRDHUP):
    epoll = select.epoll()
    epoll.register(a, events | mode)
    ready.wait()
    found = [names(e) for _, e in epoll.poll(30)]
    return found, error(a.send, b"x"), failed(a), *after(a)


def edges(a, b):
    return epolls(a, b, select.EPOLLET)


def sends(a, b):
    """Asks for nothing, and its peer reads everything that comes."""
    said = []

    def sink():
        while error(b.recv, 65536) not in (b"", "late"):
            pass

    b.settimeout(10)
    ready.wait()
    threading.Thread(target=sink, daemon=True).start()
    while len(said) < 3:
        answer = error(a.send, b"x" * 100)
        if not isinstance(answer, int):
            said.append(answer)
        select.select([], [], [], 0.002)
    return *said, error(a.recv, 9)


def sends_full(a, b):
    """Sleeps in a send that finds no room."""
    fill(a)
    ready.wait()
    return error(a.sendall, b"x" * 9), *after(a)


def polls_full(a, b):
    fill(a)
    return polls(a, b, OUT)


def epolls_full(a, b):
    fill(a)
    return epolls(a, b, 0, select.EPOLLOUT)


def unread(a, b):
    """Bytes from before the cut are read before the error."""
    b.sendall(b"before")
    while len(a.recv(9, socket.MSG_PEEK)) < 6:
        pass
    ready.wait()
    poll = select.poll()
    poll.register(a, RDHUP)
    poll.poll(30000)
    return error(a.recv, 3), error(a.recv, 9), error(a.recv, 9), *after(a)


def other_end(a, b):
    """The other end continues to send when the first was told; its own kernel gives up."""
    impatient(b)
    ready.wait()
    error(a.recv, 9)
    error(a.recv, 9)
    said = []
    while len(said) < 2:
        answer = error(b.send, b"x" * 1000)
        if not isinstance(answer, int):
            said.append(answer)
        select.select([], [], [], 0.002)
    return *said, error(b.recv, 9)


def crosses(a, b):
    """Returns how many of 20,000 bytes arrive after the cut, as long as no kernel has given up."""
    for name in ("KEEPCNT", "USER_TIMEOUT"):
        a.setsockopt(socket.IPPROTO_TCP, getattr(socket, "TCP_" + name), 100 if name == "KEEPCNT" else 0)
    ready.wait()
    cut.wait()
    b.sendall(b"y" * 20000)
    a.settimeout(0.5)
    came = 0
    while isinstance(part := error(a.recv, 65536), bytes):
        came += len(part)
    return came


cut = threading.Event()
ways = (reads, reads_all, polls, selects, epolls, edges, sends, sends_full, polls_full, epolls_full, unread, other_end, crosses)
ready = threading.Barrier(len(ways) + 1)
ends, said = {way: pair() for way in ways}, {}
threads = [threading.Thread(target=lambda way=way: said.update({way: way(*ends[way])})) for way in ways]
for one in threads:
    one.start()
ready.wait()
# The threads get to the calls in which they wait.
time.sleep(0.3)
bare = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
subprocess.run(["ip", "-n", namespace, "link", "set", device, "down"], check=True, env=bare)
cut.set()
for one in threads:
    one.join()
for way in ways:
    print(way.__name__, said[way], flush=True)
os._exit(0)
