"""The whole way with real jobs: a tiny base model is scored, tuned, kept or not, replayed, merged and verified."""

from __future__ import annotations

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
from harness.study import Study, load
from harness.upgrade import tool_of
from harness.verify import verify
from harness.view import Silent
from tests.drive import Drive, Script

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """Return a launcher of real jobs."""
    with Launcher(bytecode=tmp_path_factory.mktemp("cache") / "bytecode", mark="base-process", threads=1) as launcher:
        yield launcher


@pytest.mark.parametrize(
    ("task", "method", "quantization"),
    [
        ("sft", "lora", "none"),
        ("dpo", "lora", "none"),
        pytest.param("continue", "full", "none", marks=pytest.mark.slow),
        pytest.param("sft", "lora", "nf4", marks=pytest.mark.slow),
    ],
)
def test_a_base_model_from_its_first_score_to_its_full_run(
    base_study: Callable[..., Study], real: Launcher, task: str, method: str, quantization: str
) -> None:
    """The untouched base, the baseline, a full run beside it with its looks, a merge, and all of it verified again."""
    if quantization != "none":
        pytest.importorskip("bitsandbytes")
    baseline = {"optim.learning_rate": 2e-3, "quantization": quantization}
    study = base_study(task=task, method=method, budget="20000tok", baseline=baseline)
    night = Drive(study.paths, real, Script())
    assert "4 of 4" in night.run(Limits(trials=4)).reason
    assert [(role, state.value) for role, state, _ in night.trials()] == [
        (Role.REFERENCE, "scored"),
        *[(Role.BASELINE, "scored")] * 3,
    ]
    night.past()  # audits
    study = load(study.paths.root)
    with Ledger.open(study.paths.ledger) as ledger, Reader(study.paths.ledger) as reader:
        reference, first, *_ = reader.trials()
        assert reference.guard_score is not None
        assert first.guard_score is not None
        if task == "dpo":
            assert (reference.score, reference.accuracy) == (pytest.approx(1.0, abs=1e-6), 0.5)
        assert first.score != reference.score
        replay = Replay(study, tool_of(study.seal, thorough=True), ledger, reader, real, Silent())
        replay.reproduce()
        run = replay.full_run(Budget.parse("30000tok"), merge=method == "lora")
        assert run.base is not None
        assert run.base.val == reference.score
        assert files_of(run.model) >= {f"{'adapter_' if method == 'lora' else ''}model.safetensors", "README.md"}
        if run.merged is not None:
            assert {"model.safetensors", "config.json", "tokenizer.json"} <= files_of(run.merged.folder)
            assert run.merged.is_unquantized == (quantization != "none")
            assert run.merged.agrees or run.merged.is_unquantized
    assert [found.text for found in verify(study, scorer=real) if not found.ok] == []


def files_of(folder: Path) -> set[Any]:
    return {path.name for path in folder.iterdir()}
