"""Low-rank adapters through PEFT: attached from the config, saved so that they fit the untouched base model.

Two initialisations (PiSSA: Meng et al., arXiv 2404.02948; OLoRA: Büyükakyüz, arXiv 2406.01775) take the strongest
directions out of the base weights and train those: W = (W - s B₀A₀) + s B₀A₀. Saved as they are, such adapters would
fit only a base that was taken apart in the same way, by a decomposition that differs between machines. So they are
saved as what they change, s (BA - B₀A₀): a plain adapter of twice the rank with B' = [B, -B₀] and A' = [A; A₀].
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from harness.config import MOVING, Adapter, TrialConfig
from harness.jobs.failures import ConfigRefused
from harness.jobs.model import freeze
from harness.jobs.weights import ADAPTER_FILE, read_tensors, shapes_of
from harness.sizes import BaseFacts

_A, _B = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, slots=True)
class Adapted:
    """A base model with its adapter."""

    model: PeftModel
    plain: LoraConfig
    """The adapter as it is saved: plain, and for twice the rank where the base was taken apart."""
    initial: Mapping[str, torch.Tensor]
    """A₀ and B₀, on the CPU; empty where the base is untouched."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the adapter's tensors as they are saved, on the CPU."""
        trained = {name: tensor.detach().cpu() for name, tensor in _tensors(self.model).items()}
        if not self.initial:
            return trained
        return {
            name: torch.cat((tensor, self.initial[name]), dim=0)
            if name.endswith(_A)
            else torch.cat((tensor, -self.initial[name]), dim=1)
            for name, tensor in trained.items()
        }

    def save(self, folder: Path) -> None:
        """Write the adapter as PEFT lays it out; its ``save_pretrained`` would add a card that says nothing."""
        save_file(
            {name: tensor.contiguous() for name, tensor in self.tensors().items()},
            folder / ADAPTER_FILE,
            metadata={"format": "pt"},
        )
        lora = copy.copy(self.plain)
        lora.inference_mode = True  # who loads it to train it further says so
        lora.target_modules = sorted(lora.target_modules or ())  # a set: in another order in every process
        lora.save_pretrained(str(folder))


def attach(model: PreTrainedModel, config: TrialConfig, facts: BaseFacts, base: Path) -> Adapted:
    """Put a fresh adapter, drawn from torch's global generator, beside the base's frozen weights.

    `ConfigRefused` for combinations that have no meaning, or that PEFT cannot compute.
    """
    adapter = _adapter_of(config)
    _check(adapter, facts, transposed=_transposed(model))
    adapted = _attach(model, _lora(adapter, model, facts, base, initialisation=adapter.initialisation))
    apart = adapter.initialisation in MOVING
    initial = {name: tensor.detach().cpu().clone() for name, tensor in _tensors(adapted).items()} if apart else {}
    return Adapted(adapted, _saved(adapter, model, facts, base), initial)


def load(model: PreTrainedModel, config: TrialConfig, facts: BaseFacts, base: Path, folder: Path) -> Adapted:
    """Put a saved adapter beside the base's weights; `WeightsRefused` if the file holds anything else.

    Its shape comes from the config alone: ``adapter_config.json`` in the folder is not read.
    """
    plain = _saved(_adapter_of(config), model, facts, base)
    adapted = _attach(model, plain)
    tensors = read_tensors(folder, ADAPTER_FILE, shapes_of(_tensors(adapted)))
    _fill(adapted, tensors)
    return Adapted(adapted, plain, {})


def go_on(model: PreTrainedModel, config: TrialConfig, facts: BaseFacts, base: Path, folder: Path) -> Adapted:
    """Return what was saved as it was trained: the adapter of another trial of this method and shape, to go on from."""
    adapter = _adapter_of(config)
    if adapter.initialisation not in MOVING:
        return load(model, config, facts, base, folder)
    _check(adapter, facts, transposed=_transposed(model))
    adapted = _attach(model, _lora(adapter, model, facts, base, initialisation="default"))
    plain = _saved(adapter, model, facts, base)
    shapes = {
        name: (2 * shape[0], *shape[1:]) if name.endswith(_A) else (shape[0], 2 * shape[1])
        for name, shape in shapes_of(_tensors(adapted)).items()
    }
    saved = read_tensors(folder, ADAPTER_FILE, shapes)
    rank = adapter.rank
    trained = {name: tensor[:rank] if name.endswith(_A) else tensor[:, :rank] for name, tensor in saved.items()}
    initial = {name: tensor[rank:] if name.endswith(_A) else -tensor[:, rank:] for name, tensor in saved.items()}
    _fill(adapted, trained)
    modules = dict(adapted.named_modules())
    for name in initial:
        if name.endswith(_A):
            layer: Any = modules[name.removesuffix(_A)]
            gone = layer.scaling["default"] * initial[name.removesuffix(_A) + _B] @ initial[name]
            weight = layer.get_base_layer().weight
            weight.data -= (gone.T if layer.fan_in_fan_out else gone).to(weight)
    return Adapted(adapted, plain, {name: tensor.contiguous() for name, tensor in initial.items()})


