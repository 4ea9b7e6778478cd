"""Standard output of what runs all night: a terminal that was closed, or a dead `tee`, must not end a search."""

from __future__ import annotations

import io
import os
from typing import TextIO, cast


def lasting(file: TextIO) -> TextIO:
    """Return a text file that writes to ``file`` until that fails; from then on its descriptor leads nowhere.

    A closed terminal sends SIGHUP, upon which the driver ends the trial and writes the report: all that is lost is what
    nobody reads.
    """
    return cast("TextIO", _Lasting(file))  # writes are all that a console asks for


class _Lasting(io.TextIOBase):
    def __init__(self, file: TextIO) -> None:
        self._file = file

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a plain attribute in the stubs
        """That of the file."""
        return self._file.encoding

    def isatty(self) -> bool:
        """Tell whether people look at it."""
        return self._file.isatty()

    def fileno(self) -> int:
        """Return the file's descriptor."""
        return self._file.fileno()

    def write(self, text: str) -> int:
        """Write what can be written."""
        try:
            return self._file.write(text)
        except OSError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        """Send on what can be sent on."""
        try:
            self._file.flush()
        except OSError:
            self._drop()

    def _drop(self) -> None:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self._file.fileno())
        os.close(nothing)
