import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from frozen.evaluate import EvaluationRefused, Score, evaluate
from frozen.tokens import EncodedSplit

MakeSplit = Callable[..., EncodedSplit]
Logits = Callable[[torch.Tensor], torch.Tensor]
VOCABULARY = 50
DOCUMENTS = [[1, 2, 3], [4] * 8, [5, 6] * 20, [7], list(range(1, 18)), [9, 8] * 4, [3] * 9]
"""Shorter than, as long as, and longer than a context of 8; one of a single token."""


def score(logits_of: Logits, split: EncodedSplit, **changes: Any) -> Score:
    """Evaluate with plain settings."""
    plain = {"context": 8, "stride": 3, "micro_batch": 4, "device": "cpu"}
    return evaluate(logits_of, split, **(plain | changes))


def uniform(tokens_bt: torch.Tensor) -> torch.Tensor:
    """Predict every token equally."""
    return torch.zeros(*tokens_bt.shape, VOCABULARY)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Compute on one thread: on matrices this small, threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def small() -> Logits:
    """Return a causal model with real arithmetic: an embedding, a running mean of what came before, a matrix."""
    generator = torch.Generator().manual_seed(1)
    embedding_vd = torch.randn(VOCABULARY, 16, generator=generator)
    head_dv = torch.randn(16, VOCABULARY, generator=generator)

    def logits_of(tokens_bt: torch.Tensor) -> torch.Tensor:
        x_btd = embedding_vd[tokens_bt]
        counts_t1 = torch.arange(1, tokens_bt.shape[1] + 1)[:, None]
        return (x_btd + x_btd.cumsum(dim=1) / counts_t1) @ head_dv

    return logits_of


def by_hand(
    logits_of: Logits, documents: list[list[int]], context: int, stride: int, marks: list[list[int]] | None = None
) -> list[float]:
    """Return nats per document, one token at a time: the context is cut where the definition says, nothing batched."""
    nats = []
    for number, document in enumerate(documents):
        tokens = [0, *document]
        total = 0.0
        for target in range(1, len(tokens)):
            if marks is not None and marks[number][target - 1] != 1:
                continue
            if target <= context:
                begin = 0
            else:
                window = -(-(target - context) // stride)
                begin = min(context + window * stride, len(document)) - context
            logits_v = logits_of(torch.tensor([tokens[begin:target]]))[0, -1].double()
            total -= float(torch.log_softmax(logits_v, dim=0)[tokens[target]])
        nats.append(total)
    return nats


@pytest.mark.parametrize(("context", "stride"), [(8, 3), (8, 8), (8, 1), (2, 1), (64, 64)])
def test_score_matches_a_hand_computation(make_split: MakeSplit, small: Logits, context: int, stride: int) -> None:
    """Nats per document are those of a computation that feeds one token's context at a time."""
    split = make_split(DOCUMENTS, vocabulary=VOCABULARY)
    result = score(small, split, context=context, stride=stride)
    expected = by_hand(small, DOCUMENTS, context, stride)
    assert result.document_nats == pytest.approx(expected, rel=1e-5)
    assert result.nats == pytest.approx(sum(expected), rel=1e-6)
    assert result.bits_per_byte == pytest.approx(sum(expected) / math.log(2) / int(split.bytes.sum()), rel=1e-6)
    assert result.perplexity == pytest.approx(math.exp(sum(expected) / result.tokens), rel=1e-6)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    context=st.integers(2, 16),
    data=st.data(),
    micro_batch=st.integers(1, 9),
)
def test_uniform_model_scores_exactly_log2_of_the_vocabulary(
    make_split: MakeSplit, lengths: list[int], context: int, data: st.DataObject, micro_batch: int
) -> None:
    """Uniform logits give log2(V) × tokens / bytes for any documents, window and stride: each token counts once."""
    stride = data.draw(st.integers(1, context))
    split = make_split([[1] * length for length in lengths], vocabulary=VOCABULARY)
    result = score(uniform, split, context=context, stride=stride, micro_batch=micro_batch)
    assert (result.tokens, result.bytes) == (sum(lengths), 3 * sum(lengths))
    assert result.bits_per_byte == pytest.approx(math.log2(VOCABULARY) * sum(lengths) / (3 * sum(lengths)), rel=1e-6)
    assert result.perplexity == pytest.approx(VOCABULARY, rel=1e-5)
    assert result.document_nats == pytest.approx([length * math.log(VOCABULARY) for length in lengths], rel=1e-6)


