# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Two ends in one process, for the programs in this folder."""

import socket


def pair():
    """Returns two connected ends that have talked enough to be joined."""
    listener = socket.create_server(("127.0.0.1", 0))
    a = socket.create_connection(listener.getsockname())
    b, _ = listener.accept()
    for _ in range(40):
        for x, y in ((a, b), (b, a)):
            x.sendall(b"w" * 500)
            left = 500
            while left:
                left -= len(y.recv(left))
    return a, b
