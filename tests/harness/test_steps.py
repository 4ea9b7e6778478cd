"""What an optimizer step costs, for packed rows, padded rows and pairs: estimates against the streams themselves."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frozen.loader import Examples, Pairs
from frozen.splits import ANSWER, CONTEXT, EncodedSplit, write_split
from frozen.timer import Budget
from harness.config import TrialConfig, Value, flatten, unflatten
from harness.memory import estimate
from harness.policy import Policy, Refusal, find_policy
from harness.sizes import (
    SHORTEST_ROWS,
    RowLengths,
    as_trained,
    least_positions,
    packs,
    padding_share,
    usual_positions,
    widest_row,
)
from tests.samples import BASE, llama_facts

FACTS = llama_facts(layers=2, hidden=64, intermediate=160, heads=4, vocabulary=512)
PLAIN: dict[str, Any] = {"fraction": 1.0, "order": "shuffled", "weights": {}, "temperature": 1.0}
SFT, DPO = (Policy.load(find_policy(name), ["mine"]) for name in ("lora", "dpo"))


def config(policy: Policy = SFT, **changes: Value) -> TrialConfig:
    flat = flatten(policy.baseline({})) | {f"batch.{name}": value for name, value in changes.items()}
    return unflatten(flat)


Make = Callable[..., EncodedSplit]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def write(lengths: list[int], *, pairs: bool = False) -> EncodedSplit:
        documents = [np.full(length, 7) for length in lengths]
        marks = [[CONTEXT] + [ANSWER] * (length - 1) for length in lengths]
        return write_split(
            tmp_path / f"split{len(list(tmp_path.iterdir()))}",
            documents=documents,
            byte_counts=lengths,
            source_ids=[0] * len(lengths),
            sources=("a",),
            separator=0,
            vocabulary=16,
            marks=marks,
            pairs=pairs,
        )

    return write


def drawn(split: EncodedSplit, asked: TrialConfig, steps: int) -> list[int]:
    """Return the tokens of so many optimizer steps, as the loader lays them out."""
    batch = asked.batch
    shape: dict[str, Any] = {"sequence_length": batch.sequence_length, "batch_sequences": batch.per_device}
    stream = (
        Pairs(split, seed=1, padding=0, **shape, **PLAIN)
        if split.pairs
        else Examples(split, seed=1, padding=0, packing=batch.packing, general_fraction=0.0, **shape, **PLAIN)
    )
    tokens = [part.tokens for part in itertools.islice(stream, steps * batch.accumulation)]
    return [sum(tokens[at : at + batch.accumulation]) for at in range(0, len(tokens), batch.accumulation)]


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize(("per_device", "sequence_length"), [(1, 512), (4, 512), (8, 96), (16, 2048)])
def test_padded_steps_cost_what_was_told(make: Make, pairs: bool, per_device: int, sequence_length: int) -> None:
    """The usual step is the streams' mean within a twentieth; none is below the least, no row wider than the widest."""
    draw = np.random.default_rng(3)
    split = make(np.clip(draw.lognormal(4.5, 0.8, 600), 4, 900).astype(int).tolist(), pairs=pairs)
    asked = config(
        DPO if pairs else SFT,
        per_device=per_device,
        accumulation=2,
        sequence_length=sequence_length,
        packing=False,
    )
    lengths = RowLengths.of(split)
    found = drawn(split, asked, 200)
    usual = usual_positions(asked, lengths)
    assert usual is not None
    assert usual == pytest.approx(statistics.mean(found), rel=0.05)
    assert SHORTEST_ROWS.shortest <= lengths.shortest
    assert least_positions(asked, None) <= least_positions(asked, lengths) <= min(found)
    rows = asked.batch.per_step * (2 if pairs else 1)
    assert max(found) <= rows * widest_row(asked, lengths) <= rows * sequence_length
    assert usual_positions(asked, None) is None


def test_packed_rows_are_full(make: Make) -> None:
    """A packed step needs no lengths, and has no padding worth the name."""
    asked = config(per_device=4, accumulation=2, sequence_length=64, packing=True)
    split = make([5] * 300)
    assert drawn(split, asked, 3) == [512] * 3
    assert usual_positions(asked, None) == least_positions(asked, None) == 512
    assert padding_share(asked, RowLengths.of(split)) == 0


def test_pairs_are_never_packed() -> None:
    """What the config says of packing means nothing for preferences, whose halves are rows of their own."""
    asked = config(DPO, packing=True)
    assert not packs(asked)
    assert packs(config(packing=True))


