# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The behaviour of a socket, one line for each property: the same lines with and without the library."""

import array, ctypes, errno, fcntl, os, select, signal, socket, struct, sys, termios, threading

HOST = sys.argv[1]
listener = socket.socket(socket.AF_INET6 if ":" in HOST else socket.AF_INET)
listener.bind((HOST, 0))
listener.listen(64)


def pair(sndbuf=None):
    """Returns two connected ends that have talked enough to be joined; the first may have a buffer of a given size."""
    one = socket.socket(listener.family)
    if sndbuf:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, sndbuf)
    one.connect(listener.getsockname())
    two, _ = listener.accept()
    for _ in range(8):
        one.sendall(b"ping")
        got(two, 4)
        two.sendall(b"pong")
        got(one, 4)
    return one, two


def got(end, n):
    data = b""
    while len(data) < n:
        part = end.recv(n - len(data))
        if not part:
            break
        data += part
    return data


def there(end, n):
    """Waits until so many bytes have come."""
    count = array.array("i", [0])
    while count[0] < n:
        fcntl.ioctl(end, termios.FIONREAD, count)


def say(name, *what):
    print(name, *what, flush=True)


def error(call, *arguments):
    try:
        return call(*arguments)
    except OSError as e:
        return errno.errorcode.get(e.errno, str(e))


def blocking_and_partial():
    a, b = pair()
    threading.Timer(0.05, lambda: b.sendall(b"late")).start()
    say("blocking read waits", a.recv(100))
    b.sendall(b"0123456789")
    say("partial reads", a.recv(3), a.recv(3), a.recv(100))
    say("empty read", a.recv(0))


def flags():
    a, b = pair()
    b.sendall(b"abcdef")
    say("peek", a.recv(3, socket.MSG_PEEK), a.recv(6, socket.MSG_PEEK), a.recv(6))
    say("dontwait", error(a.recv, 1, socket.MSG_DONTWAIT))
    threading.Timer(0.05, lambda: b.sendall(b"456")).start()
    b.sendall(b"123")
    say("waitall", a.recv(6, socket.MSG_WAITALL))
    b.sendall(b"cut")
    b.shutdown(socket.SHUT_WR)
    say("waitall at the end", a.recv(6, socket.MSG_WAITALL), a.recv(1))
    a, b = pair()
    b.sendmsg([b"gather", b"", b"ed"])
    x, y = bytearray(4), bytearray(10)
    say("vectors", a.recvmsg_into([x, y])[0], bytes(x), bytes(y[:4]))
    b.sendall(b"name")
    say("recvfrom", a.recvfrom(10))


def nonblocking():
    a, b = pair()
    a.setblocking(False)
    say("nothing there", error(a.recv, 1))
    sent = 0
    while True:
        n = error(a.send, b"x" * 50000)
        if not isinstance(n, int):
            break
        sent += n
    say("full", n, sent > 100000, select.select([], [a], [], 0)[1] == [])
    say("all of it", len(got(b, sent)) == sent)
    say("room again", select.select([], [a], [], 5)[1] == [a])


def buffers():
    a, b = pair(4096)
    a.setblocking(False)
    sent = 0
    while isinstance(n := error(a.send, b"x" * 5000), int):
        sent += n
    say("a small buffer is soon full", 4000 < sent < 150000, len(got(b, sent)) == sent)


def timeouts():
    a, b = pair()
    a.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 30000))
    say("receive timeout", error(a.recv, 1))
    b.sendall(b"x")
    say("and then", a.recv(1))


def endings():
    a, b = pair()
    b.sendall(b"last")
    b.close()
    say("end", got(a, 10), a.recv(1), a.recv(1))
    a, b = pair()
    a.shutdown(socket.SHUT_WR)
    say("half closed", b.recv(1), b.send(b"still"), got(a, 5))
    say("write after shutdown", error(a.send, b"x"))
    a, b = pair()
    b.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    b.close()
    say("reset", error(a.recv, 1), error(a.recv, 1))
    a, b = pair()
    a.sendall(b"unread")
    select.select([b], [], [], 5)
    b.close()
    poll = select.poll()
    poll.register(a, select.POLLIN)
    poll.poll(5000)
    say("closed with unread bytes", error(a.recv, 1))
    a, b = pair()
    b.close()
    results = []
    for _ in range(50):
        results.append(error(a.send, b"x" * 1000))
        select.select([], [], [], 0.002)
    say("write to the closed", results[-1])
    a, b = pair()
    a.shutdown(socket.SHUT_RD)
    say("read after own shutdown", a.recv(1))


