#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Writes the golden vectors beside this file.

A second, independent implementation of the encodings of spec/, kept as plain as possible so that it can be checked by eye
against the tables there. It shares nothing with the Rust code; the Rust tests read what it wrote. Numbers of 64 bits
are hexadecimal strings, since not every JSON reader keeps them.
"""

import json
import os
import struct

MASK = (1 << 64) - 1
MAGIC = b"TOMBOLO\0"


def h(number):
    return f"0x{number & MASK:x}"


def write(name, value):
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), name)
    with open(path, "w") as file:
        file.write(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


# 1-memory.md ---------------------------------------------------------------------------------------------------------


def header(magic=MAGIC, version=1, generation=0, segment_len=0x2000, data_offset=0x1000, capacity=0x1000, start=0,
           features=0, epoch=0x0123456789ABCDEF, changes=()):
    """M-1 to M-4; `changes` are (offset, byte) to spoil it with."""
    raw = bytearray(magic + struct.pack("<HHHHQQQQQQ", version, 0, generation, 0, segment_len, data_offset, capacity,
                                        start, features, epoch) + bytes(64))
    assert len(raw) == 0x80
    for offset, byte in changes:
        raw[offset] = byte
    return bytes(raw)


def header_vector(name, clause=None, memory=None, **fields):
    raw = header(**fields)
    vector = {"name": name, "memory": h(memory if memory is not None else fields.get("segment_len", 0x2000)),
              "hex": raw.hex()}
    if clause:
        vector["refused"] = clause
    else:
        names = "generation segment_len data_offset capacity start features epoch".split()
        values = [struct.unpack_from("<H", raw, 0x0C)[0]] + list(struct.unpack_from("<6Q", raw, 0x10))
        vector["fields"] = {name: h(value) for name, value in zip(names, values)}
    return vector


def headers():
    big = dict(segment_len=0x1000 + (1 << 30), capacity=1 << 30)
    return [
        header_vector("smallest ring"),
        header_vector("largest ring", **big),
        header_vector("every field different", generation=0xBEEF, segment_len=0x12000, data_offset=0x2000,
                      capacity=0x10000, start=0xFFFFFFFFFFFFFFF8, features=0x7, epoch=0x8877665544332211),
        header_vector("features of another time are let through", features=0xFFFFFFFFFFFFFFFF),
        header_vector("start inside a word, as a stream may have", start=13),
        header_vector("magic in capitals and small letters", "M-1", magic=b"Tombolo\0"),
        header_vector("magic without its zero", "M-1", magic=b"TOMBOLO1"),
        header_vector("nothing at all", "M-1", magic=bytes(8), version=0),
        header_vector("version 0", "M-1", version=0),
        header_vector("version 2", "M-1", version=2),
        header_vector("version in the wrong byte order", "M-1", version=0x100),
        header_vector("reserved byte 0x0a", "M-3", changes=[(0x0A, 1)]),
        header_vector("reserved byte 0x0b", "M-3", changes=[(0x0B, 0x80)]),
        header_vector("reserved byte 0x0e", "M-3", changes=[(0x0E, 1)]),
        header_vector("reserved byte 0x0f", "M-3", changes=[(0x0F, 1)]),
        header_vector("reserved byte 0x40", "M-3", changes=[(0x40, 1)]),
        header_vector("reserved byte 0x7f", "M-3", changes=[(0x7F, 1)]),
        header_vector("reserved bytes before the length", "M-3", memory=0x3000, changes=[(0x40, 1)]),
        header_vector("length smaller than the memory", "M-2", memory=0x3000),
        header_vector("length larger than the memory", "M-2", memory=0x1000),
        header_vector("capacity 0", "M-4", capacity=0, data_offset=0x2000, segment_len=0x2000),
        header_vector("capacity below a page", "M-4", capacity=0x800, data_offset=0x2000, segment_len=0x2800),
        header_vector("capacity no power of two", "M-4", capacity=0x3000, segment_len=0x4000),
        header_vector("capacity beyond 1 GiB", "M-4", capacity=1 << 31, segment_len=0x1000 + (1 << 31)),
        header_vector("capacity 2^63", "M-4", capacity=1 << 63),
        header_vector("data offset 0", "M-4", data_offset=0),
        header_vector("data offset inside a page", "M-4", data_offset=0x1008),
        header_vector("data end before the segment", "M-4", capacity=0x1000, segment_len=0x3000),
        header_vector("data end behind the segment", "M-4", capacity=0x2000),
        header_vector("data offset and capacity overflow", "M-4", data_offset=0xFFFFFFFFFFFFF000),
    ]


def word_offsets():
    """M-5."""
    return {"tail": h(0x080), "head": h(0x100), "want_data": h(0x180), "reader_state": h(0x188), "want_space": h(0x200),
            "writer_state": h(0x208), "cpu": h(0x280), "reserved": h(0x300),
            "writer_counters": h(0xE00), "ring_growth": h(0xE48), "reader_counters": h(0xE80), "peer_epoch": h(0xF00), "smallest data_offset": h(0x1000)}


# 3-channel.md --------------------------------------------------------------------------------------------------------


def message(kind, detail=0, offered=0, required=0, epoch=0, map_limit=0, rest=b"", magic=MAGIC, versions=(1, 1),
            reserved=bytes(16)):
    """C-2."""
    return magic + struct.pack("<HHHHQQQQ", kind, *versions, detail, offered, required, epoch, map_limit) + reserved + rest


def messages():
    greeting = dict(offered=0x7, required=0x1, epoch=0x1122334455667788, map_limit=1 << 30)
    said = {"version_min": h(1), "version_max": h(1), **{name: h(value) for name, value in greeting.items()}}

    def good(name, raw, **fields):
        return {"name": name, "hex": raw.hex(), **fields}

    def bad(name, raw, clause="C-2"):
        return {"name": name, "hex": raw.hex(), "refused": clause}

    hello = message(1, **greeting)
    return [
        good("hello", hello, hello=said),
        good("welcome", message(2, **greeting), welcome=said),
        good("hello of an end that speaks versions 1 to 3", message(1, versions=(1, 3), **greeting),
             hello={**said, "version_max": h(3)}),
        good("hello of another time", message(1, versions=(7, 9), **greeting),
             hello={**said, "version_min": h(7), "version_max": h(9)}),
        *[good(f"refusal {code}", message(3, detail=code, rest="weil: né".encode()),
               refuse={"code": code, "reason": "weil: né"}) for code in range(1, 7)],
        good("refusal without a reason", message(3, detail=6), refuse={"code": 6, "reason": ""}),
        good("refusal with the longest reason", message(3, detail=5, rest=b"x" * 160),
             refuse={"code": 5, "reason": "x" * 160}),
        good("ring", message(4, detail=0xFFFF, epoch=9), ring={"generation": h(0xFFFF), "epoch": h(9)}),
        bad("nothing", b""),
        bad("a byte short", hello[:-1]),
        bad("a byte too long", hello + b"\0"),
        bad("another magic", message(1, magic=b"TOMBOLA\0", **greeting)),
        bad("kind 0", message(0)),
        bad("kind 5", message(5)),
        bad("reserved byte 0x30", message(1, reserved=b"\1" + bytes(15), **greeting)),
        bad("reserved byte 0x3f", message(4, detail=1, reserved=bytes(15) + b"\1")),
        bad("ring with something behind it", message(4, detail=1, epoch=9, rest=b"x")),
        bad("greeting with a detail", message(1, detail=1, **greeting), "C-3"),
        bad("reason too long", message(3, detail=1, rest=b"x" * 161), "C-5"),
        bad("reason that is no text", message(3, detail=1, rest=b"\xff"), "C-5"),
    ] + [{"name": f"refusal {code}, which nobody knows", "hex": message(3, detail=code).hex(), "one_way": True,
          "refuse": {"code": 0, "reason": ""}} for code in (0, 7, 0xFFFF)]


# 2-ring.md -----------------------------------------------------------------------------------------------------------


def records():
    spans = {0: 8, 1: 16, 7: 16, 8: 16, 9: 24, 16: 24, 17: 32, 4088: 4096, 0xFFFFFFFF: 0x100000008}
    return [{"hex": struct.pack("<IHH", length, 0, 0).hex(), "len": h(length), "span": h(span)}
            for length, span in spans.items()] + [
        {"hex": struct.pack("<IHH", 5, 1, 0).hex(), "refused": "R-20"},
        {"hex": struct.pack("<IHH", 5, 0x8000, 0).hex(), "refused": "R-20"},
        {"hex": struct.pack("<IHH", 5, 0, 1).hex(), "refused": "R-20"},
        {"hex": struct.pack("<IHH", 0, 0, 0x8000).hex(), "refused": "R-20"},
    ]


def wait_words():
    """R-10 and R-11. What is reached is written down here, not computed."""
    top = 1 << 63
    armed = {0: 1, 1: 3, 4096: 0x2001, (1 << 31) - 1: 0xFFFFFFFF, 1 << 32: 0x200000001, top - 1: MASK, top: 1, MASK: MASK}
    reached = [
        (0, 0, False), (0, 5, False), (0, MASK, False),
        (1, 0, True), (1, 1, True), (1, MASK, False),
        (0x2001, 4095, False), (0x2001, 4096, True), (0x2001, 4097, True), (0x2000, 4097, False),
        (0x2001, 4096 + (1 << 62) - 1, True), (0x2001, 4096 + (1 << 62), False),
        (MASK, top - 2, False), (MASK, top - 1, True), (MASK, top, True), (MASK, top + 7, True),
        (1, top - 1, False), (1, top, True), (MASK, MASK, True), (MASK, 0, True), (MASK, MASK - 1, False),
    ]
    return {
        "armed": [{"target": h(target), "word": h(word)} for target, word in armed.items()],
        "reached": [{"word": h(word), "position": h(position), "reached": yes} for word, position, yes in reached],
        "cpu": [{"cpu": cpu, "word": h(cpu + 1)} for cpu in (0, 1, 63, 4095)],
    }


def state_words():
    good = [(0, 0, 0, 0), (1, 0, 0, 1), (2, 0, 0, 2), (3, 0, 0, 3), (1, 1, 0, 0x10001), (1, 1, 1, 0x100010001),
            (2, 0xFFFF, 0xFFFE, 0xFFFEFFFF0002), (1, 0, 0xFFFF, 0xFFFF00000001)]
    bad = [4, 0xFF, 0x101, 0x8001, 0x0001000000000001, 0x8000000000000001, MASK]
    follows = {0: [0, 1, 2, 3], 1: [1, 2, 3], 2: [2], 3: [3]}
    return {
        "words": [{"phase": phase, "ready": ready, "current": current, "word": h(word)}
                  for phase, ready, current, word in good],
        "refused": [h(word) for word in bad],
        "phases": [{"from": old, "to": new, "allowed": new in follows[old]} for old in range(4) for new in range(4)],
    }


def trace(name, messages, start, steps):
    """Steps through one pipe of 4096 bytes; each with the words and bytes that must stand in memory after it."""
    return {"name": name, "messages": messages, "capacity": h(4096), "start": h(start), "steps": steps}


def step(do, data=b"", rings=False, memory=(), **words):
    """`words` are those of the pipe; `memory` are (offset in the data, bytes)."""
    return {"do": do, "hex": data.hex(), "rings": rings, "words": {name: h(value) for name, value in words.items()},
            "data": [{"offset": h(offset), "hex": raw.hex()} for offset, raw in memory]}


def traces():
    ten, wrap = b"0123456789", (1 << 64) - 6
    return [
        trace("a stream across the wrap of positions and of the ring", False, wrap, [
            step("begin", tail=wrap, head=wrap, want_data=0, want_space=0, writer_state=1, reader_state=1),
            step("write", ten, tail=4, head=wrap, memory=[(4090, b"012345"), (0, b"6789")]),
            step("read", ten[:3], tail=4, head=wrap),
            step("read", ten[3:], tail=4, head=wrap),
            # An empty look hands back all.
            step("read", b"", tail=4, head=4),
            # The reader sleeps for 5 bytes: the target is 9, the word 2 * 9 + 1.
            step("arm reader 5", want_data=19, head=4),
            step("write", b"abcd", tail=8, want_data=19, memory=[(4, b"abcd")]),
            step("write", b"e", rings=True, tail=9, memory=[(8, b"e")]),
            step("write", b"f", tail=10, memory=[(9, b"f")]),
            step("read", b"abcdef", tail=10, head=4),
            step("close writer", rings=True, tail=10, writer_state=2),
            step("end", head=4),
        ]),
        trace("a writer that sleeps for space", False, 0, [
            step("write", bytes(range(256)) * 16, tail=4096, head=0, memory=[(0, bytes(range(256)) * 16)]),
            # It asks for an eighth: the head must reach 512.
            step("arm writer 1", want_space=1025),
            step("read", bytes(range(256)) + bytes(range(255)), head=0),
            step("read", b"\xff", rings=True, head=512),
            step("write", b"new", tail=4099, memory=[(0, b"new"), (3, bytes(range(3, 256)))]),
            step("close reader", rings=True, reader_state=2),
        ]),
        trace("records across the end of the ring", True, 4072, [
            step("write", b"", tail=4080, memory=[(4072, bytes(8))]),
            # Nine bytes of payload: a header of 8 at 4080, eight bytes up to the end, one at the beginning.
            step("write", b"ninebytes", tail=4104, memory=[(4080, b"\x09" + bytes(7) + b"ninebyte"), (0, b"s")]),
            step("read", b"", head=4072),
            step("read", b"ninebytes", head=4072),
            # Nothing there: the look hands back what was read.
            step("none", head=4104),
            step("write", b"x" * 4088, tail=8200, memory=[(8, struct.pack("<Q", 4088) + b"x" * 4080), (0, b"x" * 8)]),
            step("read", b"x" * 4088, head=8200),
            step("abort writer", rings=True, writer_state=3),
            step("end"),
        ]),
    ]


# 7-broker.md ---------------------------------------------------------------------------------------------------------


def text(words):
    return struct.pack("<H", len(words.encode())) + words.encode()


def said(kind, body=b"", serial=0, magic=b"TMBK", reserved=0, length=None):
    """B-1."""
    return magic + struct.pack("<HHII", kind, len(body) if length is None else length, serial, reserved) + body


def broker_messages():
    """B-1, B-2. `path` is where the message came from; `shown` names what it says."""
    boot = bytes(range(16))
    hello = struct.pack("<HHQ", 1, 1, 0x1122334455667788) + boot + text("web-1")
    link = (struct.pack("<II", 7, 3) + text("db") + text("04.0") + text("1c.3/00.0")
            + struct.pack("<QHHBH", 1 << 20, 5, 2, 1, 1))
    part = struct.pack("<QQ", 0x10000, 0x2000)

    def good(path, name, raw):
        return {"path": path, "shown": name, "hex": raw.hex()}

    def bad(path, why, raw, clause):
        return {"path": path, "why": why, "hex": raw.hex(), "refused": clause}

    return [
        good("host", "Hello", said(1, hello)),
        good("link", "Hello", said(1, hello)),
        good("socket", "Hello", said(1, hello)),
        good("host", "Link", said(2, link)),
        good("host", "Allow", said(3, struct.pack("<IB", 7, 2) + text("sql-*"))),
        good("host", "Unlink", said(4, struct.pack("<II", 7, 3))),
        good("host", "Released", said(5, struct.pack("<II", 7, 3))),
        good("host", "Life", said(6, struct.pack("<IIB", 7, 3, 2))),
        good("host", "Bell", said(7, struct.pack("<IH", 7, 0xFFFF))),
        good("host", "Storm", said(8, struct.pack("<I", 7))),
        good("host", "You", said(9, text("web-1"))),
        good("host", "Number", said(10, text("web-1") + struct.pack("<H", 7))),
        good("host", "Usage", said(11, struct.pack("<IIHQ", 7, 3, 2, 1 << 21))),
        good("host", "Leave", said(12, struct.pack("<III", 7, 3, 1000))),
        good("socket", "Leave", said(12, struct.pack("<III", 7, 3, 1000))),
        good("host", "Left", said(13, struct.pack("<II", 7, 3))),
        good("link", "Connect", said(16, text("web-1") + text("sql-main") + part + struct.pack("<H", 256), 9)),
        good("link", "Accept", said(17, part, 9)),
        good("link", "Refuse", said(18, struct.pack("<H", 6) + text("nein, tut uns leid: ä"), 9)),
        good("link", "Close", said(19, serial=9)),
        good("link", "Calls", said(20, struct.pack("<H", 2))),
        good("link", "Call", said(21, part + struct.pack("<QQHB", 0x4000, 0x3000, 256, 2), 9)),
        good("socket", "Listen", said(32, text("sql-main"), 1)),
        good("socket", "AddLink", said(33, text("a") + text("b") + struct.pack("<Q", 0), 2)),
        good("socket", "RemoveLink", said(34, text("a") + text("b"), 3)),
        good("socket", "List", said(35, b"\x01", 4)),
        good("socket", "Snippet", said(36, b"\x01" + text("a"), 5)),
        good("socket", "LinkRow", said(37, struct.pack("<II", 7, 3) + text("a") + text("b")
                                       + struct.pack("<QBQ", 1 << 20, 2, 1 << 21) + text(""), 4)),
        good("socket", "DomainRow", said(38, text("a") + struct.pack("<BHHQQ", 1, 2, 28, 1 << 21, 1 << 28)
                                         + text("note"), 4)),
        good("socket", "Line", said(39, text("-device x"), 5)),
        good("socket", "Done", said(40, serial=5)),
        good("socket", "Who", said(41, struct.pack("<H", 7), 6)),
        good("socket", "EndRow", said(42, struct.pack("<I", 7) + text("a") + struct.pack("<BBHHHQI", 3, 2, 5, 3, 2, 1 << 21, 9), 4)),
        good("socket", "Look", said(43, struct.pack("<BQ", 1, 5), 7)),
        good("socket", "CallRow", said(44, struct.pack("<QII", 7 << 32 | 3, 7, 2) + text("db") + b"\x02" + text("sql")
                                       + struct.pack("<BBIIQQQI", 2, 3, 99, 1000, 1500, 1 << 21, 1 << 20, 0xffffffff)
                                       + struct.pack("<44Q", *range(44)) + bytes(8 * 44), 7)),
        good("socket", "ListenerRow", said(45, struct.pack("<Q", 6) + text("sql") + struct.pack("<II", 99, 1000), 7)),
        good("socket", "Enter", said(46, text("alice"), 8)),
        good("host", "Addresses", said(15, struct.pack("<IH", 7, 2) + bytes(10) + b"\xff\xff\x0a\0\0\x02" + bytes(range(16)))),
        good("link", "Seek", said(24, struct.pack("<I", 0xdecafbad), 9)),
        good("link", "Found", said(25, text("db") + text("sockets-0123456789abcdef"), 9)),
        good("link", "Nobody", said(26, b"", 9)),
        good("socket", "Locate", said(50, bytes(range(16)), 2)),
        good("socket", "Near", said(51, b"\x02", 2)),
        good("socket", "Claim", said(52, struct.pack("<I", 0xdecafbad))),
        good("socket", "Unclaim", said(53, struct.pack("<I", 0xdecafbad))),
        good("socket", "Find", said(54, struct.pack("<I", 0xdecafbad) + bytes(range(16)), 3)),
        bad("host", "more addresses than a message may have", said(15, struct.pack("<IH", 0, 61) + bytes(16 * 61)), "B-2"),
        bad("host", "fewer addresses than it says", said(15, struct.pack("<IH", 0, 2) + bytes(16)), "B-2"),
        bad("socket", "a guest's addresses from a program", said(15, struct.pack("<IH", 0, 0)), "B-1"),
        good("socket", "Prepare", said(60, text("a"), 9)),
        good("socket", "CancelPrepare", said(61, text("a"), 9)),
        good("host", "Nets", said(27, struct.pack("<H", 2))),
        good("socket", "Net", said(28, struct.pack("<Q", 1) + text("lan-db") + text("db") + text("net.lan-web") + struct.pack("<BH", 2, 9000)
            + bytes(10) + b"\xff\xff\x0a\x09\0\x01" + struct.pack("<B", 120) + bytes(10) + b"\xff\xff\x0a\x09\0\x02"
            + text("lan") + b"\x02\0\0\0\0\x01\x02\0\0\0\0\x02", 7)),
        bad("link", "an interface from a peer", said(27, struct.pack("<H", 0)), "B-1"),
        bad("host", "an end that neither listens nor connects", said(28, struct.pack("<Q", 1) + text("tmb0") + text("db") + text("net.tmb0")
            + struct.pack("<BH", 3, 0) + bytes(33)), "B-2"),
        good("socket", "PreparedRow", said(62, text("a") + struct.pack("<HII", 2, 1, 681) + text("note"), 9)),
        bad("host", "a machine that a guest makes ready", said(60, text("a"), 9), "B-1"),
        bad("host", "another magic", said(8, struct.pack("<I", 7), magic=b"TMBL"), "B-1"),
        bad("host", "reserved field", said(8, struct.pack("<I", 7), reserved=1), "B-1"),
        bad("host", "longer than it says", said(8, struct.pack("<I", 7), length=3), "B-1"),
        bad("host", "shorter than it says", said(8, struct.pack("<I", 7), length=5), "B-1"),
        bad("host", "unknown kind", said(30, struct.pack("<I", 7)), "B-1"),
        bad("host", "a kind of another path", said(33, text("a") + text("b") + struct.pack("<Q", 0)), "B-1"),
        bad("link", "a kind of another path", said(2, link), "B-1"),
        bad("link", "a name that the host alone gives", said(9, text("web-1")), "B-1"),
        bad("socket", "a kind of another path", said(4, struct.pack("<II", 7, 3)), "B-1"),
        bad("host", "head cut off", said(40)[:15], "B-1"),
        bad("socket", "beyond 1024 bytes", said(39, text("x" * 1007)), "B-1"),
        bad("socket", "line beyond 900 bytes", said(39, text("x" * 901)), "B-2"),
        bad("host", "body with something behind it", said(8, struct.pack("<IB", 7, 0)), "B-2"),
        bad("host", "body cut off", said(8, struct.pack("<H", 7)), "B-2"),
        bad("host", "no such life", said(6, struct.pack("<IIB", 7, 3, 4)), "B-2"),
        bad("host", "no such way", said(3, struct.pack("<IB", 7, 0) + text("*")), "B-2"),
        bad("host", "place of three steps", said(2, link.replace(text("1c.3/00.0"), text("1c.3/00.0/00.0"))), "B-2"),
        bad("link", "no such side", said(21, part + part + struct.pack("<HB", 256, 0), 9), "B-2"),
        bad("socket", "a call that brokers tell each other", said(20, struct.pack("<H", 2)), "B-1"),
        bad("socket", "name of nothing", said(32, text(""), 1), "B-2"),
        bad("socket", "name with a slash", said(32, text("a/b"), 1), "B-2"),
        bad("socket", "name of 65 letters", said(32, text("n" * 65), 1), "B-2"),
        bad("socket", "text longer than the body", said(32, struct.pack("<H", 9) + b"abc", 1), "B-2"),
        bad("link", "reason that is not UTF-8", said(18, struct.pack("<HH", 6, 1) + b"\xff", 9), "B-2"),
    ]


# 9-net.md ------------------------------------------------------------------------------------------------------------


def net_hello(magic=b"TBNET\0\0\0", versions=(1, 1), features=0x1F, mtu=1500, frame=65553, mac="020000000001", changes=()):
    """N-2; `changes` are (offset, byte) to spoil it with."""
    raw = bytearray(magic + struct.pack("<HHIQII", *versions, 0, features, mtu, frame) + bytes.fromhex(mac) + bytes(26))
    assert len(raw) == 64
    for offset, byte in changes:
        raw[offset] = byte
    return bytes(raw)


def net_hellos():
    """N-2 to N-6. One with `one_way` is read, never written."""
    def good(name, features=0x1F, mtu=1500, frame=65553, mac="020000000001", sent=None, **fields):
        raw = net_hello(features=features if sent is None else sent, mtu=mtu, frame=frame, mac=mac, **fields)
        vector = {"name": name, "hex": raw.hex(), "features": h(features), "mtu": h(mtu), "frame": h(frame), "mac": mac}
        return vector | ({"one_way": True} if sent is not None or fields else {})

    def bad(name, clause, cut=None, more=b"", **fields):
        return {"name": name, "hex": (net_hello(**fields)[:cut] + more).hex(), "refused": clause}

    return [
        good("all features"),
        good("plain frames of the smallest MTU", features=0, mtu=68, frame=86),
        good("the largest MTU", features=0x01, mtu=65535, frame=65553, mac="fe5400aabbcc"),
        good("versions 1 to 3", versions=(1, 3)),
        good("versions 0 to 1", versions=(0, 1)),
        good("features that nobody knows", sent=0xFFFFFFFFFFFFFFFF),
        good("segments without checksums", features=0, sent=0x1E),
        good("frames of four gigabytes", frame=0xFFFFFFFF, sent=0x1F),
        bad("nothing", "N-2", cut=0),
        bad("a byte short", "N-2", cut=63),
        bad("a byte too long", "N-2", more=b"\0"),
        bad("another magic", "N-2", magic=b"TBNET\0\0\1"),
        bad("a hello of a vchan", "N-2", magic=b"TbVchan\1"),
        bad("reserved byte 0x0c", "N-2", changes=[(0x0C, 1)]),
        bad("reserved byte 0x0f", "N-2", changes=[(0x0F, 1)]),
        bad("reserved byte 0x26", "N-2", changes=[(0x26, 1)]),
        bad("reserved byte 0x3f", "N-2", changes=[(0x3F, 0x80)]),
        bad("version 2 alone", "N-3", versions=(2, 2)),
        bad("versions the wrong way round", "N-3", versions=(2, 1)),
        bad("version in the wrong byte order", "N-3", versions=(0x100, 0x100)),
        bad("MTU 67", "N-5", mtu=67),
        bad("MTU 65536", "N-5", mtu=65536, frame=70000),
        bad("a longest frame of 100", "N-5", frame=100),
        bad("a longest frame without room for a tag", "N-5", frame=1517),
        bad("nobody's address", "N-6", mac="000000000000"),
        bad("the address of several", "N-6", mac="333300000001"),
        bad("everybody's address", "N-6", mac="ffffffffffff"),
    ]


def net_frames():
    """N-4, N-7, N-8: the first 26 bytes of messages to an end that takes `features` and frames of 65,553 bytes, from a peer
    whose address is 02:00:00:00:00:02; `len` is the message's. `on` is the header that goes on."""
    source, kind = "020000000002", "0800"

    def message(flags=0, segments=0, heads=0, payload=0, start=0, offset=0, last=0, frame=100, features=0x1F, mac=source):
        head = struct.pack("<BBHHHHH", flags, segments, heads, payload, start, offset, last)
        raw = head + bytes.fromhex("020000000001" + mac + kind)
        return {"hex": raw.hex(), "len": h(12 + frame), "features": h(features)}, head

    def good(name, on=None, **fields):
        vector, head = message(**fields)
        return {"name": name, **vector, "on": (head if on is None else struct.pack("<BBHHHHH", *on)).hex()}

    def bad(name, why, **fields):
        return {"name": name, **message(**fields)[0], "dropped": why}

    tcp = dict(flags=1, segments=1, heads=66, payload=1448, start=34, offset=16, frame=9000)
    return [
        good("the shortest frame", frame=14, features=0),
        good("the longest frame", frame=65553, features=0),
        good("a sum that was verified", flags=2, features=0),
        good("a sum to be computed", flags=1, start=34, offset=16, features=1),
        good("a sum at the frame's end", flags=1, start=90, offset=8),
        good("segments of TCP over IPv4", **tcp),
        good("segments of TCP over IPv6", **tcp | dict(segments=4, heads=86, payload=1428, start=54)),
        good("segments with marks", **tcp | dict(segments=0x81)),
        good("datagrams of UDP", **tcp | dict(segments=5, heads=42, payload=1472, offset=6)),
        good("fields without a meaning", on=(0,) * 7, heads=9, payload=9, start=9, offset=9),
        good("fields without a meaning beside a sum", on=(1, 0, 0, 0, 34, 16, 0), flags=1, heads=9, payload=9, start=34,
             offset=16),
        bad("no head of a frame", "short", frame=13),
        bad("a frame too long", "long", frame=65554),
        bad("an unknown flag", "header", flags=4),
        bad("the last field in use", "header", last=1),
        bad("a sum before the packet", "header", flags=1, start=13, offset=16),
        bad("a sum behind the frame", "header", flags=1, start=90, offset=9),
        bad("an unknown kind of segments", "header", **tcp | dict(segments=2)),
        bad("fragments of UDP", "header", **tcp | dict(segments=3)),
        bad("UDP with marks", "header", **tcp | dict(segments=0x85)),
        bad("marks alone", "header", **tcp | dict(segments=0x80)),
        bad("segments without a sum", "header", **tcp | dict(flags=0)),
        bad("packets of 0 bytes", "header", **tcp | dict(payload=0)),
        bad("heads longer than the frame", "header", **tcp | dict(heads=9001)),
        bad("a sum that was not offered", "feature", flags=1, start=34, offset=16, features=0),
        bad("segments that were not offered", "feature", **tcp | dict(features=0x1D)),
        bad("segments of IPv6 that were not offered", "feature", **tcp | dict(segments=4, features=0x1B)),
        bad("marks that were not offered", "feature", **tcp | dict(segments=0x81, features=0x17)),
        bad("datagrams that were not offered", "feature", **tcp | dict(segments=5, features=0x0F)),
        bad("another source", "source", mac="020000000003"),
    ]


write("segment-header.json", headers())
write("word-offset.json", word_offsets())
write("control-message.json", messages())
write("record-header.json", records())
write("wait-word.json", wait_words())
write("state-word.json", state_words())
write("ring-trace.json", traces())
write("broker-message.json", broker_messages())
write("net-hello.json", net_hellos())
write("net-frame.json", net_frames())
