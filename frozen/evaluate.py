"""Logits to score: bits per byte over documents, computed so that nothing a config turns can move it.

Bits per byte, total nats / (ln 2 × UTF-8 bytes), compares models whatever their tokenizer; per token a model could win
by having fewer tokens. The evaluation is given a function from tokens to logits and nothing else: no loss of the
model's, no targets handed in, no config. Each document is scored on its own. A separator is its first context token, so
that its first token is scored too. A document longer than the context is scored in windows: the first scores
``context`` tokens, each further one at most ``stride`` new ones with the tokens before them as context. Every token of
every document is scored exactly once, and the bytes are those of the raw documents.

Where a split marks answers (`EncodedSplit.marks`), only their tokens are scored, and the bytes are theirs; prompts and
what the chat template puts around them are context. The windows are the same, without those that score nothing.

Arithmetic: log-softmax in float32, sums in float64 over tokens in document order, so that the score does not depend on
how windows are grouped into batches. Windows are sorted by length, longest first, padded on the right.

What is not a prediction is refused: NaN or infinite logits, another shape or width, logits that depend on later tokens,
on other rows of the batch or on earlier calls. That is probed twice: on synthetic rows, whose later tokens are swapped
at several prefix lengths, and on a sample of the scored tokens themselves, scored again with everything after them cut
off. A probe proves presence, not absence: a model that leaks at a few positions only can slip through.

Letters: B rows, T positions, V vocabulary, N scored positions of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from frozen.tokens import ANSWER, EncodedSplit

Logits = Callable[[torch.Tensor], torch.Tensor]
"""int64 [B, T] to floating-point [B, T, V]."""

_PROBE_ROWS = 4
_PROBE_PREFIXES = 6
_PROBE_POSITIONS = 64
"""Longest synthetic row: a dozen passes over whole contexts cost more than scoring a small split does. What only
shows further on is for the sampled tokens to find, which are scored again in their own windows."""
_RESCORED_TOKENS = 8
_PROBE_TOLERANCE = 1e-4
"""Largest change of a logit, as a share of the largest logit (at least 1), that rounding may explain."""
_RESCORE_TOLERANCE = 1e-3
"""Nats; wider, because another shape may be computed by another kernel."""
_RESCORE_TOLERANCE_OF_HALF = 0.25
"""The same for logits in 16 bits, as a share of the token's nats. Other kernels round otherwise at every layer: a model
of 135 M parameters in bfloat16 was seen to move by 0.11 to 0.15 nats when the later tokens were cut off, and by nothing
when the shape stayed. Who sees the token itself leaves nearly no nats of it."""
_SOFTMAX_ELEMENTS = 1 << 26
"""Logits widened at once: with a vocabulary of 150,000, whole batches in float32 would need more than the model."""
_NO_PREDICTION = 500.0
"""Mean nats per token above which finite logits are nonsense, and exp() of them overflows."""


class EvaluationRefused(ValueError):
    """What was to be scored is no prediction; the text says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Score:
    """How well a split was predicted."""

    nats: float
    """Sum over all scored tokens."""
    bytes: int
    """UTF-8 bytes of what was scored: the documents, or the answers in them."""
    tokens: int
    """How many were scored."""
    document_nats: npt.NDArray[np.float64]
    """[documents], over each one's scored tokens, in the order of the split; sums to `nats`."""

    @property
    def bits_per_byte(self) -> float:
        """The study's metric; lower is better."""
        return self.nats / (math.log(2) * self.bytes)

    @property
    def perplexity(self) -> float:
        """Per token, exp(nats / tokens): for people, comparable under one tokenizer only."""
        return math.exp(self.nats / self.tokens)


class _Window(NamedTuple):
    document: int
    start: int
    """First input position; position 0 of a document is the separator."""
    length: int
    """Input positions. The last one predicts the document's token at ``start + length - 1``."""
    scored: int
    """How many of the last positions count, as far as the split scores their tokens; the very last one always does."""


