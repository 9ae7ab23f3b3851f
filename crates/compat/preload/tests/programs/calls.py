# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Calls that programs seldom make, on connections that are joined if they can be. Prints their results."""

import array, ctypes, fcntl, os, select, signal, socket, struct, termios, threading

from ends import pair

libc = ctypes.CDLL(None, use_errno=True)


def there(end, n):
    """Waits until so many bytes have come."""
    count = array.array("i", [0])
    while count[0] < n:
        fcntl.ioctl(end, termios.FIONREAD, count)


def say(what, *results):
    print(what, *results, flush=True)


class Vec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("len", ctypes.c_size_t)]


class Head(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_void_p), ("namelen", ctypes.c_uint), ("iov", ctypes.POINTER(Vec)), ("iovlen", ctypes.c_size_t),
        ("control", ctypes.c_void_p), ("controllen", ctypes.c_size_t), ("flags", ctypes.c_int),
    ]


class Message(ctypes.Structure):
    _fields_ = [("head", Head), ("len", ctypes.c_uint)]


def messages(*parts):
    buffers = [ctypes.create_string_buffer(part, len(part)) for part in parts]
    all = (Message * len(parts))()
    keep = []
    for one, buffer in zip(all, buffers):
        vec = Vec(ctypes.cast(buffer, ctypes.c_void_p), len(buffer))
        keep.append(vec)
        one.head.iov = ctypes.pointer(vec)
        one.head.iovlen = 1
    return all, buffers, keep


def error(answer):
    return answer if answer >= 0 else os.strerror(ctypes.get_errno())


def many():
    a, b = pair()
    all, _, keep = messages(b"one,", b"two,", b"three")
    say("sendmmsg", libc.sendmmsg(a.fileno(), all, 3, 0), [one.len for one in all])
    there(b, 13)
    all, buffers, keep = messages(b"\0" * 4, b"\0" * 4, b"\0" * 8)
    say("recvmmsg", libc.recvmmsg(b.fileno(), all, 3, 0x10000, None), [one.len for one in all], [x.raw for x in buffers])
    say("nothing", error(libc.recvmmsg(b.fileno(), all, 3, socket.MSG_DONTWAIT, None)))
    a.send(b"last")
    a.close()
    there(b, 4)
    say("end", libc.recvmmsg(b.fileno(), all, 3, 0, None), [one.len for one in all])
    say("not a descriptor", error(libc.recvmmsg(999, all, 3, 0, None)))


def at_offsets():
    a, b = pair()
    vec = Vec(ctypes.cast(ctypes.create_string_buffer(b"offsets"), ctypes.c_void_p), 7)
    offset = ctypes.c_long(-1)
    say("pwritev2", libc.pwritev2(a.fileno(), ctypes.byref(vec), 1, offset, 0))
    room = ctypes.create_string_buffer(100)
    vec = Vec(ctypes.cast(room, ctypes.c_void_p), 100)
    say("preadv2", libc.preadv2(b.fileno(), ctypes.byref(vec), 1, offset, 0), room.value)
    say("now", error(libc.preadv2(b.fileno(), ctypes.byref(vec), 1, offset, 8)))
    say("preadv64v2", error(libc.preadv64v2(b.fileno(), ctypes.byref(vec), 1, ctypes.c_long(3), 0)))


def pipes():
    a, b = pair()
    out, into = os.pipe()
    a.sendall(b"spliced")
    say("splice from", os.splice(b.fileno(), into, 100), os.read(out, 100))
    os.write(into, b"and back")
    say("splice to", os.splice(out, a.fileno(), 100), b.recv(100))
    a.shutdown(socket.SHUT_WR)
    say("splice end", os.splice(b.fileno(), into, 100))
    b.setblocking(False)
    c, d = pair()
    d.setblocking(False)
    try:
        os.splice(d.fileno(), into, 100, flags=2)
    except BlockingIOError:
        say("splice nothing")
    total = 0
    data = os.urandom(300000)
    sender = threading.Thread(target=c.sendall, args=(data,))
    sender.start()
    d.setblocking(True)
    got = b""
    while len(got) < len(data):
        os.splice(d.fileno(), into, 1 << 20)
        got += os.read(out, 1 << 16)
        while select.select([out], [], [], 0)[0]:
            got += os.read(out, 1 << 16)
    sender.join()
    say("splice much", got == data)


def written():
    a, b = pair()
    libc.dprintf(a.fileno(), b"%s %d %s\n", b"number", 17, b"done")
    say("dprintf", b.recv(100))
    b.sendall(b"still")
    say("and then", a.recv(100))
    a.sendall(b"going")
    say("both ways", b.recv(100))


