"""The whole way with real jobs that go on from each other: search, the schedule as a full run, and verify."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from frozen.timer import Budget
from harness.launch import Launcher
from harness.ledger import Ledger
from harness.limits import Limits
from harness.queries import Reader
from harness.records import Role
from harness.replay import Replay
from harness.setup import create
from harness.study import Study, load
from harness.studyfile import Evaluation
from harness.upgrade import tool_of
from harness.verify import verify
from harness.view import Silent
from tests.basestudy import policy
from tests.drive import Drive, Script

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """Return a launcher of real jobs."""
    with Launcher(bytecode=tmp_path_factory.mktemp("cache") / "bytecode", mark="continued", threads=1) as launcher:
        yield launcher


@pytest.mark.parametrize(
    ("task", "method"), [("sft", "lora"), pytest.param("continue", "full", marks=pytest.mark.slow)]
)
def test_a_base_model_is_trained_further_and_further(
    base_study: Callable[..., Study], real: Launcher, task: str, method: str
) -> None:
    """Two proposals are judged from the baseline's checkpoint; what is kept is replayed as a schedule and verified."""
    study = base_study(task=task, method=method, budget="10000tok", start_from="parent")
    night = Drive(study.paths, real, Script({"optim.learning_rate": 1e-2}, {"optim.learning_rate": 2e-5}))
    assert night.run(Limits(trials=40)).exit_code == 0
    replayed(night, real, first=[(Role.REFERENCE, None)], adapter=method == "lora")


def test_a_fresh_model_is_trained_further_and_further(tmp_path: Path, real: Launcher) -> None:
    """Pretraining goes on from its own checkpoints in the same way."""
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 9))) for _ in range(500)]
    lines = [json.dumps({"text": " ".join(draw.choices(words, k=120))}) for _ in range(100)]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    (tmp_path / "schedule.toml").write_text(policy("pretrain", "full", start_from="parent"))
    study = create(
        "night",
        policy=str(tmp_path / "schedule.toml"),
        data=[tmp_path / "texts.jsonl"],
        budget="10000tok",
        runs=tmp_path / "runs",
        baseline={"batch.per_device": 4},
        vocabulary=300,
        evaluation=Evaluation(context=64, stride=48, probe_bytes=2_000, val_bytes=6_000, holdout_bytes=6_000),
    )
    night = Drive(study.paths, real, Script({"optim.learning_rate": 1e-2}, {"optim.learning_rate": 2e-5}))
    assert night.run(Limits(trials=40)).exit_code == 0
    replayed(night, real, first=[], adapter=False)


def replayed(night: Drive, real: Launcher, *, first: list[tuple[Role, int | None]], adapter: bool) -> None:
    """See that both proposals were judged and the first kept; run the schedule of two configs and verify it all."""
    decided = night.past()  # audits
    assert [past.verdict is not None for past in decided] == [True, True]
    study = load(night.paths.root)
    with Ledger.open(study.paths.ledger) as ledger, Reader(study.paths.ledger) as reader:
        scored = [(t.role, t.start) for t in reader.trials()]
        expected = [*first, *[(Role.BASELINE, None)] * 3, *[(Role.CONTROL, 0)] * 3]
        assert scored[: len(expected)] == expected
        incumbent = reader.incumbent()
        assert incumbent is not None
        assert incumbent.node == 1, "a fifty times higher rate learns more of so little"
        replay = Replay(study, tool_of(study.seal, thorough=True), ledger, reader, real, Silent())
        replay.reproduce()
        run = replay.full_run(Budget.parse("20000tok"))
        assert run.segments == 2
        best = reader.trial(run.best.trial)
        assert best.start == 0
        assert best.tokens is not None
        assert best.tokens >= 19_000
        assert files_of(run.model) >= {f"{'adapter_' if adapter else ''}model.safetensors", "README.md"}
    assert [found.text for found in verify(study, scorer=real) if not found.ok] == []


def files_of(folder: Path) -> set[Any]:
    return {path.name for path in folder.iterdir()}
