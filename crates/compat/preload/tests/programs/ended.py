# SPDX-License-Identifier: Apache-2.0 OR MIT
"""One end sends and shuts its sending down; then another program, without the library, gets the other end, of which
nothing was read. Prints what that program finds, and what the first end is told: everything, or a reset. A stream that
is cut short without an error is a fault."""

import os, select, socket, subprocess, sys, zlib

from ends import pair

SIZE = 100_000
READER = """
import socket, sys, zlib
end = socket.socket(fileno=int(sys.argv[1])) if len(sys.argv) > 1 else None
if not end:
    end = socket.socket(fileno=socket.recv_fds(socket.socket(fileno=0), 1, 1)[1][0])
end.settimeout(20)
seen, got = 0, 0
try:
    while part := end.recv(65536):
        seen, got = zlib.crc32(part, seen), got + len(part)
    print(got, seen, flush=True)
    end.sendall(b"thanks")
except ConnectionResetError:
    print("reset", flush=True)
"""
bare = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}


def spawned(end):
    return subprocess.Popen([sys.executable, "-c", READER, str(end.fileno())], env=bare, pass_fds=(end.fileno(),), stdout=-1)


def passed(end):
    way, other = socket.socketpair()
    child = subprocess.Popen([sys.executable, "-c", READER], env=bare, stdin=other, stdout=-1)
    socket.send_fds(way, [b"x"], [end.fileno()])
    return child


def executed(listener):
    """The other end belongs to another process from the beginning."""
    ready, go = os.pipe(), os.pipe()
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        end = pair_of(socket.create_connection(listener.getsockname()), True)
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        end.set_inheritable(True)
        os.dup2(into, 1)
        os.execve(sys.executable, [sys.executable, "-c", READER, str(end.fileno())], bare)
    end = pair_of(listener.accept()[0], False)
    os.read(ready[0], 1)

    def start(_):
        os.write(go[1], b"x")
        os.close(into)
        return out, child

    return end, start


def pair_of(end, first):
    """Returns this end, after it has talked with the other enough to be joined."""
    for turn in range(80):
        if (turn % 2 == 0) == first:
            end.sendall(b"w" * 500)
        else:
            left = 500
            while left:
                left -= len(end.recv(left))
    return end


def heard(end):
    all = b""
    try:
        while part := end.recv(100):
            all += part
    except ConnectionResetError:
        return "reset"
    return all.decode()


def tell(name, found, back, data):
    whole = b"%d %d\n" % (len(data), zlib.crc32(data))
    print(name, {whole: "whole", b"reset\n": "reset"}.get(found, found), back, flush=True)


data = os.urandom(SIZE)
for start in (spawned, passed):
    a, b = pair()
    a.settimeout(30)
    a.sendall(data)
    a.shutdown(socket.SHUT_WR)
    child = start(b)
    b.close()
    back = heard(a)
    tell(start.__name__, child.communicate()[0], back, data)

# The library must be on TCP here, and the program still reads through it.
a, b = pair()
a.sendall(data)
a.shutdown(socket.SHUT_WR)
inner, outer = select.epoll(), select.epoll()
inner.register(b, select.EPOLLIN)
outer.register(inner, select.EPOLLIN)
assert outer.poll(20) and inner.poll(20)
b.settimeout(20)
found = b""
while part := b.recv(65536):
    found += part
b.sendall(b"thanks")
b.close()
tell("nested", b"%d %d\n" % (len(found), zlib.crc32(found)), heard(a), data)

listener = socket.create_server(("127.0.0.1", 0))
a, start = executed(listener)
a.settimeout(30)
a.sendall(data)
a.shutdown(socket.SHUT_WR)
out, child = start(None)
back = heard(a)
found = b""
while part := os.read(out, 100):
    found += part
os.waitpid(child, 0)
tell("executed", found, back, data)
