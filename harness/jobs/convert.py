"""A model as it was found, made into what a study keeps: a child that turns a folder or a GGUF file into a folder.

``python -I -m harness.jobs.convert`` reads a `Conversion` from standard input and fills its target, which only the
driver publishes. It exits with 0 when the target is whole, or writes one line of JSON, ``{"refused": "why"}``, and
exits with 2. Nothing that a model brings along is run: no code of its own, no pickles.

Weights are written anew only where they must be: from a GGUF file, under names that are not the model's own, or where
the tokenizer has more entries than the embedding has rows. Otherwise the driver links the files that are there.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import BadInput
from harness.jobs.facts import HEADS, architecture_of, config_of, facts_of, shapes_of, weight_files
from harness.records import Record

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

PADS = ("<|finetune_right_pad_id|>", "<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<|endoftext|>", "<unk>")
"""Entries that other tokenizers pad with, in order of preference; then the unknown token, then the end of sequence."""
TOKENIZER_FILES = ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
WHOLE = 1 << 50
"""Bytes of the largest file: a converted model is never cut into shards."""
BIG_PARAMETERS = 10**9
"""A GGUF file of more is kept in bf16, as such models are published; fp32 would take 4 bytes of each parameter."""
SHOWN = 5
"""Names of tensors that a note tells of."""
SAMPLE = 'In 1984, naïve  users said: "it\'s 3.50 €!"\n\n\tdef f(x):\n        return x**2  # 日本\n'
"""Text on which two ways to load a tokenizer have to agree: digits, accents, runs of spaces, quotes, code."""


class Conversion(Record):
    """What the child is told."""

    source: Path
    """A model folder, or a GGUF file."""
    target: Path
    """An empty folder."""
    name: str
    revision: str | None
    digest: str
    reserve_bytes: int
    """What must stay free on the target's disk."""


def convert(order: Conversion) -> None:
    """Fill the target; `BadInput` says why the source cannot be a base model."""
    try:
        _fill(order)
    except BadInput as error:  # the target's path is ours, and gone by the time that anybody reads this
        raise BadInput(str(error).replace(str(order.target), order.name)) from error


def _fill(order: Conversion) -> None:
    notes = _from_gguf(order) if order.source.is_file() else _from_folder(order)
    weights = order.target if any(order.target.glob("*.safetensors")) else order.source
    facts = facts_of(
        weights, name=order.name, revision=order.revision, digest=order.digest, notes=(*notes, *_told(order.target))
    )
    (order.target / "base.json").write_text(facts.model_dump_json(indent=1) + "\n", encoding="utf-8")


# --- a folder in the transformers layout ---------------------------------------------------------------------------


def _from_folder(order: Conversion) -> list[str]:
    """Copy config and tokenizer; return what was mended."""
    import torch
    from transformers import AutoModelForCausalLM

    source, target = order.source, order.target
    config = config_of(source)
    architecture_of(source, config)
    table = json.loads((source / "config.json").read_text(encoding="utf-8"))
    table.pop("auto_map", None)  # leads to code that is never run
    _write_json(target / "config.json", table)
    if (source / "generation_config.json").is_file():
        shutil.copyfile(source / "generation_config.json", target / "generation_config.json")
    entries, notes = _write_tokenizer(source, target)
    with torch.device("meta"):
        plan: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    kind = type(plan).__name__
    notes = [*_left_code(source, kind), *notes]
    absent, extra = _difference(source, plan, config)
    if not absent and not extra and entries <= config.vocab_size:
        _refuse_unsound(source, _saved(source))
        return notes
    model, unused = _loaded(source)
    _refuse_unsound(source, model.state_dict().items())
    _refuse_full_disk(order, sum(weight.numel() * weight.element_size() for weight in model.parameters()))
    if entries > config.vocab_size:
        notes.append(_resize(model, entries))
    if not absent:
        unused = extra  # with masks and other constants, which a load passes over in silence
    if unused:
        notes.append(f"Left out is what the files hold and a {kind} has no place for: {_some(unused)}.")
    if absent:
        notes.append(f"The weights were saved anew under the names that transformers gives them ({_some(absent)}).")
    model.save_pretrained(target, max_shard_size=WHOLE)
    return notes


