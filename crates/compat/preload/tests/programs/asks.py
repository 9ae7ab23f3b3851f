# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Asks and answers, in words that can be guessed: `asks.py serve HOST PORT` or `asks.py ask HOST PORT OWN FROM COUNT
WARM FILE`. The asking side uses the port FROM of its address OWN, makes the file WARM after COUNT answers, and
continues until FILE exists."""

import os, socket, sys, time

host, port = sys.argv[2], int(sys.argv[3])
QUESTION, ANSWER = b"what is the state of things?\n", b"all of it is well, as it was.\n"


def line(end):
    got = b""
    while not got.endswith(b"\n"):
        part = end.recv(4096)
        if not part:
            return got
        got += part
    return got


if sys.argv[1] == "serve":
    listener = socket.create_server((host, port))
    end, _ = listener.accept()
    while line(end):
        end.sendall(ANSWER)
else:
    end = socket.socket()
    end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    end.bind((sys.argv[4], int(sys.argv[5])))
    end.connect((host, port))
    asked = 0
    while asked < int(sys.argv[6]) or not os.path.exists(sys.argv[8]):
        end.sendall(QUESTION)
        said = line(end)
        if said != ANSWER:
            print("forged:", said)
            sys.exit(1)
        asked += 1
        if asked == int(sys.argv[6]):
            open(sys.argv[7], "w").close()
        time.sleep(0.002)
    print("asked")
