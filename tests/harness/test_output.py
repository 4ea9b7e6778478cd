from __future__ import annotations

import io
import os

from harness.output import lasting, trimmed


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


def test_lines_end_with_their_last_word() -> None:
    """Blanks within a line stay, also at its start; a line without an end is left alone."""
    file = io.StringIO()
    trimmed(file).write("  a  b  \n\n c\t \n")
    trimmed(file).write("d ")
    assert file.getvalue() == "  a  b\n\n c\nd "