def executed():
    for name in ("execl", "execlp"):
        a, b = pair()
        child = os.fork()
        if child == 0:
            os.dup2(b.fileno(), 0), os.dup2(b.fileno(), 1)
            getattr(libc, name)(b"/bin/sh", b"sh", b"-c", b"read x; echo got $x", None)
            os._exit(9)
        a.sendall(b"argument list\n")
        got = b""
        while len(got) < 18:
            got += a.recv(100)
        say(name, got, os.waitpid(child, 0)[1])


def spawned():
    a, b = pair()
    child = os.posix_spawn(
        "/bin/sh", ["sh", "-c", "read x; echo got $x"], os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, b.fileno(), 0), (os.POSIX_SPAWN_DUP2, b.fileno(), 1)],
    )
    a.sendall(b"spawned\n")
    got = b""
    while len(got) < 12:
        got += a.recv(100)
    say("posix_spawn", got, os.waitpid(child, 0)[1])


def waits():
    a, b = pair()
    epoll = select.epoll()
    epoll.register(b, select.EPOLLIN)
    events = ctypes.create_string_buffer(12 * 8)
    short = struct.pack("qq", 0, 1000000)
    say("epoll_pwait2 idle", libc.epoll_pwait2(epoll.fileno(), events, 8, short, None))
    a.send(b"x")
    say("epoll_pwait2 ready", libc.epoll_pwait2(epoll.fileno(), events, 8, None, None))
    bad = struct.pack("qq", 0, 2000000000)
    say("epoll_pwait2 of no time", error(libc.epoll_pwait2(epoll.fileno(), events, 8, bad, None)))


def interrupted():
    """A signal that restarts calls, and one that does not."""
    a, b = pair()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, lambda *_: None)
    room = ctypes.create_string_buffer(100)
    for restart in (False, True):
        signal.siginterrupt(signal.SIGALRM, not restart)
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        late = threading.Timer(1, a.sendall, (b"late",))
        late.start()
        got = libc.recv(b.fileno(), room, 100, 0)
        say("restart" if restart else "interrupt", error(got))
        signal.setitimer(signal.ITIMER_REAL, 0)
        late.join()
        if got < 0:
            b.recv(100)
    signal.siginterrupt(signal.SIGALRM, True)
    a.settimeout(None)
    big = b"z" * (64 << 20)
    signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
    sent = libc.send(a.fileno(), big, len(big), 0)
    # At the end of this program there would be no handler any more.
    signal.setitimer(signal.ITIMER_REAL, 0)
    say("a send that is interrupted says how much it sent", 0 < sent < len(big))


READ, WRITE, CLOSE, DUP3, RECVMMSG = 0, 1, 3, 292, 299


def by_number():
    """By `syscall`, as libuv closes its descriptors."""
    a, b = pair()
    say("write", libc.syscall(WRITE, a.fileno(), b"by number", ctypes.c_size_t(9)), b.recv(100))
    b.sendall(b"answer")
    room = ctypes.create_string_buffer(100)
    say("read", libc.syscall(READ, a.fileno(), room, ctypes.c_size_t(100)), room.value)
    b.sendall(b"several")
    there(a, 7)
    all, buffers, keep = messages(b"\0" * 7)
    say("recvmmsg", libc.syscall(RECVMMSG, a.fileno(), all, ctypes.c_long(1), ctypes.c_long(0), None, None), buffers[0].raw)
    copy = libc.syscall(DUP3, a.fileno(), ctypes.c_long(200), ctypes.c_long(0))
    a.close()
    b.sendall(b"copied")
    say("dup3", copy, os.read(copy, 100))
    say("closed", libc.syscall(CLOSE, copy), b.recv(1))
    a, b = pair()
    number = a.detach()
    say("close", libc.syscall(CLOSE, number))
    files = [os.open("/proc/self/comm", os.O_RDONLY)]
    while files[-1] != number:
        files.append(os.open("/proc/self/comm", os.O_RDONLY))
    say("the number is a file's", os.read(number, 100) == os.read(files[0], 100), b.recv(1))
    for file in files:
        os.close(file)
    a, b = pair()
    b.sendall(b"unread")
    there(a, 6)
    libc.syscall(CLOSE, a.detach())
    select.select([b], [], [], 5)
    say("closed with unread bytes", error(libc.recv(b.fileno(), room, 1, 0)))


for part in (many, at_offsets, pipes, written, executed, spawned, waits, interrupted, by_number):
    part()
