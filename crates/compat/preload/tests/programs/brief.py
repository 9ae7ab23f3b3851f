# SPDX-License-Identifier: Apache-2.0 OR MIT
"""`serve`: answers requests of 100 bytes, one connection after the other; `serve forks`: in a process for each. `ask
PORT REQUESTS...`: makes a connection for each number, over which so many requests are answered."""

import os
import socket
import sys

SIZE = 100


def receive(end):
    """Returns a whole message, or nothing at the end."""
    got = b""
    while len(got) < SIZE and (part := end.recv(SIZE - len(got))):
        got += part
    return got


def answer(end):
    while request := receive(end):
        end.sendall(request)


def serve(forks):
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    while True:
        end, _ = listener.accept()
        with end:
            if not forks:
                answer(end)
            elif (child := os.fork()) == 0:
                listener.close()
                answer(end)
                end.close()
                os._exit(0)
        if forks:
            os.waitpid(child, 0)


def ask(port, requests):
    with socket.create_connection(("127.0.0.1", port)) as end:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number in range(requests):
            request = number.to_bytes(2) * (SIZE // 2)
            end.sendall(request)
            assert receive(end) == request, number


if sys.argv[1] == "serve":
    serve(sys.argv[2:] == ["forks"])
else:
    for requests in sys.argv[3:]:
        ask(int(sys.argv[2]), int(requests))
