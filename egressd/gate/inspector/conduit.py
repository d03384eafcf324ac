"""The two streams of one inspected connection: what is written to each, and when each is read.

Each side is read only as fast as the other side and the limits take what comes, so memory is flat whatever the bodies are.
"""

from __future__ import annotations

from egressd.gate.inspector.pace import Pace
from egressd.gate.inspector.upstream import Opened
from egressd.gate.tls.stream import ByteStream, StreamOwner


class Conduit:
    """The sandbox's stream and at most one upstream; `owner` is told what they say."""

    def __init__(self, client: ByteStream, owner: StreamOwner, pace: Pace) -> None:
        """Nothing is read from `client` before `open`."""
        self.client = client
        self._pace = pace
        self.upstream: Opened | None = None
        self._owner = owner
        self._down: list[bytes] = []
        self._up: list[bytes] = []
        self._client_held = False
        self._upstream_held = False
        self._unsent = 0

    def open(self) -> None:
        """Begin to read from the sandbox."""
        self.client.owner = self._owner

    def is_upstream(self, stream: ByteStream) -> bool:
        """Whether `stream` is the upstream of now; an older one has no say any more."""
        return self.upstream is not None and stream is self.upstream.stream

    def adopt(self, opened: Opened) -> None:
        """Take an upstream, and begin to read from it."""
        self.upstream = opened
        self._upstream_held = False
        opened.stream.owner = self._owner

    def drop_upstream(self) -> None:
        """Let the upstream go, after what was written to it."""
        opened, self.upstream = self.upstream, None
        self.withhold()
        self._pace.take_down()
        if opened is not None:
            opened.keep_session()
            opened.stream.close()

    def abort(self, last: bytes = b"") -> None:
        """End both sides at once; what was not sent yet is lost, unless there is a `last` word for the sandbox."""
        if last:
            self.client.write(last)
            self.client.close()
        else:
            self.client.abort()
        if self.upstream is not None:
            self.upstream.stream.abort()

    # writing

    def to_client(self, data: bytes) -> None:
        """Have `data` written to the sandbox at the next flush."""
        self._down.append(data)

    def to_upstream(self, data: bytes) -> None:
        """Have `data` written to the upstream at the next flush."""
        self._up.append(data)

    def withhold(self) -> int:
        """Forget what was not yet written to the upstream; returns how many bytes that was."""
        count = self._pace.forget_up() + sum(map(len, self._up))
        self._up.clear()
        return count

    def flush(self) -> None:
        """Write what there is and may go, in one piece for each side."""
        if self._up or self._pace.holds_up:
            data, self._up = self._pace.upward(b"".join(self._up)), []
            if self.upstream is not None and data:
                self.upstream.stream.write(data)
        if self._down:
            data, self._down = b"".join(self._down), []
            self.client.write(data)

    # reading

    def steer(self, *, pending: bool, full: bool) -> None:
        """Read from each side exactly while the other one takes it.

        While a decision or a dial is `pending`, the sandbox's side stays as it is; `full` says that enough of
        later requests is kept.
        """
        upstream = self.upstream.stream if self.upstream is not None else None
        if full or self._pace.holds_up or (upstream is not None and upstream.paused):
            self.hold()
        elif not pending:
            self._hold_client(held=False)
        held = self.client.paused or self._pace.holds_down
        if upstream is not None and self._upstream_held != held:
            self._upstream_held = held
            if self._upstream_held:
                upstream.pause_reading()
            else:
                upstream.resume_reading()

    def hold(self) -> None:
        """Read no more from the sandbox for now."""
        self._hold_client(held=True)

    def _hold_client(self, *, held: bool) -> None:
        if held == self._client_held or self.client.closed:
            return
        self._client_held = held
        if held:
            self.client.pause_reading()
        else:
            self.client.resume_reading()

    # the end

    def leave(self) -> bool:
        """Let the upstream go and close the sandbox's side once it has everything; False while it has not yet."""
        self.flush()
        self.drop_upstream()
        self._unsent = self.client.waiting if not self.client.closed else 0
        if self._unsent:
            self.hold()
            return False
        self.client.linger()
        return True

    def left(self) -> bool | None:
        """Go on leaving: True once closed, False when the client has taken something since, None when it has not."""
        before, self._unsent = self._unsent, self.client.waiting if not self.client.closed else 0
        if not self._unsent:
            self.client.linger()
            return True
        return False if self._unsent < before else None
