# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Echoes over asyncio streams: `streams.py serve HOST PORT`, `streams.py ask HOST PORT BYTES`, four at a time."""

import asyncio, random, sys

host, port = sys.argv[2], int(sys.argv[3])


async def serve(reader, writer):
    while part := await reader.read(100000):
        writer.write(part)
        await writer.drain()
    writer.close()


async def ask(seed, size):
    rng, done = random.Random(seed), 0
    reader, writer = await asyncio.open_connection(host, port)
    while done < size:
        part = rng.randbytes(rng.randrange(1, 300000))
        writer.write(part)
        if await reader.readexactly(len(part)) != part:
            return False
        done += len(part)
    writer.write_eof()
    rest = await reader.read()
    writer.close()
    return rest == b""


async def main():
    if sys.argv[1] == "serve":
        await (await asyncio.start_server(serve, host, port)).serve_forever()
    size = int(sys.argv[4]) // 4
    print("whole:", sum(await asyncio.gather(*(ask(seed, size) for seed in range(4)))))


asyncio.run(main())
