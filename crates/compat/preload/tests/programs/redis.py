# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Puts values into Redis and gets them back, some at a time: `redis.py HOST PORT COUNT`."""

import random, socket, sys

end = socket.create_connection((sys.argv[1], int(sys.argv[2])))
rng, held, total = random.Random(7), b"", 0


def line():
    global held
    while b"\r\n" not in held:
        held += end.recv(65536)
    first, held = held.split(b"\r\n", 1)
    return first


def exactly(n):
    global held
    while len(held) < n + 2:
        held += end.recv(1 << 20)
    value, held = held[:n], held[n + 2 :]
    return value


for n in range(int(sys.argv[3])):
    values = {b"key%d" % key: rng.randbytes(rng.choice([1, 100, 5000, 100000])) for key in range(4)}
    for key, value in values.items():
        end.sendall(b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(key), key, len(value), value))
    end.sendall(b"".join(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key) for key in values))
    for _ in values:
        assert line() == b"+OK"
    for value in values.values():
        assert exactly(int(line()[1:])) == value
        total += 2 * len(value)
print("bytes:", total)
