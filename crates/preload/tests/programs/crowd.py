# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Very many connections, at once or one after the other, and ends that are killed at any time."""

import os, random, resource, select, signal, socket, sys

what, count = sys.argv[1], int(sys.argv[2])
random.seed(os.environ.get("SEED", "1"))
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 20000), hard))


def pattern(begin, n):
    cycle = bytes(range(251))
    begin %= 251
    return (cycle * (n // 251 + 2))[begin : begin + n]


def serve(listener):
    """Echoes, for as many as come, until none is left of all that there will be."""
    epoll = select.epoll()
    epoll.register(listener, select.EPOLLIN)
    ends, left = {}, count
    while left or ends:
        for fd, _ in epoll.poll(60):
            if fd == listener.fileno():
                end, _ = listener.accept()
                end.setblocking(False)
                epoll.register(end, select.EPOLLIN)
                ends[end.fileno()] = [end, b""]
                left -= 1
                continue
            end, waiting = ends[fd]
            if not waiting:
                try:
                    waiting = end.recv(65536)
                except BlockingIOError:
                    continue
                if not waiting:
                    ends.pop(fd)
                    end.close()
                    continue
            try:
                waiting = waiting[end.send(waiting) :]
            except BlockingIOError:
                pass
            ends[fd][1] = waiting
            epoll.modify(fd, select.EPOLLOUT if waiting else select.EPOLLIN)


def turn(end, at, n):
    data = pattern(at, n)
    end.sendall(data)
    got = b""
    while len(got) < n:
        part = end.recv(n - len(got))
        assert part, "the end comes early"
        got += part
    assert got == data, f"other bytes at {at}"


def many(address):
    """All at once, in turns."""
    ends = [socket.create_connection(address) for _ in range(count)]
    for round in range(20):
        for end in ends:
            turn(end, round * 700, 700)
    for end in ends:
        end.close()


def short(address):
    """One after the other, each with a request or a few."""
    for number in range(count):
        with socket.create_connection(address) as end:
            for round in range(random.choice((1, 1, 1, 3, 8))):
                turn(end, number, 100)


def killed(listener):
    """One end is killed while it sends or echoes; what the other has is a beginning, and it hears of the end."""
    for _ in range(count):
        child = os.fork()
        if child == 0:
            with socket.create_connection(listener.getsockname()) as end:
                for _ in range(10):
                    turn(end, 0, 1000)
                at = 0
                while True:
                    n = random.randrange(1, 20000)
                    end.sendall(pattern(at, n))
                    at += n
        end, _ = listener.accept()
        for _ in range(10):
            end.sendall(end.recv(1000, socket.MSG_WAITALL))
        late = random.randrange(10_000, 4_000_000)
        at, dead = 0, False
        try:
            while part := end.recv(random.randrange(1, 50000)):
                assert part == pattern(at, len(part)), f"other bytes at {at}"
                at += len(part)
                if at > late and not dead:
                    dead = True
                    os.kill(child, signal.SIGKILL)
        except ConnectionResetError:
            pass
        assert dead
        os.waitpid(child, 0)
        try:
            for _ in range(100):
                end.send(b"x" * 100000)
            raise AssertionError("nobody said that it is gone")
        except (BrokenPipeError, ConnectionResetError):
            pass
        end.close()


listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
if what == "killed":
    killed(listener)
else:
    child = os.fork()
    if child == 0:
        listener_name = listener.getsockname()
        listener.close()
        {"many": many, "short": short}[what](listener_name)
        print(what, flush=True)
        os._exit(0)
    serve(listener)
    assert os.waitpid(child, 0)[1] == 0
print("done", flush=True)
