"""Optimizers by name; each from a library that keeps it.

Weight decay is decoupled in all of them and applies to matrices only (an embedding is one). All read the same
``optim.learning_rate``, which the schedule multiplies; what another knob means is up to the algorithm:

- ``adamw``, ``adamw_8bit``, ``paged_adamw``, ``paged_adamw_8bit``: everything applies. 8-bit states are kept for
  tensors of at least 4096 elements; paged ones can be moved to the host by the GPU's driver, so they need a GPU.
- ``lion``: beta1 and beta2 are its own two; epsilon is idle. Its rate wants to be 3 to 10 times below AdamW's.
- ``adafactor``: fixed rate, no relative steps and no scaling by the weights' size (as Trainer's own choice of it);
  beta1, beta2 and epsilon are idle.
- ``schedule_free``: averages its steps in the place of a decaying schedule, and says that the rate should be constant
  after the warm-up. Its own warm-up is off, the config's schedule applies: ``schedule.decay_fraction = 0`` is what its
  authors mean. The average weighs each step by the square of the highest rate so far, so warm-up counts for little.
  The weights that are scored and saved are the averaged ones (`averaged`), those that are trained on are others.
- ``muon``: matrices within the blocks; embeddings, the output head and vectors are AdamW's. Its steps are scaled to the
  size of AdamW's (Liu et al., arXiv 2502.16982), so that one rate suits both. beta1, beta2 and epsilon are AdamW's.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from harness.config import Optim, TrialConfig
from harness.jobs.failures import ConfigRefused
from harness.jobs.model import require

Groups = list[dict[str, Any]]


def make_optimizer(config: TrialConfig, model: torch.nn.Module, device: torch.device) -> torch.optim.Optimizer:
    """Return the config's optimizer over all weights that are trained; `ConfigRefused` if it cannot run here."""
    optim = config.optim
    rate, betas, epsilon = optim.learning_rate, (optim.beta1, optim.beta2), optim.epsilon
    groups = _groups(optim, [parameter for parameter in model.parameters() if parameter.requires_grad])
    match optim.name:
        case "adamw":
            return _adamw(optim, groups, device)
        case "adamw_8bit" | "paged_adamw" | "paged_adamw_8bit" | "lion":
            return _bitsandbytes(optim, groups, device)
        case "adafactor":
            from transformers.optimization import Adafactor

            return Adafactor(groups, lr=rate, scale_parameter=False, relative_step=False)  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        case "schedule_free":
            require("schedulefree", "optim.name = 'schedule_free'", "optimizers")
            import schedulefree

            optimizer: torch.optim.Optimizer = schedulefree.AdamWScheduleFree(
                groups, lr=rate, betas=betas, eps=epsilon, warmup_steps=0
            )
            return optimizer
        case "muon":
            return _muon(optim, model, device)


@contextlib.contextmanager
def averaged(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Hold the weights that the optimizer vouches for; all but ``schedule_free`` train on those anyway.

    There and back again rounds: with ``schedule_free``, the number of probe points moves the last bits of the weights.
    """
    to_average, to_training = getattr(optimizer, "eval", None), getattr(optimizer, "train", None)
    if not (callable(to_average) and callable(to_training)):
        yield
        return
    to_average()
    try:
        yield
    finally:
        to_training()


def _groups(optim: Optim, parameters: list[torch.nn.Parameter]) -> Groups:
    """Return matrices, decayed, and vectors, not decayed; each only where there are some."""
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _adamw(optim: Optim, groups: Groups, device: torch.device) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        groups,
        lr=optim.learning_rate,
        betas=(optim.beta1, optim.beta2),
        eps=optim.epsilon,
        fused=True if device.type == "cuda" else None,
    )


def _bitsandbytes(optim: Optim, groups: Groups, device: torch.device) -> torch.optim.Optimizer:
    require("bitsandbytes", f"optim.name = {optim.name!r}", "quantization")
    if optim.name.startswith("paged") and device.type == "cpu":
        raise ConfigRefused(
            f"optim.name = {optim.name!r} moves its states between GPU and host, and this trial runs on a CPU:"
            f" take {optim.name.removeprefix('paged_')!r}"
        )
    import bitsandbytes.optim as library

    make: Callable[..., torch.optim.Optimizer] = {
        "adamw_8bit": library.AdamW8bit,
        "paged_adamw": library.PagedAdamW,
        "paged_adamw_8bit": library.PagedAdamW8bit,
        "lion": library.Lion,
    }[optim.name]
    options: dict[str, Any] = {"lr": optim.learning_rate, "betas": (optim.beta1, optim.beta2)}
    if "eps" in inspect.signature(make).parameters:
        options["eps"] = optim.epsilon
    return make(groups, **options)


def _muon(optim: Optim, model: torch.nn.Module, device: torch.device) -> torch.optim.Optimizer:
    outside = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not None:
        outside.add(id(head.weight))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    inside = [parameter for parameter in trained if parameter.ndim == 2 and id(parameter) not in outside]
    taken = {id(parameter) for parameter in inside}
    muon = torch.optim.Muon(
        inside, lr=optim.learning_rate, weight_decay=optim.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    rest = _groups(optim, [parameter for parameter in trained if id(parameter) not in taken])
    return Together(muon, _adamw(optim, rest, device)) if rest else muon


class Together(torch.optim.Optimizer):
    """Two optimizers that step as one, each over its own weights."""

    def __init__(self, first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> None:
        self._parts = (first, second)
        self.defaults = {}

    @property
    def param_groups(self) -> Groups:  # type: ignore[override]  # read anew: loading a state replaces the parts' groups
        """The groups of both, the very dicts: who sets a rate in one sets it in the optimizer."""
        return [group for part in self._parts for group in part.param_groups]

    @property
    def state(self) -> dict[torch.Tensor, Any]:  # type: ignore[override]
        """What both remember, by weight."""
        return {weight: state for part in self._parts for weight, state in part.state.items()}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure is ever passed
        """Step both."""
        assert closure is None
        for part in self._parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of both."""
        for part in self._parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of both."""
        return {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore both."""
        for part, state in zip(self._parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