def evaluate(
    logits_of: Logits,
    split: EncodedSplit,
    *,
    context: int,
    stride: int,
    micro_batch: int,
    device: str | torch.device,
    probes: bool = True,
) -> Score:
    """Score ``split`` under ``logits_of``.

    ``micro_batch`` windows go through the model at once; when memory runs out it is halved and scoring starts again.
    ``probes=False`` leaves out the probes for causality and independence (learning curves need them only once); a score
    that counts is never taken without them. `EvaluationRefused` if this is no prediction.
    """
    if context < 2 or not 1 <= stride <= context or micro_batch < 1:
        raise ValueError(
            f"cannot evaluate with context {context}, stride {stride}, micro-batch {micro_batch}:"
            " context is at least 2, stride lies between 1 and context, the micro-batch is at least 1"
        )
    scorer = _Scorer(logits_of, split, torch.device(device))
    windows = sorted(_windows(split, context, stride), key=lambda window: (-window.length, window))
    while True:
        token_nats = _unless_memory_runs_out(scorer, windows, micro_batch, probes=probes)
        if token_nats is not None:
            return _score(split, token_nats)
        micro_batch //= 2


def _unless_memory_runs_out(
    scorer: _Scorer, windows: list[_Window], micro_batch: int, *, probes: bool
) -> npt.NDArray[np.float64] | None:
    """Return the result, or None when memory ran out and a smaller micro-batch is left to try."""
    try:
        return scorer.run(windows, micro_batch, probes=probes)
    except (torch.OutOfMemoryError, MemoryError):
        if micro_batch == 1:
            raise
    except RuntimeError as error:
        if micro_batch == 1 or "can't allocate memory" not in str(error):  # how torch's CPU allocator says it
            raise
    # Only here, outside the handlers, are the failed attempt's tensors free of their traceback.
    if scorer.device.type == "cuda":
        torch.cuda.empty_cache()
    return None


def _windows(split: EncodedSplit, context: int, stride: int) -> list[_Window]:
    """Return windows that score every token of every document exactly once, as far as it is to be scored."""
    windows = []
    for document, length in enumerate(np.diff(split.offsets).tolist()):
        first = min(length, context)
        windows.append(_Window(document, 0, first, first))
        done = first
        while done < length:
            scored = min(stride, length - done)
            done += scored
            windows.append(_Window(document, done - context, context, scored))
    if split.marks is None:
        return windows
    return [short for window in windows if (short := _shortened(split, split.marks, window)) is not None]


def _shortened(split: EncodedSplit, marks: npt.NDArray[np.uint8], window: _Window) -> _Window | None:
    """Return the window up to its last token that is scored, or None if it scores none."""
    end = int(split.offsets[window.document]) + window.start + window.length
    answers = np.flatnonzero(marks[end - window.scored : end] == ANSWER)
    if not len(answers):
        return None
    less = window.scored - 1 - int(answers[-1])
    return window._replace(length=window.length - less, scored=window.scored - less)


def _counts(split: EncodedSplit) -> npt.NDArray[np.bool_]:
    """Return which tokens of the split are scored."""
    return np.ones(len(split.tokens), dtype=bool) if split.marks is None else np.asarray(split.marks == ANSWER)


def _score(split: EncodedSplit, token_nats: npt.NDArray[np.float64]) -> Score:
    """Add up tokens by document, then documents."""
    document_nats = np.add.reduceat(token_nats, split.offsets[:-1])
    nats, tokens = math.fsum(document_nats), int(_counts(split).sum())
    if nats > _NO_PREDICTION * tokens:
        raise EvaluationRefused(f"{nats / tokens:.4g} nats per token: worse than {_NO_PREDICTION:g} is no prediction")
    return Score(nats=nats, bytes=int(split.bytes.sum()), tokens=tokens, document_nats=document_nats)


