"""The stream of training batches: a pure function of seed, sampling and shape.

What is trained on must not depend on how fast, how wide or how often interrupted a trial was. So the documents form one
endless stream of tokens (a separator, a document, a separator, …), which is cut into sequences without dropping
anything: the tail of one document goes on in the next sequence, the tail of one pass in the next pass. The stream does
not know the batch: half the batch gives the same sequences in twice as many batches, so a repair after running out of
memory sees the same data.

Only the split that it is given can be read here, and a training job is given the train split alone.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from typing import Literal, Self

import numpy as np
import numpy.typing as npt
import torch

from frozen.tokens import EncodedSplit

Order = Literal["shuffled", "short_to_long", "easy_to_hard"]
_ORDERS = ("shuffled", "short_to_long", "easy_to_hard")


class Batches:
    """Endless int64 batches [batch_sequences, sequence_length] over a split, on the CPU.

    ``fraction`` takes the first documents of every source in the order of their digests (at least one each), so a
    smaller share is a subset of a larger one. ``order``: ``shuffled`` draws a new permutation in every pass over a
    source; ``short_to_long`` goes through each pass in rising length, by octaves, shuffled within an octave. Without
    ``weights`` all documents are one pool, so every source counts by its size. With ``weights`` a source counts by its
    size times its weight (2: its documents come twice as often as those of a source of weight 1); each source has its
    own endless passes then, and the next document comes from the source that is furthest behind its share of the
    tokens. Every source needs a weight; one without training documents has nothing to give and is passed over.
    """

    def __init__(
        self,
        split: EncodedSplit,
        *,
        seed: int,
        sequence_length: int,
        batch_sequences: int,
        fraction: float,
        order: Order,
        weights: Mapping[str, float],
    ) -> None:
        if seed < 0:
            raise ValueError(f"the seed must not be negative, got {seed}")
        if sequence_length < 1 or batch_sequences < 1:
            raise ValueError(f"a batch of {batch_sequences} sequences of {sequence_length} tokens holds nothing")
        if not 0 < fraction <= 1:
            raise ValueError(f"the fraction of the data must lie in (0, 1], got {fraction}")
        if order not in _ORDERS:
            raise ValueError(f"unknown order {order!r}: expected one of {', '.join(_ORDERS)}")
        self._split = split
        self._seed = seed
        self._shape = (batch_sequences, sequence_length)
        self._order = order
        by_source = [_first(split, source, fraction) for source in range(len(split.sources))]
        self._documents = self._mixture(by_source, weights) if weights else self._passes(_pool(by_source), stream=0)
        self._current = -1
        self._position = 0
        """Next token of the current document, its separator being the first."""
        self._end = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> torch.Tensor:
        """Return the next batch, int64 [batch_sequences, sequence_length]."""
        flat = np.empty(self._shape[0] * self._shape[1], dtype=np.int64)
        filled = 0
        while filled < flat.size:
            taken = self._take(flat.size - filled)
            self._copy(taken, flat[filled : filled + len(taken)])
            filled += len(taken)
        return torch.from_numpy(flat).view(self._shape)

    def skip(self, batches: int) -> None:
        """Go on as if ``batches`` batches had been read, without touching their tokens."""
        if batches < 0:
            raise ValueError(f"cannot skip {batches} batches: the stream only goes forward")
        left = batches * self._shape[0] * self._shape[1]
        while left:
            left -= len(self._take(left))

    def _take(self, most: int) -> range:
        """Advance by up to ``most`` tokens within one document; return the positions that were passed."""
        if self._position == self._end:
            self._current = next(self._documents)
            self._position = 0
            self._end = 1 + int(self._split.offsets[self._current + 1] - self._split.offsets[self._current])
        taken = range(self._position, min(self._end, self._position + most))
        self._position = taken.stop
        return taken

    def _copy(self, positions: range, out: npt.NDArray[np.int64]) -> None:
        """Write the current document's tokens at ``positions``; position 0 is the separator."""
        document = self._split.document(self._current)
        if positions.start == 0:
            out[0] = self._split.separator
            out[1:] = document[: positions.stop - 1]
        else:
            out[:] = document[positions.start - 1 : positions.stop - 1]

    def _passes(self, documents: npt.NDArray[np.int64], *, stream: int) -> Iterator[int]:
        """Yield document numbers without end, every one once per pass."""
        lengths = self._split.offsets[documents + 1] - self._split.offsets[documents]
        octaves = np.frexp(lengths.astype(np.float64))[1]
        number = 0
        while True:
            # A bit generator's raw stream is promised to be stable across numpy versions; `permutation` is not.
            keys = np.random.PCG64([self._seed, stream, number]).random_raw(len(documents))
            ranks = np.lexsort((keys, octaves)) if self._order == "short_to_long" else np.argsort(keys, kind="stable")
            yield from documents[ranks].tolist()
            number += 1

    def _mixture(self, by_source: list[npt.NDArray[np.int64]], weights: Mapping[str, float]) -> Iterator[int]:
        """Yield document numbers so that each source's share of the tokens follows its weight at every moment."""
        shares = _shares(self._split, by_source, weights)
        streams = {source: self._passes(by_source[source], stream=1 + source) for source in shares}
        behind = [(0.0, source) for source in shares]
        heapq.heapify(behind)
        while True:
            given, source = heapq.heappop(behind)
            document = next(streams[source])
            yield document
            length = 1 + int(self._split.offsets[document + 1] - self._split.offsets[document])
            heapq.heappush(behind, (given + length / shares[source], source))


def _first(split: EncodedSplit, source: int, fraction: float) -> npt.NDArray[np.int64]:
    """Return the source's first documents, in the order of their digests."""
    documents = np.flatnonzero(split.source_ids == source).astype(np.int64)
    return documents[: math.ceil(fraction * len(documents))]


def _pool(by_source: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    pool: npt.NDArray[np.int64] = np.sort(np.concatenate(by_source))
    return pool


def _shares(
    split: EncodedSplit, by_source: list[npt.NDArray[np.int64]], weights: Mapping[str, float]
) -> dict[int, float]:
    """Return weight × size of every source that has documents and is wanted; `ValueError` if names do not match."""
    if set(weights) != set(split.sources):
        raise ValueError(
            f"sampling weights must name every source once: the data has {', '.join(split.sources)},"
            f" the weights name {', '.join(sorted(weights))}"
        )
    for name, weight in weights.items():
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"the sampling weight of {name} must be finite and not negative, got {weight}")
    lengths = np.diff(split.offsets) + 1  # with its separator
    shares = {
        index: weights[name] * float(lengths[by_source[index]].sum())
        for index, name in enumerate(split.sources)
        if weights[name] > 0 and len(by_source[index])
    }
    if not shares:
        raise ValueError("no source with training documents has a sampling weight above zero")
    return shares
