"""The streams of training batches: pure functions of seed, sampling and shape.

What is trained on must not depend on how fast, how wide or how often interrupted a trial was. Three streams, all of
them without end:

- `Batches`, for plain text: the documents form one stream of tokens (a separator, a document, a separator, …), cut
  into sequences without dropping anything: the tail of one document goes on in the next sequence, the tail of one pass
  in the next pass.
- `Examples`, for conversations (and for plain text by the document): whole documents, several in a row that do not see
  each other, or one in a row with padding.
- `Pairs`, for preferences: the chosen and the rejected answers to the same prompts.

None knows the batch: half the batch gives the same rows in twice as many batches, so a repair after running out of
memory sees the same data. What is drawn, cut and laid together how is decided in `frozen.sampling`.

Only the split that it is given can be read here, and a training job is given the train split alone.

Letters: B rows (or pairs), T positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from frozen.sampling import (
    Items,
    Order,
    Runs,
    Sampling,
    cut_documents,
    draw,
    packed,
    padded_width,
    whole_documents,
)
from frozen.tokens import EncodedSplit

NOT_TRAINED = -100
"""Label of a position that is not trained on, as PyTorch's cross-entropy and transformers know it."""


class Batches:
    """Endless int64 batches [batch_sequences, sequence_length] over plain text, on the CPU.

    What is drawn, and in what order, is said by `frozen.sampling.Sampling`.
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
        temperature: float = 1.0,
        general_fraction: float = 0.0,
    ) -> None:
        sampling = Sampling(
            seed=seed,
            fraction=fraction,
            order=order,
            weights=weights,
            temperature=temperature,
            general_fraction=general_fraction,
        )
        _check_shape(batch_sequences, sequence_length)
        if split.marks is not None:
            raise ValueError("the split marks what is trained on: Examples or Pairs read it, a stream of text does not")
        self._split = split
        self._shape = (batch_sequences, sequence_length)
        self._documents = itertools.chain.from_iterable(draw(split, whole_documents(split), sampling))
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
        _check_skip(batches)
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


class Batch(NamedTuple):
    """Rows of whole documents, each behind a separator, on the CPU."""

    input_ids: torch.Tensor
    """int64 [B, T]"""
    labels: torch.Tensor
    """int64 [B, T]: the token at the same place (a transformers model shifts them itself), or -100 where it is not
    trained on: context, padding, and separators, which nothing before them foretells."""
    position_ids: torch.Tensor | None
    """int64 [B, T], from 0 at each document of a packed row and at its padding: transformers derives from it who sees
    whom, *if* no attention mask and no cache is given (``use_cache=False``). None where rows are single documents."""
    attention_mask: torch.Tensor | None
    """int64 [B, T], 1 for tokens and 0 for padding; None for packed rows."""
    tokens: int
    """Positions that go through the model, padding included: what a budget is charged."""


class Examples:
    """Endless `Batch`es of whole documents, in which only what the split marks for it is trained on.

    ``packing``: several documents in each row of ``sequence_length`` positions. Otherwise one in a row, padded on the
    right to the longest of the batch, rounded up to a multiple of 8 within ``sequence_length``. ``padding`` is the
    token that stands where there is none.
    """

    def __init__(
        self,
        split: EncodedSplit,
        *,
        seed: int,
        sequence_length: int,
        batch_sequences: int,
        packing: bool,
        fraction: float,
        order: Order,
        weights: Mapping[str, float],
        temperature: float,
        general_fraction: float,
        padding: int,
    ) -> None:
        sampling = Sampling(
            seed=seed,
            fraction=fraction,
            order=order,
            weights=weights,
            temperature=temperature,
            general_fraction=general_fraction,
        )
        _check_shape(batch_sequences, sequence_length)
        if split.pairs:
            raise ValueError("the split holds preference pairs: Pairs reads them")
        self._batch_sequences = batch_sequences
        self._sequence_length = sequence_length
        self._packing = packing
        self._items = cut_documents(split, sequence_length)
        self._rows = _Rows(split, self._items, padding)
        runs = draw(split, self._items, sampling)
        self._drawn = packed(runs, self._items.cost, sequence_length) if packing else _alone(runs)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """Return the next batch."""
        rows = list(itertools.islice(self._drawn, self._batch_sequences))
        if self._packing:
            width = self._sequence_length
        else:
            width = padded_width(max(int(self._items.cost[item]) for (item,) in rows), self._sequence_length)
        filled = self._rows.fill(rows, width)
        return Batch(
            input_ids=torch.from_numpy(filled.tokens),
            labels=torch.from_numpy(np.where(filled.trained, filled.tokens, NOT_TRAINED)),
            position_ids=torch.from_numpy(filled.positions) if self._packing else None,
            attention_mask=None if self._packing else torch.from_numpy(filled.taken.astype(np.int64)),
            tokens=filled.tokens.size,
        )

    def skip(self, batches: int) -> None:
        """Go on as if ``batches`` batches had been read, without touching their tokens."""
        _skip(self._drawn, batches, self._batch_sequences)


class PairBatch(NamedTuple):
    """The two answers to the same prompts, each with its prompt behind a separator, on the CPU."""

    input_ids: torch.Tensor
    """int64 [2 B, T]: B chosen answers, then the B rejected ones in the same order."""
    attention_mask: torch.Tensor
    """int64 [2 B, T], 1 for tokens and 0 for padding."""
    completion_mask: torch.Tensor
    """int64 [2 B, T], 1 for tokens of an answer and of what ends it."""
    pairs: torch.Tensor
    """int64 [B]: numbers of the pairs in the split."""
    tokens: int
    """Positions that go through the model, padding included: what a budget is charged."""


class Pairs:
    """Endless `PairBatch`es over a split of preference pairs; ``batch_sequences`` counts pairs.

    Rows are padded on the right to the longest of the batch, rounded up to a multiple of 8 within ``sequence_length``.
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
        temperature: float,
        general_fraction: float = 0.0,
        padding: int,
    ) -> None:
        sampling = Sampling(
            seed=seed,
            fraction=fraction,
            order=order,
            weights=weights,
            temperature=temperature,
            general_fraction=general_fraction,
        )
        _check_shape(batch_sequences, sequence_length)
        if not split.pairs:
            raise ValueError("the split holds no preference pairs: Batches or Examples read it")
        self._batch_sequences = batch_sequences
        self._sequence_length = sequence_length
        items = cut_documents(split, sequence_length)
        self._rows = _Rows(split, items, padding)
        self._drawn = _alone(draw(split, items, sampling))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PairBatch:
        """Return the next batch."""
        pairs = [item for (item,) in itertools.islice(self._drawn, self._batch_sequences)]
        documents = [[2 * pair] for pair in pairs] + [[2 * pair + 1] for pair in pairs]
        longest = max(self._rows.size(document) for (document,) in documents)
        filled = self._rows.fill(documents, padded_width(longest, self._sequence_length))
        return PairBatch(
            input_ids=torch.from_numpy(filled.tokens),
            attention_mask=torch.from_numpy(filled.taken.astype(np.int64)),
            completion_mask=torch.from_numpy(filled.trained.astype(np.int64)),
            pairs=torch.tensor(pairs, dtype=torch.int64),
            tokens=filled.tokens.size,
        )

    def skip(self, batches: int) -> None:
        """Go on as if ``batches`` batches had been read, without touching their tokens."""
        _skip(self._drawn, batches, self._batch_sequences)