@pytest.mark.parametrize("documents", [DOCUMENTS, DOCUMENTS[:1], [DOCUMENTS[2]]], ids=["mixed", "short", "long"])
def test_score_does_not_depend_on_the_micro_batch(
    make_split: MakeSplit, small: Logits, documents: list[list[int]]
) -> None:
    """Micro-batches 1, 3 and 8 give the same score to 1e-6, for documents shorter and longer than the context."""
    split = make_split(documents, vocabulary=VOCABULARY)
    scores = [score(small, split, micro_batch=micro_batch).bits_per_byte for micro_batch in (1, 3, 8)]
    assert max(scores) - min(scores) < 1e-6


def test_document_nats_keep_the_order_of_the_split(make_split: MakeSplit, small: Logits) -> None:
    """Sorting windows by length does not reach the result: each document alone has the nats it has among others."""
    together = score(small, make_split(DOCUMENTS, vocabulary=VOCABULARY)).document_nats
    alone = [score(small, make_split([document], vocabulary=VOCABULARY)).nats for document in DOCUMENTS]
    assert together == pytest.approx(alone, rel=1e-6)
    assert together.dtype == np.float64


def test_half_precision_logits_are_summed_in_full(make_split: MakeSplit, small: Logits) -> None:
    """Logits in bfloat16 are widened before the softmax: the sum of 85 tokens has no bfloat16 steps."""
    split = make_split(DOCUMENTS, vocabulary=VOCABULARY)
    rounded = score(lambda tokens: small(tokens).bfloat16(), split, probes=False)
    expected = score(lambda tokens: small(tokens).bfloat16().float(), split, probes=False)
    assert rounded.nats == expected.nats


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("probes", [True, False])
def test_logits_that_are_not_finite_are_refused(make_split: MakeSplit, value: float, probes: bool) -> None:
    """A single NaN or infinite logit refuses the whole score."""

    def logits_of(tokens_bt: torch.Tensor) -> torch.Tensor:
        logits_btv = uniform(tokens_bt)
        logits_btv[0, -1, 7] = value
        return logits_btv

    with pytest.raises(EvaluationRefused, match="NaN or infinity"):
        score(logits_of, make_split(DOCUMENTS, vocabulary=VOCABULARY), probes=probes)


@pytest.mark.parametrize(
    ("logits_of", "reason"),
    [
        (lambda x: torch.zeros(*x.shape, VOCABULARY + 1), "shape"),
        (lambda x: torch.zeros(*x.shape, VOCABULARY - 1), "shape"),
        (lambda x: torch.zeros(x.shape[0], VOCABULARY), "shape"),
        (lambda x: torch.zeros(x.shape[0], x.shape[1] - 1, VOCABULARY), "shape"),
        (lambda x: torch.zeros(*x.shape, VOCABULARY, dtype=torch.int64), "floating-point"),
        (lambda x: {"loss": 0.0}, "floating-point"),
        (lambda x: None, "floating-point"),
        (lambda x: torch.nn.functional.one_hot(x, VOCABULARY) * 2000.0, "no prediction"),
    ],
)
def test_what_is_no_prediction_is_refused(make_split: MakeSplit, logits_of: Logits, reason: str) -> None:
    """Wrong width, wrong shape, wrong type, no tensor, nonsense: refused with the reason."""
    with pytest.raises(EvaluationRefused, match=reason):
        score(logits_of, make_split(DOCUMENTS, vocabulary=VOCABULARY))


class Output(dict[str, Any]):
    """What a model of the transformers library returns, with a loss that claims to be perfect."""


def test_a_loss_that_the_model_returns_is_never_looked_at(make_split: MakeSplit, small: Logits) -> None:
    """The evaluation takes one tensor of logits: an output object with a zero loss is refused, not read."""
    split = make_split(DOCUMENTS, vocabulary=VOCABULARY)
    with pytest.raises(EvaluationRefused, match="floating-point"):
        score(lambda x: Output(loss=torch.zeros(()), logits=small(x)), split)  # type: ignore[arg-type,return-value]


def peeking(small: Logits, reach: int, share: float = 0.01) -> Logits:
    """Return a model whose logits lean a little towards the token ``reach`` positions ahead."""

    def logits_of(tokens_bt: torch.Tensor) -> torch.Tensor:
        ahead = torch.roll(torch.nn.functional.one_hot(tokens_bt, VOCABULARY).float(), -reach, dims=1)
        ahead[:, -reach:] = 0
        return small(tokens_bt) + share * 10 * ahead

    return logits_of


