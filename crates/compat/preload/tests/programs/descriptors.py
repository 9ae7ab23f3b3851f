# SPDX-License-Identifier: Apache-2.0 OR MIT
"""A program that relies on its descriptors: on their number, and on being the only one that closes them."""

import ctypes, errno, os, resource, socket, sys

libc = ctypes.CDLL(None, use_errno=True)


def pair(listener):
    end = socket.create_connection(listener.getsockname())
    return end, listener.accept()[0]


def talk(a, b, turns=20):
    """Talks enough for the two to be joined, and then through shared memory."""
    for turn in range(turns):
        for x, y in ((a, b), (b, a)):
            data = bytes([turn % 251]) * 1000
            x.sendall(data)
            got = b""
            while len(got) < 1000:
                part = y.recv(1000 - len(got))
                assert part, "the end comes early"
                got += part
            assert got == data


def limited(limit):
    """Opens as many connections as the limit allows; all of them talk. Their number is the same as with TCP."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    child = os.fork()
    if child == 0:
        ends = []
        while True:
            end = listener.accept()[0]
            if os.fork() == 0:
                listener.close()
                while part := end.recv(1000, socket.MSG_WAITALL):
                    end.sendall(part)
                os._exit(0)
            end.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard if len(sys.argv) > 3 else limit))
    ends = []
    try:
        while True:
            end = socket.create_connection(listener.getsockname())
            ends.append(end)
            for turn in range(20):
                end.sendall(b"x" * 1000)
                assert end.recv(1000, socket.MSG_WAITALL) == b"x" * 1000
    except OSError as error:
        assert error.errno == errno.EMFILE, error
    for turn in range(20):
        for end in ends:
            end.sendall(b"x" * 1000)
            assert end.recv(1000, socket.MSG_WAITALL) == b"x" * 1000
    print(len(ends), "connections")
    os.kill(child, 9)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == limit


def closed(how):
    """Closes every descriptor but its own, before and after it was joined."""
    listener = socket.create_server(("127.0.0.1", 0))
    hard = 20000

    def close(keep):
        kept = sorted(keep)
        if how == "each":
            for fd in range(3, hard):
                if fd not in keep:
                    libc.close(fd)
        elif how == "range":
            for low, high in zip([2] + kept, kept + [hard]):
                if low + 1 <= high - 1:
                    assert libc.close_range(low + 1, high - 1, 0) == 0
        elif how == "from":
            libc.closefrom(max(kept) + 1)
        elif how == "listed":
            for name in os.listdir("/proc/self/fd"):
                if int(name) > 2 and int(name) not in keep:
                    libc.close(int(name))
        elif how == "onto":
            null = os.open("/dev/null", os.O_RDONLY)
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            for fd in range(3, hard):
                if fd not in keep and fd != null and libc.dup2(null, fd) == fd:
                    libc.close(fd)
            os.close(null)

    close({listener.fileno()})
    a, b = pair(listener)
    talk(a, b)
    keep = {listener.fileno(), a.fileno(), b.fileno()}
    close(keep)
    talk(a, b, 500)
    c, d = pair(listener)
    talk(c, d, 500)
    a.close()
    assert b.recv(1) == b""
    print("whole")


{"limited": lambda: limited(int(sys.argv[2])), "closed": lambda: closed(sys.argv[2])}[sys.argv[1]]()