@given(lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=50), rows=st.integers(1, 64))
def test_lengths_bound_their_means(lengths: list[int], rows: int) -> None:
    """Whatever the documents: a batch is at least as wide as a row on average, and no wider than the longest."""
    split = EncodedSplit(
        tokens=np.zeros(sum(lengths), np.uint16),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        bytes=np.ones(len(lengths), np.int64),
        source_ids=np.zeros(len(lengths), np.int16),
        sources=("a",),
        separator=0,
        vocabulary=2,
    )
    found = RowLengths.of(split)
    assert (found.shortest, found.longest) == (min(lengths) + 1, max(lengths) + 1)
    for cut in (8, 500, 4096):
        assert found.mean(cut) <= found.mean_width(cut, rows) + 1e-9
        assert (
            found.mean_width(cut, rows) <= found.mean_width(cut, rows + 1) + 1e-9 <= min(cut, max(lengths) + 8) + 1e-6
        )


# --- refusing ----------------------------------------------------------------------------------------------------


def test_only_what_is_certain_is_refused() -> None:
    """Padded rows that could be short are let through; with the documents counted, more is certain."""
    asked = config(per_device=4, accumulation=1, sequence_length=1024, packing=False)
    budget = Budget("tokens", 50 * 4 * 100.0)
    assert SFT.proposals.minimum_steps == 50
    for shortest, refused in ((None, False), (90, False), (110, True)):
        lengths = None if shortest is None else RowLengths(shortest, 500, (shortest, 500))
        found = SFT.too_few_steps(asked, budget, 512, FACTS, lengths)
        assert isinstance(found, Refusal) == refused
    assert found is not None
    assert "at least 4 sequences × 1 passes × 112 tokens = 448 tokens" in found.reason
    assert "at most 44.6 steps" in found.reason
    packed = SFT.too_few_steps(config(per_device=4, accumulation=1, packing=True), budget, 512, FACTS, None)
    assert packed is not None
    assert "one optimizer step takes 4 sequences" in packed.reason


def test_a_pair_costs_two_rows() -> None:
    """Half the steps of single rows, and the sentence says why."""
    asked = config(DPO, per_device=2, accumulation=2, sequence_length=512)
    lengths = RowLengths(100, 400, (200,))
    assert least_positions(asked, lengths) == 2 * 4 * 104
    found = DPO.too_few_steps(asked, Budget("tokens", 24_000.0), 512, FACTS, lengths)
    assert found is not None
    assert "2 pairs × 2 rows × 2 passes × 104 tokens = 832 tokens" in found.reason
    assert DPO.too_few_steps(asked, Budget("tokens", 25_000.0), 512, FACTS, lengths) is None


# --- memory ------------------------------------------------------------------------------------------------------


def memory(asked: TrialConfig, lengths: RowLengths | None) -> int:
    return estimate(asked, vocabulary=512, base=FACTS, on_gpu=True, lengths=lengths).total_bytes


@pytest.mark.parametrize("policy", [SFT, DPO])
def test_a_length_that_no_document_reaches_costs_no_memory(policy: Policy) -> None:
    """Padded rows hold what the longest document does; packed ones are as long as they are told."""
    lengths = RowLengths(20, 300, (100, 300))
    short, long = (config(policy, sequence_length=n, packing=False) for n in (304, 8192))
    assert memory(long, lengths) == memory(short, lengths) < memory(long, None)
    if policy is SFT:
        short, long = (config(policy, sequence_length=n, packing=True) for n in (304, 8192))
        assert memory(long, lengths) == memory(long, None) > memory(short, lengths)


# --- what trains alike -------------------------------------------------------------------------------------------


def test_lengths_beyond_the_longest_train_alike() -> None:
    """They are one config to who proposes; a shorter one, a packed one and a fresh model's are their own."""
    lengths = RowLengths(20, 300, (100, 300))
    spelled = {as_trained(config(sequence_length=n, packing=False), lengths).digest for n in (304, 512, 4096)}
    assert len(spelled) == 1
    shorter = config(sequence_length=256, packing=False)
    assert as_trained(shorter, lengths) == shorter
    packed = config(sequence_length=4096, packing=True)
    assert as_trained(packed, lengths) == packed
    assert as_trained(BASE, lengths) == BASE
    assert as_trained(shorter, None) == shorter


@pytest.mark.parametrize("per_device", [1, 8])
def test_streams_of_such_lengths_are_the_same(make: Make, per_device: int) -> None:
    """The claim behind `as_trained`: the same rows of the same width."""
    split = make([9, 30, 290, 120, 61] * 5)
    lengths = RowLengths.of(split)
    asked = config(per_device=per_device, sequence_length=4096, packing=False)
    streams = [
        Examples(
            split,
            seed=2,
            packing=False,
            padding=0,
            general_fraction=0.0,
            batch_sequences=per_device,
            sequence_length=n,
            **PLAIN,
        )
        for n in (4096, as_trained(asked, lengths).batch.sequence_length)
    ]
    for one, other in itertools.islice(zip(*streams, strict=True), 12):
        assert one.input_ids.equal(other.input_ids)
        assert one.labels.equal(other.labels)
