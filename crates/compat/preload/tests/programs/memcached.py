# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Puts values into memcached over several connections and gets them back: `memcached.py HOST PORT COUNT`."""

import random, socket, sys

ends = [socket.create_connection((sys.argv[1], int(sys.argv[2]))) for _ in range(6)]
files = [end.makefile("rwb") for end in ends]
rng, total = random.Random(8), 0
for n in range(int(sys.argv[3])):
    values = [rng.randbytes(rng.choice([1, 100, 5000, 100000])) for _ in ends]
    for at, (file, value) in enumerate(zip(files, values)):
        file.write(b"set key%d 0 0 %d\r\n%b\r\n" % (at, len(value), value))
        file.flush()
    for file in files:
        assert file.readline() == b"STORED\r\n"
    # Each connection requests the value that another stored.
    for at, file in enumerate(files):
        file.write(b"get key%d\r\n" % ((at + 1) % len(files)))
        file.flush()
    for at, file in enumerate(files):
        value = values[(at + 1) % len(files)]
        assert file.readline() == b"VALUE key%d 0 %d\r\n" % ((at + 1) % len(files), len(value))
        assert file.read(len(value)) == value
        assert file.read(7) == b"\r\nEND\r\n"
        total += 2 * len(value)
print("bytes:", total)