def resets():
    """The result of each call on a connection that the peer has reset, before and after the error was fetched."""

    def reset(unread=b""):
        a, b = pair()
        if unread:
            b.sendall(unread)
            there(a, len(unread))
        b.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        b.close()
        return a

    def failed(a):
        return errno.errorcode.get(a.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), 0)

    def polled(a, events):
        poll = select.poll()
        poll.register(a, events)
        return [e for _, e in poll.poll(5000)]

    everything = select.POLLIN | select.POLLOUT | select.POLLRDHUP
    a = reset()
    say("reset, poll", polled(a, everything), polled(a, select.POLLIN), polled(a, select.POLLOUT), polled(a, 0))
    say("reset, select", [len(x) for x in select.select([a], [a], [a], 5)])
    say("reset, error", failed(a), failed(a), polled(a, everything), error(a.recv, 1), error(a.recv, 1))
    a = reset()
    say("reset, read", polled(a, select.POLLIN), error(a.recv, 1), failed(a), polled(a, everything), error(a.recv, 1))
    a = reset()
    say("reset, write", polled(a, select.POLLIN), error(a.send, b"x"), failed(a), error(a.send, b"x"))
    for mode in (0, select.EPOLLET, select.EPOLLONESHOT):
        a = reset()
        ep = select.epoll()
        ep.register(a, select.EPOLLIN | select.EPOLLRDHUP | mode)
        say("reset, set", [e for _, e in ep.poll(5)], [e for _, e in ep.poll(0)], failed(a), [e for _, e in ep.poll(0)])
        a, b = pair()
        ep = select.epoll()
        ep.register(a, select.EPOLLIN | select.EPOLLRDHUP | mode)
        b.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        threading.Timer(0.05, b.close).start()
        say("reset while it waits", [e for _, e in ep.poll(5)], error(a.recv, 1), failed(a))
    a = reset(b"unread")
    say("reset with bytes before it", a.recv(3), got(a, 3), polled(a, select.POLLIN), error(a.recv, 1), error(a.recv, 1))


def readiness():
    a, b = pair()
    say("select idle", [len(x) for x in select.select([a], [a], [a], 0)])
    b.sendall(b"x")
    select.select([a], [], [], 5)
    say("select ready", [len(x) for x in select.select([a], [a], [a], 5)])
    poll = select.poll()
    poll.register(a, select.POLLIN | select.POLLOUT | select.POLLRDHUP)
    say("poll ready", [e for _, e in poll.poll(1000)])
    a.recv(1)
    say("poll idle", [e for _, e in poll.poll(0)])
    r, w = os.pipe()
    poll.register(r, select.POLLIN)
    poll.modify(a, select.POLLIN)
    threading.Timer(0.05, lambda: os.write(w, b"x")).start()
    say("poll wakes for a pipe", [fd == r for fd, _ in poll.poll(5000)])
    poll.unregister(r)
    threading.Timer(0.05, lambda: b.sendall(b"x")).start()
    say("poll wakes for a socket", [e for _, e in poll.poll(5000)])
    a.recv(1)
    b.shutdown(socket.SHUT_WR)
    poll.modify(a, select.POLLIN | select.POLLRDHUP)
    say("poll half closed", [e for _, e in poll.poll(5000)], a.recv(1))
    b.close()
    say("poll timeout", select.poll().poll(10))