@pytest.mark.parametrize("reach", [1, 2, 5])
def test_a_model_that_sees_later_tokens_is_refused(make_split: MakeSplit, small: Logits, reach: int) -> None:
    """Leaning by 0.1 towards a token one, two or five ahead is noticed."""
    with pytest.raises(EvaluationRefused, match="depend on later tokens"):
        score(peeking(small, reach), make_split(DOCUMENTS, vocabulary=VOCABULARY))


def test_a_bidirectional_model_is_refused(make_split: MakeSplit, small: Logits) -> None:
    """A summary of the whole row in every logit is a view of the future."""
    with pytest.raises(EvaluationRefused, match="depend on later tokens"):
        score(lambda x: small(x) + small(x).mean(dim=1, keepdim=True), make_split(DOCUMENTS, vocabulary=VOCABULARY))


def test_a_model_that_peeks_at_its_evaluated_shapes_only_is_refused(make_split: MakeSplit, small: Logits) -> None:
    """Peeking in batches of one and answering the probes' shapes honestly is caught on the scored tokens."""
    split = make_split(DOCUMENTS, vocabulary=VOCABULARY)
    sly = peeking(small, 1, share=1.0)
    with pytest.raises(EvaluationRefused, match="alone, with the later tokens cut off"):
        score(lambda x: sly(x) if x.shape[0] == 1 else small(x), split, micro_batch=1)


def test_rounding_that_depends_on_the_shape_is_no_leak_in_half_precision(make_split: MakeSplit, small: Logits) -> None:
    """Another shape may round bfloat16 otherwise by a tenth of a nat; in fp32 the same would be a fault."""
    split = make_split(DOCUMENTS, vocabulary=VOCABULARY)

    def rounded(tokens_bt: torch.Tensor) -> torch.Tensor:
        return small(tokens_bt) * (1.01 if tokens_bt.shape[0] == 1 else 1.0)

    assert score(lambda x: rounded(x).bfloat16(), split).nats > 0
    with pytest.raises(EvaluationRefused, match="alone, with the later tokens cut off"):
        score(rounded, split)


def test_a_leak_in_half_precision_is_refused(make_split: MakeSplit, small: Logits) -> None:
    """Who sees the next token at the scored shapes leaves too few nats of it to be rounding."""
    split = make_split(DOCUMENTS, vocabulary=VOCABULARY)
    sly = peeking(small, 1, share=3.0)
    with pytest.raises(EvaluationRefused, match="alone, with the later tokens cut off"):
        score(lambda x: (sly(x) if x.shape[0] == 1 else small(x)).bfloat16(), split, micro_batch=1)


def test_a_model_that_mixes_rows_is_refused(make_split: MakeSplit, small: Logits) -> None:
    """Logits may not depend on the other rows of a batch."""

    def logits_of(tokens_bt: torch.Tensor) -> torch.Tensor:
        return small(tokens_bt) + 0.01 * small(tokens_bt[:, :1]).mean(dim=0)

    with pytest.raises(EvaluationRefused, match="other rows"):
        score(logits_of, make_split(DOCUMENTS, vocabulary=VOCABULARY))


def test_a_model_with_dropout_on_is_refused(make_split: MakeSplit, small: Logits) -> None:
    """The same tokens must get the same logits twice."""
    with pytest.raises(EvaluationRefused, match="two calls"):
        score(
            lambda x: torch.nn.functional.dropout(small(x), 0.1, training=True),
            make_split(DOCUMENTS, vocabulary=VOCABULARY),
        )


def test_a_model_that_remembers_is_refused(make_split: MakeSplit, small: Logits) -> None:
    """What earlier calls held may not change a logit."""
    seen = torch.zeros(VOCABULARY)

    def logits_of(tokens_bt: torch.Tensor) -> torch.Tensor:
        logits_btv = small(tokens_bt) + seen
        seen.add_(torch.bincount(tokens_bt.flatten(), minlength=VOCABULARY) * 1e-3)
        return logits_btv

    with pytest.raises(EvaluationRefused, match=r"calls"):
        score(logits_of, make_split(DOCUMENTS, vocabulary=VOCABULARY))


