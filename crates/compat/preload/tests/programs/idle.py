# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Ways to wait for something that does not come, on connections that were joined. Prints how often each woke within a
second, and its CPU time in thousandths. The last does not sleep but polls each millisecond."""

import resource, select, threading

from ends import pair

LONG = 1.0
ends = [pair() for _ in range(20)]
ours, theirs = [a for a, _ in ends], [b for _, b in ends]
for number in range(0, 20, 2):
    # Bytes that are never read.
    theirs[number].sendall(b"left")
gone, their_gone = pair()
their_gone.close()


def used():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_nvcsw, usage.ru_utime + usage.ru_stime


def late(end, data=b"!"):
    """Sends bytes when the time is over."""
    threading.Timer(LONG, end.sendall, (data,)).start()


def receive():
    late(theirs[1])
    ours[1].recv(1)


def send():
    a, b = pair()

    def drain():
        b.setblocking(False)
        try:
            while True:
                select.select([b], [], [], 1)
                b.recv(1 << 20)
        except BlockingIOError:
            pass

    a.setblocking(False)
    try:
        while True:
            a.send(b"x" * 100000)
    except BlockingIOError:
        a.setblocking(True)
    measured.append(used())
    threading.Timer(LONG, lambda: [b.recv(1 << 20) for _ in range(3)]).start()
    a.sendall(b"y")


def poll():
    poll = select.poll()
    for end in ours[1::2]:
        poll.register(end, select.POLLIN)
    poll.poll(LONG * 1000)


def selects():
    select.select(ours[1::2], [], ours[1::2], LONG)


def epoll(edge=0, threads=1):
    epoll = select.epoll()
    for number, end in enumerate(ours):
        epoll.register(end, (select.EPOLLIN if number % 2 else 0) | edge)
    epoll.register(gone, select.EPOLLIN | select.EPOLLONESHOT)
    while epoll.poll(0.05):
        pass
    measured.append(used())
    waiters = [threading.Thread(target=epoll.poll, args=(LONG,)) for _ in range(threads)]
    for one in waiters:
        one.start()
    for one in waiters:
        one.join()


def edges():
    epoll(select.EPOLLET)


def together():
    epoll(0, 4)


def polls():
    for _ in range(round(LONG * 1000)):
        select.select(ours[1::2], [], [], 0.001)


for way in (receive, send, poll, selects, epoll, edges, together, polls):
    measured = [used()]
    way()
    wakes, cpu = (now - before for now, before in zip(used(), measured[-1]))
    print(way.__name__, wakes, round(cpu * 1000), flush=True)
