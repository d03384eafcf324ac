"""The lab's gRPC origin: echoes one message, and each of a stream. Arguments: ADDRESS, a file of certificate and key."""

import sys
from collections.abc import Iterator
from concurrent import futures

import grpc


def same(data: bytes) -> bytes:
    return data


def hello(request: bytes, context: grpc.ServicerContext) -> bytes:
    context.set_trailing_metadata((("lab-sum", str(len(request))),))
    return b"hello, " + request


def talk(requests: Iterator[bytes], _: grpc.ServicerContext) -> Iterator[bytes]:
    yield from requests


with open(sys.argv[2], "rb") as file:
    pem = file.read()
server = grpc.server(futures.ThreadPoolExecutor(4))
methods = {
    "Hello": grpc.unary_unary_rpc_method_handler(hello, same, same),
    "Talk": grpc.stream_stream_rpc_method_handler(talk, same, same),
}
server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("lab.Greeter", methods),))
server.add_secure_port(sys.argv[1], grpc.ssl_server_credentials([(pem, pem)]))
server.start()
sys.stdout.write("listening\n")
sys.stdout.flush()
server.wait_for_termination()
