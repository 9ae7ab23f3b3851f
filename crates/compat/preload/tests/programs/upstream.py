# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Servers behind a proxy that keep their connections, and a client of the proxy.

    upstream.py HOST WEB CGI PORT         serves HTTP at WEB, FastCGI at CGI: whichever is PORT
    upstream.py HOST PORT ask THREADS N   asks each of them N times in each thread"""

import http.client, socket, struct, sys, threading

host, port, *more = sys.argv[1:]


def answer(path):
    """Returns the contents of a path, which holds their length."""
    number = int(path.rsplit("/", 1)[1])
    return (b"%s " % path.encode()) * (number % 97 * 30 + 1)


def serve(port, talk):
    listener = socket.create_server((host, port), backlog=64)
    while True:
        one, _ = listener.accept()
        threading.Thread(target=talk, args=(one,), daemon=True).start()


def whole(one, count):
    bytes = b""
    while len(bytes) < count:
        more = one.recv(count - len(bytes))
        if not more:
            raise EOFError
        bytes += more
    return bytes


def web(one):
    bytes = b""
    while True:
        while b"\r\n\r\n" not in bytes:
            more = one.recv(65536)
            if not more:
                return
            bytes += more
        head, bytes = bytes.split(b"\r\n\r\n", 1)
        body = answer(head.split()[1].decode())
        one.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


def cgi(one):
    path = None
    try:
        while True:
            _, kind, request, length, padding, _ = struct.unpack("!BBHHBB", whole(one, 8))
            content = whole(one, length + padding)[:length]
            if kind == 4:  # the parameters; one that is empty ends them
                at = 0
                while at < length:
                    lengths = []
                    for _ in range(2):
                        wide = content[at] >> 7
                        lengths.append(int.from_bytes(content[at:at + 4], "big") & 0x7FFFFFFF if wide else content[at])
                        at += 4 if wide else 1
                    name, value = content[at:at + lengths[0]], content[at + lengths[0]:at + sum(lengths)]
                    at += sum(lengths)
                    path = value.decode() if name == b"REQUEST_URI" else path
            elif kind == 5 and length == 0:  # the end of what it is given
                said = b"Content-Type: text/plain\r\n\r\n" + answer(path)
                records = [(6, said[at:at + 65000]) for at in range(0, len(said), 65000)] + [(6, b""), (3, b"\0" * 8)]
                one.sendall(b"".join(struct.pack("!BBHHBB", 1, kind, request, len(part), 0, 0) + part for kind, part in records))
    except EOFError:
        pass


def ask(counts, kind, count):
    client = http.client.HTTPConnection(host, int(port), timeout=20)
    for number in range(count):
        path = f"/{kind}/{number}"
        client.request("GET", path)
        got = client.getresponse()
        body = got.read()
        counts.append((got.status == 200 and body == answer(path), len(body)))


if more[0] == "ask":
    counts = []
    threads = [threading.Thread(target=ask, args=(counts, kind, int(more[2]))) for kind in ("web", "cgi") for _ in range(int(more[1]))]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    print("right:", sum(right for right, _ in counts), "bytes:", 2 * sum(length for _, length in counts))
else:
    here = more[1]
    serve(int(here), web if here == port else cgi)
