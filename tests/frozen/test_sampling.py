import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from frozen.loader import Batches, Examples, Pairs
from frozen.sampling import (
    OPEN_ROWS,
    Items,
    Sampling,
    cut_documents,
    draw,
    mean_row_tokens,
    mean_surprisal,
    packed,
    positions_per_epoch,
    whole_documents,
)
from frozen.tokens import EncodedSplit

MakeSplit = Callable[..., EncodedSplit]
fixture_is_a_pure_function = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50, deadline=None
)
PLAIN: dict[str, Any] = {"fraction": 1.0, "order": "shuffled", "weights": {}, "temperature": 1.0, "general_fraction": 0}


def drawn(split: EncodedSplit, **changes: Any) -> Iterator[int]:
    """Return the stream of whole documents under plain settings."""
    sampling = Sampling(**({"seed": 1} | PLAIN | changes))
    return itertools.chain.from_iterable(draw(split, whole_documents(split), sampling))


def first(items: Iterator[int], count: int) -> list[int]:
    return list(itertools.islice(items, count))


def shares_of(split: EncodedSplit, documents: list[int]) -> list[float]:
    """Return each source's share of the tokens of some drawn documents, separators included."""
    cost = np.diff(split.offsets) + 1
    tokens = np.bincount(split.source_ids[documents], weights=cost[documents], minlength=len(split.sources))
    return [float(share) for share in tokens / tokens.sum()]


# Mixing


@fixture_is_a_pure_function
@given(
    lengths=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=8), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.1, 10), min_size=4, max_size=4),
    temperature=st.floats(1, 50),
    fraction=st.floats(0.05, 1),
    data=st.data(),
)
def test_shares_follow_weights_temperature_and_general_fraction(
    make_split: MakeSplit,
    lengths: list[list[int]],
    weights: list[float],
    temperature: float,
    fraction: float,
    data: st.DataObject,
) -> None:
    """Share ∝ (weight × size)^(1 / temperature) within the own and within the general sources, the two in the ratio."""
    names = tuple("abcd"[: len(lengths)])
    general = names[data.draw(st.integers(1, len(names))) :]
    general_fraction = data.draw(st.floats(0.05, 0.9)) if general else 0.0
    flat = [[1] * length for source in lengths for length in source]
    ids = [source for source, own in enumerate(lengths) for _ in own]
    split = make_split(flat, source_ids=ids, sources=names, general=general)
    given_weights = dict(zip(names, weights, strict=False))
    documents = first(
        drawn(
            split,
            weights=given_weights,
            temperature=temperature,
            fraction=fraction,
            general_fraction=general_fraction,
        ),
        8000,
    )
    sizes = [sum(length + 1 for length in own[: math.ceil(fraction * len(own))]) for own in lengths]
    raw = [(given_weights[name] * size) ** (1 / temperature) for name, size in zip(names, sizes, strict=True)]
    groups = [[i for i, name in enumerate(names) if (name in general) is is_general] for is_general in (False, True)]
    expected = [0.0] * len(names)
    for group, part in zip(groups, (1 - general_fraction, general_fraction), strict=True):
        for source in group:
            expected[source] = part * raw[source] / sum(raw[index] for index in group)
    assert shares_of(split, documents) == pytest.approx(expected, abs=0.01)


def test_temperature_makes_small_sources_come_oftener(make_split: MakeSplit) -> None:
    """Nine to one in size is nine to one at temperature 1 and three to one at 2; without weights too."""
    split = make_split([[1] * 9] * 10 + [[2] * 9] * 90, source_ids=[0] * 10 + [1] * 90, sources=("small", "large"))
    for temperature, share in ((1.0, 0.1), (2.0, 0.25), (100.0, 0.5)):
        documents = first(drawn(split, temperature=temperature), 4000)
        assert shares_of(split, documents)[0] == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize("changes", [{}, {"temperature": 2.0}, {"weights": {"own": 1, "other": 2, "wide": 3}}])
def test_general_text_is_not_read_at_fraction_zero(make_split: MakeSplit, changes: dict[str, Any]) -> None:
    """Whatever else mixes, a fraction of 0 reads none of it, and everything else."""
    split = make_split([[1]] * 9, source_ids=[0, 1, 2] * 3, sources=("own", "wide", "other"), general=("wide",))
    assert set(first(drawn(split, **changes), 200)) == {0, 2, 3, 5, 6, 8}


def test_general_text_holds_its_share_at_every_moment(make_split: MakeSplit) -> None:
    """A quarter of the tokens after any number of documents, to within one document."""
    split = make_split([[1] * 9] * 40, source_ids=[0, 0, 0, 1] * 10, sources=("own", "wide"), general=("wide",))
    documents = first(drawn(split, general_fraction=0.25), 400)
    for count in range(1, 400):
        general = sum(10 for document in documents[:count] if document % 4 == 3)
        assert abs(general - 0.25 * 10 * count) <= 10


