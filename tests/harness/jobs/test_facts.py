from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import BadInput
from harness.jobs.facts import facts_of
from harness.sizes import BaseFacts
from tests.standin import make_base, prepare


@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("llama", False), ("gpt2", True)])
def test_facts_are_those_of_the_loaded_model(tmp_path: Path, kind: str, tied: bool) -> None:
    """Parameters and linear layers, counted from headers, are what the loaded model has."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.pytorch_utils import Conv1D

    folder = prepare(make_base(tmp_path / "base", kind=kind, tied=tied))  # type: ignore[arg-type]
    model = AutoModelForCausalLM.from_pretrained(folder)
    facts = BaseFacts.read(folder)
    assert facts.parameters == model.num_parameters()
    assert facts.vocabulary == model.get_input_embeddings().weight.shape[0]
    linears = {
        name: (module.nx, module.nf) if isinstance(module, Conv1D) else (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and name != "lm_head"
    }
    prefix = model.base_model_prefix + "."
    found = {linear.name: (linear.inputs, linear.outputs) for linear in facts.linears}
    assert {name.removeprefix(prefix): shape for name, shape in found.items()} == {
        name.removeprefix(prefix): shape for name, shape in linears.items()
    }
    assert all(linear.parts != ("other",) for linear in facts.linears)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    """Weights that run code when they are loaded are no base model."""
    folder = make_base(tmp_path / "base")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(BadInput, match=r"pytorch_model\.bin"):
        facts_of(folder, name="x", revision=None, digest="0" * 64)
