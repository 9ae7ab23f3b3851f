# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Makes a connection between two ends of this process for each line that it reads: `talk` moves 100 kB in each
direction, `few` some bytes, `none` no byte, `at ADDRESS PORT` talks with another program. Prints a line when both ends
are closed."""
import socket
import sys


def receive(end, left):
    while left:
        left -= len(end.recv(left))


listener = socket.create_server(("127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 0))
print(listener.getsockname()[1], flush=True)
for line in sys.stdin:
    step, *where = line.split()
    if step == "at":
        with socket.create_connection((where[0], int(where[1]))) as end:
            for _ in range(100):
                end.sendall(b"x" * 1000)
                receive(end, 1000)
        print("done", flush=True)
        continue
    one = socket.create_connection(listener.getsockname())
    other, _ = listener.accept()
    for _ in range({"talk": 100, "few": 1, "none": 0}[step]):
        size = 1000 if step == "talk" else 10
        for sender, receiver in ((one, other), (other, one)):
            sender.sendall(b"x" * size)
            receive(receiver, size)
    one.close()
    other.close()
    print("done", flush=True)
