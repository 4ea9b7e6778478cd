"""The model of a trial: built from its config, and loaded from nothing but tensors.

The scoring child builds the model anew and reads tensors by name and shape from one file, so a score is that of the
architecture the config names, whatever else lies in the training child's folder.
"""

from __future__ import annotations

import stat
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from harness.config import TrialConfig
from harness.jobs.failures import WeightsRefused

WEIGHTS_FILE = "model.safetensors"
_TIED = "lm_head.weight"


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


def load_weights(config: TrialConfig, folder: Path, vocabulary: int, separator: int) -> LlamaForCausalLM:
    """Return the config's model with the tensors of ``folder/model.safetensors``, in evaluation mode.

    `WeightsRefused` if the file is missing, is no plain file, or does not hold exactly this model's tensors.
    """
    path = folder / WEIGHTS_FILE
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        raise WeightsRefused(f"there is no {WEIGHTS_FILE} in {folder}") from None
    if not stat.S_ISREG(mode):
        raise WeightsRefused(f"{path} is no plain file: a link could lead to weights that this job did not train")
    tensors = load_file(path)
    model = build_model(config, vocabulary, separator)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name != _TIED}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        raise WeightsRefused(
            f"{path} does not hold the config's model: {name} is {found.get(name, 'missing')} in the file,"
            f" {expected.get(name, 'not there')} in the model ({len(wrong)} tensors differ)"
        )
    model.load_state_dict(tensors, strict=False)  # names were compared above; the tied head follows the embedding
    model.requires_grad_(False)
    model.train(False)
    return model
