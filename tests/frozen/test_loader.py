import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from frozen.loader import Batches
from frozen.tokens import EncodedSplit

MakeSplit = Callable[..., EncodedSplit]
fixture_is_a_pure_function = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)


def batches(split: EncodedSplit, **changes: Any) -> Batches:
    """Make a loader with plain settings."""
    plain = {"seed": 1, "sequence_length": 8, "batch_sequences": 2, "fraction": 1.0, "order": "shuffled", "weights": {}}
    return Batches(split, **(plain | changes))


def stream(loader: Batches, tokens: int) -> list[int]:
    """Return the first tokens of a loader's stream."""
    flat: list[int] = []
    while len(flat) < tokens:
        flat += next(loader).flatten().tolist()
    return flat[:tokens]


def numbered(lengths: list[int]) -> list[list[int]]:
    """Return documents whose every token is the document's number, counted from 1 (0 is the separator)."""
    return [[number] * length for number, length in enumerate(lengths, start=1)]


def documents_of(tokens: list[int]) -> list[list[int]]:
    """Cut a stream at its separators."""
    groups = itertools.groupby(tokens, key=lambda token: token == 0)
    return [list(group) for is_separator, group in groups if not is_separator]


def test_batches_have_shape_and_type(make_split: MakeSplit) -> None:
    """A batch is int64 [batch_sequences, sequence_length], writable and on the CPU."""
    batch = next(batches(make_split(numbered([5, 9, 30]))))
    assert (batch.shape, batch.dtype, batch.device.type) == ((2, 8), torch.int64, "cpu")


@fixture_is_a_pure_function
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    sequence_length=st.integers(1, 17),
    batch_sequences=st.integers(1, 5),
    order=st.sampled_from(["shuffled", "short_to_long"]),
    seed=st.integers(0, 5),
)
def test_every_pass_holds_every_document_once(
    make_split: MakeSplit, lengths: list[int], sequence_length: int, batch_sequences: int, order: str, seed: int
) -> None:
    """Nothing is dropped: three passes of the stream hold each document whole, after a separator, three times."""
    split = make_split(numbered(lengths))
    loader = batches(split, sequence_length=sequence_length, batch_sequences=batch_sequences, order=order, seed=seed)
    one_pass = sum(lengths) + len(lengths)
    tokens = stream(loader, 3 * one_pass)
    for number in range(3):
        this = tokens[number * one_pass : (number + 1) * one_pass]
        assert this[0] == 0
        assert sorted(documents_of(this)) == sorted(numbered(lengths))


@fixture_is_a_pure_function
@given(batch_sequences=st.integers(1, 7), skipped=st.integers(0, 30), weighted=st.booleans())
def test_skipping_is_reading_without_looking(
    make_split: MakeSplit, batch_sequences: int, skipped: int, weighted: bool
) -> None:
    """After ``skip(n)`` the next batches are those that follow n read batches, across passes and with weights."""
    split = make_split(numbered([3, 11, 7, 2]), source_ids=[0, 1, 0, 1], sources=("one", "two"))
    weights = {"one": 1.0, "two": 3.0} if weighted else {}
    read = batches(split, batch_sequences=batch_sequences, weights=weights)
    jumped = batches(split, batch_sequences=batch_sequences, weights=weights)
    for _ in range(skipped):
        next(read)
    jumped.skip(skipped)
    for _ in range(3):
        assert torch.equal(next(read), next(jumped))


@pytest.mark.parametrize("weights", [{}, {"one": 1.0, "two": 2.0}])
def test_the_batch_does_not_change_the_sequences(make_split: MakeSplit, weights: dict[str, float]) -> None:
    """Half the batch gives the same sequences in twice as many batches."""
    split = make_split(numbered([3, 11, 7, 2]), source_ids=[0, 1, 0, 1], sources=("one", "two"))
    wide = batches(split, batch_sequences=6, weights=weights)
    narrow = batches(split, batch_sequences=3, weights=weights)
    for _ in range(10):
        assert torch.equal(next(wide), torch.cat([next(narrow), next(narrow)]))


def test_the_stream_is_a_function_of_the_seed(make_split: MakeSplit) -> None:
    """The same seed repeats the stream exactly, another one differs."""
    split = make_split(numbered([4] * 30))
    first, again, other = (stream(batches(split, seed=seed), 400) for seed in (7, 7, 8))
    assert first == again != other


def test_passes_are_shuffled_anew(make_split: MakeSplit) -> None:
    """The second pass has another order than the first."""
    tokens = stream(batches(make_split(numbered([4] * 30))), 300)
    assert documents_of(tokens[:150]) != documents_of(tokens[150:])


def test_golden_stream(make_split: MakeSplit) -> None:
    """The stream is the same on every machine and with every numpy: a change here is a change of every score."""
    tokens = stream(batches(make_split(numbered([2] * 8)), seed=3), 24)
    assert [tokens[index] for index in range(1, 24, 3)] == GOLDEN