class _Scorer:
    """Runs windows through the model and looks at what comes back."""

    def __init__(self, logits_of: Logits, split: EncodedSplit, device: torch.device) -> None:
        self._logits_of = logits_of
        self._split = split
        self._counts = _counts(split)
        self.device = device

    def run(self, windows: list[_Window], micro_batch: int, *, probes: bool) -> npt.NDArray[np.float64]:
        """Return nats per token, float64 [tokens of the split]; 0 where a token is not to be scored."""
        token_nats = np.where(self._counts, np.nan, 0.0)
        with torch.no_grad():  # not inference_mode: a probe point must leave no tensor that training cannot use
            for begin in range(0, len(windows), micro_batch):
                self._score_batch(windows[begin : begin + micro_batch], token_nats)
            if np.isnan(token_nats).any():
                raise AssertionError("a token of the split was not scored")
            if probes:
                rows, length = min(_PROBE_ROWS, micro_batch), min(_PROBE_POSITIONS, windows[0].length)
                _Probe(self, self._split, rows=max(2, rows), length=max(2, length)).run()
                self._score_again(windows, token_nats)
        return token_nats

    def logits(self, tokens: npt.NDArray[np.int64]) -> torch.Tensor:
        """Return the model's logits [B, T, V] for tokens [B, T]; refused unless they have that shape."""
        x_bt = torch.from_numpy(tokens).to(self.device)
        logits_btv = self._logits_of(x_bt)
        if not isinstance(logits_btv, torch.Tensor) or not logits_btv.is_floating_point():
            raise EvaluationRefused("the model returned no floating-point tensor of logits")
        expected = (*tokens.shape, self._split.vocabulary)
        if tuple(logits_btv.shape) != expected:
            raise EvaluationRefused(
                f"the logits have shape {tuple(logits_btv.shape)}, expected {expected} (rows, positions, vocabulary)"
            )
        return logits_btv

    def inputs(self, window: _Window) -> npt.NDArray[np.int64]:
        """Return a window's input tokens, int64 [length]."""
        document = self._split.document(window.document)
        if window.start > 0:
            return document[window.start - 1 : window.start - 1 + window.length].astype(np.int64)
        return np.concatenate(([self._split.separator], document[: window.length - 1])).astype(np.int64)

    def _first(self, window: _Window) -> int:
        """Return the place, among the split's tokens, of the one that the window's first position predicts."""
        return int(self._split.offsets[window.document]) + window.start

    def _targets(self, window: _Window) -> npt.NDArray[np.int64]:
        """Return the places of the tokens that a window scores, int64 [N]."""
        end = self._first(window) + window.length
        return end - window.scored + np.flatnonzero(self._counts[end - window.scored : end])

    def _score_batch(self, windows: list[_Window], token_nats: npt.NDArray[np.float64]) -> None:
        """Score the windows' last positions and write their nats into ``token_nats``, in place."""
        tokens = np.full((len(windows), max(window.length for window in windows)), self._split.separator, np.int64)
        places, rows, columns = [], [], []
        for row, window in enumerate(windows):
            tokens[row, : window.length] = self.inputs(window)
            place = self._targets(window)
            places.append(place)
            rows.append(np.full(len(place), row))
            columns.append(place - self._first(window))
        place = np.concatenate(places)
        if not np.isnan(token_nats[place]).all():
            raise AssertionError("a token of the split was about to be scored twice")
        logits_btv = self.logits(tokens)
        index = torch.from_numpy(np.stack((np.concatenate(rows), np.concatenate(columns)))).to(self.device)
        targets = self._split.tokens[place].astype(np.int64)
        step = max(1, _SOFTMAX_ELEMENTS // self._split.vocabulary)
        for begin in range(0, len(place), step):
            part = slice(begin, begin + step)
            token_nats[place[part]] = self._nats(logits_btv[index[0, part], index[1, part]], targets[part])

    def _nats(self, logits_nv: torch.Tensor, targets: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return -log softmax of the targets, float64 [N]."""
        if not bool(torch.isfinite(logits_nv).all()):
            raise EvaluationRefused("the logits hold NaN or infinity")
        log_p_nv = torch.log_softmax(logits_nv.float(), dim=-1)
        target_n1 = torch.from_numpy(targets).to(self.device)[:, None]
        nats: npt.NDArray[np.float64] = (-log_p_nv.gather(1, target_n1)[:, 0]).double().cpu().numpy()
        if not np.isfinite(nats).all():
            raise EvaluationRefused("the logits are so large that their softmax is not finite")
        return nats

    def _score_again(self, windows: list[_Window], token_nats: npt.NDArray[np.float64]) -> None:
        """Score a sample of tokens once more, alone in the batch and with nothing after them."""
        rng = np.random.default_rng(len(token_nats))
        for choice in rng.choice(len(windows), size=min(_RESCORED_TOKENS, len(windows)), replace=False).tolist():
            window = windows[choice]
            targets = self._targets(window)
            place = int(targets[rng.integers(len(targets))])
            length = place - self._first(window) + 1
            logits_1tv = self.logits(self.inputs(window)[None, :length])
            nats = float(self._nats(logits_1tv[:, -1], self._split.tokens[place : place + 1].astype(np.int64))[0])
            narrow = torch.finfo(logits_1tv.dtype).bits < 32
            tolerance = _RESCORE_TOLERANCE_OF_HALF if narrow else _RESCORE_TOLERANCE
            if abs(nats - token_nats[place]) > tolerance * max(1.0, nats):
                raise EvaluationRefused(
                    f"a token of document {window.document} scored {token_nats[place]:.6g} nats in its batch but"
                    f" {nats:.6g} alone, with the later tokens cut off: the logits depend on later tokens, on other"
                    " rows or on earlier calls"
                )


class _Probe:
    """Synthetic rows of the split's own tokens, all of one length: same shapes, so only the model can differ."""

    def __init__(self, scorer: _Scorer, split: EncodedSplit, *, rows: int, length: int) -> None:
        self._scorer = scorer
        self._rng = np.random.default_rng(length)
        self._vocabulary = split.vocabulary
        starts = self._rng.integers(len(split.tokens), size=rows)
        places = (starts[:, None] + np.arange(length)) % len(split.tokens)
        self._tokens = split.tokens[places].astype(np.int64)
        self._tokens[:, 0] = split.separator

    def run(self) -> None:
        """Refuse a model whose logits depend on anything but a row's own earlier tokens."""
        length = self._tokens.shape[1]
        everywhere = np.ones(self._tokens.shape, dtype=bool)
        base = self._logits(self._tokens)
        self._compare(base, self._logits(self._tokens), everywhere, "differ between two calls with the same tokens")
        prefixes = self._rng.integers(1, length, size=(_PROBE_PREFIXES, len(self._tokens)))
        prefixes[0], prefixes[1] = 1, length - 1
        for prefix in prefixes:
            changed = self._other(self._tokens)
            kept = np.arange(length) < prefix[:, None]
            changed[kept] = self._tokens[kept]
            self._compare(base, self._logits(changed), kept, "depend on later tokens")
        for others in (slice(0, 1), slice(1, None)):
            changed = self._tokens.copy()
            changed[others] = self._other(self._tokens[others])
            kept = everywhere.copy()
            kept[others] = False
            self._compare(base, self._logits(changed), kept, "depend on other rows of the batch")
        self._compare(base, self._logits(self._tokens), everywhere, "depend on earlier calls")

    def _logits(self, tokens: npt.NDArray[np.int64]) -> torch.Tensor:
        return self._scorer.logits(tokens).detach().float().clone()

    def _other(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return tokens that differ from the given ones everywhere (a vocabulary of one has no others)."""
        if self._vocabulary == 1:
            return tokens.copy()
        shift = self._rng.integers(1, self._vocabulary, size=tokens.shape)
        other: npt.NDArray[np.int64] = (tokens + shift) % self._vocabulary
        return other

    def _compare(self, base: torch.Tensor, other: torch.Tensor, kept: npt.NDArray[np.bool_], fault: str) -> None:
        """Refuse if logits [B, T, V] differ where ``kept`` [B, T] says that they must not."""
        mask = torch.from_numpy(kept).to(base.device)
        expected, found = base[mask], other[mask]
        if not bool(torch.isfinite(expected).all() and torch.isfinite(found).all()):
            raise EvaluationRefused("the logits hold NaN or infinity")
        change = float((expected - found).abs().max())
        if change > _PROBE_TOLERANCE * max(1.0, float(expected.abs().max())):
            raise EvaluationRefused(f"the logits {fault}: one changed by {change:.4g}")
