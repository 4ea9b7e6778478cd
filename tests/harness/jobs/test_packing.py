"""Which models may be given packed rows: the check against models that keep documents apart and models that do not."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from harness.config import Value
from harness.jobs.failures import ConfigRefused
from harness.jobs.job import TrainJob
from harness.jobs.packing import refuse_unless_kept_apart
from harness.jobs.train import train
from harness.records import Failed, Trained, TrialState
from tests.standin import VOCABULARY, Kind, make_base

pytestmark = pytest.mark.process
Tune = Callable[..., TrainJob]
ALL_WEIGHTS: dict[str, Value] = {"optim.learning_rate": 1e-4}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Compute on one thread: on matrices this small, threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Kind], Path]:
    """Return a maker of saved models, each kind once."""
    made = functools.cache(lambda kind: make_base(tmp_path_factory.mktemp("kinds") / kind, kind=kind))
    return lambda kind: made(kind)


def check(model: torch.nn.Module, rows: int = 2) -> None:
    refuse_unless_kept_apart(model, rows=rows, vocabulary=VOCABULARY, separator=0, device=torch.device("cpu"))


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "fit"), [("llama", True), ("gpt2", True), ("mamba", False), ("opt", False)])
def test_models_are_asked_themselves(
    stand_in: Callable[[Kind], Path], kind: Kind, fit: bool, dtype: torch.dtype, rows: int
) -> None:
    """A recurrent state, and positions that a model counts for itself, let documents see each other."""
    model = AutoModelForCausalLM.from_pretrained(stand_in(kind), dtype=dtype)
    model.train()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    if fit:
        check(model, rows)
    else:
        with pytest.raises(
            ConfigRefused, match=r"does not keep the documents of a packed row apart: .*packing = false"
        ):
            check(model, rows)
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)
    assert all(weight.grad is None for weight in model.parameters())


class OneRowOnly(torch.nn.Module):
    """Looks at positions in batches of one row only, as flash attention does, which no CPU has."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None, **options: Any) -> Any:
        """Drop the positions of several rows."""
        return self.model(input_ids=input_ids, position_ids=position_ids if len(input_ids) == 1 else None, **options)


def test_one_row_at_a_time_may_be_the_remedy(stand_in: Callable[[Kind], Path]) -> None:
    """Who keeps documents apart in batches of one row is told so."""
    model = OneRowOnly(AutoModelForCausalLM.from_pretrained(stand_in("llama")))
    check(model, rows=1)
    with pytest.raises(ConfigRefused, match=r"batch\.per_device = 1"):
        check(model, rows=2)


@pytest.mark.parametrize(
    ("task", "packing", "fits"),
    [("sft", True, False), ("sft", False, True), ("continue", True, True)],
)
def test_training_refuses_it_before_it_begins(tune: Tune, task: str, packing: bool, fits: bool) -> None:
    """Answers in packed rows end as invalid, with what to do; padded rows and a stream of text train."""
    job = tune(task, "full", ALL_WEIGHTS | {"batch.packing": packing}, kind="opt", budget="1200tok", probe_points=0)
    result = train(job, lambda point: None)
    if fits:
        assert isinstance(result, Trained), result
        return
    assert isinstance(result, Failed)
    assert result.state is TrialState.INVALID
    assert result.steps == 0
    assert result.error_text.startswith("OPTForCausalLM does not keep the documents of a packed row apart")
    assert "batch.packing = false" in result.error_text


def test_an_adapter_is_named_by_its_base(tune: Tune) -> None:
    """A person knows the architecture, not PEFT's wrapper of it."""
    result = train(tune("sft", "lora", {"adapter.targets": "all_linear"}, kind="opt"), lambda point: None)
    assert isinstance(result, Failed)
    assert result.error_text.startswith("OPTForCausalLM does not keep")
