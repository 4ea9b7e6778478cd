"""Training of base models, by task, method, quantization and kind of model, on stand-ins."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from frozen.loader import Examples, Pairs
from frozen.timer import Budget, Timer
from frozen.tokens import EncodedSplit
from harness.config import Optimizer, Value
from harness.jobs.feed import Feed
from harness.jobs.job import TrainJob
from harness.jobs.model import load_base
from harness.jobs.optimizers import averaged, make_optimizer
from harness.jobs.schedule import rate_factor
from harness.jobs.score import score
from harness.jobs.train import Training, train
from harness.jobs.trainers import FrozenTrainer
from harness.jobs.tuning import FrozenSFTTrainer
from harness.records import AbortIf, CurvePoint, Failed, Scored, Trained, TrialState
from tests.harness.jobs.conftest import score_of

pytestmark = pytest.mark.process
Tune = Callable[..., TrainJob]
CPU = torch.device("cpu")
ALL = [
    ("continue", "full", "none"),
    ("continue", "lora", "none"),
    ("continue", "lora", "nf4"),
    ("sft", "full", "none"),
    ("sft", "lora", "none"),
    ("sft", "lora", "nf4_double"),
    ("dpo", "full", "none"),
    ("dpo", "lora", "none"),
    ("dpo", "lora", "nf4"),
]
RUN_ON_A_CPU: list[Optimizer] = ["adamw", "adamw_8bit", "lion", "adafactor", "schedule_free", "muon"]


def done(job: TrainJob, points: list[CurvePoint] | None = None) -> Trained:
    result = train(job, [].append if points is None else points.append)
    assert isinstance(result, Trained), result
    return result


def scored(job: TrainJob, *, untouched: bool = False, split: str = "val") -> Scored:
    order = score_of(job, untouched=untouched)
    result = score(order.model_copy(update={"split": order.split.with_name(split)}))
    assert isinstance(result, Scored), result
    return result


def saved(job: TrainJob) -> dict[str, torch.Tensor]:
    (file,) = (job.folder / "model").glob("*.safetensors")
    tensors: dict[str, torch.Tensor] = load_file(file)
    return tensors


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def losses(job: TrainJob, kind: type[FrozenTrainer] | None = None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train in process; return the loss of every step and the trained weights."""
    torch.set_num_threads(1)
    split = EncodedSplit.load(job.train)
    found: list[float] = []
    timer = Timer(Budget.parse(job.budget), flops_per_token=1.0)
    training = Training(job, split, timer, CPU, lambda point: None)
    trainer = training.trainer(kind)

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, *arguments: object, **rest: object) -> None:
            found.append(float(trainer.step_loss))

    trainer.add_callback(Watch())
    trainer.train()
    trained = {name: weight.detach() for name, weight in training.model.named_parameters() if weight.requires_grad}
    return found, trained


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize(("task", "method", "quantization"), ALL)
def test_training_is_repeatable_and_better_than_nothing(
    tune: Tune, task: str, method: str, quantization: str, kind: str
) -> None:
    """Some steps beat the untouched base on text nobody trained on; the same order again gives the same bits."""
    diff: dict[str, Value] = {"quantization": quantization}
    budget = "1200tok"
    if task == "dpo":
        diff |= {"optim.learning_rate": 3e-2}
        budget = "5000tok"
    jobs = [tune(task, method, diff, kind=kind, name=name, budget=budget) for name in ("one", "two")]
    points: list[CurvePoint] = []
    first, second = done(jobs[0], points), done(jobs[1])
    assert (first.steps, first.tokens, first.parameters) == (second.steps, second.tokens, second.parameters)
    assert first.steps > 2
    assert same(saved(jobs[0]), saved(jobs[1]))
    assert all(tensor.dtype == torch.float32 for tensor in saved(jobs[0]).values())
    after, before = scored(jobs[0]), scored(jobs[0], untouched=True)
    assert after.score < before.score
    assert len(points) == 2
    assert points[-1].probe_score is not None
    if task == "dpo":
        assert before.score == pytest.approx(1.0)
        assert (after.pairs, len(after.document_nats)) == (6, 6)
        assert points[-1].probe_score < 1.0