def epolls():
    a, b = pair()
    ep = select.epoll()
    ep.register(a, select.EPOLLIN)
    b.sendall(b"xy")
    say("level", ep.poll(5) == [(a.fileno(), 1)], ep.poll(5) == [(a.fileno(), 1)])
    a.recv(1)
    say("level, one left", ep.poll(5) == [(a.fileno(), 1)])
    a.recv(1)
    say("level, none left", ep.poll(0))
    ep.modify(a, select.EPOLLIN | select.EPOLLET)
    b.sendall(b"x")
    say("edge", len(ep.poll(5)), len(ep.poll(0)))
    b.sendall(b"y")
    say("edge again", len(ep.poll(5)), len(ep.poll(0)), a.recv(5))
    ep.modify(a, select.EPOLLOUT | select.EPOLLET)
    say("edge of room", len(ep.poll(5)), len(ep.poll(0)))
    ep.modify(a, select.EPOLLOUT | select.EPOLLET)
    say("edge after change", len(ep.poll(5)))
    ep.modify(a, select.EPOLLIN | select.EPOLLONESHOT)
    b.sendall(b"z")
    say("oneshot", len(ep.poll(5)), len(ep.poll(0)))
    ep.modify(a, select.EPOLLIN | select.EPOLLONESHOT)
    say("oneshot again", len(ep.poll(5)), a.recv(5))
    ep.modify(a, select.EPOLLIN | select.EPOLLRDHUP)
    threading.Timer(0.05, b.close).start()
    say("hang-up", [e & (select.EPOLLIN | select.EPOLLRDHUP) for _, e in ep.poll(5)], a.recv(1))
    a.close()
    say("closed is gone", ep.poll(0))
    a, b = pair()
    say("twice", error(ep.register, a), error(ep.register, a), error(ep.unregister, a), error(ep.unregister, a))
    # A set that is watched by another set.
    a, b = pair()
    inner, outer = select.epoll(), select.epoll()
    inner.register(a, select.EPOLLIN)
    outer.register(inner, select.EPOLLIN)
    b.sendall(b"n")
    say("nested", len(outer.poll(5)), len(inner.poll(5)), a.recv(1), len(outer.poll(0)))
    # Two threads on one set.
    a, b = pair()
    c, d = pair()
    ep = select.epoll()
    ep.register(a, select.EPOLLIN | select.EPOLLONESHOT)
    ep.register(c, select.EPOLLIN | select.EPOLLONESHOT)
    found = []
    waiters = [threading.Thread(target=lambda: found.extend(ep.poll(5, 1))) for _ in range(2)]
    for one in waiters:
        one.start()
    b.sendall(b"1")
    d.sendall(b"2")
    for one in waiters:
        one.join()
    say("two threads", len(found), len({fd for fd, _ in found}))


def descriptors():
    a, b = pair()
    c = socket.socket(fileno=os.dup(a.fileno()))
    a.close()
    b.sendall(b"dup")
    say("dup lives on", c.recv(10), b.fileno() != c.fileno())
    c.sendall(b"back")
    c.close()
    say("and ends", got(b, 10))
    a, b = pair()
    b.sendall(b"12345")
    select.select([a], [], [], 5)
    n = array.array("i", [0])
    fcntl.ioctl(a, termios.FIONREAD, n)
    say("FIONREAD", n[0], a.recv(9))
    d, e = pair()
    os.dup2(d.fileno(), a.fileno())
    say("dup2 over it closes it", b.recv(1))
    e.sendall(b"new")
    say("and it is the other", a.recv(9))
    f = e.makefile("rwb", buffering=0)
    f.write(b"file")
    say("file", d.recv(9))
    say("names", e.getpeername() == d.getsockname(), d.getpeername() == e.getsockname())


def signals():
    a, b = pair()
    seen = []

    def handler(*_):
        if not seen:
            b.sendall(b"from a handler")
        seen.append(1)

    signal.signal(signal.SIGALRM, handler)
    # Repeatedly: Python handles a signal that comes before the read begins only after the read.
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    say("read goes on after a signal", a.recv(100), len(seen) > 0)
    signal.setitimer(signal.ITIMER_REAL, 0)


def processes():
    a, b = pair()
    child = os.fork()
    if child == 0:
        b.sendall(b"child:" + b.recv(100))
        os._exit(0)
    a.sendall(b"hello")
    say("child answers", got(a, 11))
    os.waitpid(child, 0)
    b.sendall(b"parent")
    say("parent goes on", got(a, 6))
    a, b = pair()
    child = os.fork()
    if child == 0:
        os.dup2(b.fileno(), 9)
        os.execv("/bin/sh", ["sh", "-c", "read x <&9; echo got $x >&9"])
    a.sendall(b"through exec\n")
    say("exec", got(a, 17))
    os.waitpid(child, 0)


def inherited():
    """A set that a child has from its parent; each waits in it in turns."""
    a, b = pair()
    c, d = pair()
    for mode in (0, select.EPOLLET, select.EPOLLONESHOT):
        ep = select.epoll()
        for end in (b, d):
            ep.register(end, select.EPOLLIN | mode)
        child = os.fork()
        if child == 0:
            found = [fd for fd, _ in ep.poll(5)]
            b.sendall(b"child:" + b.recv(100) + (b"" if found == [b.fileno()] else b"?"))
            os._exit(0)
        a.sendall(b"hello")
        say("a set in a child", got(a, 11), os.waitpid(child, 0)[1])
        c.sendall(b"parent")
        say("and in its parent", [fd == d.fileno() for fd, _ in ep.poll(5) if fd != b.fileno()], got(d, 6))
        ep.close()


