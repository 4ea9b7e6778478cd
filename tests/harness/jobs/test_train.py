from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from frozen.loader import Batches
from frozen.timer import Budget, Timer
from frozen.tokens import EncodedSplit
from harness.config import Value, apply
from harness.jobs.job import ScoreJob, TrainJob
from harness.jobs.model import WEIGHTS_FILE, build_model
from harness.jobs.optimizers import make_optimizer
from harness.jobs.schedule import rate_factor
from harness.jobs.score import score
from harness.jobs.train import Training, train
from harness.records import AbortIf, CurvePoint, Failed, Scored, Trained, TrialState

pytestmark = pytest.mark.process


def turned(job: TrainJob, diff: dict[str, Value], **changes: object) -> TrainJob:
    job.folder.mkdir(exist_ok=True)
    return job.model_copy(update={"config": apply(job.config, diff), **changes})


def weights(job: TrainJob) -> dict[str, torch.Tensor]:
    return load_file(job.folder / "model" / WEIGHTS_FILE)


def by_hand(job: TrainJob, steps: int) -> dict[str, torch.Tensor]:
    """Train with plain torch: same stream, same schedule, accumulation by summed token losses."""
    config, split = job.config, EncodedSplit.load(job.train)
    torch.manual_seed(job.seed)
    model = build_model(config, split.vocabulary, split.separator).train()
    optimizer = make_optimizer(config, model, torch.device("cpu"))
    shape = config.batch
    batches = Batches(
        split,
        seed=job.seed,
        sequence_length=shape.sequence_length,
        batch_sequences=shape.per_device * shape.accumulation,
        fraction=1.0,
        order="shuffled",
        weights={},
    )
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = config.optim.learning_rate * rate_factor(config.schedule, (step + 0.5) / steps)
        tokens = next(batches)
        logits = model(input_ids=tokens).logits[:, :-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}


def test_trainer_does_what_a_plain_loop_does(train_job: TrainJob) -> None:
    """Five steps through Trainer, accumulated, give the weights of a plain torch loop over the whole batch."""
    job = turned(train_job, {"model.attention_dropout": 0.0}, budget="1280tok")
    result = train(job, lambda point: None)
    assert isinstance(result, Trained)
    assert (result.steps, result.tokens) == (5, 1280)
    expected, found = by_hand(job, 5), weights(job)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=2e-5, rtol=1e-4)


def test_halved_batch_and_doubled_accumulation_train_alike(train_job: TrainJob) -> None:
    """The repair after running out of memory sees the same data and computes the same step."""
    both = []
    for name, diff in (("a", {"batch.per_device": 4}), ("b", {"batch.per_device": 2, "batch.accumulation": 4})):
        job = turned(train_job, {"model.attention_dropout": 0.0, **diff}, folder=train_job.folder.with_name(name))
        job.folder.mkdir()
        assert isinstance(train(job, lambda point: None), Trained)
        both.append(weights(job))
    for name, tensor in both[0].items():
        torch.testing.assert_close(both[1][name], tensor, atol=2e-4, rtol=1e-3)


def test_curve(train_job: TrainJob) -> None:
    """A point comes at every tenth of the budget and at its end, with everything on it, and the loss falls."""
    points: list[CurvePoint] = []
    result = train(turned(train_job, {}), points.append)
    assert isinstance(result, Trained)
    assert [point.step for point in points] == [2, 4, 6, 8, 10, 12, 14, 16, 18, 20]
    assert points[-1].progress == pytest.approx(1.0)
    losses = [point.train_loss for point in points if point.train_loss is not None]
    assert losses[-1] < losses[0]
    assert all(point.probe_score and point.gradient_norm and point.learning_rate for point in points)


def test_divergence_is_stopped_at_once(train_job: TrainJob) -> None:
    """A learning rate that is far too high ends the job early, as diverged, with a sentence."""
    diff: dict[str, Value] = {
        "optim.learning_rate": 1.0,
        "schedule.warmup_fraction": 0.0,
        "optim.max_grad_norm": 1e4,
        "batch.accumulation": 1,
    }
    result = train(turned(train_job, diff, budget="200000tok"), lambda point: None)
    assert isinstance(result, Failed)
    assert result.state is TrialState.DIVERGED
    assert "loss" in result.error_text
    assert result.steps is not None
    assert result.steps < 20
    assert not (train_job.folder / "model").exists()


@pytest.mark.parametrize(("after", "ends_at"), [(0.05, 0.1), (0.35, 0.4)])
def test_a_proposal_gives_up_at_the_first_point_that_meets_its_condition(
    train_job: TrainJob, after: float, ends_at: float
) -> None:
    """Not before the share of the budget that it names; the curve up to there is kept, a model is not."""
    points: list[CurvePoint] = []
    result = train(turned(train_job, {}, abort_if=AbortIf(probe_above=0.5, after=after)), points.append)
    assert isinstance(result, Failed)
    assert (result.state, result.error_class) == (TrialState.STOPPED, "Aborted")
    assert points[-1].progress == pytest.approx(ends_at, abs=0.05)
    assert f"above the 0.5 at which the proposal gives up (from {after:.0%} on)" in result.error_text
    assert not (train_job.folder / "model").exists()


