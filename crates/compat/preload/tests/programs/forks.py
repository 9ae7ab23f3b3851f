# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Ends that consist of several processes: the bytes that each of them sends and reads arrive once, whole and in order.

Every byte holds its sender (the high bit) and its place in what that one sent (the rest)."""

import ctypes, os, random, signal, socket, sys

SIZE = int(sys.argv[2])
random.seed(os.environ.get("SEED", "1"))


def stream(who, begin, n):
    cycle = bytes(who << 7 | at for at in range(128))
    begin %= 128
    return (cycle * (n // 128 + 2))[begin : begin + n]


def send(end, who, n, most=30000, begin=0):
    done = 0
    while done < n:
        part = stream(who, begin + done, min(n - done, random.randrange(1, most)))
        end.sendall(part)
        done += len(part)


class Check:
    """Checks the bytes of each sender, in order."""

    def __init__(self):
        self.seen = [0, 0]

    def take(self, part):
        for who in (0, 1):
            others = range(128) if who else range(128, 256)
            mine = part.translate(None, bytes(others))
            assert mine == stream(who, self.seen[who], len(mine)), f"{who} at {self.seen[who]}"
            self.seen[who] += len(mine)


def receive(end, check, n=None):
    got = 0
    while n is None or got < n:
        part = end.recv(min(100000, n - got) if n else 100000)
        if not part:
            assert n is None, f"the end after {got} of {n}"
            return
        check.take(part)
        got += len(part)


def fork(body):
    child = os.fork()
    if child == 0:
        try:
            body()
            os._exit(0)
        except BaseException as error:
            print(type(error).__name__, error, flush=True)
        os._exit(1)
    return child


def join(child, code=0):
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == code, f"a process ended with {status}"


def warm(end, first):
    """Some turns, after which both ends have found each other."""
    for _ in range(40):
        for turn in (first, not first):
            if turn:
                end.sendall(b"w" * 2000)
            else:
                left = 2000
                while left:
                    left -= len(end.recv(left))


def writers(end, peer):
    """Both write; the peer reads until both are done."""
    child = fork(lambda: send(end, 1, SIZE))
    send(end, 0, SIZE)
    join(child)
    end.close()


def apart(end, peer):
    """The same in another PID namespace, in which the parent has no number; more follows once one process is left."""
    pid = os.getpid()
    unshare()
    child = fork(lambda: (send(end, 1, SIZE), receive(end, Check(), SIZE)))
    assert os.getpid() == pid
    send(end, 0, SIZE)
    join(child)
    end.close()


def apart_peer(end):
    check = Check()
    receive(end, check, 2 * SIZE)
    assert check.seen == [SIZE, SIZE], check.seen
    send(end, 0, SIZE)
    assert end.recv(1) == b""


def unshare():
    """Puts all later children into a PID namespace of their own."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_user, new_pid = 0x10000000, 0x20000000
    if libc.unshare(new_pid) != 0 and libc.unshare(new_user | new_pid) != 0:
        sys.exit(f"unshare: {os.strerror(ctypes.get_errno())}")


def writers_peer(end):
    check = Check()
    receive(end, check)
    assert check.seen == [SIZE, SIZE], check.seen


def readers(end, peer):
    """Both read; each byte comes to one of them."""
    back, out = os.pipe()

    def read():
        total = 0
        seen = 0
        while part := end.recv(random.randrange(1, 60000)):
            assert part == stream(0, part[0], len(part))
            total += len(part)
            seen += sum(part)
        return f"{total} {seen}\n".encode()

    child = fork(lambda: os.write(out, read()))
    mine = read()
    join(child)
    theirs = os.read(back, 100)
    totals = [sum(pair) for pair in zip(*(map(int, line.split()) for line in (mine, theirs)))]
    assert totals == [SIZE, sum(stream(0, 0, SIZE))], totals


def readers_peer(end):
    send(end, 0, SIZE)


def split(end, peer):
    """One process reads, the other writes."""
    child = fork(lambda: send(end, 0, SIZE))
    check = Check()
    receive(end, check, SIZE)
    join(child)
    assert check.seen == [SIZE, 0]


def split_peer(end):
    child = fork(lambda: send(end, 0, SIZE))
    check = Check()
    receive(end, check, SIZE)
    join(child)


