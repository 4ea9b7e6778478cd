import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from frozen.loader import Batch, Batches, Examples, Pairs
from frozen.sampling import cut_documents
from frozen.tokens import EncodedSplit

MakeSplit = Callable[..., EncodedSplit]
fixture_is_a_pure_function = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50, deadline=None
)
PADDING = 99
Made = Sequence[tuple[list[int], list[int]]]


def examples(split: EncodedSplit, **changes: Any) -> Examples:
    """Make a loader of documents with plain settings."""
    plain: dict[str, Any] = {
        "seed": 1,
        "sequence_length": 16,
        "batch_sequences": 2,
        "packing": True,
        "fraction": 1.0,
        "order": "shuffled",
        "weights": {},
        "temperature": 1.0,
        "general_fraction": 0.0,
        "padding": PADDING,
    }
    return Examples(split, **(plain | changes))


def pairs_of(split: EncodedSplit, **changes: Any) -> Pairs:
    """Make a loader of pairs with plain settings."""
    plain: dict[str, Any] = {
        "seed": 1,
        "sequence_length": 16,
        "batch_sequences": 2,
        "fraction": 1.0,
        "order": "shuffled",
        "weights": {},
        "temperature": 1.0,
        "padding": PADDING,
    }
    return Pairs(split, **(plain | changes))


