# SPDX-License-Identifier: Apache-2.0 OR MIT
"""asyncio's `sendfile` on a connection that has talked before, and a part of the file again: `sendfile.py FILE`."""

import asyncio, hashlib, sys


async def serve(reader, writer):
    while (word := await reader.readexactly(8)) != b"the file":
        writer.write(word)
    size = int.from_bytes(await reader.readexactly(8), "big")
    for begin in (0, size // 2):
        digest, left = hashlib.sha256(), size - begin
        while left:
            part = await reader.read(min(left, 1 << 20))
            digest.update(part)
            left -= len(part)
        writer.write(digest.digest())
    writer.close()


async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    for _ in range(100):
        writer.write(b"how goes")
        await reader.readexactly(8)
    with open(sys.argv[1], "rb") as file:
        whole = file.read()
        writer.write(b"the file" + len(whole).to_bytes(8, "big"))
        for begin in (0, len(whole) // 2):
            sent = await asyncio.get_running_loop().sendfile(writer.transport, file, begin)
            same = await reader.readexactly(32) == hashlib.sha256(whole[begin:]).digest()
            print(sent, same, file.tell())
    writer.close()


asyncio.run(main())
