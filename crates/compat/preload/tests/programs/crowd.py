# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Very many connections, at once or one after the other, and ends that are killed at any time."""

import ctypes, os, random, resource, select, signal, socket, sys

what, count = sys.argv[1], int(sys.argv[2])
random.seed(os.environ.get("SEED", "1"))
LIMIT = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 5000)
resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def pattern(begin, n):
    cycle = bytes(range(251))
    begin %= 251
    return (cycle * (n // 251 + 2))[begin : begin + n]


class Holdings:
    """Resources of this process, and of the folder where endpoints meet: after a tenth of the run there must be as many
    as at the end."""

    def __init__(self):
        self.at_first = None

    def count(self):
        status = dict(line.split(":", 1) for line in open("/proc/self/status"))
        files = [name for _, _, names in os.walk(os.environ.get("TOMBOLO_SOCKETS", "/nowhere")) for name in names]
        return len(os.listdir("/proc/self/fd")), len(files), int(status["VmRSS"].split()[0])

    def look(self, done):
        if done == count // 10:
            self.at_first = self.count()
        if done == count:
            (fds, files, kib), now = self.at_first, self.count()
            # The library opens descriptors for a peer process when it needs them, eight at most; a connection or two
            # exists at each look.
            assert now[0] - fds <= 10 and now[1] - files <= 2 and now[2] - kib <= GROWS, (self.at_first, now)


GROWS = 2048


def serve(listener):
    """Echoes to all clients, until none of the expected ones is left."""
    holdings = Holdings()
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
                if what == "short":
                    holdings.look(count - left)
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
    holdings = Holdings()
    for number in range(count):
        with socket.create_connection(address) as end:
            holdings.look(number + 1)
            for round in range(random.choice((1, 1, 1, 3, 8))):
                turn(end, number, 100)


def killed(listener, serves):
    """One end, which connected or `serves`, is killed while it sends. The other end has received a beginning of the
    stream, and is told of the end."""
    for _ in range(count):
        # It may happen before the two have found each other, during that, or after it.
        turns = random.choice((0, 1, 2, 3, 10))
        child = os.fork()
        if child == 0:
            end = listener.accept()[0] if serves else socket.create_connection(listener.getsockname())
            for _ in range(turns):
                turn(end, 0, 1000)
            at = 0
            while True:
                n = random.randrange(1, 20000)
                end.sendall(pattern(at, n))
                at += n
        end = socket.create_connection(listener.getsockname()) if serves else listener.accept()[0]
        for _ in range(turns):
            end.sendall(end.recv(1000, socket.MSG_WAITALL))
        late = random.choice((0, random.randrange(100_000), random.randrange(10_000, 4_000_000)))
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


def revoked(address):
    """While streams go in both directions, the session of the two processes is cut, and the socket for callers as well.
    The streams arrive whole."""
    libc = ctypes.CDLL(None)
    for seed in range(count):
        with socket.create_connection(address) as end:
            for round in range(10):
                turn(end, round, 1000)
            late, size, sent, got, held = random.randrange(8_000_000), 12_000_000, 0, 0, False
            end.setblocking(False)
            while got < size:
                readable, writable, _ = select.select([end], [end] if sent < size and not held else [], [], 60)
                assert readable or writable, f"nothing moves at {sent} and {got}"
                try:
                    if writable:
                        sent += end.send(pattern(sent, min(random.randrange(1, 100_000), size - sent)))
                    if readable:
                        part = end.recv(random.randrange(1, 100_000))
                        assert part and part == pattern(got, len(part)), f"other bytes at {got}"
                        got += len(part)
                except BlockingIOError:
                    pass
                if late is not None and got > late:
                    late, cut = None, 0
                    for name in os.listdir("/proc/self/fd"):
                        # The library's sockets, at numbers beyond the limit.
                        if int(name) >= LIMIT and os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                            cut += libc.shutdown(int(name), 2) == 0
                    assert cut, "there was nothing to cut"
                    held = True
                if held and got == sent:
                    # Both ends rest for a moment, and learn of the cut.
                    assert select.select([end], [], [], 0.2)[0] == []
                    held = False


def listen():
    """The addresses determine which end waits for the other. Where sessions are cut, each seed has a fixed one."""
    if what != "revoked":
        return socket.create_server(("127.0.0.1", 0), backlog=4096)
    below, above = map(int, open("/proc/sys/net/ipv4/ip_local_port_range").read().split())
    for port in random.sample(range(1024, below) if int(os.environ["SEED"]) % 2 else range(above + 1, 65536), 1000):
        try:
            return socket.create_server(("127.0.0.1", port), backlog=4096)
        except OSError:
            pass
    raise AssertionError("no port is free")


listener = listen()
if what.startswith("killed"):
    killed(listener, what == "killed_server")
else:
    child = os.fork()
    if child == 0:
        listener_name = listener.getsockname()
        listener.close()
        {"many": many, "short": short, "revoked": revoked}[what](listener_name)
        print(what, flush=True)
        os._exit(0)
    serve(listener)
    assert os.waitpid(child, 0)[1] == 0
print("done", flush=True)
