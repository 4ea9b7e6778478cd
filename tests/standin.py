"""Tiny base models in the standard layout, made on the spot: what a hub would bring, at a thousandth of the size."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML, as many published models write it, without marks for the answers."""
CHATML_MARKED = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ '<|im_start|>assistant\n' }}{% generation %}"
    "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
Kind = Literal["llama", "gpt2", "mamba", "opt"]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCABULARY = 384


def make_tokenizer(
    folder: Path, *, template: str | None = CHATML, pad: str | None = "<|endoftext|>", vocabulary: int = VOCABULARY
) -> None:
    """Train a byte-level BPE tokenizer on this file and save it as transformers would."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text(encoding="utf-8")], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|im_end|>", pad_token=pad
    )
    if template is not None:
        fast.chat_template = template
    fast.save_pretrained(folder)


def make_base(
    folder: Path,
    *,
    kind: Kind = "llama",
    template: str | None = CHATML,
    pad: str | None = "<|endoftext|>",
    tied: bool = True,
    seed: int = 0,
) -> Path:
    """Save a random model of some ten thousand parameters with its tokenizer, as ``save_pretrained`` lays them out."""
    import torch

    make_tokenizer(folder, template=template, pad=pad)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _model(kind, tied=tied)
        model.save_pretrained(folder)
    return folder


def _model(kind: Kind, *, tied: bool) -> Any:
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MambaConfig, OPTConfig

    common = {"vocab_size": VOCABULARY, "tie_word_embeddings": tied, "bos_token_id": 0, "eos_token_id": 2}
    shape = common | {"hidden_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "max_position_embeddings": 512}
    config: Any
    match kind:
        case "llama":
            config = LlamaConfig(**shape, **heads, intermediate_size=64, num_key_value_heads=2)
        case "gpt2":
            config = GPT2Config(**common, n_embd=32, n_layer=2, n_head=4, n_positions=512)
        case "mamba":
            config = MambaConfig(**shape, state_size=8)
        case "opt":
            config = OPTConfig(**shape, **heads, ffn_dim=64, word_embed_proj_dim=32)
    return AutoModelForCausalLM.from_config(config)


def make_gguf(base: Path, path: Path) -> Path:
    """Write a Llama stand-in as a GGUF file, with its tokenizer and template, as llama.cpp's converter lays it out."""
    import json

    import gguf
    import numpy as np
    from safetensors.numpy import load_file

    config = json.loads((base / "config.json").read_text())
    heads, key_heads = config["num_attention_heads"], config["num_key_value_heads"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("stand-in")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(key_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config["vocab_size"])
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    entries = sorted(tokenizer["model"]["vocab"].items(), key=lambda entry: entry[1])
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([entry for entry, _ in entries])
    writer.add_token_types([3 if entry in special else 1 for entry, _ in entries])
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    )
    writer.add_bos_token_id(special["<|endoftext|>"])
    writer.add_eos_token_id(special["<|im_end|>"])
    if (base / "chat_template.jinja").is_file():
        writer.add_chat_template((base / "chat_template.jinja").read_text())
    for name, tensor in load_file(base / "model.safetensors").items():
        for suffix, count in (("q_proj.weight", heads), ("k_proj.weight", key_heads)):
            if name.endswith(suffix):  # llama.cpp rotates neighbours, transformers halves
                rows, columns = tensor.shape
                tensor = tensor.reshape(count, 2, rows // count // 2, columns).swapaxes(1, 2).reshape(rows, columns)
        module = name.removesuffix(".weight")
        writer.add_tensor(f"{names.get_name(module)}.weight", np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def prepare(folder: Path) -> Path:
    """Add ``base.json``, so that ``folder`` is what a study keeps under ``data/base``."""
    from harness.jobs.facts import facts_of

    facts = facts_of(folder, name=str(folder), revision=None, digest="0" * 64)
    (folder / "base.json").write_text(facts.model_dump_json(indent=1), encoding="utf-8")
    return folder