def _left_code(source: Path, kind: str) -> Iterator[str]:
    """Yield what became of the code that a folder brings along, where it names some."""
    named: set[str] = set()
    for file in ("config.json", "tokenizer_config.json"):
        table = _read_json(source / file) if (source / file).is_file() else {}
        classes = table.get("auto_map") or {}
        for each in classes.values() if isinstance(classes, dict) else (classes,):
            named |= {name for name in (each if isinstance(each, list) else [each]) if isinstance(name, str)}
    if named:
        yield (
            f"The model brings code of its own ({_some(named)}), which is not run: it is loaded as transformers' own"
            f" {kind}. If that code computes anything else, this is another model than its authors'."
        )


def _difference(source: Path, model: PreTrainedModel, config: PretrainedConfig) -> tuple[set[str], set[str]]:
    """Return the names of a model's tensors that no file has, and the files' others; `BadInput` if shapes differ."""
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = dict(shapes_of(source))
    if config.tie_word_embeddings:
        wanted, found = (
            {name: shape for name, shape in table.items() if not HEADS.search(name)} for table in (wanted, found)
        )
    wrong = sorted(name for name in wanted.keys() & found.keys() if wanted[name] != found[name])
    if wrong:
        name = wrong[0]
        raise BadInput(
            f"{source}: {name} has shape {list(found[name])} in the weights, config.json asks for {list(wanted[name])}"
        )
    return wanted.keys() - found.keys(), found.keys() - wanted.keys()


