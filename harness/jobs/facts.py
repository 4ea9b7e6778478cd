"""What a base model is, read off its files: no weights are loaded, only headers and config.json.

Here and not beside the driver, because transformers reads a config (defaults are left out of config.json) and imports
torch on the way; that import is left to the functions that need it, so the driver may use the others.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import BadInput
from harness.sizes import TRANSPOSED, BaseFacts, Linear

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
OUTSIDE = re.compile(r"(embed|wte|wpe|lm_head|embed_out|norm|ln_)")
"""Two-dimensional weights that are no linear layer of a block."""


HEADS = re.compile(r"(^|\.)(lm_head|embed_out)\.weight$")
"""Output heads, which some files hold beside the embedding that they are tied to."""
INDEX = "model.safetensors.index.json"


def facts_of(folder: Path, *, name: str, revision: str | None, digest: str, notes: tuple[str, ...] = ()) -> BaseFacts:
    """Return the facts of a model folder in the transformers layout with safetensors; `BadInput` if it is none."""
    config = config_of(folder)
    tied = bool(config.tie_word_embeddings)
    shapes = {name: shape for name, shape in shapes_of(folder) if not (tied and HEADS.search(name))}
    architecture = architecture_of(folder, config)
    try:
        heads = config.num_attention_heads
        hidden, layers = config.hidden_size, config.num_hidden_layers
    except AttributeError as error:
        raise BadInput(f"{folder}: the architecture {architecture} is not supported ({error})") from error
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
        hidden=hidden,
        layers=layers,
        heads=heads,
        key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_size=getattr(config, "head_dim", None) or hidden // heads,
        intermediate=intermediate or 4 * hidden,
        context=getattr(config, "max_position_embeddings", None),
        tied=tied,
        weight_bytes=sum(path.stat().st_size for path in weight_files(folder)),
        linears=tuple(_linears(shapes, transposed=architecture in TRANSPOSED)),
        notes=notes,
    )


def config_of(folder: Path) -> PretrainedConfig:
    """Return the model's config; code that a model folder brings along is never run."""
    from transformers import AutoConfig

    path = folder / "config.json"
    if not path.is_file():
        raise BadInput(f"{folder} is no model folder: it has no config.json")
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read: {error}") from error
    if not isinstance(table, dict):
        raise BadInput(f"{path} is not the config of a model: it holds no object")
    kind = table.get("model_type")
    if "auto_map" in table and not _is_known(kind):
        raise BadInput(
            f"{folder} needs code of its own (model type {kind!r}, auto_map in config.json), and code from a model's"
            " folder is never run: choose a model that transformers knows"
        )
    if "quantization_config" in table:
        method = table["quantization_config"].get("quant_method", "some method")
        raise BadInput(f"{folder} holds weights quantized by {method}: a base model needs the unquantized ones")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{path} cannot be used: {(str(error).splitlines() or [repr(error)])[0]}") from error
    return config


def _is_known(model_type: object) -> bool:
    from transformers import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def architecture_of(folder: Path, config: PretrainedConfig) -> str:
    """Return the class of a decoder with a language-model head; `BadInput` for an encoder, a classifier and others."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as DECODERS

    known = set(DECODERS.values())
    found = next(iter(config.architectures or ()), None) or DECODERS.get(config.model_type)
    if found not in known or getattr(config, "is_encoder_decoder", False):
        raise BadInput(
            f"{folder} is a {found or config.model_type}, and only models that predict the next token can be trained"
            " here (LlamaForCausalLM, GPT2LMHeadModel, …): no encoders, classifiers or models of images"
        )
    assert found is not None
    return str(found)


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model folder; `BadInput` where weights come as pickles, or not at all."""
    if (folder / INDEX).is_file():
        return _shards(folder)
    whole = folder / "model.safetensors"
    found = [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
    if not found:
        pickles = sorted(path.name for suffix in ("bin", "pt", "pth", "ckpt") for path in folder.glob(f"*.{suffix}"))
        what = f"only {', '.join(pickles[:3])}, which run code when they are loaded" if pickles else "no weights"
        raise BadInput(f"{folder} holds {what}: a base model needs safetensors")
    return found


def _shards(folder: Path) -> list[Path]:
    try:
        names = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{folder / INDEX} cannot be read: {error!r}") from error
    missing = sorted(name for name in names if Path(name).name != name or not (folder / name).is_file())
    if missing or not names:
        raise BadInput(f"{folder} lacks {', '.join(missing[:3]) or 'all weights'}, which {INDEX} names")
    return [folder / name for name in sorted(names)]


def shapes_of(folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every saved tensor, from the headers alone; `BadInput` if a file is cut or damaged."""
    for path in weight_files(folder):
        yield from _header(path).items()


def _header(path: Path) -> dict[str, tuple[int, ...]]:
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header: Mapping[str, Any] = json.loads(file.read(min(length, size)))
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        expected = 8 + length + max((int(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
        shapes = {name: tuple(int(side) for side in entry["shape"]) for name, entry in tensors.items()}
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, struct.error) as error:
        raise BadInput(f"{path} is no safetensors file: {error}") from error
    if expected != size:
        what = "cut off" if size < expected else "damaged"
        raise BadInput(f"{path} is {what}: it has {size} bytes, its header says {expected}; get it again")
    return shapes


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
