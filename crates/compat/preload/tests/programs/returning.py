# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Streams without end, in both directions at once, with each byte checked, until a file exists.

serve ADDRESS PORT WAY COUNT STOP | connect ADDRESS PORT WAY COUNT STOP

Prints for each connection how many bytes it sent and received."""

import os
import random
import select
import socket
import sys
import threading
import time

PATTERN = random.Random(7).randbytes(1_000_003)
PIECE = 16_000


class Stream:
    def __init__(self, sock):
        self.sock, self.sent, self.received = sock, 0, 0
        self.shut = self.ended = False
        # Without a time limit, so that a waiting call waits in the call itself.
        sock.settimeout(None)

    def send(self, most=PIECE):
        """Returns whether there was room."""
        at = self.sent % len(PATTERN)
        try:
            n = self.sock.send(PATTERN[at : at + most])
        except BlockingIOError:
            return False
        self.sent += n
        return n == most

    def receive(self, most=PIECE):
        """Returns whether there was something."""
        try:
            data = self.sock.recv(most)
        except BlockingIOError:
            return False
        at = self.received % len(PATTERN)
        expected = PATTERN[at : at + len(data)]
        expected += PATTERN[: len(data) - len(expected)]
        if data != expected:
            sys.exit(f"other bytes after {self.received}")
        self.received += len(data)
        self.ended = not data
        return bool(data)

    def shut_down(self):
        if not self.shut:
            self.shut = True
            self.sock.shutdown(socket.SHUT_WR)

    def say(self):
        print(f"{self.sent} {self.received}", flush=True)


def stopped():
    return os.path.exists(STOP)


def handle(stream, events, edge):
    """Handles an event. Moves little, so that it does not take all CPU time."""
    if events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLRDHUP | select.EPOLLERR):
        while stream.receive() and edge:
            pass
    if not stream.shut and events & select.EPOLLOUT:
        if stopped():
            stream.shut_down()
        for _ in range(4):
            if stream.shut or not stream.send():
                break


def wanted(stream):
    return select.EPOLLIN | (0 if stream.shut else select.EPOLLOUT)


def by_poll(streams):
    by_number = {stream.sock.fileno(): stream for stream in streams}
    while by_number:
        poll = select.poll()
        for number, stream in by_number.items():
            poll.register(number, wanted(stream))
        for number, events in poll.poll(30_000) or sys.exit("nothing in 30 s"):
            handle(by_number[number], events, False)
            if by_number[number].ended:
                by_number[number].shut_down()
        by_number = {number: stream for number, stream in by_number.items() if not stream.ended}
        time.sleep(0.001)


def by_epoll(streams, flag):
    """One set, with each connection in it once, for levels, edges or one event."""
    epoll = select.epoll()
    by_number = {stream.sock.fileno(): stream for stream in streams}
    shut = set()
    for number, stream in by_number.items():
        epoll.register(number, wanted(stream) | flag)
    while by_number:
        for number, events in epoll.poll(30) or sys.exit("nothing in 30 s"):
            stream = by_number[number]
            if flag & select.EPOLLET and events & select.EPOLLOUT and not stopped():
                # Until there is no room, because only then there is another edge.
                while stream.send() and stream.receive():
                    pass
                while stream.receive() or stream.send():
                    pass
            handle(stream, events, flag & select.EPOLLET)
            if stream.ended:
                stream.shut_down()
                epoll.unregister(number)
                del by_number[number]
            elif flag & select.EPOLLONESHOT or stream.shut and number not in shut:
                shut |= {number} if stream.shut else set()
                epoll.modify(number, wanted(stream) | flag)
        time.sleep(0.001)


def by_pool(streams):
    """Three threads on one set; each event is for one of them."""
    epoll = select.epoll()
    by_number = {stream.sock.fileno(): stream for stream in streams}
    busy = {number: threading.Lock() for number in by_number}
    for number, stream in by_number.items():
        epoll.register(number, wanted(stream) | select.EPOLLONESHOT)

    def work():
        while not all(stream.ended for stream in streams):
            for number, events in epoll.poll(0.2):
                stream = by_number[number]
                if not busy[number].acquire(blocking=False):
                    print("one event was told to two threads", flush=True)
                    os._exit(1)
                handle(stream, events, False)
                time.sleep(0.001)
                busy[number].release()
                if stream.ended:
                    stream.shut_down()
                else:
                    epoll.modify(number, wanted(stream) | select.EPOLLONESHOT)

    run([work] * 3)


def by_turns(streams, serves):
    """Each connection has a thread, which asks and waits for the answer."""

    def work(stream):
        chance = random.Random(stream.sock.fileno())
        while True:
            if serves:
                if not stream.receive(1 << 16):
                    break
                if stream.received > stream.sent:
                    stream.sock.sendall(b"")
                while stream.sent < stream.received:
                    stream.send(min(PIECE, stream.received - stream.sent))
            elif stopped():
                break
            else:
                goal = stream.sent + chance.randrange(1, 40_000)
                while stream.sent < goal:
                    stream.send(min(PIECE, goal - stream.sent))
                while stream.received < goal:
                    stream.receive(goal - stream.received) or sys.exit("it ended early")
                time.sleep(0.001)
        stream.shut_down()

    run([lambda stream=stream: work(stream) for stream in streams])


def by_two(streams):
    """Each connection has a thread that sends and one that receives."""

    def send(stream):
        while not stopped():
            stream.send()
            time.sleep(0.002)
        stream.shut_down()

    def receive(stream):
        while stream.receive():
            pass

    run([lambda stream=stream, do=do: do(stream) for stream in streams for do in (send, receive)])


def run(all_work):
    def guarded(work):
        try:
            work()
        except BaseException as error:
            print(f"{error!r}", file=sys.stderr, flush=True)
            os._exit(1)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in all_work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def carry(streams, way, serves):
    if way in ("poll", "level", "edge", "once", "pool"):
        for stream in streams:
            stream.sock.setblocking(False)
    match way:
        case "poll":
            by_poll(streams)
        case "level":
            by_epoll(streams, 0)
        case "edge":
            by_epoll(streams, select.EPOLLET)
        case "once":
            by_epoll(streams, select.EPOLLONESHOT)
        case "pool":
            by_pool(streams)
        case "turns":
            by_turns(streams, serves)
        case "two":
            by_two(streams)
    for stream in streams:
        stream.say()


def main():
    global STOP
    role, address, port, way, count, STOP = sys.argv[1:]
    count, serves = int(count), role == "serve"
    if not serves:
        streams = [Stream(socket.create_connection((address, int(port)))) for _ in range(count)]
        carry(streams, "level" if way == "fork" else way, serves)
        return
    listener = socket.create_server((address, int(port)))
    sockets = [listener.accept()[0] for _ in range(count)]
    if way != "fork":
        carry([Stream(sock) for sock in sockets], way, serves)
        return
    for sock in sockets:
        if os.fork() == 0:
            for other in sockets:
                if other is not sock:
                    other.close()
            carry([Stream(sock)], "level", serves)
            os._exit(0)
    for sock in sockets:
        sock.close()
    for _ in sockets:
        if os.waitstatus_to_exitcode(os.wait()[1]) != 0:
            sys.exit("a child failed")


main()
