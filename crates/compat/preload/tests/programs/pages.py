# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Requests the pages of COUNT numbers from ADDRESS PORT, by eight threads that each keep their connection, and checks
each answer."""
import hashlib
import http.client
import sys
import threading

address, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
right = [0] * 8


def ask(which):
    connection = http.client.HTTPConnection(address, port, timeout=30)
    for n in range(which, count, 8):
        connection.request("GET", f"/?n={n}")
        answer = connection.getresponse()
        text = answer.read()
        right[which] += text == hashlib.md5(str(n).encode()).hexdigest().encode() * (1 + n % 997)


threads = [threading.Thread(target=ask, args=(which,)) for which in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("right:", sum(right), "of", count)
