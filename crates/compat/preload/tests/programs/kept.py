# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Both ends are in one process, and then one of them is kept by another program alone: unread bytes arrive, in both
directions."""

import os, socket, subprocess, sys, zlib

from ends import pair

SIZE = 150_000
HELPER = """
import socket, sys, zlib
end = socket.socket(fileno=int(sys.argv[1]))
end.settimeout(20)
seen, got = 0, 0
while part := end.recv(65536):
    seen, got = zlib.crc32(part, seen), got + len(part)
end.sendall(b"%d %d" % (got, seen))
"""


def vfork(fd, env):
    return subprocess.Popen([sys.executable, "-c", HELPER, str(fd)], env=env, pass_fds=(fd,)).wait


def posix_spawn(fd, env):
    child = os.posix_spawn(sys.executable, [sys.executable, "-c", HELPER, str(fd)], env)
    return lambda: os.waitpid(child, 0)[1]


def rest(end):
    all = b""
    while part := end.recv(65536):
        all += part
    return all


for start in (vfork, posix_spawn):
    for library in (True, False):
        for keeper in (0, 1):
            env = dict(os.environ)
            if not library:
                env.pop("LD_PRELOAD", None)
            ends = pair()
            kept, other = ends[keeper], ends[1 - keeper]
            kept.set_inheritable(True)
            other.settimeout(20)
            there, back = os.urandom(SIZE), os.urandom(SIZE)
            other.sendall(there)
            kept.sendall(back)
            wait = start(kept.fileno(), env)
            kept.close()
            other.sendall(b"more")
            other.shutdown(socket.SHUT_WR)
            all = rest(other)
            expected = b"%d %d" % (SIZE + 4, zlib.crc32(b"more", zlib.crc32(there)))
            print(start.__name__, library, keeper, wait(), all == back + expected, flush=True)
            assert all == back + expected, (len(all), all[SIZE:][:50], expected)
