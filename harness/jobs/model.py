"""The model of a trial: built from its config or loaded from the sealed base, and filled with nothing but tensors.

The scoring child builds the model anew and reads tensors by name and shape from one file, so a score is that of the
architecture that the config and the base name, whatever else lies in the training child's folder. No code but
transformers' own ever runs: what a base model's folder brings along is never imported, and pickles are never read.

Trained weights are held, and saved, in fp32, whatever the base came in: an update is smaller than bf16 can tell apart.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from harness.config import TrialConfig
from harness.jobs.failures import ConfigRefused
from harness.jobs.weights import ONE_FILE, WEIGHTS_FILE, read_tensors, shapes_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build_model(config: TrialConfig, vocabulary: int, separator: int) -> LlamaForCausalLM:
    """Return a fresh fp32 Llama with tied embeddings; its weights come from torch's global generator."""
    shape = config.shape
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=shape.width,
            intermediate_size=shape.feedforward_width,
            num_hidden_layers=shape.depth,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.heads,
            attention_dropout=shape.attention_dropout,
            max_position_embeddings=config.batch.sequence_length,
            tie_word_embeddings=True,
            bos_token_id=separator,
            eos_token_id=separator,
            dtype=torch.float32,
        )
    )


def load_base(folder: Path, config: TrialConfig, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Return the prepared base model on ``device``, its weights in ``dtype``, or in 4 bits where the config says so.

    What is not a linear layer stays in ``dtype`` beside 4-bit weights, and they are multiplied in it. `ConfigRefused`
    if bitsandbytes is not installed.
    """
    options: dict[str, Any] = (
        {} if config.quantization == "none" else {"quantization_config": _in_4_bits(config, dtype)}
    )
    if options and device.type != "cpu":
        options["device_map"] = {"": device}  # 4-bit weights are made on the device and cannot be moved there
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=False, use_safetensors=True, local_files_only=True, dtype=dtype, **options
    )
    for module in model.modules():
        # On some CPUs bitsandbytes would round the scales of 4-bit weights, in place, at the first evaluation: a probe
        # would change what is trained, and the score would depend on the CPU.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            vars(module)["support_avx512bf16_for_cpu"] = False
    if not options:
        model.to(device)  # type: ignore[arg-type]  # the stub of `to` knows fewer overloads than the method
    return model


def _in_4_bits(config: TrialConfig, dtype: torch.dtype) -> BitsAndBytesConfig:
    require("bitsandbytes", f"quantization {config.quantization!r}", "quantization")
    return BitsAndBytesConfig(  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=config.quantization == "nf4_double",
        bnb_4bit_compute_dtype=dtype,
    )


def require(package: str, what: str, extra: str) -> None:
    """Raise `ConfigRefused` with a remedy if an optional package is missing."""
    if importlib.util.find_spec(package) is None:
        raise ConfigRefused(
            f"{what} needs the package {package}, which is not installed: pip install overnight[{extra}]"
        )


def fill(model: PreTrainedModel, folder: Path) -> None:
    """Replace all weights by the tensors of ``folder/model.safetensors``; `WeightsRefused` if they do not fit."""
    names = saved_names(model)
    expected = {name: shape for name, shape in shapes_of(model.state_dict()).items() if name in names}
    tensors = read_tensors(folder, WEIGHTS_FILE, expected)
    model.load_state_dict(tensors, strict=False)  # names were compared; tied ones follow


def saved_names(model: PreTrainedModel) -> set[str]:
    """Return the names of all weights, tied ones once."""
    return set(model.state_dict()) - set(model.all_tied_weights_keys)


def load_weights(config: TrialConfig, folder: Path, vocabulary: int, separator: int) -> LlamaForCausalLM:
    """Return the config's fresh model with the tensors of ``folder/model.safetensors``, in evaluation mode.

    `WeightsRefused` if the file is missing, is no plain file, or does not hold exactly this model's tensors.
    """
    model = build_model(config, vocabulary, separator)
    fill(model, folder)
    freeze(model)
    return model


def freeze(model: torch.nn.Module) -> None:
    """Put a model in evaluation mode, for good."""
    model.requires_grad_(False)
    model.train(False)


def without_dropout(model: torch.nn.Module) -> None:
    """Turn off the dropout that a base model's own config asks for."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "attention_dropout", None), float):
            vars(module)["attention_dropout"] = 0.0  # of the functional kind: no module of its own


def save_full(model: PreTrainedModel, folder: Path) -> None:
    """Write weights and model config in the standard layout."""
    model.config.use_cache = True  # Trainer turns it off; whoever generates with the model wants it
    model.save_pretrained(folder, max_shard_size=ONE_FILE)
