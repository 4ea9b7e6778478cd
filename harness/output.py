"""Standard output with manners: what runs all night outlives its terminal, and pipes get no trailing blanks."""

from __future__ import annotations

import io
import os
import re
from typing import TextIO, cast


def lasting(file: TextIO) -> TextIO:
    """Return a text file that writes to ``file`` until that fails; from then on its descriptor leads nowhere.

    A closed terminal sends SIGHUP, upon which the driver ends the trial and writes the report: all that is lost is what
    nobody reads.
    """
    return cast("TextIO", _Lasting(file))  # writes are all that a console asks for


def trimmed(file: TextIO) -> TextIO:
    """Return a text file that leaves out the blanks before line ends, with which tables are filled up.

    A line must be written at once, as rich does.
    """
    return cast("TextIO", _Trimmed(file))


class _Through(io.TextIOBase):
    """Passes everything on."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a plain attribute in the stubs
        return self._file.encoding

    def isatty(self) -> bool:
        return self._file.isatty()

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, text: str) -> int:
        return self._file.write(text)

    def flush(self) -> None:
        self._file.flush()


class _Trimmed(_Through):
    def write(self, text: str) -> int:
        self._file.write(re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE) if text.endswith("\n") else text)
        return len(text)


class _Lasting(_Through):
    def write(self, text: str) -> int:
        try:
            return self._file.write(text)
        except OSError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError:
            self._drop()

    def _drop(self) -> None:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self._file.fileno())
        os.close(nothing)
