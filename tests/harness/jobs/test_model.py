from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.config import TrialConfig, apply
from harness.jobs.failures import WeightsRefused
from harness.jobs.model import WEIGHTS_FILE, build_model, load_weights

VOCABULARY = 64


@pytest.mark.parametrize(("depth", "width", "heads"), [(1, 8, 1), (2, 32, 2), (3, 96, 4), (2, 50, 5)])
def test_parameter_count(config: TrialConfig, depth: int, width: int, heads: int) -> None:
    """The formula that budgets in flops use is the count of the model that is built."""
    turned = apply(config, {"model.depth": depth, "model.width": width, "model.heads": heads})
    model = build_model(turned, VOCABULARY, separator=0)
    assert turned.model.parameters(VOCABULARY) == sum(parameter.numel() for parameter in model.parameters())
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


@pytest.fixture
def saved(config: TrialConfig, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    build_model(config, VOCABULARY, separator=0).save_pretrained(tmp_path)
    return tmp_path


def test_load_gives_the_saved_model(config: TrialConfig, saved: Path) -> None:
    """The loaded model computes the logits of the one that was saved, head and embedding tied."""
    torch.manual_seed(0)
    original = build_model(config, VOCABULARY, separator=0)
    original.train(False)
    tokens = torch.arange(12)[None] % VOCABULARY
    loaded = load_weights(config, saved, VOCABULARY, separator=0)
    assert torch.equal(loaded(input_ids=tokens).logits, original(input_ids=tokens).logits)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_nothing_but_tensors_is_read(config: TrialConfig, saved: Path) -> None:
    """A config that lies beside the weights is ignored."""
    (saved / "config.json").write_text('{"num_hidden_layers": 99, "auto_map": {"AutoModel": "evil.Model"}}')
    assert load_weights(config, saved, VOCABULARY, separator=0).config.num_hidden_layers == config.model.depth


@pytest.mark.parametrize("fault", ["missing", "link", "extra", "shape", "lacking"])
def test_other_weights_are_refused(config: TrialConfig, saved: Path, fault: str) -> None:
    """Weights that are not exactly this model's are refused with the name of what differs."""
    path = saved / WEIGHTS_FILE
    tensors = load_file(path)
    match fault:
        case "missing":
            path.unlink()
        case "link":
            path.symlink_to(path.rename(saved / "elsewhere"))
        case "extra":
            save_file(tensors | {"surplus": torch.zeros(1)}, path)
        case "shape":
            save_file(tensors | {"model.norm.weight": torch.zeros(7)}, path)
        case "lacking":
            del tensors["model.norm.weight"]
            save_file(tensors, path)
    words = {"missing": "no model", "link": "plain file", "extra": "surplus"}
    with pytest.raises(WeightsRefused, match=words.get(fault, "model.norm.weight")):
        load_weights(config, saved, VOCABULARY, separator=0)