@pytest.mark.parametrize("untouched", [True, False])
@pytest.mark.parametrize(("task", "method", "quantization"), [*ALL[3:8:2], ("dpo", "full", "none")])
def test_both_sets_are_scored_in_one_go(
    tune: Tune, material: Path, task: str, method: str, quantization: str, untouched: bool
) -> None:
    """The guard set is plain text whatever the task; each set gets the score that it gets alone."""
    job = tune(task, method, {"quantization": quantization, "optim.learning_rate": 1e-2}, budget="400tok")
    if not untouched:
        done(job)
    order, guard = score_of(job, untouched=untouched), material / "continue" / "val"
    both = score(order.model_copy(update={"guard": guard}))
    alone = score(order)
    text = score(order.model_copy(update={"split": guard, "task": "continue"}))
    assert isinstance(both, Scored)
    assert isinstance(alone, Scored)
    assert isinstance(text, Scored)
    assert both.guard is not None
    assert alone.guard is None
    assert both.document_nats == alone.document_nats
    assert both.guard.document_nats == text.document_nats
    assert (both.pairs, both.guard.pairs) == (alone.pairs, None)


# --- losses -----------------------------------------------------------------------------------------------------------


def by_hand(job: TrainJob, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Fine-tune all weights with plain torch: every trained token of a step counts alike."""
    config, split = job.config, EncodedSplit.load(job.train)
    assert job.base is not None
    torch.manual_seed(job.seed)
    model = load_base(job.base, config, CPU, torch.float32).eval()
    optimizer = make_optimizer(config, model, CPU)
    batches = Examples(
        split,
        seed=job.seed,
        sequence_length=config.batch.sequence_length,
        batch_sequences=config.batch.per_device,
        packing=config.batch.packing,
        fraction=1.0,
        order="shuffled",
        weights={},
        temperature=1.0,
        general_fraction=0.0,
        padding=0,
    )
    found = []
    for _ in range(steps):
        nats, count = torch.zeros(()), 0
        for _ in range(config.batch.accumulation):
            batch = next(batches)
            # One document at a time: nothing can leak from its neighbours in a row.
            for row in range(len(batch.input_ids)):
                starts = (batch.input_ids[row] == split.separator).nonzero()[:, 0].tolist()
                bounds = zip(starts, [*starts[1:], len(batch.input_ids[row])], strict=True)
                for begin, end in bounds:
                    tokens, labels = batch.input_ids[row, begin:end], batch.labels[row, begin:end]
                    wanted = labels[1:] >= 0
                    if wanted.any():
                        logits = model(input_ids=tokens[None]).logits[0, :-1]
                        log_p = torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0]
                        nats = nats - log_p[wanted].sum()
                        count += int(wanted.sum())
        loss = nats / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = config.optim.learning_rate
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found, dict(model.named_parameters())


FLAT: Mapping[str, Value] = {"schedule.warmup_fraction": 0.0, "schedule.decay_fraction": 0.0}


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_trainer_gives_every_trained_token_the_same_weight(
    tune: Tune, kind: str, packing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and weights are those of a loop over single documents, although rows differ in what is trained on."""
    monkeypatch.setattr("harness.jobs.train.load_base", _without_dropout)
    job = tune("sft", "full", {**FLAT, "batch.packing": packing}, kind=kind, budget="400tok", probe_points=0)
    found, weights = losses(job)
    expected, by_loop = by_hand(job, len(found))
    assert len(found) > 1
    assert found == pytest.approx(expected, rel=1e-5)
    for name, weight in by_loop.items():
        # AdamW turns a gradient of nearly nothing into a whole step: elements may differ, the weights may not
        assert (weights[name] - weight).abs().mean() < 2e-5, name


def _without_dropout(*arguments: object) -> torch.nn.Module:
    """Load a base model that gives the same every time."""
    from harness.jobs.model import without_dropout

    model = load_base(*arguments)  # type: ignore[arg-type]
    without_dropout(model)
    return model


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(
    ("task", "method", "quantization"), [choice for choice in ALL if choice[0] != "dpo"], ids=lambda value: str(value)
)
def test_both_trainers_compute_the_same(
    tune: Tune, task: str, method: str, quantization: str, packing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SFTTrainer, which trains on a GPU, has Trainer's loss in every step, and ends with its weights."""
    monkeypatch.setattr("harness.jobs.train.load_base", _without_dropout)
    diff: dict[str, Value] = {"batch.packing": packing, "quantization": quantization}
    if method == "lora":
        diff["adapter.dropout"] = 0.0
    one, other = (tune(task, method, diff, name=name, probe_points=0, budget="800tok") for name in ("one", "two"))
    plain, plain_weights = losses(one, FrozenTrainer)
    fused, fused_weights = losses(other, FrozenSFTTrainer)
    assert len(plain) > 2
    assert fused == pytest.approx(plain, rel=1e-5)
    assert all(weight.dtype == torch.float32 for weight in fused_weights.values())
    for name, weight in plain_weights.items():
        assert (fused_weights[name] - weight).abs().mean() < 2e-5, name


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_preferences_are_trained_by_the_papers_loss(tune: Tune, method: str, kind: str) -> None:
    """Each step's loss is -log sigmoid(beta × margin over the base), averaged; ln 2 before the first."""
    diff = {**FLAT, "optim.learning_rate": 1e-2} | ({"adapter.dropout": 0.0} if method == "lora" else {})
    job = tune("dpo", method, diff, kind=kind, budget="800tok", probe_points=0)
    found, _ = losses(job)
    assert found[0] == pytest.approx(math.log(2), rel=1e-5)
    assert found[-1] != pytest.approx(math.log(2), rel=1e-3)

    short = tune("dpo", method, diff, kind=kind, budget="200tok", probe_points=0, name="short")
    timer = Timer(Budget.parse("100000tok"), flops_per_token=1.0)
    training = Training(short, EncodedSplit.load(short.train), timer, CPU, lambda point: None)
    assert short.base is not None
    base = load_base(short.base, short.config, CPU, torch.float32).eval()
    pairs = Pairs(
        EncodedSplit.load(short.train),
        seed=short.seed,
        sequence_length=short.config.batch.sequence_length,
        batch_sequences=short.config.batch.per_device,
        fraction=1.0,
        order="shuffled",
        weights={},
        temperature=1.0,
        padding=0,
    )
    expected = []
    for _ in found[:3]:
        for _ in range(short.config.batch.accumulation):
            batch = next(pairs)
            mask = batch.completion_mask[:, 1:].bool()
            gained = [
                torch.log_softmax(model(batch.input_ids, attention_mask=batch.attention_mask).logits[:, :-1], -1)
                .gather(2, batch.input_ids[:, 1:, None])[..., 0]
                .where(mask, 0.0)
                .sum(1)
                for model in (training.model.train(False), base)
            ]
            chosen, rejected = (gained[0] - gained[1]).chunk(2)
            loss = -torch.nn.functional.logsigmoid(0.2 * (chosen - rejected)).mean()
            (loss / short.config.batch.accumulation).backward()
            expected.append(float(loss.detach()))
        torch.nn.utils.clip_grad_norm_(training.model.parameters(), short.config.optim.max_grad_norm)
        training.optimizer.step()
        training.optimizer.zero_grad()
    of_steps = [sum(pair) / 2 for pair in zip(expected[::2], expected[1::2], strict=True)]
    assert found[:3] == pytest.approx(of_steps, rel=1e-4)


LOSSES = ["sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "apo_zero", "apo_down"]


@pytest.mark.parametrize("loss", LOSSES)
def test_every_preference_loss_trains(tune: Tune, loss: str) -> None:
    """The losses are finite and move the weights; none is taken for divergence while nothing was learnt."""
    job = tune(
        "dpo",
        "lora",
        {"preference.loss": loss, "regularization.label_smoothing": 0.01},
        budget="300tok",
        probe_points=0,
    )
    assert done(job).steps >= 1
    assert any(tensor.abs().max() > 0 for name, tensor in saved(job).items() if "lora_B" in name)


def test_label_smoothing(tune: Tune) -> None:
    """The loss of the first step is (1 - a) × nats + a × mean nats over the vocabulary, by hand."""
    smoothing = 0.2
    plain, smooth = (
        losses(tune("sft", "full", {**FLAT, **more, "batch.packing": False}, name=name, budget="200tok"))[0][0]
        for name, more in (("a", {}), ("b", {"regularization.label_smoothing": smoothing}))
    )
    assert smooth != pytest.approx(plain, rel=1e-4)
    # A model of random weights is close to uniform, so both terms are close to ln(vocabulary).
    assert smooth == pytest.approx((1 - smoothing) * plain + smoothing * math.log(384), rel=0.01)


def test_noise_on_embeddings_is_there_in_training_only(tune: Tune) -> None:
    """NEFTune changes the loss of the first step and leaves no hook in what is saved or scored."""
    plain, noisy = (
        losses(tune("sft", "full", {**FLAT, **more}, name=name, budget="200tok"))[0][0]
        for name, more in (("a", {}), ("b", {"regularization.neftune_alpha": 20.0}))
    )
    assert noisy != pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_recomputed_activations_change_nothing(tune: Tune, method: str, kind: str) -> None:
    """Gradient checkpointing gives the same losses, dropout included."""
    one, other = (
        losses(tune("sft", method, {"gradient_checkpointing": on}, kind=kind, name=str(on)))[0] for on in (False, True)
    )
    assert other == pytest.approx(one, rel=1e-6)


def test_half_precision_holds_what_is_frozen_and_not_what_is_trained(tune: Tune) -> None:
    """With bf16 the base is held in it, the adapter in fp32; the result can be scored."""
    job = tune("sft", "lora", {"precision": "bf16"}, budget="200tok")
    timer = Timer(Budget.parse(job.budget), flops_per_token=1.0)
    training = Training(job, EncodedSplit.load(job.train), timer, CPU, lambda point: None)
    kinds = {(weight.requires_grad, weight.dtype) for weight in training.model.parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    done(job)
    half = score_of(job).evaluation.model_copy(update={"precision": "bf16"})
    whole = scored(job)
    result = score(score_of(job).model_copy(update={"evaluation": half}))
    assert isinstance(result, Scored)
    assert result.score == pytest.approx(whole.score, rel=1e-2)


# --- the budget -------------------------------------------------------------------------------------------------------


def test_what_goes_through_the_model_is_charged(tune: Tune) -> None:
    """Rows padded to the longest of their batch cost what they are, step by step."""
    job = tune("sft", "lora", {"batch.packing": False}, budget="1200tok")
    result = done(job)
    split = EncodedSplit.load(job.train)
    batches = Examples(
        split,
        seed=1,
        sequence_length=48,
        batch_sequences=2,
        packing=False,
        fraction=1.0,
        order="shuffled",
        weights={},
        temperature=1.0,
        general_fraction=0.0,
        padding=0,
    )
    drawn = [next(batches).tokens for _ in range(2 * result.steps)]
    assert result.tokens == sum(drawn)
    assert len(set(drawn)) > 1


def rates(job: TrainJob) -> list[float]:
    """Train in process; return the learning rate of every step."""
    torch.set_num_threads(1)
    timer = Timer(Budget.parse(job.budget), flops_per_token=1.0)
    training = Training(job, EncodedSplit.load(job.train), timer, CPU, lambda point: None)
    trainer, found = training.trainer(), []

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, *arguments: object, **rest: object) -> None:
            found.append(training.optimizer.param_groups[0]["lr"])

    trainer.add_callback(Watch())
    trainer.train()
    return found


@pytest.mark.parametrize(("task", "packing"), [("sft", True), ("sft", False), ("dpo", False), ("continue", False)])
def test_the_first_step_of_a_ramp_learns(tune: Tune, task: str, packing: bool) -> None:
    """Padded rows and pairs are counted before they are trained on: each rate is that of its step's own middle."""
    diff: dict[str, Value] = {"batch.packing": packing, "schedule.warmup_fraction": 0.5, "schedule.shape": "linear"}
    job = tune(task, "lora", diff, budget="2000tok", probe_points=0)
    found = rates(job)
    feed = Feed(job, EncodedSplit.load(job.train), skip=0, with_mask=False)
    spent, expected = 0, []
    for _ in found:
        cost = feed.coming_tokens(job.config.batch.accumulation)
        expected.append(job.config.optim.learning_rate * rate_factor(job.config.schedule, (spent + cost / 2) / 2000))
        for batch in itertools.islice(feed, job.config.batch.accumulation):
            assert batch["input_ids"].numel()
        assert feed.take_tokens() == cost
        spent += cost
    assert found == pytest.approx(expected)
    assert found[0] > 0


def test_text_that_is_not_packed_comes_by_the_document(tune: Tune) -> None:
    """The knob turns something for continued pretraining as well: rows of single documents, padded."""
    packed, padded = (
        Feed(job, EncodedSplit.load(job.train), skip=0, with_mask=False)
        for job in (tune("continue", "full", {"batch.packing": on}, name=str(on)) for on in (True, False))
    )
    stream, rows = next(iter(packed)), next(iter(padded))
    assert stream["input_ids"].shape == (2, 48)
    assert "attention_mask" not in stream
    assert (rows["input_ids"][:, 0] == 0).all()
    assert rows["input_ids"].shape[1] < 48
    assert (rows["attention_mask"] == 0).any()


@pytest.mark.parametrize(("task", "rows"), [("sft", 2), ("dpo", 4)])
def test_warming_up_is_as_wide_as_the_widest_batch(
    tune: Tune, task: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A length that no document reaches must not run out of memory before training begins."""
    seen: list[tuple[int, ...]] = []
    draw = torch.randint

    def watched(high: int, shape: tuple[int, ...], **rest: object) -> torch.Tensor:
        seen.append(tuple(shape))
        return draw(high, shape)

    monkeypatch.setattr(torch, "randint", watched)
    job = tune(task, "lora", {"batch.packing": False, "batch.sequence_length": 512})
    Training(job, EncodedSplit.load(job.train), Timer(Budget("tokens", 1e6), flops_per_token=1.0), CPU, lambda _: None)
    longest = int(np.diff(EncodedSplit.load(job.train).offsets).max()) + 1
    assert seen == [(rows, -(-longest // 8) * 8)]


def test_a_proposal_gives_up_in_bits_per_pair(tune: Tune) -> None:
    """The condition of a proposal is held against the study's metric."""
    result = train(tune("dpo", "lora", abort_if=AbortIf(probe_above=0.01, after=0.1)), lambda point: None)
    assert isinstance(result, Failed)
    assert result.state is TrialState.STOPPED
    assert "bits per pair" in result.error_text


@pytest.mark.parametrize("task", ["sft", "continue"])
def test_divergence_of_a_base_model(tune: Tune, task: str) -> None:
    """A rate that is far too high ends as diverged, with a sentence."""
    diff: dict[str, Value] = {**FLAT, "optim.learning_rate": 1.0, "optim.max_grad_norm": 1e4}
    result = train(tune(task, "full", diff, budget="60000tok"), lambda point: None)
    assert isinstance(result, Failed)
    assert result.state is TrialState.DIVERGED
    assert "loss" in result.error_text or "probe" in result.error_text


# --- going on ---------------------------------------------------------------------------------------------------------


RESUMED: list[tuple[str, str, dict[str, Value]]] = [
    ("sft", "lora", {}),
    ("sft", "lora", {"quantization": "nf4"}),
    ("sft", "lora", {"adapter.initialisation": "pissa", "adapter.dropout": 0.3}),
    ("sft", "lora", {"adapter.dora": True, "batch.packing": False}),
    ("sft", "lora", {"regularization.neftune_alpha": 5.0, "regularization.label_smoothing": 0.1}),
    ("dpo", "lora", {}),
    ("dpo", "full", {}),
    *(("continue", "full", {"optim.name": name}) for name in RUN_ON_A_CPU),
]


@pytest.mark.parametrize(("task", "method", "diff"), RESUMED)
def test_resume_is_exact(tune: Tune, task: str, method: str, diff: dict[str, Value]) -> None:
    """A run that is interrupted and goes on saves the very bits of an uninterrupted one."""
    whole, parted = (
        tune(task, method, diff, name=name, resumable=True, probe_points=4, budget="1600tok") for name in ("a", "b")
    )
    steps: list[int] = []
    assert isinstance(train(whole, lambda point: steps.append(point.step)), Trained)

    def interrupt(point: CurvePoint) -> None:
        if point.step == steps[2]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(parted, interrupt)
    again: list[int] = []
    assert isinstance(train(parted, lambda point: again.append(point.step)), Trained)
    assert again == steps[2:]
    assert same(saved(whole), saved(parted))
    assert scored(whole).document_nats == scored(parted).document_nats


@pytest.mark.parametrize(
    ("task", "method", "diff"),
    [
        ("sft", "full", {}),
        ("sft", "lora", {}),
        ("sft", "lora", {"adapter.initialisation": "pissa"}),
        ("sft", "lora", {"adapter.rslora": True, "adapter.initialisation": "olora"}),
        ("dpo", "lora", {"adapter.rslora": True}),
        ("dpo", "full", {}),
    ],
)
def test_training_goes_on_from_what_a_parent_saved(tune: Tune, task: str, method: str, diff: dict[str, Value]) -> None:
    """Before its first step the child's probe score is the parent's last; its reference is the base all the same."""
    parent = tune(task, method, {"optim.learning_rate": 2e-2, **diff}, name="parent", budget="2000tok")
    points: list[CurvePoint] = []
    done(parent, points)
    child = tune(task, method, diff, name="child", start=parent.folder / "model")
    timer = Timer(Budget.parse(child.budget), flops_per_token=1.0)
    training = Training(child, EncodedSplit.load(child.train), timer, CPU, lambda point: None)
    assert training.probe is not None
    begins = training.probe.score(training.model, averaged(training.optimizer))
    assert begins == pytest.approx(points[-1].probe_score, rel=1e-5)
    done(child)
    assert scored(child).score != scored(parent).score


def test_a_start_of_another_shape_is_invalid(tune: Tune) -> None:
    """Another rank is another adapter."""
    parent = tune("sft", "lora", name="parent", budget="400tok")
    done(parent)
    result = train(tune("sft", "lora", {"adapter.rank": 8}, start=parent.folder / "model"), lambda point: None)
    assert isinstance(result, Failed)
    assert (result.state, result.error_class) == (TrialState.INVALID, "WeightsRefused")


# --- optimizers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("name", RUN_ON_A_CPU)
def test_every_optimizer_learns(tune: Tune, name: str, method: str) -> None:
    """Each lowers the score on what it trains on, and gives the same bits twice."""
    rate = 2e-3 if name == "lion" else 1e-2
    diff: dict[str, Value] = {"optim.name": name, "optim.learning_rate": rate}
    jobs = [tune("sft", method, diff, name=folder, budget="2400tok", probe_points=0) for folder in ("a", "b")]
    for job in jobs:
        done(job)
    assert same(saved(jobs[0]), saved(jobs[1]))
    assert scored(jobs[0], split="train").score < scored(jobs[0], untouched=True, split="train").score


def test_schedule_free_saves_the_average(tune: Tune) -> None:
    """What is saved is not what the last gradient was taken at, and scores better at a rate that is too high."""
    job = tune("sft", "full", {**FLAT, "optim.name": "schedule_free", "optim.learning_rate": 1e-2}, probe_points=0)
    _, trained_on = losses(job)
    done(job)
    assert not torch.equal(saved(job)["model.norm.weight"], trained_on["model.norm.weight"])


def test_a_probe_leaves_no_trace(tune: Tune) -> None:
    """How often the curve is looked at changes no bit, also beside 4-bit weights."""
    often, never = (
        tune("sft", "lora", {"quantization": "nf4_double"}, name=str(points), probe_points=points) for points in (5, 0)
    )
    done(often)
    done(never)
    assert same(saved(often), saved(never))


def test_no_probe_split_is_read_without_points(tune: Tune, tmp_path: Path) -> None:
    """A run without a curve needs no probe."""
    done(tune("dpo", "lora", probe_points=0, probe=tmp_path / "absent"))


def test_rate_follows_the_schedule(tune: Tune) -> None:
    """The rate of the last point is the schedule's at the middle of its step."""
    points: list[CurvePoint] = []
    job = tune("sft", "lora", {"schedule.final_rate_fraction": 0.5})
    result = done(job, points)
    middle = (result.tokens - result.tokens / result.steps / 2) / 1200
    assert points[-1].learning_rate == pytest.approx(3e-3 * rate_factor(job.config.schedule, middle), rel=0.02)