@pytest.mark.parametrize("documents", [[[1]], [[1], [2]], [[1, 2]], [[1] * 300]])
def test_probes_live_with_the_smallest_splits(make_split: MakeSplit, small: Logits, documents: list[list[int]]) -> None:
    """One document of one token can be scored, and a model that is honest is never refused."""
    split = make_split(documents, vocabulary=VOCABULARY)
    for micro_batch in (1, 8):
        assert score(small, split, micro_batch=micro_batch).tokens == sum(map(len, documents))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_out_of_memory_halves_the_micro_batch_and_starts_again(
    make_split: MakeSplit, small: Logits, error: Exception
) -> None:
    """The score is the same, and every window runs in a batch that fits."""
    split = make_split(DOCUMENTS * 3, vocabulary=VOCABULARY)
    rows: list[int] = []

    def logits_of(tokens_bt: torch.Tensor) -> torch.Tensor:
        rows.append(tokens_bt.shape[0])
        if tokens_bt.shape[0] > 3:
            raise error
        return small(tokens_bt)

    result = score(logits_of, split, micro_batch=16)
    assert rows[:4] == [16, 8, 4, 2]
    assert result.nats == pytest.approx(score(small, split).nats, rel=1e-9)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("something else")])
def test_what_halving_cannot_cure_is_raised(make_split: MakeSplit, error: Exception) -> None:
    """A micro-batch of one that does not fit, and any other error of the model, reach the caller."""

    def logits_of(tokens_bt: torch.Tensor) -> torch.Tensor:
        raise error

    with pytest.raises(type(error)):
        score(logits_of, make_split(DOCUMENTS, vocabulary=VOCABULARY))


@pytest.mark.parametrize("changes", [{"context": 1, "stride": 1}, {"stride": 0}, {"stride": 9}, {"micro_batch": 0}])
def test_impossible_settings_are_refused(make_split: MakeSplit, changes: dict[str, int]) -> None:
    """A stride beyond the context would leave tokens out; zero of anything scores nothing."""
    with pytest.raises(ValueError, match="cannot evaluate"):
        score(uniform, make_split(DOCUMENTS, vocabulary=VOCABULARY), **changes)


def test_scoring_changes_nothing_in_training(make_split: MakeSplit) -> None:
    """A probe point in the middle of training leaves random numbers, gradients and later backward passes alone."""
    split = make_split(DOCUMENTS, vocabulary=VOCABULARY)
    weight = torch.randn(VOCABULARY, VOCABULARY, requires_grad=True)
    state = torch.get_rng_state()
    score(lambda x: weight[x], split)
    assert weight.grad is None
    assert torch.equal(torch.get_rng_state(), state)
    weight[torch.tensor([1])].sum().backward()
    assert weight.grad is not None


MARKS = [[0, 1, 1], [0] * 7 + [1], [1] * 4 + [0] * 20 + [2] + [0] * 10 + [1, 1, 0, 1, 2], [1], [0, 1, 2] * 5 + [0, 1]]
MARKED_DOCUMENTS = DOCUMENTS[:5]


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]]]:
    """Documents and marks, at least one answer token in each."""
    documents, marks = [], []
    for _ in range(draw(st.integers(1, 6))):
        length = draw(st.integers(1, 40))
        documents.append(draw(st.lists(st.integers(1, VOCABULARY - 1), min_size=length, max_size=length)))
        mark = draw(st.lists(st.sampled_from([0, 0, 1, 2]), min_size=length, max_size=length))
        mark[draw(st.integers(0, length - 1))] = 1
        marks.append(mark)
    return documents, marks


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(made=conversations(), context=st.integers(2, 16), data=st.data(), micro_batch=st.integers(1, 9))
def test_only_answers_are_scored_each_token_once(
    make_split: MakeSplit,
    small: Logits,
    made: tuple[list[list[int]], list[list[int]]],
    context: int,
    data: st.DataObject,
    micro_batch: int,
) -> None:
    """Against one forward pass per answer token, for any marks, window, stride and micro-batch."""
    stride = data.draw(st.integers(1, context))
    documents, marks = made
    split = make_split(documents, marks=marks, vocabulary=VOCABULARY)
    result = score(small, split, context=context, stride=stride, micro_batch=micro_batch)
    expected = by_hand(small, documents, context, stride, marks)
    assert result.document_nats == pytest.approx(expected, rel=1e-5)
    assert result.nats == pytest.approx(sum(expected), rel=1e-6)
    assert result.tokens == sum(mark.count(1) for mark in marks)
    assert result.bytes == sum(3 * len(document) for document in documents)


