from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from frozen.tokens import EncodedSplit, train_tokenizer
from harness.config import apply
from harness.jobs.job import ScoreJob, TrainJob
from harness.launch import Launcher
from harness.records import CurvePoint, Failed, Merged, Scored, Trained, TrialState
from tests.harness.jobs.conftest import merge_of, score_of

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def launcher(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """Start the real nursery; compiled modules are kept between test runs: compiling torch takes longer than it."""
    bytecode = request.config.cache.mkdir("bytecode")
    with Launcher(bytecode=bytecode, mark=str(tmp_path_factory.getbasetemp()), threads=1) as launcher:
        yield launcher


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a real tokenizer to be carried along; the synthetic splits do not come from it."""
    folder = tmp_path_factory.mktemp("real") / "tokenizer"
    train_tokenizer(["carried along " * 20], 300, folder)
    return folder


def trained(launcher: Launcher, job: TrainJob) -> Trained:
    result = launcher.run(job, log=job.folder.with_suffix(".log"), deadline_seconds=300)
    assert isinstance(result, Trained), job.folder.with_suffix(".log").read_text()
    return result


def test_walk(launcher: Launcher, train_job: TrainJob, score_job: ScoreJob, tokenizer: Path) -> None:
    """Two runs of one order give the same bytes and score, and an independent program gets that score from them."""
    first = train_job.model_copy(update={"tokenizer": tokenizer, "threads": 2})
    second = first.model_copy(update={"folder": first.folder.with_name("again")})
    one, other = trained(launcher, first), trained(launcher, second)
    assert (one.steps, one.tokens, one.device) == (other.steps, other.tokens, "cpu") == (20, 5120, "cpu")
    models = [job.folder / "model" for job in (first, second)]
    assert models[0].joinpath("model.safetensors").read_bytes() == models[1].joinpath("model.safetensors").read_bytes()

    scores = []
    for model in models:
        order = score_job.model_copy(update={"weights": model, "tokenizer": tokenizer})
        scores.append(launcher.run(order, log=first.folder.with_suffix(".log"), deadline_seconds=300))
    assert isinstance(scores[0], Scored)
    assert isinstance(scores[1], Scored)
    assert scores[0].document_nats == scores[1].document_nats

    model = AutoModelForCausalLM.from_pretrained(models[0])
    assert AutoTokenizer.from_pretrained(models[0]).decode(
        AutoTokenizer.from_pretrained(models[0])("along")["input_ids"]
    )
    split = EncodedSplit.load(score_job.split)
    short = [index for index in range(split.documents) if len(split.document(index)) <= score_job.evaluation.context]
    assert short
    for index in short:
        document = torch.from_numpy(split.document(index).astype("int64"))
        tokens = torch.cat([torch.tensor([split.separator]), document])
        with torch.no_grad():
            logits = model(input_ids=tokens[None, :-1]).logits[0]
        nats = torch.nn.functional.cross_entropy(logits, document, reduction="sum")
        assert float(nats) == pytest.approx(scores[0].document_nats[index], rel=1e-5)


def test_nursery_computes_nothing(launcher: Launcher, train_job: TrainJob) -> None:
    """The warm parent has one thread after a job: a thread pool in it would be dead in every child."""
    trained(launcher, train_job)
    assert len(list(Path(f"/proc/{launcher.nursery_pid}/task").iterdir())) == 1


def test_resume_after_a_kill(launcher: Launcher, train_job: TrainJob) -> None:
    """A resumable run that is killed goes on where its last checkpoint was and ends with the same bytes."""
    whole = train_job.model_copy(update={"resumable": True, "budget": "10240tok"})
    trained(launcher, whole)
    parted = whole.model_copy(update={"folder": whole.folder.with_name("parted")})
    points: list[CurvePoint] = []
    killed = launcher.run(
        parted,
        log=parted.folder.with_suffix(".log"),
        deadline_seconds=300,
        on_point=points.append,
        should_stop=lambda: len(points) >= 3,
    )
    assert isinstance(killed, Failed)
    assert killed.state is TrialState.INTERRUPTED
    assert (parted.folder / "resume.pt").exists()
    trained(launcher, parted)
    one, other = (job.folder / "model" / "model.safetensors" for job in (whole, parted))
    assert one.read_bytes() == other.read_bytes()


def test_divergence_in_a_child(launcher: Launcher, train_job: TrainJob) -> None:
    """A diverging config comes back from its child as an outcome with a reason."""
    diff = {"optim.learning_rate": 1.0, "optim.max_grad_norm": 1e4, "schedule.warmup_fraction": 0.0}
    job = train_job.model_copy(update={"config": apply(train_job.config, diff), "budget": "51200tok"})
    result = launcher.run(job, log=job.folder.with_suffix(".log"), deadline_seconds=300)
    assert isinstance(result, Failed)
    assert result.state is TrialState.DIVERGED
    assert result.wall_seconds is not None


@pytest.mark.parametrize(
    ("task", "method", "quantization"),
    [("sft", "lora", "nf4"), ("dpo", "lora", "none"), ("dpo", "full", "none"), ("continue", "full", "none")],
)
def test_walk_of_a_base_model(
    launcher: Launcher, tune: Callable[..., TrainJob], tmp_path: Path, task: str, method: str, quantization: str
) -> None:
    """Within the sandbox a base model is trained, scored against itself and merged; the nursery stays as it was."""
    job = tune(task, method, {"quantization": quantization, "optim.learning_rate": 2e-2}, budget="2000tok")
    log = job.folder.with_suffix(".log")
    trained(launcher, job)
    guard = {"guard": job.probe}
    before, after = (
        launcher.run(score_of(job, untouched=untouched).model_copy(update=guard), log=log, deadline_seconds=300)
        for untouched in (True, False)
    )
    assert isinstance(before, Scored), log.read_text()
    assert isinstance(after, Scored), log.read_text()
    assert after.nats != before.nats
    assert before.guard is not None
    assert after.guard is not None
    assert after.guard.nats != before.guard.nats
    if method == "lora":
        result = launcher.run(merge_of(job, tmp_path / "merged"), log=log, deadline_seconds=300)
        assert isinstance(result, Merged), log.read_text()
        assert (tmp_path / "merged" / "model" / "model.safetensors").is_file()
        assert (abs(result.difference) < 1e-4) == (quantization == "none")
    assert len(list(Path(f"/proc/{launcher.nursery_pid}/task").iterdir())) == 1
