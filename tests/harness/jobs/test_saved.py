"""What is saved, scored and merged of tuned base models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from frozen.tokens import EncodedSplit
from harness.config import Value
from harness.jobs import adapters
from harness.jobs.job import ScoreJob, TrainJob
from harness.jobs.measure import measure
from harness.jobs.merge import merge
from harness.jobs.model import load_base
from harness.jobs.score import score
from harness.jobs.train import train
from harness.jobs.weights import ADAPTER_FILE, WEIGHTS_FILE
from harness.records import Failed, Merged, Scored, Trained, TrialState
from harness.sizes import BaseFacts
from tests.harness.jobs.conftest import merge_of, score_of

pytestmark = pytest.mark.process
Tune = Callable[..., TrainJob]
ADAPTERS: dict[str, dict[str, Value]] = {
    "plain": {},
    "rslora": {"adapter.rslora": True},
    "dora": {"adapter.dora": True},
    "gaussian": {"adapter.initialisation": "gaussian"},
    "orthogonal": {"adapter.initialisation": "orthogonal"},
    "pissa": {"adapter.initialisation": "pissa", "adapter.rslora": True},
    "olora": {"adapter.initialisation": "olora"},
    "all linear": {"adapter.targets": "all_linear"},
}


def tuned_job(tune: Tune, method: str = "lora", diff: dict[str, Value] | None = None, **changes: object) -> TrainJob:
    job = tune("sft", method, {"optim.learning_rate": 2e-2, **(diff or {})}, budget="1000tok", **changes)
    result = train(job.model_copy(update={"probe_points": 0}), lambda point: None)
    assert isinstance(result, Trained), result
    return job


def scored(job: ScoreJob) -> Scored:
    result = score(job)
    assert isinstance(result, Scored), result
    return result


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("choice", ADAPTERS)
def test_an_adapter_is_what_peft_loads(tune: Tune, choice: str, kind: str) -> None:
    """PEFT's own loader finds base, adapter and tokenizer, and its model has the score; no card is left."""
    if (choice, kind) == ("olora", "gpt2"):
        pytest.skip("refused: PEFT does not compute it for transposed weights")
    job = tuned_job(tune, diff=ADAPTERS[choice], kind=kind)
    folder = job.folder / "model"
    names = {path.name for path in folder.iterdir()}
    assert {"adapter_config.json", ADAPTER_FILE, "tokenizer.json"} <= names
    assert "README.md" not in names
    written = json.loads((folder / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(job.base)
    assert written["target_modules"] == sorted(written["target_modules"])

    model = AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    order = score_of(job)
    theirs = measure(model, EncodedSplit.load(order.split), order.evaluation, torch.device("cpu"))
    ours = scored(order)
    assert theirs.nats == pytest.approx(ours.nats, rel=1e-6)
    assert ours.document_nats != pytest.approx(scored(score_of(job, untouched=True)).document_nats, rel=1e-3)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_full_model_is_what_transformers_loads(tune: Tune, kind: str, tied: bool) -> None:
    """The standard loaders find model and tokenizer in the folder, and the model has the score."""
    job = tuned_job(tune, "full", kind=kind, tied=tied)
    folder = job.folder / "model"
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert AutoTokenizer.from_pretrained(folder)("a")["input_ids"]
    order = score_of(job)
    theirs = measure(model, EncodedSplit.load(order.split), order.evaluation, torch.device("cpu"))
    assert theirs.nats == pytest.approx(scored(order).nats, rel=1e-6)


@pytest.mark.parametrize("choice", ["pissa", "olora"])
def test_a_base_that_was_taken_apart_is_put_together(tune: Tune, choice: str) -> None:
    """Before the first step such an adapter changes nothing, and what is saved fits the untouched base."""
    job = tune("sft", "lora", ADAPTERS[choice])
    assert job.base is not None
    facts, cpu = BaseFacts.read(job.base), torch.device("cpu")
    tokens = torch.arange(3, 40)[None]
    base = load_base(job.base, job.config, cpu, torch.float32).eval()
    expected = base(tokens).logits.detach()
    fresh = load_base(job.base, job.config, cpu, torch.float32)
    adapted = adapters.attach(fresh, job.config, facts, job.base)
    assert adapted.initial
    torch.testing.assert_close(adapted.model.eval()(tokens).logits, expected, atol=1e-5, rtol=1e-5)
    adapted.save(job.folder)
    again = adapters.load(base, job.config, facts, job.base, job.folder)
    torch.testing.assert_close(again.model.eval()(tokens).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("fault", ["missing", "link", "extra", "shape", "lacking"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_other_weights_are_refused(tune: Tune, method: str, fault: str) -> None:
    """The tensors must be exactly the config's, in a plain file."""
    job = tuned_job(tune, method)
    file = job.folder / "model" / (WEIGHTS_FILE if method == "full" else ADAPTER_FILE)
    tensors = load_file(file)
    first = min(tensors)
    match fault:
        case "missing":
            file.unlink()
        case "link":
            file.symlink_to(file.rename(job.folder / "elsewhere"))
        case "extra":
            save_file(tensors | {"surplus": torch.zeros(1)}, file)
        case "shape":
            save_file(tensors | {first: torch.zeros(7)}, file)
        case "lacking":
            save_file({name: tensor for name, tensor in tensors.items() if name != first}, file)
    result = score(score_of(job))
    assert isinstance(result, Failed)
    assert (result.state, result.error_class) == (TrialState.INVALID, "WeightsRefused")
    assert {"missing": "there is no", "link": "plain file", "extra": "surplus"}.get(fault, first) in result.error_text


def test_nothing_but_tensors_is_read(tune: Tune) -> None:
    """Configs beside the adapter are not looked at: rank, scale, targets and base are the order's."""
    job = tuned_job(tune)
    before = scored(score_of(job))
    folder = job.folder / "model"
    (folder / "adapter_config.json").write_text('{"lora_alpha": 1e9, "base_model_name_or_path": "/evil"}')
    (folder / "config.json").write_text('{"auto_map": {"AutoModelForCausalLM": "evil.Model"}}')
    (folder / "evil.py").write_text("raise SystemExit")
    assert scored(score_of(job)).document_nats == before.document_nats


def test_the_config_decides_what_the_tensors_mean(tune: Tune) -> None:
    """The same file under another rank is refused, and under another scale has another score."""
    job = tuned_job(tune)
    assert job.config.adapter is not None

    def under(**changes: object) -> ScoreJob:
        assert job.config.adapter is not None
        adapter = job.config.adapter.model_copy(update=changes)
        config = job.config.model_copy(update={"adapter": adapter})
        return score_of(job).model_copy(update={"config": config})

    assert isinstance(score(under(rank=8)), Failed)
    assert isinstance(score(under(targets="query_value")), Failed)
    assert scored(under(alpha_ratio=4.0)).nats != scored(under()).nats


def test_quantized_configs_are_scored_quantized(tune: Tune) -> None:
    """The untouched base in 4 bits scores otherwise than in fp32, a little."""
    plain = scored(score_of(tune("sft", "lora", name="a"), untouched=True))
    four = scored(score_of(tune("sft", "lora", {"quantization": "nf4"}, name="b"), untouched=True))
    assert four.nats != plain.nats
    assert four.nats == pytest.approx(plain.nats, rel=0.05)


def test_an_untouched_base_wins_half_of_its_pairs(tune: Tune) -> None:
    """Every pair is a tie: one bit each, half of them right."""
    result = scored(score_of(tune("dpo", "lora"), untouched=True))
    assert result.score == pytest.approx(1.0, abs=1e-9)
    assert (result.pairs, result.right_pairs, result.accuracy) == (6, 3, 0.5)


def test_the_reference_of_pairs_is_the_base_as_it_is(tune: Tune) -> None:
    """A knob that holds weights in 4 bits cannot move what all configs are compared with: what it costs is seen."""
    job = tune("dpo", "lora", {"quantization": "nf4", "optim.learning_rate": 1e-8})
    assert isinstance(train(job, lambda point: None), Trained)
    hardly_trained = scored(score_of(job))
    assert abs(hardly_trained.score - 1.0) > 1e-5
    untouched = scored(score_of(job, untouched=True))
    assert untouched.score == pytest.approx(1.0, abs=1e-9)


# --- merging ----------------------------------------------------------------------------------------------------------


def merged(job: TrainJob, folder: Path) -> Merged:
    result = merge(merge_of(job, folder))
    assert isinstance(result, Merged), result
    return result


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("choice", ["plain", "dora", "pissa"])
def test_merging_keeps_the_score(tune: Tune, tmp_path: Path, choice: str, kind: str, tied: bool) -> None:
    """One model in the standard layout scores as base and adapter do, whoever loads it."""
    job = tuned_job(tune, diff=ADAPTERS[choice], kind=kind, tied=tied)
    result = merged(job, tmp_path / "merged")
    order = score_of(job)
    parts = scored(order)
    assert abs(result.difference) < 1e-4
    assert result.parts_nats == pytest.approx(parts.nats, rel=1e-9)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged" / "model").eval()
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    assert result.parameters == model.num_parameters()
    whole = measure(model, EncodedSplit.load(order.split), order.evaluation, torch.device("cpu"))
    assert abs(whole.bits_per_byte - parts.score) < 1e-4
    assert AutoTokenizer.from_pretrained(tmp_path / "merged" / "model")("a")["input_ids"]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_merging_into_an_unquantized_base_is_measured(tune: Tune, tmp_path: Path, kind: str) -> None:
    """What was trained beside 4-bit weights scores otherwise once merged; the difference is reported."""
    job = tuned_job(tune, diff={"quantization": "nf4"}, kind=kind)
    result = merged(job, tmp_path / "merged")
    assert result.parts_nats == pytest.approx(scored(score_of(job)).nats, rel=1e-9)
    assert result.difference != 0
    assert abs(result.difference) < 0.1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged" / "model").eval()
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    whole = measure(model, EncodedSplit.load(score_of(job).split), job.evaluation, torch.device("cpu"))
    assert whole.nats == pytest.approx(result.whole_nats, rel=1e-6)


def test_a_full_model_cannot_be_merged(tune: Tune, tmp_path: Path) -> None:
    """There is no adapter in it."""
    result = merge(merge_of(tuned_job(tune, "full"), tmp_path / "merged"))
    assert isinstance(result, Failed)
    assert "nothing to merge" in result.error_text
