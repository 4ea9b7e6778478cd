"""What is trained on, in what order, and how it is laid into rows: numbers of documents and places, no tensors.

Everything here is a pure function of the split, the seed and the sampling, so that what a trial is trained on depends
neither on how fast, how wide or how often interrupted it was, nor on the machine. An *item* is what is drawn as a
whole: a document, or a preference pair.

**Mixing.** Without weights, temperature and general text all items are one pool: every one comes once per pass.
Otherwise each source has its own endless passes, and the next item comes from the source that is furthest behind its
share of the tokens, so the shares hold at every moment.

**Cutting.** A row holds the separator and at most ``sequence_length - 1`` tokens of a document. Of a longer document
the start is kept; only where the first answer would not fit is the start moved to the right, and only so far that the
answer fits, or half a row of it. So an answer begins with all that came before it, or at least half a row of that (it
is never learnt without its question), and no document loses all its answers. The two halves of a pair begin at the same
place: their difference must not come from one having seen more of the prompt.

**Packing.** Whole documents are laid into rows of one length by best fit: each into the fullest of the last
`OPEN_ROWS` rows that has room for it. With 20,000 documents of lognormal lengths (median 200 to 1,200 tokens, rows of
512 and 2,048) 0.4 to 7 % of the positions are padding; with a single open row 1 to 32 %, with one document per row up
to six times the tokens. A document comes at most `OPEN_ROWS` rows later than it would have, so orders survive, and the
rows are closed at the end of a pass over the pool.

**Padding.** Rows of single documents come in the order that was drawn, and documents of similar length are *not*
brought together to save padding. A step's loss is a mean over its tokens, so batches of short documents next to batches
of long ones would give the short ones' tokens many times the weight that the score gives them. It costs: with eight
rows to a batch and lengths about a median of 300, 37 to 60 % of the positions are padding. Packing saves it and changes
no weight; ``short_to_long`` is there for who wants it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from frozen.tokens import EncodedSplit

Order = Literal["shuffled", "short_to_long", "easy_to_hard"]
Runs = Iterator[Iterable[int]]
"""Items in the order in which they are drawn: pass by pass over a pool, or one endless run of a mixture."""

OPEN_ROWS = 64
WIDTH_STEP = 8
"""Padded rows are as wide as a multiple of this: fewer different shapes for kernels to be chosen and compiled for."""
_ORDERS = ("shuffled", "short_to_long", "easy_to_hard")
_BUCKETS = 8
_BITS = 2.0**20
"""Surprisal is counted in whole 2^-20 bits: sums are exact, so another machine's rounding cannot change an order."""
_CHUNK = 1 << 22
"""Tokens looked up at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Which items are drawn, and in what order.

    ``fraction`` takes the first items of every source in the order of their digests (at least one each), so a smaller
    share is a subset of a larger one. ``order``: ``shuffled`` draws a new permutation in every pass over a source;
    ``short_to_long`` goes through each pass in rising length, by octaves, ``easy_to_hard`` in rising mean surprisal of
    the tokens under their own frequencies in the split, by eighths of the documents, both shuffled within. (Platanios
    et al., arXiv 1903.09848, section 2.2, sum the surprisal, which mixes in the length.) A source counts by its size in
    tokens times its weight (1 without ``weights``), to the power 1 / ``temperature``: 1 leaves proportions as they are,
    more makes small sources come oftener. With ``weights`` every source needs one; a source without documents has
    nothing to give and is passed over. ``general_fraction`` of the tokens come from the sources that the split calls
    general, mixed among themselves by the same rule; at 0 those are not read.
    """

    seed: int
    fraction: float
    order: Order
    weights: Mapping[str, float]
    temperature: float
    general_fraction: float

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"the seed must not be negative, got {self.seed}")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"the fraction of the data must lie in (0, 1], got {self.fraction}")
        if self.order not in _ORDERS:
            raise ValueError(f"unknown order {self.order!r}: expected one of {', '.join(_ORDERS)}")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(f"the sampling temperature must be finite and above 0, got {self.temperature}")
        if not 0 <= self.general_fraction < 1:
            raise ValueError(f"the general fraction must lie in [0, 1), got {self.general_fraction}")

    @property
    def mixes(self) -> bool:
        """Whether sources are drawn from by shares, each in passes of its own, instead of as one pool."""
        return bool(self.weights) or self.temperature != 1 or self.general_fraction > 0