def held_in(adapted: Adapted, dtype: torch.dtype, device: torch.device) -> PeftModel:
    """Return the model for evaluation, the adapter's weights held as its base's are."""
    for parameter in adapted.model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(device, dtype)
    freeze(adapted.model)
    return adapted.model


def _adapter_of(config: TrialConfig) -> Adapter:
    assert config.adapter is not None  # method 'lora' has one: the config holds it
    return config.adapter


def _check(adapter: Adapter, facts: BaseFacts, *, transposed: bool) -> None:
    # The gate refuses it for the architectures that it knows to be transposed; here the model itself is seen.
    if adapter.initialisation == "olora" and transposed:
        raise ConfigRefused(
            "adapter.initialisation = 'olora' is not computed by PEFT for"
            f" {facts.architecture}, whose weights lie transposed"
        )


def _lora(
    adapter: Adapter, model: PreTrainedModel, facts: BaseFacts, base: Path, *, initialisation: str, twice: bool = False
) -> LoraConfig:
    rank = adapter.rank * (2 if twice else 1)
    alpha = adapter.scaled_alpha * (1 if not twice else math.sqrt(2) if adapter.rslora else 2)
    return LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(base),
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # PEFT only divides by the rank
        lora_dropout=adapter.dropout,
        target_modules=_modules(model, adapter, facts),
        use_rslora=adapter.rslora,
        use_dora=adapter.dora,
        init_lora_weights=True if initialisation == "default" else initialisation,  # type: ignore[arg-type]
        fan_in_fan_out=_transposed(model),
    )


def _saved(adapter: Adapter, model: PreTrainedModel, facts: BaseFacts, base: Path) -> LoraConfig:
    """Return the config that is written beside the tensors, and that they are scored with."""
    twice = adapter.initialisation in MOVING
    return _lora(adapter, model, facts, base, initialisation="default", twice=twice)


def _modules(model: PreTrainedModel, adapter: Adapter, facts: BaseFacts) -> list[str]:
    """Return the model's own names for the layers that the facts name, which come from files."""
    wanted = [layer.name for layer in facts.adapted(adapter.targets)]
    names = {name for name, _ in model.named_modules()}
    prefix = f"{model.base_model_prefix}."
    found = [name if name in names else prefix + name for name in wanted]
    missing = [name for name, there in zip(wanted, found, strict=True) if there not in names]
    if missing or not found:
        what = missing[0] if missing else f"any layer for adapter.targets = {adapter.targets!r}"
        raise ConfigRefused(f"{facts.architecture} lacks {what}: this base model cannot be adapted that way")
    return found


def _transposed(model: PreTrainedModel) -> bool:
    """Tell whether linear layers store inputs before outputs; those in 4 bits were turned round on loading."""
    return any(isinstance(module, Conv1D) for module in model.modules())


def _attach(model: PreTrainedModel, lora: LoraConfig) -> PeftModel:
    adapted = get_peft_model(model, lora)
    assert isinstance(adapted, PeftModel)
    return adapted


def _tensors(model: PeftModel) -> dict[str, torch.Tensor]:
    # "auto" would look for the base model's config, on the hub if need be, to see whether embeddings were resized
    tensors: dict[str, torch.Tensor] = get_peft_model_state_dict(model, save_embedding_layers=False)
    return tensors


def _fill(model: PeftModel, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors whose names and shapes were compared before."""
    result: Any = set_peft_model_state_dict(model, dict(tensors))
    assert not result.unexpected_keys, f"PEFT does not know {result.unexpected_keys[0]}"
