from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness import base as bases
from harness import hub
from harness.base import Base, locate, prepare_base
from harness.errors import BadInput
from harness.jobs.convert import convert
from harness.sizes import BaseFacts
from tests.standin import VOCABULARY, make_base, make_gguf, make_tokenizer

Say = Callable[[str], None]


def quiet(text: str) -> None:
    del text


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None takes one out."""
    table = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in table.items() if value is not None}))


# --- names and refusals, without a child ----------------------------------------------------------------------------


def test_a_local_folder_goes_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that could be both is the folder, and a revision of it means nothing."""
    monkeypatch.chdir(tmp_path)
    assert locate("gpt2") is None
    assert locate("org/name", revision="main") is None
    (tmp_path / "gpt2").mkdir()
    assert locate("gpt2") == Path("gpt2")
    with pytest.raises(BadInput, match="--revision main names a commit on the Hub, but gpt2 is on this machine"):
        locate("gpt2", revision="main")


@pytest.mark.parametrize("name", ["./gpt2", "/no/such", "~/none", "a/b/c", "model.gguf", "org/model.GGUF", "", "a\0b"])
def test_what_is_no_name_is_not_asked_of_the_hub(name: str) -> None:
    """A mistyped path is said, not looked up."""
    with pytest.raises(BadInput, match=r"no model folder or file|no name of a model|names nothing"):
        locate(name)


