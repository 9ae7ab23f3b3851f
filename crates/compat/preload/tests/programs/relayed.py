# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The two ends of a proxy, each with bytes of its own: `serve ADDRESS PORT BYTES` answers one client after it has sent
everything, `ask ADDRESS PORT BYTES` connects. Both print whether they received what was sent."""
import hashlib
import random
import socket
import sys

role, address, port, size = sys.argv[1:]
size = int(size)
own, other = (random.Random(seed).randbytes(size) for seed in ((1, 2) if role == "ask" else (2, 1)))


def whole(end):
    got = hashlib.sha256()
    count = 0
    while data := end.recv(1 << 18):
        got.update(data)
        count += len(data)
    return count, got.digest() == hashlib.sha256(other).digest()


def send(end):
    # A call that began on TCP stays with the kernel until it returns, so the bytes go in several calls.
    for at in range(0, size, 1 << 16):
        end.sendall(own[at : at + (1 << 16)])
    end.shutdown(socket.SHUT_WR)


if role == "serve":
    end, _ = socket.create_server((address, int(port))).accept()
    print("whole:", *whole(end))
    send(end)
else:
    end = socket.create_connection((address, int(port)))
    send(end)
    print("whole:", *whole(end))
end.close()
