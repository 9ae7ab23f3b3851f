# SPDX-License-Identifier: Apache-2.0 OR MIT
"""A peer is killed under load: prints what the other end is told, and that it ends."""

import os, signal, socket, threading

listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen()
child = os.fork()
if child == 0:
    end, _ = listener.accept()
    while part := end.recv(10000):
        end.sendall(part)
    os._exit(0)

end = socket.create_connection(listener.getsockname())


def echo(n):
    end.sendall(b"x" * n)
    while n:
        part = end.recv(n)
        if not part:
            raise EOFError
        n -= len(part)


for _ in range(100):
    echo(1000)
threading.Timer(0.1, os.kill, (child, signal.SIGKILL)).start()
try:
    while True:
        echo(10000)
except (EOFError, ConnectionResetError):
    print("reading ends")
os.waitpid(child, 0)
try:
    while True:
        end.send(b"z" * 100000)
except (BrokenPipeError, ConnectionResetError):
    print("writing ends")