def bystander(end, peer):
    """A child that has the socket and does not use it, like one that saves a snapshot."""
    wake, sleep = os.pipe()

    def wait():
        os.close(sleep)
        os.read(wake, 1)

    child = fork(wait)
    send(end, 0, SIZE)
    receive(end, Check(), SIZE)
    os.close(sleep)
    join(child)
    send(end, 0, SIZE)
    receive(end, Check(), SIZE)


def bystander_peer(end):
    for _ in range(2):
        receive(end, Check(), SIZE)
        send(end, 0, SIZE)


def writer_dies(end, peer):
    """A writer is killed at any time; the bytes of the other are not affected."""

    def die():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.001, 0.05))
        send(end, 1, 1 << 40)

    child = fork(die)
    send(end, 0, SIZE)
    join(child, -signal.SIGALRM)
    end.close()


def writer_dies_peer(end):
    check = Check()
    receive(end, check)
    assert check.seen[0] == SIZE, check.seen


def reader_dies(end, peer):
    """A reader is killed at any time; the other reads on until the end."""

    def die():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.001, 0.05))
        while True:
            end.recv(10000)

    child = fork(die)
    join(child, -signal.SIGALRM)
    while part := end.recv(random.randrange(1, 60000)):
        assert part == stream(0, part[0], len(part))
    end.send(b"all")


def reader_dies_peer(end):
    send(end, 0, SIZE)
    end.shutdown(socket.SHUT_WR)
    assert end.recv(10) == b"all"


def becomes(end, peer, begin=b"go"):
    """A child executes a program without the library, with the socket as its input."""
    back, out = os.pipe()
    became, becoming = os.pipe()

    def become():
        os.dup2(end.fileno(), 0)
        os.dup2(out, 1)
        os.environ.pop("LD_PRELOAD", None)
        os.execv("/bin/cat", ["cat"])

    child = fork(become)
    os.close(out)
    os.close(becoming)
    os.read(became, 1)
    if begin:
        end.send(begin)
    end.close()
    check = Check()
    while part := os.read(back, 100000):
        check.take(part)
    os.waitpid(child, 0)
    return check.seen[0]


def becomes_at_once(end, peer):
    """The same while the peer is sending, so that bytes are in shared memory when it happens: the stream ends, and in
    order."""
    got = becomes(end, peer, None)
    assert got <= SIZE


def becomes_peer(end):
    assert end.recv(2) == b"go"
    send(end, 0, SIZE, 3000)


def becomes_at_once_peer(end):
    try:
        send(end, 0, SIZE, 3000)
    except (ConnectionResetError, BrokenPipeError):
        pass


def cannot_become(end, peer):
    """There is no such program, and the process continues."""

    def try_to():
        try:
            os.execvp("/nonexistent", ["x"])
        except FileNotFoundError:
            pass
        send(end, 1, SIZE)

    child = fork(try_to)
    join(child)
    send(end, 0, SIZE)
    end.close()


cannot_become_peer = writers_peer


def serve(keep):
    """A server that forks for each client, and keeps the client's socket or not."""
    listener = socket.create_server(("127.0.0.1", 0))

    def call():
        for _ in range(4):
            end = socket.create_connection(listener.getsockname())
            warm(end, True)
            send(end, 0, SIZE)
            receive(end, Check(), SIZE)
            end.close()

    caller = fork(call)

    def echo(end):
        warm(end, False)
        receive(end, Check(), SIZE)
        send(end, 0, SIZE)

    kept, children = [], []
    for _ in range(4):
        end, _ = listener.accept()
        children.append(fork(lambda: echo(end)))
        if keep:
            kept.append(end)
        else:
            end.close()
    for child in children:
        join(child)
    join(caller)


def pair(name):
    listener = socket.create_server(("127.0.0.1", 0))

    def peer():
        end = socket.create_connection(listener.getsockname())
        listener.close()
        warm(end, True)
        globals()[name + "_peer"](end)

    child = fork(peer)
    end, _ = listener.accept()
    listener.close()
    warm(end, False)
    got = globals()[name](end, child)
    assert got in (None, SIZE), got
    join(child)


if sys.argv[1] in ("serves", "keeps"):
    serve(sys.argv[1] == "keeps")
else:
    pair(sys.argv[1])
print("done")