@pytest.mark.parametrize(
    ("general", "changes", "message"),
    [
        ((), {"general_fraction": 0.1}, "no source marked general"),
        (("empty",), {"general_fraction": 0.1}, "no source marked general"),
        (("two",), {"general_fraction": 0.1, "weights": {"one": 1, "two": 0, "empty": 1}}, "above zero"),
        (("one", "two"), {"general_fraction": 0.1}, "general text aside"),
        (("one", "two"), {}, "nothing to train on but general text"),
        ((), {"general_fraction": 1.0}, "general fraction must lie"),
        ((), {"general_fraction": -0.1}, "general fraction must lie"),
        ((), {"temperature": 0.0}, "temperature"),
        ((), {"temperature": math.nan}, "temperature"),
        ((), {"order": "sorted"}, "order 'sorted'"),
        ((), {"weights": {"one": 1}}, "the data has one, two, empty, the weights name one"),
        (("two",), {"weights": {"one": 0, "two": 1, "empty": 1}}, "above zero"),
    ],
)
@pytest.mark.parametrize("stream", [Batches, Examples])
def test_impossible_mixtures_are_refused(
    make_split: MakeSplit, stream: type, general: tuple[str, ...], changes: dict[str, Any], message: str
) -> None:
    """When the loader is made, not when the first batch is read, and in words."""
    split = make_split([[1], [2]], source_ids=[0, 1], sources=("one", "two", "empty"), general=general)
    shape: dict[str, Any] = {"seed": 1, "sequence_length": 8, "batch_sequences": 1}
    rest = {} if stream is Batches else {"packing": True, "padding": 0}
    with pytest.raises(ValueError, match=message):
        stream(split, **(PLAIN | shape | rest | changes))


# Orders


@fixture_is_a_pure_function
@given(
    documents=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=20), min_size=1, max_size=40),
    order=st.sampled_from(["shuffled", "short_to_long", "easy_to_hard"]),
    fraction=st.floats(0.05, 1),
    mixes=st.booleans(),
)
def test_every_pass_draws_every_document_once(
    make_split: MakeSplit, documents: list[list[int]], order: str, fraction: float, mixes: bool
) -> None:
    """Three passes over a pool, or over the only source of a mixture."""
    split = make_split(documents)
    count = math.ceil(fraction * len(documents))
    stream = first(drawn(split, order=order, fraction=fraction, weights={"one": 1.0} if mixes else {}), 3 * count)
    for number in range(3):
        assert sorted(stream[number * count : (number + 1) * count]) == list(range(count))


