"""What a base model is, read off its files: no weights are loaded, only headers and config.json."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import BadInput
from harness.sizes import BaseFacts, Linear

if TYPE_CHECKING:
    from transformers import PretrainedConfig

PARTS: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = tuple(
    (re.compile(pattern), parts)
    for pattern, parts in (
        (r"(q_proj|\bquery|wq)$", ("query",)),
        (r"(k_proj|\bkey|wk)$", ("key",)),
        (r"(v_proj|\bvalue|wv)$", ("value",)),
        (r"(c_attn|qkv_proj|query_key_value|Wqkv|att_proj)$", ("query", "key", "value")),
        (r"(attn|attention|self_attention)\.(o_proj|out_proj|c_proj|dense|wo)$", ("attention_output",)),
        (r"(mlp|feed_forward|ffn|block_sparse_moe|experts)\b.*\.\w+$|\.(fc1|fc2)$", ("mlp",)),
    )
)
"""Names of linear layers, first match counts; what matches nothing is ``other``."""
TRANSPOSED = frozenset({"GPT2LMHeadModel"})
"""Architectures whose linear layers store inputs before outputs."""
OUTSIDE = re.compile(r"(embed|wte|wpe|lm_head|embed_out|norm|ln_)")
"""Two-dimensional weights that are no linear layer of a block."""


def facts_of(folder: Path, *, name: str, revision: str | None, digest: str, notes: tuple[str, ...] = ()) -> BaseFacts:
    """Return the facts of a model folder in the transformers layout with safetensors; `BadInput` if it is none."""
    config = config_of(folder)
    shapes = dict(shapes_of(folder))
    architecture = (config.architectures or [config.model_type])[0]
    heads = config.num_attention_heads
    embedding = getattr(config, "vocab_size", None)
    if not isinstance(embedding, int):
        raise BadInput(f"{folder}: config.json names no vocab_size, so this is no language model")
    intermediate = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    return BaseFacts(
        name=name,
        revision=revision,
        digest=digest,
        architecture=architecture,
        parameters=sum(_size(shape) for shape in shapes.values()),
        vocabulary=embedding,
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=heads,
        key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        intermediate=intermediate or 4 * config.hidden_size,
        context=getattr(config, "max_position_embeddings", None),
        tied=bool(config.tie_word_embeddings),
        weight_bytes=sum(path.stat().st_size for path in weight_files(folder)),
        linears=tuple(_linears(shapes, transposed=architecture in TRANSPOSED)),
        notes=notes,
    )


def config_of(folder: Path) -> PretrainedConfig:
    """Return the model's config; code that a model folder brings along is never run."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise BadInput(f"{folder} is no model folder: it has no config.json")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"{folder}/config.json cannot be used: {str(error).splitlines()[0]}") from error
    return config


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model folder; `BadInput` where weights come as pickles, or not at all."""
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        what = f"only {', '.join(pickles[:3])}, which run code when they are loaded" if pickles else "no weights"
        raise BadInput(f"{folder} holds {what}: a base model needs safetensors")
    return found


def shapes_of(folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every saved tensor, from the headers alone."""
    for path in weight_files(folder):
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header: Mapping[str, Any] = json.loads(file.read(length))
        except (OSError, ValueError, struct.error, MemoryError) as error:
            raise BadInput(f"{path} is no safetensors file: {error}") from error
        yield from ((name, tuple(entry["shape"])) for name, entry in header.items() if name != "__metadata__")


def _linears(shapes: Mapping[str, tuple[int, ...]], *, transposed: bool) -> Iterator[Linear]:
    for name, shape in sorted(shapes.items()):
        if len(shape) != 2 or not name.endswith(".weight") or OUTSIDE.search(name):
            continue
        module = name.removesuffix(".weight")
        parts = next((parts for pattern, parts in PARTS if pattern.search(module)), ("other",))
        outputs, inputs = reversed(shape) if transposed else shape
        yield Linear(name=module, parts=parts, inputs=inputs, outputs=outputs)


def _size(shape: tuple[int, ...]) -> int:
    product = 1
    for length in shape:
        product *= length
    return product
