# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Sockets that other programs get: by their own number through every way to start one, and by a message. The other
program reads from the socket and writes to it. Prints what the two ends receive."""

import array, ctypes, os, socket, sys

from ends import pair

libc = ctypes.CDLL(None, use_errno=True)
LIBRARY = os.environ.get("LD_PRELOAD")


def script(fd):
    return f"read x <&{fd}; echo got $x >&{fd}"


def posix_spawn(fd, env):
    return lambda: os.waitpid(os.posix_spawn("/bin/sh", ["sh", "-c", script(fd)], env), 0)[1]


def posix_spawnp(fd, env):
    return lambda: os.waitpid(os.posix_spawnp("sh", ["sh", "-c", script(fd)], env), 0)[1]


def system(fd, env):
    return lambda: libc.system(script(fd).encode())


def popen(fd, env):
    libc.popen.restype = ctypes.c_void_p
    return lambda: libc.pclose(ctypes.c_void_p(libc.popen(script(fd).encode(), b"r")))


def forked(fd, env):
    def start():
        child = os.fork()
        if child == 0:
            os.execve("/bin/sh", ["sh", "-c", script(fd)], env)
        return os.waitpid(child, 0)[1]

    return start


def vforked(fd, env):
    import subprocess

    return subprocess.Popen(["/bin/sh", "-c", script(fd)], env=env, pass_fds=(fd,)).wait


def got(end, n):
    all = b""
    while len(all) < n:
        part = end.recv(n - len(all))
        if not part:
            break
        all += part
    return all


for start in (posix_spawn, posix_spawnp, system, popen, forked, vforked):
    for library in (True, False):
        env = dict(os.environ)
        if not library:
            env.pop("LD_PRELOAD", None)
            if start in (system, popen):
                continue  # These have no environment but this process's.
        a, b = pair()
        b.set_inheritable(True)
        if start is vforked:
            # The child has no copy of the other end, and this process sleeps until the child is another program.
            wait = start(b.fileno(), env)
            a.sendall(b"hello\n")
        else:
            a.sendall(b"hello\n")
            wait = start(b.fileno(), env)
        status = wait()
        print(start.__name__, library, status, got(a, 10))
        a.sendall(b"more")
        b.sendall(b"back")
        print(start.__name__, library, got(b, 4), got(a, 4), flush=True)

# By a message, to a process with the library and to one without.
receiver = """
import socket, sys
way = socket.socket(fileno=0)
_, (fd,), _, _ = socket.recv_fds(way, 1, 1)
end = socket.socket(fileno=fd)
print("message", end.recv(6))
end.sendall(b"answer")
way.sendall(b"x")
"""
for library in (True, False):
    a, b = pair()
    way, other = socket.socketpair()
    env = dict(os.environ)
    if not library:
        env.pop("LD_PRELOAD", None)
    child = os.posix_spawn(
        sys.executable, [sys.executable, "-c", receiver], env,
        file_actions=[(os.POSIX_SPAWN_DUP2, other.fileno(), 0)],
    )
    other.close()
    a.sendall(b"before")
    print("kept", got(b, 6))
    socket.send_fds(way, [b"x"], [b.fileno()])
    a.sendall(b"passed")
    print(library, got(a, 6), way.recv(1))
    assert os.waitpid(child, 0)[1] == 0
    a.sendall(b"after")
    print(library, got(b, 5), flush=True)