@st.composite
def marked(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Tokens and marks of a document with an answer; none of the tokens is the separator or the padding."""
    tokens = draw(st.lists(st.integers(1, 98), min_size=1, max_size=30))
    marks = draw(st.lists(st.sampled_from([0, 0, 1, 2]), min_size=len(tokens), max_size=len(tokens)))
    marks[draw(st.integers(0, len(tokens) - 1))] = 1
    return tokens, marks


def split_of(make_split: MakeSplit, made: Made, **changes: Any) -> EncodedSplit:
    return make_split([tokens for tokens, _ in made], marks=[marks for _, marks in made], **changes)


def documents_in(batch: Batch) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return tokens and labels of every document in a batch, found by its separator alone; the rest must be padding."""
    found = []
    for row, (tokens, labels) in enumerate(zip(batch.input_ids.tolist(), batch.labels.tolist(), strict=True)):
        used = len(tokens) if PADDING not in tokens else tokens.index(PADDING)
        assert set(tokens[used:]) <= {PADDING}
        assert set(labels[used:]) <= {-100}
        assert tokens[0] == 0
        begins = [place for place in range(used) if tokens[place] == 0]
        for begin, end in zip(begins, [*begins[1:], used], strict=True):
            assert labels[begin] == -100
            found.append((tuple(tokens[begin + 1 : end]), tuple(labels[begin + 1 : end])))
            if batch.position_ids is not None:
                assert batch.position_ids[row, begin:end].tolist() == list(range(end - begin))
        if batch.position_ids is not None:
            assert batch.position_ids[row, used:].tolist() == list(range(len(tokens) - used))
        if batch.attention_mask is not None:
            assert batch.attention_mask[row].tolist() == [1] * used + [0] * (len(tokens) - used)
            assert len(begins) == 1
    return found


def expected_documents(split: EncodedSplit, sequence_length: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return tokens and labels of every document, cut, straight from the split's arrays."""
    items = cut_documents(split, sequence_length)
    found = []
    for start, stop in zip(items.starts.tolist(), items.stops.tolist(), strict=True):
        tokens = split.tokens[start:stop].tolist()
        marks = [1] * len(tokens) if split.marks is None else split.marks[start:stop].tolist()
        labels = [token if mark in (1, 2) else -100 for token, mark in zip(tokens, marks, strict=True)]
        found.append((tuple(tokens), tuple(labels)))
    return found


@fixture_is_a_pure_function
@given(
    made=st.lists(marked(), min_size=1, max_size=12),
    sequence_length=st.integers(2, 40),
    packing=st.booleans(),
    plain=st.booleans(),
    order=st.sampled_from(["shuffled", "short_to_long", "easy_to_hard"]),
    seed=st.integers(0, 3),
)
def test_every_pass_holds_every_document_once_with_its_labels(
    make_split: MakeSplit, made: Made, sequence_length: int, packing: bool, plain: bool, order: str, seed: int
) -> None:
    """Token by token: labels are the marked tokens and nothing else, in three passes read row by row."""
    split = make_split([tokens for tokens, _ in made]) if plain else split_of(make_split, made)
    loader = examples(
        split, sequence_length=sequence_length, packing=packing, order=order, seed=seed, batch_sequences=1
    )
    expected = sorted(expected_documents(split, sequence_length))
    for _ in range(3):
        found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        while len(found) < len(made):
            batch = next(loader)
            found += documents_in(batch)
            assert batch.tokens == batch.input_ids.numel()
        assert sorted(found) == expected


@pytest.mark.parametrize("packing", [True, False])
def test_types_and_shapes(make_split: MakeSplit, packing: bool) -> None:
    """int64 throughout, on the CPU; a mask for padded rows, positions for packed ones."""
    batch = next(examples(make_split([[1] * 9, [2] * 4]), packing=packing))
    arrays = [batch.input_ids, batch.labels, batch.position_ids if packing else batch.attention_mask]
    shape = (2, 16)  # padded: ten positions, rounded up to a multiple of eight
    for array in arrays:
        assert array is not None
        assert (array.dtype, array.device.type, tuple(array.shape)) == (torch.int64, "cpu", shape)
    assert (batch.attention_mask is None, batch.position_ids is None) == (packing, not packing)


@pytest.mark.parametrize(
    ("lengths", "sequence_length", "width"),
    [([3, 3], 64, 8), ([3, 7], 64, 8), ([3, 8], 64, 16), ([3, 50], 64, 56), ([3, 80], 64, 64), ([9, 9], 10, 10)],
)
def test_padded_rows_are_as_wide_as_the_longest(
    make_split: MakeSplit, lengths: list[int], sequence_length: int, width: int
) -> None:
    """Rounded up to a multiple of eight, but never beyond the sequence length."""
    split = make_split([[1] * length for length in lengths])
    batch = next(examples(split, sequence_length=sequence_length, packing=False))
    assert (tuple(batch.input_ids.shape), batch.tokens) == ((2, width), 2 * width)


@fixture_is_a_pure_function
@given(
    made=st.lists(marked(), min_size=2, max_size=12),
    packing=st.booleans(),
    changes=st.sampled_from([{}, {"temperature": 3.0}, {"weights": {"one": 1, "two": 2}}, {"general_fraction": 0.3}]),
    batch_sequences=st.integers(1, 4),
    skipped=st.integers(0, 30),
)
def test_rows_do_not_depend_on_the_batch_and_skipping_is_reading(
    make_split: MakeSplit, made: Made, packing: bool, changes: dict[str, Any], batch_sequences: int, skipped: int
) -> None:
    """The same documents lie in the same rows whatever the batch, and after ``skip`` as after reading."""
    general = ("two",) if "general_fraction" in changes else ()
    ids = [number % 2 for number in range(len(made))]
    split = split_of(make_split, made, source_ids=ids, sources=("one", "two"), general=general)
    single = examples(split, packing=packing, batch_sequences=1, **changes)
    wide = examples(split, packing=packing, batch_sequences=batch_sequences, **changes)
    jumped = examples(split, packing=packing, batch_sequences=batch_sequences, **changes)
    jumped.skip(skipped)
    for number in range(skipped + 3):
        batch = next(wide)
        rows = [next(single) for _ in range(batch_sequences)]
        for row, alone in enumerate(rows):
            width = alone.input_ids.shape[1]
            assert torch.equal(alone.input_ids[0], batch.input_ids[row, :width])
            assert torch.equal(alone.labels[0], batch.labels[row, :width])
        if number >= skipped:
            again = next(jumped)
            assert torch.equal(again.input_ids, batch.input_ids)
            assert torch.equal(again.labels, batch.labels)


@fixture_is_a_pure_function
@given(
    made=st.lists(marked(), min_size=1, max_size=15),
    one=st.floats(0.01, 1),
    other=st.floats(0.01, 1),
    packing=st.booleans(),
)
def test_fractions_are_nested(make_split: MakeSplit, made: Made, one: float, other: float, packing: bool) -> None:
    """What a smaller share reads, a larger one reads too."""
    numbered = [([number + 1] * len(tokens), marks) for number, (tokens, marks) in enumerate(made)]
    split = split_of(make_split, numbered)

    def seen(fraction: float) -> set[int]:
        batches = itertools.islice(examples(split, fraction=fraction, packing=packing), 2 * len(made))
        return {int(token) for batch in batches for token in batch.input_ids.unique()} - {0, PADDING}

    assert seen(min(one, other)) <= seen(max(one, other))
    assert seen(1.0) == set(range(1, len(made) + 1))


def test_the_stream_is_a_function_of_the_seed(make_split: MakeSplit) -> None:
    """The same seed repeats the rows exactly, another one differs, and passes are shuffled anew."""
    split = make_split([[number] * 3 for number in range(1, 41)])

    def rows(seed: int) -> list[list[int]]:
        loader = examples(split, seed=seed, batch_sequences=1)
        return [next(loader).input_ids[0].tolist() for _ in range(20)]

    assert rows(1) == rows(1) != rows(2)
    assert rows(1)[:10] != rows(1)[10:]


def test_golden_rows(make_split: MakeSplit) -> None:
    """The rows are the same on every machine and with every numpy: a change here is a change of every score."""
    split = make_split([[number] * (1 + number % 5) for number in range(1, 11)])
    loader = examples(split, seed=3, batch_sequences=1, sequence_length=12)
    rows = [next(loader).input_ids[0] for _ in range(4)]
    documents = [torch.unique_consecutive(row[(row > 0) & (row < PADDING)]).tolist() for row in rows]
    assert documents == [[1, 5, 10, 8], [2, 6, 7], [4, 9], [3]]


@pytest.mark.parametrize("mark", [1, 2])
def test_what_ends_an_answer_is_trained_on_too(make_split: MakeSplit, mark: int) -> None:
    """Answer and end alike; context is not."""
    batch = next(examples(make_split([[5, 6, 7]], marks=[[0, 1, mark]]), batch_sequences=1, packing=False))
    assert batch.labels[0].tolist() == [-100, -100, 6, 7, -100, -100, -100, -100]


def test_every_row_has_something_to_learn(make_split: MakeSplit) -> None:
    """A row without a label would give a loss of NaN: long questions are cut before their answers are lost."""
    split = make_split([[1] * 100] * 5, marks=[[0] * 98 + [1, 2]] * 5)
    for packing in (True, False):
        batch = next(examples(split, packing=packing, batch_sequences=5))
        assert ((batch.labels != -100).sum(dim=1) == 2).all()


def test_packing_wastes_little(make_split: MakeSplit) -> None:
    """Of rows of 512, under a twentieth is padding; one open row would leave over a fifth."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(np.log(200), 1, 2000).astype(int) + 1, 511)
    split = make_split([[1] * length for length in lengths.tolist()])
    batches = itertools.islice(examples(split, sequence_length=512, batch_sequences=8), 100)
    padding = torch.cat([(batch.input_ids == PADDING).float().flatten() for batch in batches]).mean()
    assert padding < 1 / 20


# Pairs


@st.composite
def preferences(draw: st.DrawFn) -> list[tuple[list[int], list[int]]]:
    """One to eight pairs of documents that share a prompt, which is not longer than half a row."""
    made = []
    for _ in range(draw(st.integers(1, 8))):
        prompt = draw(st.lists(st.integers(1, 98), min_size=0, max_size=7))
        for _ in range(2):
            answer = draw(st.lists(st.integers(1, 98), min_size=1, max_size=20))
            made.append(
                (prompt + answer, [0] * len(prompt) + [1] * (len(answer) - 1) + [draw(st.sampled_from([1, 2]))])
            )
            made[-1][1][len(prompt)] = 1
    return made


@fixture_is_a_pure_function
@given(
    made=preferences(),
    batch_sequences=st.integers(1, 3),
    order=st.sampled_from(["shuffled", "short_to_long", "easy_to_hard"]),
)
def test_pairs_lie_side_by_side(make_split: MakeSplit, made: Made, batch_sequences: int, order: str) -> None:
    """Row i is pair i's chosen answer, row B + i its rejected one; masks follow the marks; each comes once a pass."""
    split = split_of(make_split, made, pairs=True)
    documents = expected_documents(split, 16)
    loader = pairs_of(split, batch_sequences=batch_sequences, order=order)
    read: list[int] = []
    while len(read) < len(made):
        batch = next(loader)
        numbers = batch.pairs.tolist()
        read += numbers
        rows = [2 * number for number in numbers] + [2 * number + 1 for number in numbers]
        assert batch.tokens == batch.input_ids.numel()
        assert batch.input_ids.shape[0] == 2 * batch_sequences
        assert batch.input_ids.shape == batch.attention_mask.shape == batch.completion_mask.shape
        assert batch.input_ids.shape[1] % 8 == 0
        for row, document in enumerate(rows):
            tokens, labels = documents[document]
            padding = batch.input_ids.shape[1] - 1 - len(tokens)
            assert batch.input_ids[row].tolist() == [0, *tokens, *[PADDING] * padding]
            assert batch.attention_mask[row].tolist() == [1] * (1 + len(tokens)) + [0] * padding
            expected = [0, *(int(label != -100) for label in labels), *[0] * padding]
            assert batch.completion_mask[row].tolist() == expected
    count = len(made) // 2
    for begin in range(0, len(read) - count + 1, count):
        assert sorted(read[begin : begin + count]) == list(range(count))


@fixture_is_a_pure_function
@given(made=preferences(), batch_sequences=st.integers(1, 3), skipped=st.integers(0, 20))
def test_skipping_pairs_is_reading_them(make_split: MakeSplit, made: Made, batch_sequences: int, skipped: int) -> None:
    """Also across passes."""
    split = split_of(make_split, made, pairs=True)
    read, jumped = (pairs_of(split, batch_sequences=batch_sequences) for _ in range(2))
    for _ in range(skipped):
        next(read)
    jumped.skip(skipped)
    for one, other in zip(itertools.islice(read, 3), jumped, strict=False):
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(one, other, strict=True))


def test_a_fraction_of_the_pairs_and_their_mixture(make_split: MakeSplit) -> None:
    """Sources and fractions count pairs: a source of 4 of 20 pairs with weight 4 gives half of them."""
    made = [([1, 2], [0, 1])] * 40
    ids = [0] * 8 + [1] * 32
    split = split_of(make_split, made, pairs=True, source_ids=ids, sources=("few", "many"))
    batch = next(pairs_of(split, fraction=0.25, batch_sequences=10))
    assert set(batch.pairs.tolist()) == {0, 4, 5, 6, 7}
    mixed = pairs_of(split, weights={"few": 4.0, "many": 1.0}, batch_sequences=400)
    counts = Counter(number < 4 for number in next(mixed).pairs.tolist())
    assert counts[True] == pytest.approx(200, abs=2)


def test_each_split_has_its_loader(make_split: MakeSplit) -> None:
    """Text, conversations and pairs are told apart: the wrong loader would train on prompts, or on rejected answers."""
    text = make_split([[1, 2]])
    chat = make_split([[1, 2]], marks=[[0, 1]])
    preferred = make_split([[1, 2], [1, 3]], marks=[[0, 1], [0, 1]], pairs=True)
    shape: dict[str, Any] = {"seed": 1, "sequence_length": 8, "batch_sequences": 1}
    rest: dict[str, Any] = {"fraction": 1.0, "order": "shuffled", "weights": {}}
    for split in (chat, preferred):
        with pytest.raises(ValueError, match="Examples or Pairs read it"):
            Batches(split, **shape, **rest)
    with pytest.raises(ValueError, match="Pairs reads them"):
        examples(preferred)
    for split in (text, chat):
        with pytest.raises(ValueError, match="holds no preference pairs"):
            pairs_of(split)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": -1}, "seed"),
        ({"sequence_length": 1}, "no room"),
        ({"batch_sequences": 0}, "holds nothing"),
        ({"fraction": 0.0}, "fraction"),
        ({"padding": 100}, "padding token 100 lies outside the vocabulary of 100"),
        ({"padding": -1}, "padding token -1"),
    ],
)
def test_impossible_settings_are_refused(make_split: MakeSplit, changes: dict[str, Any], message: str) -> None:
    """Each bad argument is named, with its value, by both loaders."""
    with pytest.raises(ValueError, match=message):
        examples(make_split([[5]]), **changes)
    with pytest.raises(ValueError, match=message):
        pairs_of(make_split([[5], [6]], marks=[[1], [1]], pairs=True), **changes)


def test_streams_only_go_forward(make_split: MakeSplit) -> None:
    """A negative skip is refused."""
    with pytest.raises(ValueError, match="-1 batches"):
        examples(make_split([[5]])).skip(-1)
    with pytest.raises(ValueError, match="-1 batches"):
        pairs_of(make_split([[5], [6]], marks=[[1], [1]], pairs=True)).skip(-1)