class Items(NamedTuple):
    """What can be drawn from a split and where it lies, as laid into rows of a given length."""

    starts: npt.NDArray[np.int64]
    """[documents]: where each document's row begins in the split's tokens; the separator goes before it."""
    stops: npt.NDArray[np.int64]
    """[documents]: where it ends."""
    cost: npt.NDArray[np.int64]
    """[items]: positions that an item takes without padding, separators included."""
    drawn: npt.NDArray[np.int64]
    """Numbers of the items that have something to train on."""
    documents_each: int
    """1, or 2 where items are pairs: item ``i`` is documents ``2 i`` and ``2 i + 1``."""


def whole_documents(split: EncodedSplit) -> Items:
    """Return a split's documents uncut, as the endless stream of plain text takes them."""
    starts, stops = split.offsets[:-1], split.offsets[1:]
    return Items(starts, stops, stops - starts + 1, np.arange(split.documents), documents_each=1)


def cut_documents(split: EncodedSplit, sequence_length: int) -> Items:
    """Return a split's documents, or pairs, cut to rows of ``sequence_length``; see the module for the rule.

    An item without anything to train on (of a pair: in one of its halves) is passed over; `ValueError` if all are.
    """
    if sequence_length < 2:
        raise ValueError(f"a row of {sequence_length} tokens has no room for a separator and a token to learn")
    room = sequence_length - 1
    starts, ends = split.offsets[:-1].copy(), split.offsets[1:]
    if split.marks is not None:
        for document in np.flatnonzero(ends - starts > room).tolist():
            starts[document] += _first_kept(split.marks[starts[document] : ends[document]], room)
    if split.pairs:
        begins = split.offsets[:-1]
        starts = begins + (starts - begins).reshape(-1, 2).max(axis=1).repeat(2)
    stops = np.maximum(starts, np.minimum(starts + room, ends))
    trained = _trained(split, starts, stops)
    cost = stops - starts + 1
    each = 1
    if split.pairs:
        trained, cost, each = trained[0::2] & trained[1::2], cost[0::2] + cost[1::2], 2
    if not trained.any():
        raise ValueError(f"no document of the split has a token to train on within {sequence_length} tokens")
    return Items(starts, stops, cost, np.flatnonzero(trained), each)


