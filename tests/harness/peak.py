"""What real training holds: tensors that autograd keeps, and the peak of a process that takes two steps."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.config import TrialConfig, unflatten
from harness.sizes import BaseFacts

if TYPE_CHECKING:
    import torch


def build(config: TrialConfig, base: BaseFacts) -> Any:
    """Return a random Llama of the facts' shape as the config has it trained."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=base.vocabulary,
            hidden_size=base.hidden,
            intermediate_size=base.intermediate,
            num_hidden_layers=base.layers,
            num_attention_heads=base.heads,
            num_key_value_heads=base.key_value_heads,
            tie_word_embeddings=base.tied,
            dtype=torch.float32,
        )
    )
    adapter = config.adapter
    if config.method == "lora" and adapter is not None:
        if config.precision == "bf16":
            model = model.to(torch.bfloat16)
        targets = sorted({one.name.rpartition(".")[2] for one in base.adapted(adapter.targets)})
        model = get_peft_model(model, LoraConfig(r=adapter.rank, target_modules=targets, lora_dropout=adapter.dropout))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if config.method == "lora":
            model.enable_input_require_grads()
    return model.train()


def loss_of(model: Any, config: TrialConfig, base: BaseFacts) -> Any:
    """Return the loss of one random pass."""
    import torch

    tokens = torch.randint(base.vocabulary, (config.batch.per_device, config.batch.sequence_length))
    with torch.autocast("cpu", torch.bfloat16, enabled=config.precision == "bf16"):
        return model(input_ids=tokens, labels=tokens).loss


def saved_bytes(config: TrialConfig, base: BaseFacts) -> int:
    """Return the bytes of all tensors that autograd keeps for the backward pass, the model's own aside."""
    import torch

    model = build(config, base)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loss_of(model, config, base)
        found = sum(kept.values())
    del loss
    return found


def peak_bytes(config: TrialConfig, base: BaseFacts) -> int:
    """Return how far two optimizer steps raise this process's peak."""
    import torch
    from peft import LoraConfig
    from transformers import LlamaForCausalLM

    del LoraConfig, LlamaForCausalLM  # imported for their size, before the peak is read
    torch.set_num_threads(1)
    idle = _high_water_bytes()
    model = build(config, base)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    for _ in range(2):
        for _ in range(config.batch.accumulation):
            loss_of(model, config, base).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return _high_water_bytes() - idle


def _high_water_bytes() -> int:
    """Return the peak of this program alone; `resource` counts what ran before ``exec`` too: a big test process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
    return int(kilobytes) * 1024


if __name__ == "__main__":
    asked = json.loads(sys.stdin.read())
    sys.stdout.write(f"{peak_bytes(unflatten(asked['config']), BaseFacts.model_validate(asked['base']))}\n")