def refused(source: Path, cache: Path, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        prepare_base(str(source), None, cache, quiet)
    assert not list(cache.rglob("*.safetensors"))
    assert not list(cache.rglob(".building-*"))


def test_folders_that_are_no_model(tmp_path: Path) -> None:
    """Empty, an adapter, GGUF files inside, text: each is told what it is, before a child is started."""
    folder, cache = tmp_path / "folder", tmp_path / "cache"
    folder.mkdir()
    refused(folder, cache, "no config.json; it is empty")
    (folder / "small.gguf").write_bytes(b"GGUF")
    refused(folder, cache, r"name its GGUF file itself, e\.g\. .*small\.gguf")
    (folder / "adapter_config.json").write_text("{}")
    refused(folder, cache, "it is an adapter")
    (folder / "text.txt").write_text("hello")
    refused(folder / "text.txt", cache, "neither a model folder nor a GGUF file")
    part = folder / "big-00001-of-00003.gguf"
    part.write_bytes(b"GGUF")
    refused(part, cache, "one part of a GGUF")
    (folder / "config.json").write_text("{}")
    refused(folder, cache, "holds no weights")
    (folder / "pytorch_model.bin").write_bytes(b"")
    refused(folder, cache, r"only pytorch_model\.bin, which run code")


def test_a_gguf_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What to install is said."""
    (tmp_path / "x.gguf").write_bytes(b"GGUF")

    def absent(name: str) -> str:
        raise bases.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(bases.importlib.metadata, "version", absent)
    refused(tmp_path / "x.gguf", tmp_path / "cache", "pip install gguf")


def test_damaged_weights(tmp_path: Path) -> None:
    """A file that is cut, longer than it says, no safetensors, or one of several that is missing."""
    folder, cache = make_base(tmp_path / "base"), tmp_path / "cache"
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    refused(folder, cache, r"model\.safetensors is cut off: it has \d+ bytes, its header says \d+")
    weights.write_bytes(whole + b"x")
    refused(folder, cache, "is damaged")
    for content in (b"", whole[:100], b"\xff" * 200, b"version https://git-lfs.github.com/spec/v1\noid sha256:0"):
        weights.write_bytes(content)
        refused(folder, cache, "is no safetensors file")
    weights.write_bytes(whole)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, cache, r"lacks model-00001-of-00002\.safetensors")
    for text in ("[]", "{", json.dumps({"weight_map": {"a": "../x.safetensors"}})):
        (folder / "model.safetensors.index.json").write_text(text)
        refused(folder, cache, "cannot be read|lacks")


# --- preparing: in a child as always, or, where it makes no difference, in this process, which has its imports done ---


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert in this process."""
    monkeypatch.setattr(bases, "_run", convert)


@pytest.mark.process
def test_a_sound_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    """Same bytes, facts of the owner's name, found in the cache the next time, and the owner's file is not shared."""
    folder = make_base(tmp_path / "base")
    said: list[str] = []
    base = prepare_base(str(folder), None, tmp_path / "cache", said.append)
    weights = base.folder / "model.safetensors"
    assert weights.read_bytes() == (folder / "model.safetensors").read_bytes()
    assert not weights.samefile(folder / "model.safetensors")
    assert (base.folder / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert base.facts == BaseFacts.read(base.folder)
    assert (base.facts.name, base.facts.revision, base.facts.vocabulary) == (str(folder), None, VOCABULARY)
    assert base.facts.notes == (
        "The output head is the embedding matrix itself (tied): training one trains the other.",
    )
    assert len(said) == 1
    moved = folder.rename(tmp_path / "moved")
    again = prepare_base(str(moved), None, tmp_path / "cache", said.append)
    assert (again.folder, again.facts.name, again.facts.digest) == (base.folder, str(moved), base.facts.digest)
    assert len(said) == 1
    again.link(tmp_path / "study")
    assert BaseFacts.read(tmp_path / "study").name == str(moved)
    assert (tmp_path / "study" / "model.safetensors").samefile(weights)
    assert not (tmp_path / "study" / "manifest.json").exists()
    sealed = {f"data/base/{name}": digest for name, digest in again.digests.items()}
    again.check_sealed(sealed | {"data/base/base.json": "x", "data/train/tokens.npy": "y"})
    with pytest.raises(BadInput, match=r"tokenizer\.json: it is not as it was"):
        again.check_sealed(sealed | {"data/base/tokenizer.json": "0" * 64})
    with pytest.raises(BadInput, match=r"model\.safetensors: it is not as it was"):
        again.check_sealed({name: digest for name, digest in sealed.items() if "safetensors" not in name})


@pytest.mark.usefixtures("here")
def test_a_cut_cache_is_made_anew(tmp_path: Path) -> None:
    """What a full disk or a careless hand left is no model."""
    folder = make_base(tmp_path / "base")
    base = prepare_base(str(folder), None, tmp_path / "cache", quiet)
    (base.folder / "model.safetensors").write_bytes(b"")
    again = prepare_base(str(folder), None, tmp_path / "cache", quiet)
    assert (again.folder / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


@pytest.mark.usefixtures("here")
def test_gpt2_as_it_was_published(tmp_path: Path) -> None:
    """Weights without the model's prefix and with buffers of old are saved under the names that are its own."""
    folder = make_base(tmp_path / "base", kind="gpt2", template=None, pad=None)
    tensors = load_file(folder / "model.safetensors")
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file(old | {"h.0.attn.bias": torch.ones(1, 1, 8, 8)}, folder / "model.safetensors", metadata={"format": "pt"})
    edit(folder / "tokenizer_config.json", eos_token="<|endoftext|>", unk_token="<|endoftext|>")
    base = prepare_base(str(folder), None, tmp_path / "cache", quiet)
    saved = load_file(base.folder / "model.safetensors")
    assert saved.keys() == tensors.keys()
    assert all((saved[name] == tensors[name]).all() for name in tensors)
    assert base.facts.parameters == sum(tensor.numel() for tensor in tensors.values())
    said = " ".join(base.facts.notes)
    assert "saved anew under the names that transformers gives them (transformer.h.0." in said
    assert "Left out" not in said
    assert "'<|endoftext|>', which it has, is used for padding" in said
    assert "no chat template" in said
    assert json.loads((base.folder / "tokenizer_config.json").read_text())["pad_token"] == "<|endoftext|>"
    assert json.loads((base.folder / "config.json").read_text())["pad_token_id"] is None


@pytest.mark.usefixtures("here")
def test_a_tokenizer_with_more_entries_than_rows(tmp_path: Path) -> None:
    """The model is widened, the same way every time, and the old rows stay what they were."""
    folder = make_base(tmp_path / "base")
    old = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    make_tokenizer(folder, vocabulary=VOCABULARY + 40)
    one, two = (prepare_base(str(folder), None, tmp_path / name, quiet) for name in ("one", "two"))
    assert one.digests == two.digests
    assert one.facts.vocabulary == VOCABULARY + 40
    assert f"has {VOCABULARY + 40} entries, the model had rows for {VOCABULARY}" in " ".join(one.facts.notes)
    new = load_file(one.folder / "model.safetensors")["model.embed_tokens.weight"]
    assert new.shape[0] == VOCABULARY + 40
    assert (new[:VOCABULARY] == old).all()
    assert new[VOCABULARY:].abs().max() <= old.abs().max()


@pytest.mark.usefixtures("here")
def test_a_tokenizer_with_fewer_entries_and_without_a_beginning(tmp_path: Path) -> None:
    """The width of the logits stays the model's, and both are said."""
    folder = make_base(tmp_path / "base", tied=False)
    make_tokenizer(folder, vocabulary=VOCABULARY - 60)
    edit(folder / "tokenizer_config.json", bos_token=None)
    base = prepare_base(str(folder), None, tmp_path / "cache", quiet)
    assert base.facts.vocabulary == VOCABULARY
    assert base.facts.notes == (
        "The tokenizer names no token for the beginning of a text.",
        f"The logits are {VOCABULARY} wide, of which the tokenizer uses {VOCABULARY - 60}.",
    )


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "code": (
        lambda folder: edit(folder / "config.json", model_type="mymodel", auto_map={"AutoConfig": "x.MyConfig"}),
        r"needs code of its own \(model type 'mymodel'",
    ),
    "unknown": (lambda folder: edit(folder / "config.json", model_type="mymodel"), r"config\.json cannot be used"),
    "encoder": (
        lambda folder: edit(folder / "config.json", model_type="bert", architectures=["BertForMaskedLM"]),
        "is a BertForMaskedLM, and only models that predict the next token",
    ),
    "classifier": (
        lambda folder: edit(folder / "config.json", architectures=["LlamaForSequenceClassification"]),
        "is a LlamaForSequenceClassification",
    ),
    "quantized": (
        lambda folder: edit(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4}),
        "holds weights quantized by gptq",
    ),
    "shape": (lambda folder: edit(folder / "config.json", intermediate_size=48), r"has shape \[.*\] in the weights"),
    "missing": (
        lambda folder: edit(folder / "config.json", num_hidden_layers=3),
        r"lacks weights of a LlamaForCausalLM: model\.layers\.2\.input_layernorm\.weight, .*\(9 in all\)",
    ),
    "no tokenizer": (
        lambda folder: [(folder / name).unlink() for name in ("tokenizer.json", "tokenizer_config.json")] and None,
        "has no tokenizer that can be loaded",
    ),
    "broken tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{}") and None, "no tokenizer that can"),
    "broken config": (
        lambda folder: (folder / "config.json").write_text("[]") and None,
        "is not the config of a model",
    ),
}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("what", REFUSED)
def test_models_that_cannot_be_a_base(tmp_path: Path, what: str) -> None:
    """Each with its own reason, and nothing is left in the cache."""
    folder = make_base(tmp_path / "base")
    spoil, said = REFUSED[what]
    spoil(folder)
    refused(folder, tmp_path / "cache", said)