class _Filled(NamedTuple):
    """Arrays [rows, width] of documents laid side by side."""

    tokens: npt.NDArray[np.int64]
    trained: npt.NDArray[np.bool_]
    positions: npt.NDArray[np.int64]
    taken: npt.NDArray[np.bool_]


class _Rows:
    """Lays documents into rows."""

    def __init__(self, split: EncodedSplit, items: Items, padding: int) -> None:
        if not 0 <= padding < split.vocabulary:
            raise ValueError(f"the padding token {padding} lies outside the vocabulary of {split.vocabulary}")
        self._split = split
        self._items = items
        self._padding = padding

    def size(self, document: int) -> int:
        """Return how many positions a document takes, its separator included."""
        return 1 + int(self._items.stops[document] - self._items.starts[document])

    def fill(self, rows: list[list[int]], width: int) -> _Filled:
        """Lay each row's documents side by side, each behind its separator, and pad on the right."""
        shape = (len(rows), width)
        tokens = np.full(shape, self._padding, dtype=np.int64)
        trained = np.zeros(shape, dtype=bool)
        positions = np.empty(shape, dtype=np.int64)
        taken = np.zeros(shape, dtype=bool)
        marks = self._split.marks
        for row, documents in enumerate(rows):
            place = 0
            for document in documents:
                start, stop = int(self._items.starts[document]), int(self._items.stops[document])
                end = place + 1 + stop - start
                tokens[row, place] = self._split.separator
                tokens[row, place + 1 : end] = self._split.tokens[start:stop]
                trained[row, place + 1 : end] = True if marks is None else marks[start:stop] > 0
                positions[row, place:end] = np.arange(end - place)
                place = end
            taken[row, :place] = True
            positions[row, place:] = np.arange(width - place)
        return _Filled(tokens, trained, positions, taken)


def _alone(runs: Runs) -> Iterator[list[int]]:
    return ([item] for item in itertools.chain.from_iterable(runs))


def _skip(drawn: Iterator[list[int]], batches: int, batch_sequences: int) -> None:
    _check_skip(batches)
    for _ in itertools.islice(drawn, batches * batch_sequences):
        pass


def _check_skip(batches: int) -> None:
    if batches < 0:
        raise ValueError(f"cannot skip {batches} batches: the stream only goes forward")


def _check_shape(batch_sequences: int, sequence_length: int) -> None:
    if sequence_length < 1 or batch_sequences < 1:
        raise ValueError(f"a batch of {batch_sequences} sequences of {sequence_length} tokens holds nothing")