def _first_kept(marks: npt.NDArray[np.uint8], room: int) -> int:
    """Return from which token on ``room`` tokens of a longer document are kept."""
    trained = np.flatnonzero(marks)
    if not len(trained):
        return 0
    first = int(trained[0])
    breaks = np.flatnonzero(np.diff(trained) > 1)
    answer = int(breaks[0]) + 1 if len(breaks) else len(trained)
    return max(0, first + min(answer, max(1, room // 2)) - room)


def _trained(split: EncodedSplit, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return which documents have a token to train on between ``starts`` and ``stops``."""
    if split.marks is None:
        return np.ones(split.documents, dtype=bool)
    trained: npt.NDArray[np.bool_] = np.maximum.reduceat(split.marks, split.offsets[:-1]).astype(bool)
    for document in np.flatnonzero((starts > split.offsets[:-1]) | (stops < split.offsets[1:])).tolist():
        trained[document] = bool(split.marks[starts[document] : stops[document]].any())
    return trained


def draw(split: EncodedSplit, items: Items, sampling: Sampling) -> Runs:
    """Return the endless runs of item numbers that ``sampling`` asks for; `ValueError` if the split cannot give it."""
    by_source = _by_source(split, items, sampling.fraction)
    level = _levels(split, items, sampling.order)
    if sampling.mixes:
        shares = _shares(split, items, by_source, sampling)
        return iter([_mixture(items, by_source, level, shares, sampling.seed)])
    own = [documents for name, documents in zip(split.sources, by_source, strict=True) if name not in split.general]
    pool = np.sort(np.concatenate([np.empty(0, np.int64), *own]))
    if not len(pool):
        raise ValueError("there is nothing to train on but general text, and its fraction is 0")
    return _passes(pool, level, sampling.seed, stream=0)


def _by_source(split: EncodedSplit, items: Items, fraction: float) -> list[npt.NDArray[np.int64]]:
    """Return the items of each source that are read, in the order of their digests."""
    source_ids = split.source_ids[:: items.documents_each]
    found = []
    for source in range(len(split.sources)):
        numbers = items.drawn[source_ids[items.drawn] == source]
        found.append(numbers[: math.ceil(fraction * len(numbers))])
    return found


def _levels(split: EncodedSplit, items: Items, order: Order) -> npt.NDArray[Any] | None:
    """Return what an order sorts items by, [items]; None: by nothing."""
    match order:
        case "shuffled":
            return None
        case "short_to_long":
            return np.frexp((items.cost - 1).astype(np.float64))[1]
        case "easy_to_hard":
            return mean_surprisal(split, items.documents_each)


def mean_surprisal(split: EncodedSplit, documents_each: int = 1) -> npt.NDArray[np.float64]:
    """Return each item's mean surprisal in bits per token under the split's own token frequencies, [items]."""
    counts = np.zeros(split.vocabulary, dtype=np.int64)
    for begin in range(0, len(split.tokens), _CHUNK):
        counts += np.bincount(split.tokens[begin : begin + _CHUNK], minlength=split.vocabulary)
    bits = np.round(-np.log2(np.maximum(counts, 1) / len(split.tokens)) * _BITS).astype(np.int64)
    edges = split.offsets[::documents_each]
    sums = np.empty(len(edges) - 1, dtype=np.int64)
    first = 0
    while first < len(sums):
        last = max(first + 1, int(np.searchsorted(edges, edges[first] + _CHUNK, side="right")) - 1)
        chosen = bits[split.tokens[edges[first] : edges[last]]]
        sums[first:last] = np.add.reduceat(chosen, edges[first:last] - edges[first])
        first = last
    mean: npt.NDArray[np.float64] = sums / np.diff(edges) / _BITS
    return mean


def _passes(
    numbers: npt.NDArray[np.int64], level: npt.NDArray[Any] | None, seed: int, *, stream: int
) -> Iterator[list[int]]:
    """Yield passes without end: every number once per pass."""
    ranks = None
    if level is not None:
        ranks = level[numbers]
        if ranks.dtype.kind == "f":  # a measure that has no steps of its own: eighths of what is read
            places = np.empty(len(numbers), dtype=np.int64)
            places[np.argsort(ranks, kind="stable")] = np.arange(len(numbers))
            ranks = places * _BUCKETS // len(numbers)
    for number in itertools.count():
        # A bit generator's raw stream is promised to be stable across numpy versions; `permutation` is not.
        keys = np.random.PCG64([seed, stream, number]).random_raw(len(numbers))
        turn = np.argsort(keys, kind="stable") if ranks is None else np.lexsort((keys, ranks))
        yield numbers[turn].tolist()


def _mixture(
    items: Items,
    by_source: list[npt.NDArray[np.int64]],
    level: npt.NDArray[Any] | None,
    shares: Mapping[int, float],
    seed: int,
) -> Iterator[int]:
    """Yield item numbers so that each source's part of the tokens follows its share at every moment."""
    streams = {
        source: itertools.chain.from_iterable(_passes(by_source[source], level, seed, stream=1 + source))
        for source in shares
    }
    behind = [(0.0, source) for source in shares]
    heapq.heapify(behind)
    while True:
        given, source = heapq.heappop(behind)
        item = next(streams[source])
        yield item
        heapq.heappush(behind, (given + int(items.cost[item]) / shares[source], source))


def _shares(
    split: EncodedSplit, items: Items, by_source: list[npt.NDArray[np.int64]], sampling: Sampling
) -> dict[int, float]:
    """Return the share of every source that has items and is wanted; `ValueError` if there is none, or no such name."""
    weights = sampling.weights or dict.fromkeys(split.sources, 1.0)
    if set(weights) != set(split.sources):
        raise ValueError(
            f"sampling weights must name every source once: the data has {', '.join(split.sources)},"
            f" the weights name {', '.join(sorted(weights))}"
        )
    for name, weight in weights.items():
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"the sampling weight of {name} must be finite and not negative, got {weight}")
    shares = {
        source: (weights[name] * float(items.cost[by_source[source]].sum())) ** (1 / sampling.temperature)
        for source, name in enumerate(split.sources)
        if weights[name] > 0 and len(by_source[source])
    }
    general = {source: share for source, share in shares.items() if split.sources[source] in split.general}
    own = {source: share for source, share in shares.items() if source not in general}
    if not own:
        raise ValueError("no source with training documents has a sampling weight above zero (general text aside)")
    fraction = sampling.general_fraction
    if fraction == 0:
        return own
    if not general:
        raise ValueError(
            f"a general fraction of {fraction} of the tokens needs general text: the data has no source marked general"
            " that has training documents and a sampling weight above zero; mark one, or set the fraction to 0"
        )
    own_sum, general_sum = sum(own.values()), sum(general.values())
    return {source: share * (1 - fraction) / own_sum for source, share in own.items()} | {
        source: share * fraction / general_sum for source, share in general.items()
    }


def packed(runs: Iterable[Iterable[int]], cost: npt.NDArray[np.int64], sequence_length: int) -> Iterator[list[int]]:
    """Yield rows of items that fit into ``sequence_length`` together, oldest first; see the module for the rule."""
    for run in runs:
        rows: list[list[int]] = []
        rooms: list[int] = []
        for item in run:
            size = int(cost[item])
            best, least = -1, sequence_length + 1
            for index, room in enumerate(rooms):
                if size <= room < least:
                    best, least = index, room
            if best < 0:
                rows.append([item])
                rooms.append(sequence_length - size)
            else:
                rows[best].append(item)
                rooms[best] -= size
            if len(rows) > OPEN_ROWS:
                del rooms[0]
                yield rows.pop(0)
        yield from rows


def padded_width(longest: int, sequence_length: int) -> int:
    """Return how wide a batch of padded rows is whose longest takes ``longest`` positions."""
    return min(sequence_length, -(-longest // WIDTH_STEP) * WIDTH_STEP)


def positions_per_epoch(
    split: EncodedSplit,
    *,
    sequence_length: int,
    batch_sequences: int,
    packing: bool,
    fraction: float,
    order: Order,
    weights: Mapping[str, float],
    temperature: float,
    general_fraction: float,
) -> int:
    """Return how many positions, padding included, one pass over the data costs: what a token budget is charged.

    A mixture has made a pass when it has drawn as many tokens as the sources not called general hold, from those
    sources. Counted for the first pass of seed 0; packing and padding differ a little from pass to pass.
    """
    sampling = Sampling(
        seed=0,
        fraction=fraction,
        order=order,
        weights=weights,
        temperature=temperature,
        general_fraction=general_fraction,
    )
    if packing and split.marks is None:
        items = whole_documents(split)
        return int(items.cost[_first_pass(split, items, sampling)].sum())
    items = cut_documents(split, sequence_length)
    drawn = _first_pass(split, items, sampling)
    if packing and not split.pairs:
        return sequence_length * sum(1 for _ in packed([drawn], items.cost, sequence_length))
    longest = (items.stops - items.starts + 1).reshape(-1, items.documents_each).max(axis=1)[drawn]
    batches = np.maximum.reduceat(longest, np.arange(0, len(drawn), batch_sequences)).tolist()
    rows = [batch_sequences] * (len(drawn) // batch_sequences) + [len(drawn) % batch_sequences or batch_sequences]
    return items.documents_each * sum(
        count * padded_width(width, sequence_length) for count, width in zip(rows, batches, strict=False)
    )


def mean_row_tokens(
    split: EncodedSplit,
    *,
    sequence_length: int,
    packing: bool,
    fraction: float,
    order: Order,
    weights: Mapping[str, float],
    temperature: float,
    general_fraction: float,
) -> float:
    """Return the least positions that a row costs on average over a pass: no padding counted where rows are padded.

    A token budget divided by this and by the rows of a step tells how many steps there are at most. (In an order that
    begins with short documents, a budget of less than one pass can give more.) A pair has two rows.
    """
    if packing and not split.pairs:
        return float(sequence_length)
    sampling = Sampling(
        seed=0,
        fraction=fraction,
        order=order,
        weights=weights,
        temperature=temperature,
        general_fraction=general_fraction,
    )
    items = cut_documents(split, sequence_length)
    return float(items.cost[_first_pass(split, items, sampling)].mean()) / items.documents_each


def _first_pass(split: EncodedSplit, items: Items, sampling: Sampling) -> list[int]:
    """Return the items of one pass over the data."""
    run = next(draw(split, items, sampling))
    if not sampling.mixes:
        return list(run)
    own = np.array([name not in split.general for name in split.sources])[split.source_ids[:: items.documents_each]]
    read = np.concatenate(_by_source(split, items, sampling.fraction))
    left = int(items.cost[read[own[read]]].sum())
    drawn = []
    for item in run:
        drawn.append(item)
        left -= int(items.cost[item]) if own[item] else 0
        if left <= 0:
            break
    return drawn