@fixture_is_a_pure_function
@given(documents=st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=20), min_size=1, max_size=40))
def test_easy_documents_come_first(make_split: MakeSplit, documents: list[list[int]]) -> None:
    """Eighths of the documents in rising mean surprisal, against frequencies counted by the standard library."""
    split = make_split(documents)
    counts = Counter(token for document in documents for token in document)
    total = sum(counts.values())
    bits = [sum(-math.log2(counts[t] / total) for t in document) / len(document) for document in documents]
    assert mean_surprisal(split) == pytest.approx(bits, abs=1e-5)
    stream = first(drawn(split, order="easy_to_hard"), len(documents))
    ranked = sorted(range(len(documents)), key=lambda document: mean_surprisal(split)[document])
    for bucket in range(8):
        places = [place for place in range(len(documents)) if place * 8 // len(documents) == bucket]
        assert {stream[place] for place in places} == {ranked[place] for place in places}


def test_easy_documents_are_shuffled_within_their_eighth(make_split: MakeSplit) -> None:
    """Passes and seeds differ in order, so that difficulty is all that is fixed."""
    split = make_split([[1] * 2 + [number] for number in range(1, 81)])
    one = first(drawn(split, order="easy_to_hard"), 160)
    other = first(drawn(split, order="easy_to_hard", seed=2), 80)
    assert one[:80] != one[80:]
    assert one[:80] != other


def test_surprisal_of_a_long_split_is_looked_up_in_parts(
    make_split: MakeSplit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts of three tokens, some documents longer: the same to the last bit."""
    split = make_split([[1, 2], [3], [1] * 7, [4, 4, 1], [2], [5, 1]])
    whole, pairs = mean_surprisal(split).tolist(), mean_surprisal(split, 2).tolist()
    monkeypatch.setattr("frozen.sampling._CHUNK", 3)
    assert mean_surprisal(split).tolist() == whole
    assert mean_surprisal(split, 2).tolist() == pairs


# Cutting


@st.composite
def marked(draw: st.DrawFn, most: int = 40) -> tuple[list[int], list[int]]:
    """Tokens and marks of a document with an answer."""
    length = draw(st.integers(1, most))
    marks = draw(st.lists(st.sampled_from([0, 0, 0, 1, 1, 2]), min_size=length, max_size=length))
    marks[draw(st.integers(0, length - 1))] = 1
    return list(range(1, length + 1)), marks


@fixture_is_a_pure_function
@given(made=st.lists(marked(), min_size=1, max_size=6), sequence_length=st.integers(2, 45))
def test_a_cut_keeps_an_answer_and_what_came_before_it(
    make_split: MakeSplit, made: list[tuple[list[int], list[int]]], sequence_length: int
) -> None:
    """No document is lost; a cut row is full; a start that moved leaves half a row of context before the answer."""
    split = make_split([tokens for tokens, _ in made], marks=[marks for _, marks in made])
    items = cut_documents(split, sequence_length)
    room = sequence_length - 1
    assert items.drawn.tolist() == list(range(len(made)))
    for document, (tokens, marks) in enumerate(made):
        start, stop = (int(a[document] - split.offsets[document]) for a in (items.starts, items.stops))
        assert stop - start == min(room, len(tokens))
        assert any(marks[start:stop])
        began = next(place for place, mark in enumerate(marks) if mark)
        ended = next((place for place in range(began, len(marks)) if not marks[place]), len(marks))
        if start:
            assert began - start >= room // 2
            assert stop in (ended, began + room // 2, began + 1)
        elif stop < len(tokens):
            assert min(stop, ended) - began >= min(ended - began, max(1, room // 2))


@pytest.mark.parametrize(
    ("marks", "kept"),
    [
        ([0] * 4 + [1] * 16, (0, 10)),  # the question and the beginning of a long answer
        ([0] * 14 + [1] * 3 + [0] * 3, (7, 17)),  # a long question: its end and the whole answer
        ([0] * 8 + [1] * 4 + [0] * 8, (2, 12)),  # an answer that sticks out: moved no further than it must
        ([0] * 8 + [1] * 12, (3, 13)),  # half a row of an answer that does not fit
        ([0] * 2 + [1] + [0] * 13 + [1] * 4, (0, 10)),  # the first answer decides
    ],
)
def test_where_a_long_conversation_is_cut(make_split: MakeSplit, marks: list[int], kept: tuple[int, int]) -> None:
    """Rows of eleven positions, a separator and ten tokens."""
    items = cut_documents(make_split([[1] * 20], marks=[marks]), 11)
    assert (items.starts[0], items.stops[0]) == kept


def test_a_pair_is_cut_at_one_place(make_split: MakeSplit) -> None:
    """Both answers keep the same part of their prompt, also where only one of them is too long."""
    split = make_split([[1] * 20, [2] * 10], marks=[[0] * 8 + [1] * 12, [0] * 8 + [1] * 2], pairs=True)
    items = cut_documents(split, 11)
    assert items.starts.tolist() == [3, 20 + 3]
    assert items.stops.tolist() == [13, 20 + 10]
    assert items.cost.tolist() == [11 + 8]


def test_a_pair_that_loses_an_answer_is_passed_over(make_split: MakeSplit) -> None:
    """Where one prompt is far longer than the other, no cut suits both; the other pairs are read."""
    lost: list[tuple[list[int], list[int]]] = [([1] * 50, [0] * 49 + [1]), ([2] * 4, [0] * 3 + [1])]
    found: list[tuple[list[int], list[int]]] = [([3] * 4, [0] * 3 + [1]), ([4] * 5, [0] * 3 + [1, 1])]
    both = [*lost, *found]
    split = make_split([tokens for tokens, _ in both], marks=[marks for _, marks in both], pairs=True)
    assert cut_documents(split, 8).drawn.tolist() == [1]
    alone = make_split([tokens for tokens, _ in lost], marks=[marks for _, marks in lost], pairs=True)
    with pytest.raises(ValueError, match="no document of the split has a token to train on within 8 tokens"):
        cut_documents(alone, 8)


def test_a_row_needs_room_for_a_token(make_split: MakeSplit) -> None:
    """One position holds the separator and nothing to learn."""
    with pytest.raises(ValueError, match="no room"):
        cut_documents(make_split([[1]]), 1)


# Packing


@settings(deadline=None)
@given(
    costs=st.lists(st.integers(2, 16), min_size=1, max_size=300),
    sequence_length=st.integers(16, 40),
)
def test_rows_hold_whole_items_once_and_in_bounds(costs: list[int], sequence_length: int) -> None:
    """Nothing is lost or repeated, nothing overflows, no two neighbouring rows would have fitted into one."""
    cost = np.array(costs)
    rows = list(packed([range(len(costs))], cost, sequence_length))
    assert sorted(item for row in rows for item in row) == list(range(len(costs)))
    sizes = [int(cost[row].sum()) for row in rows]
    assert max(sizes) <= sequence_length
    assert all(one + other > sequence_length for one, other in itertools.pairwise(sizes))


def test_items_come_at_most_the_open_rows_late() -> None:
    """Best fit must not hold a document back for ever: an awkward one in a stream that never fits beside it."""
    cost = np.array([5, 6])
    rows = packed([itertools.chain([0], itertools.repeat(1))], cost, 10)
    assert [0] in list(itertools.islice(rows, OPEN_ROWS + 1))


# What a pass costs


@pytest.mark.parametrize("kind", ["text", "packed", "padded", "pairs"])
@pytest.mark.parametrize("order", ["shuffled", "short_to_long", "easy_to_hard"])
@pytest.mark.parametrize("fraction", [1.0, 0.3])
def test_positions_per_epoch_are_those_of_the_stream(
    make_split: MakeSplit, kind: str, order: str, fraction: float
) -> None:
    """What the loader charges for the first pass, as read batch by batch."""
    rng = np.random.default_rng(0)
    lengths = (rng.integers(1, 60, 45).repeat(2) if kind == "pairs" else rng.integers(1, 60, 90)).tolist()
    marks = None if kind == "text" else [[0] * (length - 1) + [1] for length in lengths]
    split = make_split([[1 + n % 9] * n for n in lengths], marks=marks, pairs=kind == "pairs")
    settings: dict[str, Any] = PLAIN | {"order": order, "fraction": fraction, "sequence_length": 32}
    packing = kind in ("text", "packed")
    expected = positions_per_epoch(split, batch_sequences=1, packing=packing, **settings)
    least = mean_row_tokens(split, packing=packing, **settings)
    count = math.ceil(fraction * (45 if kind == "pairs" else 90))
    shape: dict[str, Any] = settings | {"batch_sequences": 1, "seed": 0}
    if kind == "text":
        assert expected == sum(length + 1 for length in lengths[:count])
        return
    passed = rows = 0
    if kind == "pairs":
        for pair_batch in itertools.islice(Pairs(split, padding=99, **shape), count):
            passed, rows = passed + pair_batch.tokens, rows + 2
    elif kind == "padded":
        for batch in itertools.islice(Examples(split, packing=False, padding=99, **shape), count):
            passed, rows = passed + batch.tokens, rows + 1
    else:
        documents = 0
        for batch in Examples(split, packing=True, padding=99, **shape):
            assert batch.position_ids is not None
            documents += int(((batch.position_ids == 0) & (batch.input_ids == 0)).sum())
            passed, rows = passed + batch.tokens, rows + 1
            if documents >= count:
                break
    assert passed == expected
    assert least <= passed / rows


def test_positions_per_epoch_count_the_padding_of_a_batch(make_split: MakeSplit) -> None:
    """Rows of 3 and 19 positions beside each other are 24 wide, 48 in all; alone they take 8 and 24."""
    split = make_split([[1] * 2, [1] * 18], marks=[[1] * 2, [1] * 18])
    for batch_sequences, sequence_length, expected in ((2, 64, 48), (1, 64, 8 + 24), (2, 20, 40), (8, 64, 48)):
        found = positions_per_epoch(
            split, batch_sequences=batch_sequences, packing=False, **PLAIN, sequence_length=sequence_length
        )
        assert found == expected


def test_an_epoch_of_a_mixture_reads_as_much_of_its_own(make_split: MakeSplit) -> None:
    """With a fifth of general text a pass over 800 own tokens costs 1,000, to within a document."""
    split = make_split([[1] * 9] * 120, source_ids=[0, 0, 1] * 40, sources=("own", "wide"), general=("wide",))
    settings: dict[str, Any] = PLAIN | {"sequence_length": 10, "batch_sequences": 1, "packing": True}
    assert positions_per_epoch(split, **settings) == 800
    assert positions_per_epoch(split, **(settings | {"general_fraction": 0.2})) == pytest.approx(1000, abs=10)
    assert positions_per_epoch(split, **(settings | {"temperature": 2.0})) == 800


def test_a_packed_row_is_as_long_as_asked(make_split: MakeSplit) -> None:
    """Where rows are filled, or padded to their full length, there is nothing to estimate."""
    split = make_split([[1] * 3], marks=[[1] * 3])
    assert mean_row_tokens(split, packing=True, sequence_length=64, **PLAIN) == 64
    assert mean_row_tokens(split, packing=False, sequence_length=64, **PLAIN) == 4


def test_items_are_numbered_by_the_split(make_split: MakeSplit) -> None:
    """Uncut documents cost their tokens and a separator."""
    items = whole_documents(make_split([[1, 2], [3]]))
    assert isinstance(items, Items)
    assert (items.cost.tolist(), items.drawn.tolist()) == ([3, 2], [0, 1])
