from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from harness.jobs.report import Line, Reporter
from harness.records import CurvePoint, Failed, Merged, Scored, TrialState

numbers = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(numbers, max_size=20), numbers)
def test_score_survives_the_pipe(document_nats: list[float], nats: float) -> None:
    """Every float arrives as exactly the float that was sent."""
    scored = Scored(nats=nats, bytes=1, tokens=1, document_nats=tuple(document_nats), score_seconds=0.0)
    assert Line.model_validate_json(Line(scored=scored).model_dump_json(exclude_unset=True)).content == scored


@given(numbers, numbers)
def test_merging_survives_the_pipe(parts: float, whole: float) -> None:
    """So does every float of a merge, and the difference is the merged model's loss in bits per byte."""
    merged = Merged(parameters=1, bytes=8, parts_nats=parts, whole_nats=whole)
    assert Line.model_validate_json(Line(merged=merged).model_dump_json(exclude_unset=True)).content == merged
    assert (merged.difference > 0) == (whole - parts > 0)


@pytest.mark.parametrize("text", ["{}", "[]", '{"point": null}', '{"failed": {}}', "NaN", '{"score": 1}'])
def test_bad_lines_are_refused(text: str) -> None:
    """A line that is not exactly one known thing is an error."""
    with pytest.raises(ValidationError):
        Line.model_validate_json(text)


def test_one_line_per_message() -> None:
    """What a job sends arrives as one JSON document per line, in order."""
    read, write = os.pipe()
    point = CurvePoint(
        progress=0, seconds=0, step=0, train_loss=None, probe_score=None, learning_rate=None, gradient_norm=None
    )
    failed = Failed(state=TrialState.DIVERGED, error_class="Diverged", error_text="two\nlines")
    reporter = Reporter(write)
    reporter.point(point)
    reporter.result(failed)
    os.close(write)
    with os.fdopen(read) as lines:
        assert [Line.model_validate_json(line).content for line in lines] == [point, failed]
