"""Which optimizer gets which weights, and what a config may not ask for; nothing is trained here."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
import torch

from harness.config import Value
from harness.jobs.job import TrainJob
from harness.jobs.model import load_base
from harness.jobs.optimizers import make_optimizer
from harness.jobs.train import train
from harness.records import Failed, TrialState
from tests.harness.jobs.conftest import tuned

Tune = Callable[..., TrainJob]
CPU = torch.device("cpu")


def refused(job: TrainJob) -> str:
    result = train(job, lambda point: None)
    assert isinstance(result, Failed), result
    assert (result.state, result.error_class) == (TrialState.INVALID, "ConfigRefused")
    return result.error_text


@pytest.mark.parametrize("name", ["paged_adamw", "paged_adamw_8bit"])
def test_paged_optimizers_need_a_gpu(tune: Tune, name: str) -> None:
    """On a CPU they would quietly be something else."""
    text = refused(tune("sft", "lora", {"optim.name": name}))
    assert "CPU" in text
    assert repr(name.removeprefix("paged_")) in text


@pytest.mark.parametrize(
    ("package", "diff"),
    [
        ("bitsandbytes", {"quantization": "nf4"}),
        ("bitsandbytes", {"optim.name": "lion"}),
        ("schedulefree", {"optim.name": "schedule_free"}),
    ],
)
def test_a_missing_package_is_named(
    tune: Tune, package: str, diff: dict[str, Value], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A config that needs what is not installed fails with what to install."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else real(name, *rest))
    text = refused(tune("sft", "lora", diff))
    assert package in text
    assert "pip install overnight[" in text


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_muon_takes_the_matrices_of_the_blocks(tune: Tune, kind: str) -> None:
    """Embeddings, output head and vectors are AdamW's, and only matrices decay, whoever steps them."""
    base = tune("sft", "full", kind=kind, tied=False).base
    assert base is not None
    config = tuned("sft", "full", {"optim.name": "muon"})
    model = load_base(base, config, CPU, torch.float32)
    groups = make_optimizer(config, model, CPU).param_groups
    by_muon = {id(weight) for group in groups if "ns_steps" in group for weight in group["params"]}
    names = {name for name, weight in model.named_parameters() if id(weight) in by_muon}
    assert names
    assert all((".layers." in name or ".h." in name) and "norm" not in name and ".ln_" not in name for name in names)
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    for group in groups:
        assert all((weight.ndim >= 2) == (group["weight_decay"] > 0) for weight in group["params"])


def test_weights_that_lie_transposed_are_not_decomposed(tune: Tune) -> None:
    """The trial fails with a sentence that names the knob."""
    assert "whose weights lie transposed" in refused(
        tune("sft", "lora", {"adapter.initialisation": "olora"}, kind="gpt2")
    )
