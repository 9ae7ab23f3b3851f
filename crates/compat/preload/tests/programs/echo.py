# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Echoes over several connections at once, by an epoll server and blocking clients: `echo.py level|edge BYTES`."""

import hashlib, random, select, socket, sys, threading

edge, size, count = sys.argv[1] == "edge", int(sys.argv[2]), 4
listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen()
address = listener.getsockname()


def server():
    ep = select.epoll()
    listener.setblocking(False)
    ep.register(listener, select.EPOLLIN)
    ends, done = {}, 0
    while done < count:
        for fd, event in ep.poll():
            if fd == listener.fileno():
                try:
                    end, _ = listener.accept()
                except BlockingIOError:
                    continue
                end.setblocking(False)
                ends[end.fileno()] = [end, bytearray(), False]
                both = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET
                ep.register(end, both if edge else select.EPOLLIN)
                continue
            state = ends[fd]
            end, held, _ = state
            if event & (select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLHUP):
                while edge or len(held) < 1000000:
                    try:
                        part = end.recv(random.choice([1, 100, 4096, 65536]))
                    except BlockingIOError:
                        break
                    if not part:
                        state[2] = True
                        break
                    held += part
            while held:
                try:
                    n = end.send(held[: random.choice([1, 1000, 100000])])
                except BlockingIOError:
                    break
                del held[:n]
            if not held and state[2]:
                ep.unregister(fd)
                end.close()
                del ends[fd]
                done += 1
            elif not edge:
                wants = 0 if len(held) >= 1000000 or state[2] else select.EPOLLIN
                ep.modify(fd, wants | (select.EPOLLOUT if held else 0))


def client(seed):
    data = random.Random(seed).randbytes(1 << 18)
    end = socket.create_connection(address)
    sent, came = hashlib.md5(), hashlib.md5()

    def send():
        n, rng = 0, random.Random(seed + 100)
        while n < size:
            k = rng.randrange(1, 60000)
            end.sendall(data[:k])
            sent.update(data[:k])
            n += k
        end.shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=send)
    sender.start()
    while part := end.recv(50000):
        came.update(part)
    sender.join()
    end.close()
    if sent.digest() == came.digest():
        whole.append(seed)


whole = []
threads = [threading.Thread(target=server)] + [threading.Thread(target=client, args=(n,)) for n in range(count)]
for one in threads:
    one.start()
for one in threads:
    one.join()
print(len(whole), "of", count)
