"""How a job speaks to its driver: one JSON document per line on a pipe that the driver made.

No result is ever read from a file or a log. The driver believes only the kind of line that fits the order: a training
job cannot report a score.
"""

from __future__ import annotations

import os
from typing import Self

from pydantic import model_validator

from harness.records import CurvePoint, Failed, Merged, Record, Scored, Trained


class Line(Record):
    """One line of a job's report: exactly one of its fields is set."""

    point: CurvePoint | None = None
    trained: Trained | None = None
    scored: Scored | None = None
    merged: Merged | None = None
    failed: Failed | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if len(self.model_fields_set) != 1 or self.content is None:
            raise ValueError("a line of a report holds exactly one of point, trained, scored, merged and failed")
        return self

    @property
    def content(self) -> CurvePoint | Trained | Scored | Merged | Failed | None:
        """What the line says."""
        return self.point or self.trained or self.scored or self.merged or self.failed


class Reporter:
    """The job's end of the pipe."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def point(self, point: CurvePoint) -> None:
        """Send one point of the learning curve."""
        self._send(Line(point=point))

    def result(self, result: Trained | Scored | Merged | Failed) -> None:
        """Send how the job ended; the last thing that it says."""
        match result:
            case Trained():
                self._send(Line(trained=result))
            case Scored():
                self._send(Line(scored=result))
            case Merged():
                self._send(Line(merged=result))
            case Failed():
                self._send(Line(failed=result))

    def _send(self, line: Line) -> None:
        data = line.model_dump_json(exclude_unset=True).encode() + b"\n"
        while data:
            data = data[os.write(self._descriptor, data) :]