def _saved(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield name and values of every saved tensor, one at a time."""
    from safetensors import safe_open

    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # no mapping
                yield name, file.get_tensor(name)


def _refuse_unsound(source: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise `BadInput` if a weight is NaN or infinite: nothing that such a model says could be scored."""
    for name, tensor in tensors:
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        values = tensor if tensor.element_size() > 1 else tensor.float()  # no arithmetic in eight bits
        # One pass without a mask as large as the tensor: a NaN is passed on by both.
        if all(bound.isfinite() for bound in values.aminmax()):
            continue
        wrong = int((~values.isfinite()).sum())
        raise BadInput(
            f"{source}: {name} holds NaN or infinite values ({wrong} of {values.numel()}), so the model computes"
            " nothing: get it again"
        )


def _loaded(source: Path) -> tuple[PreTrainedModel, set[str]]:
    """Return the model with every weight from the files, and what of these it has no place for.

    `BadInput` if some are missing.
    """
    try:
        return _complete(source, source, dtype="auto", use_safetensors=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise BadInput(f"{source} cannot be loaded: {_line(error)}") from error


def _complete(source: Path, folder: Path, **how: Any) -> tuple[PreTrainedModel, set[str]]:
    """Load a model, and return it with the names of what was not used.

    `BadInput` if the files lack some of its weights, which would then be random.
    """
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, output_loading_info=True, **how)
    model: PreTrainedModel = loaded[0]
    missing = sorted(loaded[1]["missing_keys"])
    if missing:
        raise BadInput(
            f"{source} lacks weights of a {type(model).__name__}: {', '.join(missing[:3])}"
            f"{' …' if len(missing) > 3 else ''} ({len(missing)} in all) are not in it"
        )
    return model, set(loaded[1]["unexpected_keys"])


def _some(names: Collection[str]) -> str:
    """Return the first few names in order, and how many more there are."""
    more = len(names) - SHOWN
    return ", ".join(sorted(names)[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _resize(model: PreTrainedModel, entries: int) -> str:
    """Give every entry of the tokenizer a row; new ones are drawn around the mean of the old (Hewitt, 2021)."""
    import torch

    embedding: Any = model.get_input_embeddings()
    before = embedding.weight.shape[0]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # the same model every time
        model.resize_token_embeddings(entries, mean_resizing=True)
    return (
        f"The tokenizer has {entries} entries, the model had rows for {before}: its embeddings were widened, the new"
        " rows are the mean of the old ones with a little noise and untrained."
    )


# --- GGUF ----------------------------------------------------------------------------------------------------------


def _from_gguf(order: Conversion) -> list[str]:
    """Load a GGUF file, dequantized, and save it in the standard layout."""
    import torch
    from transformers import AutoConfig

    source, target = order.source, order.target
    parameters, kinds = _gguf_tensors(source)
    kind, width = (torch.bfloat16, 2) if parameters > BIG_PARAMETERS else (torch.float32, 4)
    _refuse_full_disk(order, parameters * width)
    try:
        AutoConfig.from_pretrained(source.parent, gguf_file=source.name)  # says it of an unknown architecture
        tokenizer = _tokenizer(source.parent, gguf_file=source.name)
        model, unused = _complete(source, source.parent, gguf_file=source.name, dtype=kind)
    except (OSError, ValueError, KeyError, IndexError, TypeError, NotImplementedError, RuntimeError) as error:
        raise BadInput(f"{source} cannot be converted: {_line(error)}") from error
    _refuse_unsound(source, model.state_dict().items())
    config = model.config
    del config.quantization_config  # save_pretrained refuses what it takes for quantized weights
    config.architectures = [type(model).__name__]
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    notes = [
        f"Converted from GGUF ({kinds}) to {str(kind).removeprefix('torch.')}: quantized weights stay as coarse as they"
        " were."
    ]
    if unused:
        name = type(model).__name__
        notes.append(f"Left out is what the file holds and a {name} has no place for: {_some(unused)}.")
    tokenizer.save_pretrained(target)
    entries, more = _mend_tokenizer(target)
    if entries > config.vocab_size:
        more.append(_resize(plain, entries))
    plain.save_pretrained(target, max_shard_size=WHOLE)
    _drop_name(target / "config.json")
    architecture_of(target, config_of(target))
    return notes + more


def _gguf_tensors(source: Path) -> tuple[int, str]:
    """Return the number of parameters and the kinds of quantization of a GGUF file."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise BadInput(f"{source} is a GGUF file, and reading it needs a package more: `pip install gguf`") from error
    try:
        tensors = GGUFReader(source).tensors
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise BadInput(f"{source} is damaged or cut off: {_line(error)}") from error
    kinds = dict.fromkeys(tensor.tensor_type.name for tensor in sorted(tensors, key=lambda t: -int(t.n_elements)))
    return sum(int(tensor.n_elements) for tensor in tensors), ", ".join(list(kinds)[:3])


def _drop_name(path: Path) -> None:
    """Take out of a config where the file lay, or the same model would have two digests."""
    table = json.loads(path.read_text(encoding="utf-8"))
    _write_json(
        path, {key: value for key, value in table.items() if key not in ("_name_or_path", "_model_name_or_path")}
    )


# --- the tokenizer -------------------------------------------------------------------------------------------------


def _write_tokenizer(source: Path, target: Path) -> tuple[int, list[str]]:
    """Put a fast tokenizer into the target; return its entries (highest id + 1) and what was mended.

    A tokenizer.json is copied as it is, because loading and saving one may change how text is cut.
    """
    if (source / "tokenizer.json").is_file():
        shutil.copyfile(source / "tokenizer.json", target / "tokenizer.json")
        table = _read_json(source / "tokenizer_config.json") if (source / "tokenizer_config.json").is_file() else {}
        table.pop("auto_map", None)
        _write_json(target / "tokenizer_config.json", table)
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, target / name)
    else:
        _tokenizer(source).save_pretrained(target)
    return _mend_tokenizer(target)


def _tokenizer(folder: Path, **more: Any) -> PreTrainedTokenizerBase:
    """Load a fast tokenizer; `BadInput` if there is none."""
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, use_fast=True, trust_remote_code=False, **more
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise BadInput(f"{folder} has no tokenizer that can be loaded: {_line(error)}") from error
    if not tokenizer.is_fast:
        raise BadInput(
            f"{folder} has only a slow tokenizer ({type(tokenizer).__name__}); a fast one, tokenizer.json, is needed"
        )
    return tokenizer


def _mend_tokenizer(target: Path) -> tuple[int, list[str]]:
    """Name a padding token where there is none, without adding one; return the entries and what was done."""
    from tokenizers import Tokenizer

    notes = []
    path = target / "tokenizer_config.json"
    table = _read_json(path)
    for key in ("is_local", "local_files_only", "name_or_path"):  # of the moment at which it was loaded
        table.pop(key, None)
    _write_json(path, table)
    tokenizer = _tokenizer(target)
    vocabulary = tokenizer.get_vocab()
    if tokenizer.pad_token is None:
        known = [pad for pad in PADS if pad in vocabulary and pad != tokenizer.eos_token]
        pad = next(iter([*known, *filter(None, (tokenizer.unk_token, tokenizer.eos_token))]), None)
        if pad is None:
            raise BadInput(f"the tokenizer of {target} has neither a padding token nor one that could stand for it")
        # In the tokenizer only: a model whose config names it would keep that token's embedding from being trained.
        _write_json(path, table | {"pad_token": pad})
        notes.append(f"The tokenizer names no padding token: {pad!r}, which it has, is used for padding.")
    direct = Tokenizer.from_file(str(target / "tokenizer.json"))
    if direct.encode(SAMPLE, add_special_tokens=False).ids != tokenizer.encode(SAMPLE, add_special_tokens=False):
        notes.append(
            "transformers cuts a sample of text otherwise than tokenizer.json does; the latter is what is trained on."
        )
    return max(vocabulary.values()) + 1, notes


def _told(target: Path) -> Iterator[str]:
    """Yield what an owner should know of the model that needed no mending."""
    tokenizer = _tokenizer(target)
    config = config_of(target)
    if tokenizer.bos_token is None:
        yield "The tokenizer names no token for the beginning of a text."
    if not tokenizer.chat_template:
        yield "There is no chat template; conversations are laid out by a built-in one."
    entries = max(tokenizer.get_vocab().values()) + 1
    if entries < config.vocab_size:
        yield f"The logits are {config.vocab_size} wide, of which the tokenizer uses {entries}."
    if config.tie_word_embeddings:
        yield "The output head is the embedding matrix itself (tied): training one trains the other."


# --- files ---------------------------------------------------------------------------------------------------------


def _refuse_full_disk(order: Conversion, need_bytes: int) -> None:
    missing = need_bytes + order.reserve_bytes - shutil.disk_usage(order.target).free
    if missing > 0:
        raise BadInput(
            f"the disk of {order.target.parent} is nearly full: {missing / 1e9:.1f} GB are missing to keep the"
            f" converted model of {need_bytes / 1e9:.1f} GB"
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read: {error}") from error
    if not isinstance(table, dict):
        raise BadInput(f"{path} holds no object")
    return table


def _write_json(path: Path, table: dict[str, Any]) -> None:
    path.write_text(json.dumps(table, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _line(error: Exception) -> str:
    """Return the beginning of what a library says, on one line."""
    return (" ".join(str(error).split()) or repr(error))[:300]


def main() -> int:
    """Carry out the order on standard input."""
    order = Conversion.model_validate_json(sys.stdin.read())
    try:
        convert(order)
    except BadInput as error:
        sys.stdout.write("\n" + json.dumps({"refused": str(error)}) + "\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