def change(folder: Path, edited: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the saved tensors of a model folder."""
    tensors = load_file(folder / "model.safetensors")
    edited(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("wide", [False, True])
def test_weights_that_are_no_numbers(tmp_path: Path, kind: torch.dtype, value: float, wide: bool) -> None:
    """One of them, in files that are taken as they are or in a model that is saved anew: the tensor is named."""
    folder, name = make_base(tmp_path / "base"), "model.layers.1.mlp.down_proj.weight"
    if wide:
        make_tokenizer(folder, vocabulary=VOCABULARY + 40)

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors |= {each: tensor.to(kind) for each, tensor in tensors.items()}
        tensors[name][3, 5] = value

    change(folder, spoil)
    refused(folder, tmp_path / "cache", rf"base: {name} holds NaN or infinite values \(1 of 2048\)")


@pytest.mark.usefixtures("here")
def test_a_gguf_with_weights_that_are_no_numbers(tmp_path: Path) -> None:
    """The same of a file that is converted."""
    folder = make_base(tmp_path / "base")
    change(folder, lambda tensors: tensors.update({"model.norm.weight": torch.full((32,), math.nan)}))
    path = make_gguf(folder, tmp_path / "small.gguf")
    refused(path, tmp_path / "cache", r"small\.gguf: model\.norm\.weight holds NaN or infinite values \(32 of 32\)")


@pytest.mark.usefixtures("here")
def test_tensors_that_the_model_has_no_place_for(tmp_path: Path) -> None:
    """They are left out and named, and nothing is said of names that did not change."""
    folder = make_base(tmp_path / "base")
    before = load_file(folder / "model.safetensors")
    extra = {"value_head.weight": torch.ones(3), "model.layers.0.self_attn.rotary.inv_freq": torch.ones(4)}
    change(folder, lambda tensors: tensors.update(extra))
    base = prepare_base(str(folder), None, tmp_path / "cache", quiet)
    assert base.facts.notes[0] == (
        "Left out is what the files hold and a LlamaForCausalLM has no place for:"
        " model.layers.0.self_attn.rotary.inv_freq, value_head.weight."
    )
    assert not any("anew" in note for note in base.facts.notes)
    assert load_file(base.folder / "model.safetensors").keys() == before.keys()


@pytest.mark.usefixtures("here")
def test_tensors_under_other_names_beside_those_without_a_place(tmp_path: Path) -> None:
    """Both are said, each of its own tensors."""
    folder = make_base(tmp_path / "base", kind="gpt2")

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["value_head.weight"] = torch.ones(3)

    change(folder, rename)
    notes = prepare_base(str(folder), None, tmp_path / "cache", quiet).facts.notes
    assert notes[0] == "Left out is what the files hold and a GPT2LMHeadModel has no place for: value_head.weight."
    assert notes[1].startswith("The weights were saved anew under the names that transformers gives them (transformer.")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"model": {"type": "BPE"}}', "version https://git-lfs"])
def test_a_bad_tokenizer_is_named_as_its_owner_knows_it(tmp_path: Path, content: str) -> None:
    """The folder in which the model was being made is gone by then and says nothing to anybody."""
    folder = make_base(tmp_path / "base")
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(BadInput) as raised:
        prepare_base(str(folder), None, tmp_path / "cache", quiet)
    assert str(raised.value).startswith(f"{folder} has no tokenizer that can be loaded: ")
    assert ".building" not in str(raised.value)


@pytest.mark.usefixtures("here")
def test_code_beside_a_known_model_is_left_behind(tmp_path: Path) -> None:
    """A folder's own code never runs and is not taken over, also where the model needs none."""
    folder = make_base(tmp_path / "base")
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    edit(folder / "config.json", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Tokenizer", None]})
    base = prepare_base(str(folder), None, tmp_path / "cache", quiet)
    assert base.facts.notes[0].startswith(
        "The model brings code of its own (evil.Config, evil.Model, evil.Tokenizer), which is not run: it is loaded as"
        " transformers' own LlamaForCausalLM."
    )
    assert not (tmp_path / "ran").exists()
    assert not list(base.folder.glob("*.py"))
    assert not any("auto_map" in path.read_text() for path in base.folder.glob("*config.json"))


@pytest.mark.process
def test_gguf(tmp_path: Path) -> None:
    """The converted model is the one that was written, tensor for tensor, with tokenizer and template."""
    from tokenizers import Tokenizer

    folder = make_base(tmp_path / "base", pad=None)
    path = make_gguf(folder, tmp_path / "small.gguf")
    base = prepare_base(str(path), None, tmp_path / "cache", quiet)
    before, after = (load_file(place / "model.safetensors") for place in (folder, base.folder))
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)
    text = "def make_base(folder):\n    return 12345"
    ids = [Tokenizer.from_file(str(place / "tokenizer.json")).encode(text).ids for place in (folder, base.folder)]
    assert ids[0] == ids[1]
    assert (base.folder / "chat_template.jinja").read_text() == (folder / "chat_template.jinja").read_text()
    assert base.facts.notes[0] == "Converted from GGUF (F32) to float32: quantized weights stay as coarse as they were."
    assert "quantization_config" not in (base.folder / "config.json").read_text()
    assert str(tmp_path) not in (base.folder / "config.json").read_text()
    assert base.facts.context == 512


@pytest.mark.usefixtures("here")
def test_damaged_gguf(tmp_path: Path) -> None:
    """A file that is cut, or of an architecture that nobody knows."""
    path = make_gguf(make_base(tmp_path / "base"), tmp_path / "small.gguf")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    refused(path, tmp_path / "cache", "is damaged or cut off")
    path.write_bytes(whole.replace(b"llama", b"lluma"))
    refused(path, tmp_path / "cache", "cannot be converted: .*lluma")


@pytest.mark.usefixtures("here")
def test_the_hubs_files_are_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No third copy of a big model: the Hub's cache, ours and the study share bytes; the commit is in the facts."""
    blobs = make_base(tmp_path / "blobs")
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for path in blobs.iterdir():
        (folder / path.name).symlink_to(path)
    monkeypatch.setattr(hub, "fetch_model", lambda name, revision: hub.Snapshot(folder, "c" * 40))
    base = prepare_base("org/name", "main", tmp_path / "cache", quiet)
    assert (base.facts.name, base.facts.revision) == ("org/name", "c" * 40)
    assert (base.folder / "model.safetensors").samefile(blobs / "model.safetensors")
    assert not (base.folder / "model.safetensors").is_symlink()


@pytest.mark.process
def test_the_child_says_why_it_refuses(tmp_path: Path) -> None:
    """A refusal crosses the border between the processes as the sentence that it is."""
    folder = make_base(tmp_path / "base")
    edit(folder / "config.json", architectures=["LlamaForSequenceClassification"])
    refused(folder, tmp_path / "cache", "^[^ ]*base is a LlamaForSequenceClassification, and only models")


def test_a_child_that_dies_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory, and an end without a word."""
    folder = make_base(tmp_path / "base")
    for code, said in (("kill -9 $$", "memory is too small"), ("echo oh >&2; exit 3", "cannot be prepared: oh")):
        monkeypatch.setattr(bases, "COMMAND", ("sh", "-c", code))
        refused(folder, tmp_path / "cache", said)


@pytest.mark.process
def test_a_kill_leaves_nothing_half(tmp_path: Path) -> None:
    """`kill -9` on the way: no folder has its name, and the next preparation sweeps what is left."""
    folder = make_base(tmp_path / "base")
    code = (
        "import sys; from pathlib import Path; from harness.base import prepare_base;"
        "prepare_base(sys.argv[1], None, Path(sys.argv[2]), print)"
    )
    cache = tmp_path / "cache"
    child = subprocess.Popen([sys.executable, "-c", code, str(folder), str(cache)], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list(cache.glob("models/.building-*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    (left,) = (cache / "models").iterdir()
    assert left.name.startswith(".building-")
    base = prepare_base(str(folder), None, cache, quiet)
    assert [path.name for path in (cache / "models").iterdir()] == [base.folder.name]


@pytest.mark.slow
def test_the_demo_model(tmp_path: Path) -> None:
    """The real file that `make demo-model` installs gives the logits that loading it directly gives."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from harness.demomodel import demo_model

    path = demo_model()
    if path is None:
        pytest.skip("make demo-model installs it")
    base = prepare_base(str(path), None, tmp_path / "cache", quiet)
    assert isinstance(base, Base)
    ours = AutoModelForCausalLM.from_pretrained(base.folder)
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(base.folder)("def area(width):\n", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