def options():
    """Options that are set and read."""
    a, b = pair()
    a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 50000))
    sent = 0
    while isinstance(n := error(a.send, b"x" * 100000), int):
        sent += n
    say("send timeout", n, len(got(b, sent)) == sent)
    for name, value in (("KEEPIDLE", 7), ("KEEPINTVL", 3), ("KEEPCNT", 5), ("NODELAY", 1)):
        a.setsockopt(socket.IPPROTO_TCP, getattr(socket, "TCP_" + name), value)
        say(name, a.getsockopt(socket.IPPROTO_TCP, getattr(socket, "TCP_" + name)))
    a.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    b.sendall(b"kept alive")
    say("keep-alive", got(a, 10), a.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
    a, b = pair()
    a.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 10))
    a.sendall(b"lingers")
    a.close()
    say("closed with time to linger", got(b, 10), b.recv(1))


def looks():
    """Flags that leave bytes, or throw them away."""
    a, b = pair()
    b.sendall(b"0123456789")
    there(a, 10)
    say("peek for all", a.recv(10, socket.MSG_PEEK | socket.MSG_WAITALL), a.recv(4, socket.MSG_WAITALL))
    say("peek after", a.recv(100, socket.MSG_PEEK), a.recv(100))
    say("nothing to peek", error(a.recv, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    threading.Timer(0.05, b.sendall, (b"late",)).start()
    say("peek waits", a.recv(1, socket.MSG_PEEK), got(a, 4))
    b.shutdown(socket.SHUT_WR)
    say("peek at the end", a.recv(1, socket.MSG_PEEK), a.recv(1, socket.MSG_PEEK | socket.MSG_WAITALL), a.recv(1))


def truncated():
    """MSG_TRUNC throws bytes away, and returns how many."""
    a, b = pair()
    b.sendall(b"0123456789")
    there(a, 10)
    libc = ctypes.CDLL(None)
    room = ctypes.create_string_buffer(b"untouched")
    say("thrown away", libc.recv(a.fileno(), None, ctypes.c_size_t(4), socket.MSG_TRUNC), a.recv(2))
    say("looked at", libc.recv(a.fileno(), room, ctypes.c_size_t(9), socket.MSG_TRUNC | socket.MSG_PEEK), room.value, a.recv(9))
    say("none", error(a.recv, 1, socket.MSG_TRUNC | socket.MSG_DONTWAIT))
    threading.Timer(0.05, b.sendall, (b"late",)).start()
    say("waits", libc.recv(a.fileno(), None, ctypes.c_size_t(100), socket.MSG_TRUNC))
    sender = threading.Thread(target=b.sendall, args=(b"x" * 3000000 + b"end",))
    sender.start()
    all = libc.recv(a.fileno(), None, ctypes.c_size_t(3000000), socket.MSG_TRUNC | socket.MSG_WAITALL)
    say("all of many", all, got(a, 3))
    sender.join()
    b.sendall(b"message")
    there(a, 7)
    say("of a message", len(a.recvmsg(7, 0, socket.MSG_TRUNC)[0]))
    b.close()
    say("at the end", libc.recv(a.fileno(), None, ctypes.c_size_t(4), socket.MSG_TRUNC))


def exclusive():
    a, b = pair()
    ep = select.epoll()
    ep.register(a, select.EPOLLIN | select.EPOLLEXCLUSIVE)
    b.sendall(b"one")
    say("exclusive", len(ep.poll(5)), got(a, 3), len(ep.poll(0)))
    b.sendall(b"two")
    say("exclusive again", len(ep.poll(5)), got(a, 3), error(ep.modify, a, select.EPOLLIN))


def urgent():
    a, b = pair()
    b.sendall(b"before")
    b.send(b"!", socket.MSG_OOB)
    poll = select.poll()
    poll.register(a, select.POLLPRI)
    say("urgent", [e for _, e in poll.poll(5000)], error(a.recv, 1, socket.MSG_OOB))
    b.sendall(b"after")
    say("and the rest", got(a, 6), got(a, 5))
    a.sendall(b"back")
    say("and back", got(b, 4))
    # A program that waits for nothing but the end, in a set, while there are bytes before it.
    for edge in (0, select.EPOLLET):
        a, b = pair()
        ep = select.epoll()
        ep.register(a, select.EPOLLPRI | edge)
        b.sendall(b"before")
        there(a, 6)
        say("nothing urgent", ep.poll(0))
        b.send(b"?", socket.MSG_OOB)
        say("urgent in a set", [e for _, e in ep.poll(5)], [e for _, e in ep.poll(0)], error(a.recv, 1, socket.MSG_OOB))
        say("and no more", [e for _, e in ep.poll(0)], got(a, 6))


for part in (
    options, looks, truncated, exclusive, urgent,
    blocking_and_partial, flags, nonblocking, buffers, timeouts, endings, resets, readiness, epolls, descriptors, signals, processes,
    inherited,
):
    part()
