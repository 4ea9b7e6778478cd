"""Signals before a search's owner listens, after it, and in every other command.

Left to themselves they end Python with a trace (SIGINT) or without a word (SIGTERM, SIGHUP), and run no clean-up.
What lies before `Interrupts`, the start of the interpreter itself and the import of the command line (some hundredths
of a second), nobody can cover; nothing has been touched by then.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import FrameType, TracebackType
from typing import NoReturn, Self

INTERRUPTED = 130
"""Exit code of a command that a signal ended."""
_SHOW_CURSOR = b"\x1b[?25h"


def listened_to() -> tuple[signal.Signals, ...]:
    """Return the signals that end a command: those of a terminal and of a system that shuts down.

    What was ignored when the program started stays so: `nohup` and shells that start jobs in the background ask for it.
    """
    usual = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return tuple(number for number in usual if signal.getsignal(number) != signal.SIG_IGN)


def leave(number: int) -> NoReturn:
    """End the process at once, with a sentence: nothing that it could still do is waited for."""
    with contextlib.suppress(OSError):  # a SIGHUP comes from a terminal that is gone
        if os.isatty(sys.__stdout__.fileno() if sys.__stdout__ is not None else -1):
            os.write(1, _SHOW_CURSOR)  # the live view hides it
        os.write(2, f"overnight: {sentence(number)}\n".encode())
    os._exit(INTERRUPTED)


def sentence(number: int) -> str:
    """Say which signal came."""
    return f"interrupted by {signal.Signals(number).name}"


class Interrupts:
    """Turns the first signal inside into a `KeyboardInterrupt`, which runs every clean-up; the second ends at once.

    `came` is the first signal. Whatever is raised after it ends the block: a library that is interrupted while it is
    imported may turn the interrupt into an error of its own.

    With ``last`` nothing comes after the block but the interpreter's end, in which a signal could only spoil the exit
    code of what is done: it is ignored then. Else the handlers of before come back.
    """

    def __init__(self, *, last: bool = False) -> None:
        self.came: signal.Signals | None = None
        self._last = last
        self._over = False

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._handle) for number in listened_to()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._over = True
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self._last else handler)
        return error is not None and self.came is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._over or self.came is not None:
            leave(number)
        self.came = signal.Signals(number)
        raise KeyboardInterrupt
