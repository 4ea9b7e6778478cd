"""A base model and its adapter to one model in the standard layout, and what that changed."""

from __future__ import annotations

import torch

from frozen.evaluate import EvaluationRefused
from frozen.tokens import EncodedSplit
from harness.jobs import adapters
from harness.jobs import device as devices
from harness.jobs.failures import ConfigRefused, WeightsRefused, state_of
from harness.jobs.job import MergeJob
from harness.jobs.measure import measure
from harness.jobs.model import fill, freeze, load_base, save_full
from harness.jobs.weights import write_whole
from harness.records import Failed, Merged
from harness.sizes import BaseFacts


def merge(job: MergeJob) -> Merged | Failed:
    """Save base and adapter as one fp32 model in ``job.folder / "model"``; both are scored, the whole from its file."""
    device = devices.prepare(job.device, job.threads, repeatable=True)
    split = EncodedSplit.load(job.split)
    try:
        return _merge(job, split, device)
    except (EvaluationRefused, WeightsRefused, ConfigRefused) as error:
        return Failed(state=state_of(error), error_class=type(error).__name__, error_text=str(error))


def _merge(job: MergeJob, split: EncodedSplit, device: torch.device) -> Merged:
    if job.config.method != "lora":
        raise ConfigRefused("there is nothing to merge: method 'full' saves a whole model")
    facts, target = BaseFacts.read(job.base), job.folder / "model"
    unquantized = job.config.model_copy(update={"quantization": "none"})
    base = load_base(job.base, job.config, device, torch.float32)
    parts = adapters.held_in(adapters.load(base, job.config, facts, job.base, job.weights), torch.float32, device)
    before = measure(parts, split, job.evaluation, device)
    if job.config.quantization != "none":
        base = load_base(job.base, unquantized, device, torch.float32)
        parts = adapters.held_in(adapters.load(base, unquantized, facts, job.base, job.weights), torch.float32, device)
    whole = parts.merge_and_unload()  # PEFT forwards it to the tuner
    write_whole(target, job.tokenizer, lambda folder: save_full(whole, folder))
    saved = load_base(job.base, unquantized, device, torch.float32)
    fill(saved, target)
    freeze(saved)
    after = measure(saved, split, job.evaluation, device)
    return Merged(parameters=facts.parameters, bytes=before.bytes, parts_nats=before.nats, whole_nats=after.nats)
