"""The one exception of the wirings."""


class WiringError(Exception):
    """The sandbox could not be wired, so it does not start: what was run, what it said, what to do about it.

    `command` is a program or a system call, `stderr` its complaint (one or more lines), `hint` a sentence or empty.
    """

    def __init__(self, command: str, stderr: str, hint: str = "") -> None:
        self.command = command
        self.stderr = stderr.strip()
        self.hint = hint
        super().__init__(str(self))

    def __str__(self) -> str:
        first = f"{self.command}: {self.stderr or 'failed'}"
        return f"{first}\nhint: {self.hint}" if self.hint else first

    @classmethod
    def from_os(cls, command: str, error: OSError, hint: str = "") -> "WiringError":
        """The same for a system call that failed."""
        return cls(command, error.strerror or str(error), hint)
