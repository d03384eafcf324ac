import sys

import grpc


def same(data: bytes) -> bytes:
    return data


with grpc.secure_channel(sys.argv[1], grpc.ssl_channel_credentials()) as channel:
    hello = channel.unary_unary("/lab.Greeter/Hello", same, same)
    talk = channel.stream_stream("/lab.Greeter/Talk", same, same)
    sys.stdout.write(hello(b"unary", timeout=10).decode() + "\n")
    sys.stdout.write(b" ".join(talk(iter([b"one", b"two", b"three"]), timeout=10)).decode() + "\n")