def test_a_document_within_the_context_is_one_forward_pass(make_split: MakeSplit, small: Logits) -> None:
    """Its answers have the nats of the whole document run once, by itself, without windows or padding."""
    split = make_split(MARKED_DOCUMENTS, marks=MARKS, vocabulary=VOCABULARY)
    result = score(small, split, context=64, stride=64)
    for index, (document, marks) in enumerate(zip(MARKED_DOCUMENTS, MARKS, strict=True)):
        log_p_tv = torch.log_softmax(small(torch.tensor([[0, *document[:-1]]]))[0].double(), dim=-1)
        token_nats = -log_p_tv[torch.arange(len(document)), torch.tensor(document)]
        assert result.document_nats[index] == pytest.approx(float(token_nats[torch.tensor(marks) == 1].sum()), rel=1e-6)


def test_scores_of_answers_do_not_depend_on_the_micro_batch(make_split: MakeSplit, small: Logits) -> None:
    """Micro-batches 1 to 8 give the same bits per byte to 1e-6."""
    split = make_split(MARKED_DOCUMENTS, marks=MARKS, vocabulary=VOCABULARY)
    scores = [score(small, split, micro_batch=micro_batch).bits_per_byte for micro_batch in (1, 2, 3, 8)]
    assert max(scores) - min(scores) < 1e-6


def test_windows_without_an_answer_are_not_run(make_split: MakeSplit) -> None:
    """Of a conversation of 1,000 tokens with one answer token, only the window that holds it goes through the model."""
    seen: list[tuple[int, ...]] = []

    def logits_of(tokens_bt: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(tokens_bt.shape))
        return uniform(tokens_bt)

    marks = [0] * 1000
    marks[501] = 1
    split = make_split([[1] * 1000], marks=[marks], vocabulary=VOCABULARY)
    result = score(logits_of, split, context=8, stride=4, probes=False)
    assert seen == [(1, 6)]  # tokens 500 to 503 are scored in one window of 8; it ends with 501
    assert result.tokens == 1
    assert result.nats == pytest.approx(math.log(VOCABULARY))


@pytest.mark.parametrize("reach", [1, 2])
@pytest.mark.parametrize("micro_batch", [1, 4])
def test_a_leak_in_conversations_is_refused(make_split: MakeSplit, small: Logits, reach: int, micro_batch: int) -> None:
    """The probes look at marked splits as at any other."""
    split = make_split(MARKED_DOCUMENTS, marks=MARKS, vocabulary=VOCABULARY)
    with pytest.raises(EvaluationRefused, match="depend on later tokens"):
        score(peeking(small, reach), split, micro_batch=micro_batch)


def test_a_leak_at_evaluated_shapes_of_answers_only_is_refused(make_split: MakeSplit, small: Logits) -> None:
    """The scored answers themselves are scored again, with the later tokens cut off."""
    split = make_split(MARKED_DOCUMENTS * 2, marks=MARKS * 2, vocabulary=VOCABULARY)
    sly = peeking(small, 1, share=1.0)
    with pytest.raises(EvaluationRefused, match="alone, with the later tokens cut off"):
        score(lambda x: sly(x) if x.shape[0] == 1 else small(x), split, micro_batch=1)


def test_a_bad_logit_where_nothing_is_scored_changes_nothing(make_split: MakeSplit, small: Logits) -> None:
    """What the model says after a prompt's token is not looked at when learning curves are drawn."""
    split = make_split([[1, 2, 3, 4]], marks=[[0, 0, 1, 1]], vocabulary=VOCABULARY)

    def logits_of(tokens_bt: torch.Tensor) -> torch.Tensor:
        logits_btv = small(tokens_bt)
        logits_btv[:, 0] = math.nan
        return logits_btv

    assert score(logits_of, split, probes=False).nats == pytest.approx(score(small, split).nats)


def test_a_large_vocabulary_is_widened_in_parts(
    make_split: MakeSplit, small: Logits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three positions at a time: the same nats to the last bit."""
    split = make_split(DOCUMENTS, vocabulary=VOCABULARY)
    whole = score(small, split).document_nats.tolist()
    monkeypatch.setattr("frozen.evaluate._SOFTMAX_ELEMENTS", 3 * VOCABULARY)
    assert score(small, split).document_nats.tolist() == whole
