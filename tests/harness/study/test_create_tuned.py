"""Studies on a base model: what a request for one becomes, and what it is refused for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frozen.tokens import EncodedSplit
from harness import base as bases
from harness import cli, demomodel, hub, origin, request
from harness.config import TrialConfig, apply, flatten
from harness.errors import BadInput, OvernightError
from harness.expectations import expectations
from harness.jobs.convert import convert
from harness.limits import Limits
from harness.policy import Refusal
from harness.queries import Reader
from harness.records import Proposal
from harness.setup import create
from harness.study import Study, load
from harness.studyfile import Agent, StudyFile
from tests.standin import VOCABULARY, make_base, make_gguf

NOUNS = ("ship", "house", "river", "stone", "engine", "letter", "garden", "clock", "bridge", "candle")
VERBS = ("finds", "moves", "breaks", "paints", "counts", "sells", "hides", "mends", "lifts", "burns")
TINY = {"batch.per_device": 2, "batch.accumulation": 1, "batch.sequence_length": 64, "precision": "fp32"}
POLICY = """
tasks = {tasks}
[fixed]
"optim.weight_decay" = 0.0
"optim.beta1" = 0.9
"optim.beta2" = 0.999
"optim.epsilon" = 1e-8
"optim.max_grad_norm" = 1.0
"schedule.shape" = "cosine"
"schedule.warmup_fraction" = 0.1
"schedule.decay_fraction" = 1.0
"schedule.final_rate_fraction" = 0.0
"sampling.fraction" = 1.0
"sampling.order" = "shuffled"
"method" = "lora"
"adapter.alpha" = 8.0
"adapter.dropout" = 0.0
"adapter.targets" = "query_value"
"batch.accumulation" = 1
"batch.packing" = true
"precision" = "{precision}"
{more}
[knobs."optim.learning_rate"]
type = "float"
low = 1e-5
high = 1e-2
scale = "log"
default = 1e-3
watch = "loss"
[knobs."adapter.rank"]
type = "choice"
choices = [2, 4]
default = 2
watch = "loss"
[knobs."batch.per_device"]
type = "choice"
choices = [1, 2, 4]
default = 2
watch = "loss"
[knobs."batch.sequence_length"]
type = "choice"
choices = [64, 128, 1024]
default = 64
watch = "loss"
"""


def sentences(number: int) -> list[str]:
    """Return sentences of which no two are alike."""
    return [
        f"The {NOUNS[i % 10]} of {i} {NOUNS[i // 7 % 10]}s {VERBS[i // 3 % 10]} what {i * i} {VERBS[i % 9]} at noon"
        for i in range(number)
    ]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, with data of every kind, policies and a base model; conversion is in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bases, "_run", convert)
    said = sentences(300)
    alpaca = [{"instruction": text, "input": "", "output": f"{text[::-1]} and {i}"} for i, text in enumerate(said)]
    pairs = [{"prompt": text, "chosen": f"yes {i}: {text}", "rejected": f"no {i}"} for i, text in enumerate(said)]
    for name, rows in (("alpaca", alpaca), ("pairs", pairs), ("texts", [{"text": text} for text in said])):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, factor in (("general", 17), ("guard", 23)):
        Path(f"{name}.txt").write_text("\n".join(f"{name} {factor * i} is {factor**3 * i * i}." for i in range(100)))
    Path("quotes.csv").write_text("author,quote\n" + "".join(f'A{i},"{text}"\n' for i, text in enumerate(said)))
    for name, tasks, precision, more in (
        ("tuned", ["sft", "continue"], "bf16", ""),
        ("dpo", ["dpo"], "fp32", '"preference.beta" = 0.1\n"preference.loss" = "sigmoid"'),
    ):
        Path(f"{name}.toml").write_text(POLICY.format(tasks=json.dumps(tasks), precision=precision, more=more))
    make_base(tmp_path / "base")
    monkeypatch.setattr(origin, "device", lambda: "cpu")
    return tmp_path


def make(name: str = "night", **changes: Any) -> Study:
    told: dict[str, Any] = {"policy": "tuned.toml", "data": ["alpaca.jsonl"], "budget": "20000tok", "model": "base"}
    return create(name, **(told | changes))


@pytest.mark.usefixtures("place")
def test_a_study_on_a_base_model_is_whole() -> None:
    """The model is in it, sealed; its tokenizer is the study's; what was recognised, noted and left out is said."""
    said: list[str] = []
    study = make(progress=said.append)
    assert study.file.study.task == "sft"
    assert study.base is not None
    assert (study.base.name, study.vocabulary) == ("base", VOCABULARY)
    assert study.seal.verify(thorough=True) == study.seal.digest
    assert "data/base/model.safetensors" in study.seal.manifest.data
    assert (study.paths.tokenizer / "tokenizer.json").read_bytes() == Path("base/tokenizer.json").read_bytes()
    val = EncodedSplit.load(study.paths.split("val"))
    assert val.marks is not None
    assert val.vocabulary == VOCABULARY
    text = "\n".join(said)
    assert "Base model base: LlamaForCausalLM, 0.0 million parameters, context 512" in text
    assert "Note on the base model: The output head is the embedding" in text
    assert "Source alpaca: read as alpaca" in text
    assert "Trials compute in fp32: this machine has no GPU" in text
    assert study.baseline.precision == "fp32"
    assert (study.evaluation.context, study.evaluation.precision) == (512, "fp32")
    with Reader(study.paths.ledger) as reader:
        assert reader.study().model == "base"
        lines = expectations(study, reader, "landlock", Limits(), Agent(), asked=None)
    assert lines[1].startswith("Base model: base (LlamaForCausalLM, 0.0 million parameters); the baseline trains an")
    assert "method lora" in lines[1]
    assert lines[2].startswith("Note on the base model: ")


