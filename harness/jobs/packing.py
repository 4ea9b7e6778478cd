"""Does this model keep the documents of a packed row apart? Asked of the model itself, not of a list of names.

Packed rows tell where documents begin by nothing but positions that begin anew. Attention of most architectures in
transformers takes a mask from that; recurrent and hybrid models carry their state across, models with positions of
their own (ALiBi, learned ones that are counted from the mask) do not look, and flash attention looks only in batches of
a single row. What does not look trains on documents that see their neighbours, without an error and without a sign.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from peft import PeftModel

from harness.jobs.failures import ConfigRefused

TOKENS = 12
"""Of each of the two documents: enough for a state to carry over, and nothing beside a step."""
SHARE = 0.05
"""Largest part of what a visible document does to the next one that rounding may explain. Seen in fp32: up to 1e-5
where they are kept apart, 0.2 to 1 where they are not."""
TIMES_ROUNDING = 3.0
"""In bf16 another shape alone moves the logits, of a model of 135 M parameters by 1.4 % of their norm, which is 8 % of
what a visible document does. So nothing within a few times that is taken for a leak."""


class Leak(NamedTuple):
    """How far the logits of a document move, as norms relative to those of the document alone."""

    packed: float
    """Behind another one in a packed row."""
    visible: float
    """Behind another one in plain text, which it is meant to see."""
    rounding: float
    """By nothing but the shape of the row."""

    @property
    def is_real(self) -> bool:
        """Whether the packed document sees its neighbour."""
        return self.packed > max(SHARE * self.visible, TIMES_ROUNDING * self.rounding)


def refuse_unless_kept_apart(
    model: torch.nn.Module, *, rows: int, vocabulary: int, separator: int, device: torch.device
) -> None:
    """Raise `ConfigRefused` for a model in whose packed rows, ``rows`` at once, a document sees the one before it.

    Four small forward passes without dropout; no random number is drawn from the global generators.
    """
    several = min(rows, 2)
    found = _leak(model, several, vocabulary, separator, device)
    if not found.is_real:
        return
    name = type(model.get_base_model() if isinstance(model, PeftModel) else model).__name__
    remedy = "set batch.packing = false"
    if several > 1 and not _leak(model, 1, vocabulary, separator, device).is_real:
        remedy += ", or batch.per_device = 1, where it does (and more batch.accumulation)"
    raise ConfigRefused(
        f"{name} does not keep the documents of a packed row apart: one moves the logits of the next by"
        f" {found.packed:.1%}, of {found.visible:.1%} where it is meant to be seen; {remedy}"
    )


def _leak(model: torch.nn.Module, rows: int, vocabulary: int, separator: int, device: torch.device) -> Leak:
    own = torch.Generator().manual_seed(0)
    first, second = (torch.randint(vocabulary, (rows, TOKENS), generator=own).to(device) for _ in range(2))
    first[:, 0] = second[:, 0] = separator
    positions = torch.arange(TOKENS, device=device).repeat(rows, 2)
    was_training = model.training
    model.train(False)
    try:
        with torch.no_grad():
            alone = _logits(model, second)
            behind = torch.cat([first, second], dim=1)
            packed = _logits(model, behind, position_ids=positions)[:, TOKENS:]
            visible = _logits(model, behind)[:, TOKENS:]
            before = _logits(model, torch.cat([second, first], dim=1))[:, :TOKENS]
    finally:
        model.train(was_training)
    scale = float(alone.norm())
    return Leak(*(float((other - alone).norm()) / scale for other in (packed, visible, before)))


def _logits(model: torch.nn.Module, tokens: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
    """Return logits in fp32; ``use_cache=False``, because with a cache no model looks at the positions."""
    logits: torch.Tensor = model(input_ids=tokens, use_cache=False, **options).logits
    return logits.float()
