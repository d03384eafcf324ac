"""Opening a journal's target: a file, or a stream."""

from __future__ import annotations

import os
from pathlib import Path

from egressd.journal.file_sink import FileSink
from egressd.journal.rotation import Terms
from egressd.journal.sinks import STDOUT, Sink, is_stream, open_target, unavailable
from egressd.journal.stream_sink import StreamSink, own_stdout


def open_sink(target: Path | str, state: Path | None, terms: Terms) -> Sink:
    """Return the sink for a path, or for standard output where `target` is `-`.

    A new file is 0600, in directories that are 0700 where they are new. Refused, with JournalUnavailable: a
    symbolic link, anything but a file, FIFO or character device, and a file that anybody may write.
    `state` is the directory in which the end of a file is kept, None to keep it nowhere.
    """
    if str(target) == STDOUT:
        return StreamSink(own_stdout(), "standard output")
    path = Path(target)
    try:
        if is_stream(path):
            return StreamSink(open_target(path, os.O_WRONLY), str(path))
        return FileSink(path, state, terms)
    except OSError as error:
        raise unavailable(path, error) from error
