from __future__ import annotations

import os

from harness.output import lasting


def test_writing_goes_on_where_nobody_reads() -> None:
    """A pipe without a reader takes everything, and closing it at the end fails no more than writing."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as file:
        out = lasting(file)
        out.write("seen\n")
        out.flush()
        assert os.read(reader, 100) == b"seen\n"
        os.close(reader)
        for _ in range(3):
            out.write("lost\n" * 100_000)
            out.flush()
        assert (out.isatty(), out.encoding, out.fileno()) == (False, file.encoding, writer)