@pytest.mark.parametrize("wanted", [AbortIf(probe_above=50, after=0.1), AbortIf(probe_above=0.5, after=0.95)])
def test_a_condition_that_is_not_met_changes_nothing(train_job: TrainJob, wanted: AbortIf) -> None:
    """A probe that is good enough, or one that is only bad once nothing is left to save: the run ends as without."""
    assert isinstance(train(train_job, lambda point: None), Trained)
    plain = weights(train_job)
    assert isinstance(train(turned(train_job, {}, abort_if=wanted), lambda point: None), Trained)
    again = weights(train_job)
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def test_budget_of_one_step(train_job: TrainJob) -> None:
    """A config whose single step eats the budget is invalid, and nothing is saved."""
    result = train(turned(train_job, {}, budget="200tok"), lambda point: None)
    assert isinstance(result, Failed)
    assert (result.state, result.error_class) == (TrialState.INVALID, "BudgetTooSmall")


def test_warm_up_changes_nothing(train_job: TrainJob) -> None:
    """After the throw-away passes weights, gradients and random numbers are as without them; the excess is charged."""
    job = turned(train_job, {}, budget="60s", warmup_cap_seconds=0.0)
    timer = Timer(Budget.parse(job.budget), flops_per_token=1.0)
    split = EncodedSplit.load(job.train)
    training = Training(job, split, timer, torch.device("cpu"), lambda point: None)
    after = torch.get_rng_state()
    torch.manual_seed(job.seed)
    fresh = build_model(job.config, split.vocabulary, split.separator)
    assert torch.equal(torch.get_rng_state(), after)
    for name, tensor in fresh.state_dict().items():
        assert torch.equal(tensor, training.model.state_dict()[name])
    assert all(parameter.grad is None for parameter in training.model.parameters())
    assert timer.train_seconds == training.warmup_seconds > 0


def test_resume_is_exact(train_job: TrainJob) -> None:
    """A run that is interrupted and goes on from its last point saves the very bytes of an uninterrupted one."""
    whole = turned(train_job, {}, resumable=True)
    assert isinstance(train(whole, lambda point: None), Trained)
    parted = whole.model_copy(update={"folder": train_job.folder.with_name("parted")})
    parted.folder.mkdir()

    def interrupt(point: CurvePoint) -> None:
        if point.step == 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(parted, interrupt)
    steps: list[int] = []
    result = train(parted, lambda point: steps.append(point.step))
    assert isinstance(result, Trained)
    assert (result.steps, steps) == (20, [12, 14, 16, 18, 20])
    one, other = (job.folder / "model" / WEIGHTS_FILE for job in (whole, parted))
    assert one.read_bytes() == other.read_bytes()
    assert not (parted.folder / "resume.pt").exists()


def test_resume_of_another_job_is_refused(train_job: TrainJob) -> None:
    """A resume file of another seed is an error, not a start in the middle."""

    def interrupt(point: CurvePoint) -> None:
        if point.step == 4:
            raise KeyboardInterrupt

    job = turned(train_job, {}, resumable=True)
    with pytest.raises(KeyboardInterrupt):
        train(job, interrupt)
    with pytest.raises(ValueError, match="another config, seed or budget"):
        train(job.model_copy(update={"seed": 2}), lambda point: None)


def test_a_damaged_resume_file_starts_over(train_job: TrainJob, capfd: pytest.CaptureFixture[str]) -> None:
    """A disk that lost half of the file costs the work, not the run; the log names the file."""
    job = turned(train_job, {}, resumable=True)

    def interrupt(point: CurvePoint) -> None:
        if point.step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(job, interrupt)
    place = job.folder / "resume.pt"
    place.write_bytes(place.read_bytes()[: place.stat().st_size // 2])
    steps: list[int] = []
    assert isinstance(train(job, lambda point: steps.append(point.step)), Trained)
    assert steps[0] == 2
    assert "resume.pt cannot be read" in capfd.readouterr().err


def test_score_of_a_trained_model(train_job: TrainJob, score_job: ScoreJob) -> None:
    """Training makes the scored text more probable than guessing does, and the documents add up."""
    assert isinstance(train(turned(train_job, {}), lambda point: None), Trained)
    result = score(score_job)
    assert isinstance(result, Scored)
    split = EncodedSplit.load(score_job.split)
    assert (result.bytes, result.tokens) == (int(split.bytes.sum()), len(split.tokens))
    assert sum(result.document_nats) == pytest.approx(result.nats)
    assert result.nats / result.tokens < 4.1


@pytest.mark.parametrize("fault", ["nan", "absent"])
def test_score_refuses(train_job: TrainJob, score_job: ScoreJob, fault: str, tmp_path: Path) -> None:
    """Weights that give no prediction, or that are not there, end as invalid with the reason."""
    split = EncodedSplit.load(score_job.split)
    model = build_model(train_job.config, split.vocabulary, split.separator)
    folder = tmp_path / "weights"
    folder.mkdir()
    if fault == "nan":
        with torch.no_grad():
            model.model.norm.weight.fill_(float("nan"))
        model.save_pretrained(folder)
    result = score(score_job.model_copy(update={"weights": folder}))
    assert isinstance(result, Failed)
    assert result.state is TrialState.INVALID
    assert ("NaN" if fault == "nan" else "no model.safetensors") in result.error_text
