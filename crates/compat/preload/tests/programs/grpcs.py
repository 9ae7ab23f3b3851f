# SPDX-License-Identifier: Apache-2.0 OR MIT
"""gRPC, whose threads share one epoll set: calls and a stream of messages that must come back unchanged.

`grpcs.py serve HOST PORT`, or `grpcs.py ask HOST PORT`, which prints how many bytes of messages it got back."""

import os, sys
from concurrent import futures

import grpc

where = ":".join(sys.argv[2:4])
# Messages unchanged, however large.
AS_IT_IS, OPTIONS = bytes, [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class Echo(grpc.GenericRpcHandler):
    def service(self, call):
        if call.method == "/echo/one":
            return grpc.unary_unary_rpc_method_handler(lambda message, _: message, AS_IT_IS, AS_IT_IS)
        return grpc.stream_stream_rpc_method_handler(lambda messages, _: iter(messages), AS_IT_IS, AS_IT_IS)


if sys.argv[1] == "serve":
    server = grpc.server(futures.ThreadPoolExecutor(4), options=OPTIONS)
    server.add_generic_rpc_handlers((Echo(),))
    server.add_insecure_port(where)
    server.start()
    server.wait_for_termination()
else:
    channel = grpc.insecure_channel(where, options=OPTIONS)
    one = channel.unary_unary("/echo/one", AS_IT_IS, AS_IT_IS)
    many = channel.stream_stream("/echo/many", AS_IT_IS, AS_IT_IS)
    got = 0
    for size in [*range(0, 5000, 5), *[3 << 20] * 20]:
        message = os.urandom(size)
        assert one(message) == message
        got += size
    messages = [os.urandom(size * 37 % 50000) for size in range(1500)]
    for sent, back in zip(messages, many(iter(messages)), strict=True):
        assert sent == back
        got += len(back)
    print("bytes:", got)
