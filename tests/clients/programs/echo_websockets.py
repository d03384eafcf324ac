import sys

from websockets.sync.client import connect

with connect(sys.argv[1], open_timeout=20) as socket:
    for word in ("one", "two"):
        socket.send(word)
        sys.stdout.write(f"{socket.recv(timeout=10)}\n")