GOLDEN = [1, 5, 8, 2, 6, 7, 4, 3]


def test_short_documents_come_first(make_split: MakeSplit) -> None:
    """``short_to_long`` never goes from one octave of lengths to a shorter one within a pass."""
    lengths = [40, 3, 17, 1, 9, 33, 5, 2, 60]
    tokens = stream(batches(make_split(numbered(lengths)), order="short_to_long"), sum(lengths) + len(lengths))
    octaves = [len(document).bit_length() for document in documents_of(tokens)]
    assert octaves == sorted(octaves)


@fixture_is_a_pure_function
@given(st.floats(0.01, 1), st.floats(0.01, 1))
def test_fractions_are_nested(make_split: MakeSplit, one: float, other: float) -> None:
    """A smaller share of the data is a subset of a larger one, and of every source at least one document."""
    split = make_split(numbered([2] * 30), source_ids=[0, 1, 1] * 10, sources=("one", "two"))

    def seen(fraction: float) -> set[int]:
        return set(stream(batches(split, fraction=fraction), 90)) - {0}

    small, large = seen(min(one, other)), seen(max(one, other))
    assert small <= large
    assert {split.source_ids[number - 1] for number in small} == {0, 1}
    assert seen(1) == set(range(1, 31))


@pytest.mark.parametrize(("weights", "share"), [({"small": 1, "large": 1}, 0.1), ({"small": 9, "large": 1}, 0.5)])
def test_a_source_counts_by_its_size_times_its_weight(
    make_split: MakeSplit, weights: dict[str, float], share: float
) -> None:
    """Equal weights leave the mixture as it is; nine times the weight makes up for a ninth of the size."""
    split = make_split([[1] * 10] * 2 + [[2] * 30] * 6, source_ids=[0] * 2 + [1] * 6, sources=("small", "large"))
    tokens = np.array(stream(batches(split, weights=weights), 8000))
    assert (tokens == 1).sum() / (tokens > 0).sum() == pytest.approx(share, abs=0.02)


def test_a_source_without_weight_is_never_read(make_split: MakeSplit) -> None:
    """Weight zero leaves a source out."""
    split = make_split(numbered([5, 5, 5]), source_ids=[0, 1, 0], sources=("one", "two"))
    assert set(stream(batches(split, weights={"one": 1, "two": 0}), 200)) == {0, 1, 3}


def test_a_source_without_documents_is_passed_over(make_split: MakeSplit) -> None:
    """A source that lost all its documents to deduplication does not stop a trial."""
    split = make_split(numbered([5, 5]), source_ids=[0, 0], sources=("one", "empty"))
    assert set(stream(batches(split, weights={"one": 1, "empty": 1}), 50)) == {0, 1, 2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": -1}, "seed"),
        ({"sequence_length": 0}, "holds nothing"),
        ({"batch_sequences": 0}, "holds nothing"),
        ({"fraction": 0.0}, "fraction"),
        ({"fraction": 1.5}, "fraction"),
        ({"order": "random"}, "order 'random'"),
        ({"weights": {"two": 1.0}}, "the data has one, the weights name two"),
        ({"weights": {"one": -1.0}}, "weight of one"),
        ({"weights": {"one": float("nan")}}, "weight of one"),
        ({"weights": {"one": 0.0}}, "above zero"),
    ],
)
def test_impossible_settings_are_refused(make_split: MakeSplit, changes: dict[str, Any], message: str) -> None:
    """Each bad argument is named, with its value."""
    with pytest.raises(ValueError, match=message):
        stream(batches(make_split(numbered([5])), **changes), 8)


def test_the_stream_only_goes_forward(make_split: MakeSplit) -> None:
    """A negative skip is refused."""
    with pytest.raises(ValueError, match="-1 batches"):
        batches(make_split(numbered([5]))).skip(-1)


def test_splits_made_before_there_were_marks_are_read(tmp_path: Path) -> None:
    """The four arrays and three facts of the first format load as plain text, and stream as they did."""
    arrays = {
        "tokens": np.array([1, 1, 2, 3, 3, 3], dtype=np.uint16),
        "offsets": np.array([0, 2, 3, 6], dtype=np.int64),
        "bytes": np.array([4, 2, 6], dtype=np.int64),
        "source_ids": np.zeros(3, dtype=np.int16),
    }
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    (tmp_path / "split.json").write_text('{"separator": 0, "vocabulary": 10, "sources": ["one"]}')
    split = EncodedSplit.load(tmp_path)
    assert (split.marks, split.pairs, split.general) == (None, False, ())
    assert sorted(documents_of(stream(batches(split), 9))) == [[1, 1], [2], [3, 3, 3]]