@pytest.mark.usefixtures("place")
def test_general_text_asks_for_no_larger_splits() -> None:
    """It is in none of them, and is often many times the data: a tenth of it may be more than there is to score."""
    said = [" ".join(f"{i * i} and {i * j}" for j in range(300)) for i in range(1000, 1100)]
    Path("web.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in said))
    alone, beside = make("alone"), make("beside", general=["web.jsonl"])
    assert beside.file.eval.val_bytes == alone.file.eval.val_bytes
    assert EncodedSplit.load(beside.paths.split("train")).general == ("web",)


@pytest.mark.usefixtures("place")
def test_every_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text further, answers, preferences: with general text and a guard set where they mean something."""
    further = make(
        "further",
        task="continue",
        data=["texts.jsonl"],
        general=["web=general.txt"],
        guard="guard.txt",
        max_regression=0.1,
    )
    assert [(source.name, source.general) for source in further.file.study.data] == [("texts", False), ("web", True)]
    guard = further.file.eval.guard
    assert guard is not None
    assert guard.max_regression == 0.1
    assert EncodedSplit.load(further.paths.split("guard")).documents > 0
    assert further.evaluation.context == 64
    assert EncodedSplit.load(further.paths.split("train")).general == ("web",)
    pairs = make("pairs", policy="dpo.toml", data=["pairs.jsonl"], beta=0.3)
    assert (pairs.file.study.task, pairs.metric, pairs.evaluation.preference_beta) == ("dpo", "bits_per_pair", 0.3)
    assert EncodedSplit.load(pairs.paths.split("val")).pairs
    monkeypatch.setattr(origin, "device", lambda: "cuda:0")
    monkeypatch.setattr(request, "BIG_BASE_PARAMETERS", 1)
    big = make("big")
    assert (big.evaluation.precision, big.baseline.precision) == ("bf16", "bf16")
    for study in (further, pairs, big):
        assert StudyFile.read(study.paths.study_toml) == study.file


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"task": "dpo"}, "the policy tuned is not for the task dpo but for sft, continue; for dpo there is --policy "),
        ({"model": None}, "the task sft trains a base model further: name it with --model"),
        ({"model": "fresh"}, "the task sft trains a base model further: name it with --model"),
        ({"model": "./bse"}, "there is no model folder or file './bse'"),
        (
            {"model": "base", "revision": "main"},
            "--revision main names a commit on the Hub, but base is on this machine",
        ),
        ({"policy": "pretrain"}, "the task pretrain trains a fresh model, not base"),
        ({"policy": "pretrain", "model": None, "revision": "x"}, "names a commit of a base model"),
        ({"policy": "pretrain", "model": None, "general": ["general.txt"]}, "has nothing to forget"),
        ({"data": []}, "a study needs data"),
        ({"budget": None}, "a new study needs --budget"),
        ({"budget": "20tok"}, "the baseline does not fit its budget"),
        ({"baseline": {"batch.sequence_length": 1024}}, "is longer than the 512 tokens that base has positions for"),
        ({"beta": 0.1}, "--beta belongs to preferences"),
        ({"max_regression": 0.1}, "--max-regression needs --guard"),
        ({"options": {"format": ["guard=text"]}}, "there is none: --guard SRC"),
        ({"guard": "nothing.txt"}, "no readable file or folder 'nothing.txt'"),
        ({"options": {"format": ["chat"]}}, "source alpaca"),
        ({"eval_keys": {"val_byte": 3}}, "--eval 'val_byte' is not known; did you mean 'val_bytes'?"),
        ({"eval_keys": {"val_bytes": "x"}}, "[eval] val_bytes = 'x'"),
        ({"eval_keys": {"val_bytes": 10**8}}, "too small for four splits"),
        ({"data": ["pairs.jsonl"], "options": {"format": ["preference"]}}, "source pairs"),
    ],
)
def test_a_bad_request_makes_nothing(place: Path, changes: dict[str, Any], said: str) -> None:
    """One sentence with what to do, and no study."""
    with pytest.raises(OvernightError) as caught:
        make(**changes)
    assert said in str(caught.value)
    assert caught.value.exit_code == 2
    assert not (place / "runs" / "night").exists()
    assert not list(place.rglob(".night*"))


@pytest.mark.usefixtures("place")
def test_unpacked_rows_are_refused_only_where_it_is_certain() -> None:
    """How long they are is known when they are read: the budget may be enough though full rows would not fit."""
    unpacked = {"batch.packing": False}
    with pytest.raises(BadInput, match="one optimizer step takes 2 sequences × 1 passes × 64 tokens"):
        make("packed", budget="1000tok")
    with pytest.raises(BadInput, match="at least 2 sequences × 1 passes × 8 tokens"):  # before any data is read
        make("hardly", budget="300tok", baseline=unpacked)
    with pytest.raises(BadInput, match="at least 2 sequences × 1 passes × 64 tokens"):  # every document is longer
        make("counted", budget="1000tok", baseline=unpacked)
    assert not list(Path("runs").glob("*counted*"))
    longer = {"batch.sequence_length": 128}
    with pytest.raises(BadInput, match="one optimizer step takes 2 sequences × 1 passes × 128 tokens"):
        make("full", budget="4500tok", baseline=longer)
    assert make("padded", budget="4500tok", baseline=longer | unpacked).baseline.batch.packing is False


@pytest.mark.usefixtures("place")
def test_a_proposal_may_not_outgrow_the_positions_of_the_base() -> None:
    """A policy's range may be wider than what one base model can take; that costs a refusal and no trial."""
    study = make()
    asked = {"budget": study.budget, "vocabulary": study.vocabulary, "base": study.base}
    for length, fits in ((128, True), (1024, False)):
        diff = {"batch.sequence_length": length}
        proposal = Proposal(diff=diff, source="human", rationale="longer", watch="loss")
        verdict = study.policy.admit(proposal, study.baseline, **asked)
        assert isinstance(verdict, TrialConfig) is fits
        assert fits or "longer than the 512 tokens that base has positions for" in str(verdict)


STARTS = """"adapter.targets" = "attention"
[knobs."adapter.rank"]
type = "choice"
choices = [16, 18]
default = 16
watch = "loss"
[knobs."adapter.initialisation"]
type = "choice"
choices = ["default", "gaussian", "orthogonal", "pissa", "olora"]
default = "default"
watch = "loss"
[knobs."optim.learning_rate"]"""


@pytest.fixture
def starts(place: Path) -> str:
    """Return a policy that turns how adapters begin; the base's thinnest layer has 16 outputs."""
    text = POLICY.format(tasks='["sft"]', precision="fp32", more="").replace('"adapter.targets" = "query_value"\n', "")
    rank = text.index('[knobs."adapter.rank"]')
    text = text[:rank] + text[text.index('[knobs."batch.per_device"]') :]
    (place / "starts.toml").write_text(text.replace('[knobs."optim.learning_rate"]', STARTS))
    return "starts.toml"


@pytest.mark.parametrize("kind", ["default", "gaussian", "orthogonal", "pissa", "olora"])
def test_an_adapter_begins_with_no_more_directions_than_the_thinnest_layer_has(starts: str, kind: str) -> None:
    """A proposal costs a refusal and no trial, a baseline no study; what draws its numbers may be wider."""
    said = (
        f"adapter.initialisation '{kind}' takes adapter.rank directions out of every weight, and"
        " model.layers.0.self_attn.k_proj (16 × 32) has 16: adapter.rank may be at most that, got 18"
    )
    moves = kind in ("pissa", "olora")
    study = make(policy=starts)
    asked = {"budget": study.budget, "vocabulary": study.vocabulary, "base": study.base}
    for rank in (16, 18):
        diff = {"adapter.initialisation": kind, "adapter.rank": rank}
        proposal = Proposal(diff=diff, source="human", rationale="why", watch="loss")
        verdict = study.policy.admit(proposal, study.baseline, **asked)
        if kind == "default" and rank == 16:
            continue  # the baseline itself
        assert str(verdict) == str(Refusal(said)) if moves and rank == 18 else isinstance(verdict, TrialConfig)
    wide = {"adapter.initialisation": kind, "adapter.rank": 18}
    if not moves:
        assert make("wide", policy=starts, baseline=wide).baseline.adapter.rank == 18
        return
    with pytest.raises(BadInput, match="the baseline does not fit its base model") as caught:
        make("wide", policy=starts, baseline=wide)
    assert said in str(caught.value)
    assert not Path("runs/wide").exists()


def test_weights_that_lie_transposed_are_not_decomposed(starts: str, place: Path) -> None:
    """PEFT computes PiSSA of GPT-2, and no OLoRA."""
    make_base(place / "old", kind="gpt2")
    make("pissa", policy=starts, model="old", baseline={"adapter.initialisation": "pissa"})
    with pytest.raises(BadInput, match="'olora' cannot be computed for a GPT2LMHeadModel, whose weights lie transpo"):
        make("olora", policy=starts, model="old", baseline={"adapter.initialisation": "olora"})


@pytest.mark.usefixtures("place")
def test_a_changed_cache_is_noticed_when_it_is_sealed() -> None:
    """A flipped byte of the same length passes the look at sizes, and not the seal."""
    study = make("one")
    assert study.base is not None
    (weights,) = Path("runs/.cache/models").glob("*/model.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.unlink()
    weights.write_bytes(content)
    with pytest.raises(BadInput, match=r"model\.safetensors: it is not as it was when the base model was prepared"):
        make("two")
    assert not Path("runs/two").exists()


@pytest.mark.usefixtures("place")
def test_a_new_study_takes_over_model_task_and_data() -> None:
    """Also when the model's own folder is gone; only what is named anew is other."""
    old = make(
        "old",
        task="continue",
        data=["q=quotes.csv"],
        options={"column": ["quote"]},
        general=["web=general.txt"],
        guard="guard.txt",
        baseline={"adapter.rank": 4},
        seed=3,
    )
    shutil.rmtree("base")
    shutil.rmtree("runs/.cache/models")
    assert cli.main(["init", "new", "--from", "old", "--set", "optim.learning_rate=0.002"]) == 0
    new = load("new")
    assert new.file.study.data == old.file.study.data
    assert new.file.eval == old.file.eval
    assert (new.file.study.task, new.file.study.model) == ("continue", "base")
    assert new.base == old.base
    flat = flatten(new.baseline)
    assert (flat["adapter.rank"], flat["optim.learning_rate"]) == (4, 0.002)
    name = "model.safetensors"
    assert (new.paths.base / name).samefile(old.paths.base / name)
    assert np.array_equal(
        EncodedSplit.load(new.paths.split("val")).tokens, EncodedSplit.load(old.paths.split("val")).tokens
    )
    assert cli.main(["init", "other", "--from", "old", "--task", "sft", "--data", "alpaca.jsonl"]) == 2


@pytest.mark.usefixtures("place")
def test_a_damaged_base_is_not_handed_on(capsys: pytest.CaptureFixture[str]) -> None:
    """The copy in the old study is compared with the digests under which it was sealed."""
    old = make("old")
    weights = old.paths.base / "model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert cli.main(["init", "new", "--from", "old"]) == 2
    assert "no longer the model that study old was sealed with" in " ".join(capsys.readouterr().err.split())


PRESETS: dict[str, tuple[str, list[str], Callable[[Study], bool]]] = {
    "quotes": ("gpt2", ["q=quotes.csv"], lambda study: not study.baseline.batch.packing),
    "alpaca": ("base", ["alpaca.jsonl"], lambda study: study.baseline.batch.accumulation == 8),
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_on_stand_ins(place: Path, name: str) -> None:
    """The same code as with the real model and data; here with tiny ones, as the command's options put them in."""
    from harness.policy import packaged_policies
    from harness.presets import find_preset

    if find_preset(name).policy not in packaged_policies():
        pytest.skip("its policy is not there")
    make_base(place / "gpt2", kind="gpt2", pad=None, template=None)
    model, data, holds = PRESETS[name]
    told = ["--model", model, "--data", *data, "--budget", "10s", "--set", "batch.sequence_length=256"]
    assert cli.main(["init", "mine", "--preset", name, *told]) == 0
    study = load("mine")
    assert study.file.study.task == find_preset(name).task
    assert holds(study)


def test_the_demo_of_fine_tuning(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With neither data nor model: the model of the package, docstrings, and a budget of about a minute."""
    monkeypatch.setattr(demomodel, "demo_model", lambda: None)
    with pytest.raises(BadInput, match="`make demo-model` installs one"):
        create("demo-sft", policy="tuned.toml")
    assert not (place / "runs" / "demo-sft").exists()
    path = make_gguf(place / "base", place / "small.gguf")
    monkeypatch.setattr(demomodel, "demo_model", lambda: path)
    monkeypatch.setattr(demomodel, "KNOBS", {"batch.per_device": 1})
    study = create("demo-sft", policy="tuned.toml")
    assert str(study.budget) == demomodel.BUDGET
    assert study.base is not None
    assert study.base.notes[0].startswith("Converted from GGUF")
    assert (study.file.eval.val_bytes, study.evaluation.context) == (demomodel.EVALUATION["val_bytes"], 512)
    (source,) = study.file.study.data
    assert (source.name, source.format) == ("docstrings", "alpaca")


@pytest.mark.usefixtures("place")
def test_a_model_of_the_hub_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit is in study.toml and in the facts, whatever branch was named."""
    monkeypatch.setattr(hub, "fetch_model", lambda name, revision: hub.Snapshot(Path("base").resolve(), "c" * 40))
    study = make(model="org/name", revision="main")
    assert study.base is not None
    assert (study.file.study.model, study.file.study.revision, study.base.revision) == ("org/name", "c" * 40, "c" * 40)


@pytest.mark.usefixtures("place")
def test_a_policy_for_gpus_begins_with_what_a_cpu_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paged states need a GPU: without one the baseline is given the same optimizer unpaged, and is told so."""
    monkeypatch.setattr("harness.origin.device", lambda: "cpu")
    said: list[str] = []
    wanted = {"batch.sequence_length": 256, "batch.per_device": 1, "batch.accumulation": 1}
    study = make(policy="qlora", baseline=wanted, progress=said.append)
    assert (study.baseline.optim.name, study.baseline.precision) == ("adamw_8bit", "fp32")
    assert any("adamw_8bit" in line for line in said)
    paged = apply(study.baseline, {"optim.name": "paged_adamw"})
    assert "there is no GPU: take 'adamw'" in (study.gauge([]).misfit(paged) or "")
