"""The part of the decision framework that is particular to a base model trained further: with or without an adapter.

Usual ranges are those of common practice: LoRA about ten times the rate of a full fine-tune (Hu et al., arXiv
2106.09685; Schulman et al., "LoRA without regret", 2025), continued pretraining below both. Forgetting is answered in
the order of what it costs the task: a lower rate, general text mixed in, a smaller adapter, an adapter at all (Biderman
et al., arXiv 2405.09673: LoRA learns less and forgets less). Every idea says what shows whether it works.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from agent.evidence import Effect, telling
from agent.idea import Idea, Situation
from agent.space import show, tidy
from harness.config import Task, Value, flatten, idle
from harness.records import History
from harness.sizes import padding_share

RATE = "optim.learning_rate"
LEAST_BATCH = 32
"""Sequences of an optimizer step below which gradients of short answers get too noisy; smaller ones are for nudges."""
FORGOTTEN = 0.01
"""Relative rise of the guard's score over the untouched base model's that counts as forgetting."""
LITTLE_PADDING = 0.05
"""Share of the positions that packing may leave as padding, too: less is no reason to pack."""
ROOMY = 0.5
"""Share of the device's memory below which more of it should be used."""
GUARD = "the guard's score against the untouched base's, beside the study's own"
WIDER_TARGETS: Mapping[Value, Value] = {
    "query_value": "all_linear",
    "attention": "all_linear",
    "attention_mlp": "all_linear",
}


def usual_rates(task: str, method: str) -> tuple[float, float] | None:
    """Return the usual range of the learning rate; None where there is none (preferences)."""
    rates: dict[tuple[Task, str], tuple[float, float]] = {
        ("sft", "lora"): (1e-4, 3e-4),
        ("sft", "full"): (5e-5, 1e-4),
        ("continue", "lora"): (1e-4, 3e-4),
        ("continue", "full"): (1e-5, 5e-5),
    }
    return next((span for (one, other), span in rates.items() if (one, other) == (task, method)), None)


def urgent(s: Situation) -> Iterator[Idea]:
    """Yield what comes before the sweep: a rate in the wrong decade, and answers to forgetting."""
    if s.tunes:
        yield from _usual_rate(s)
        yield from forgetting(s)


def reach(s: Situation) -> Iterator[Idea]:
    """Let an adapter reach more of the model, or learn more at once: what matters most after rate and batch."""
    if not s.tunes:
        return
    if s.turns("adapter.targets"):
        now = flatten(s.space.base)["adapter.targets"]
        wider = WIDER_TARGETS.get(now)
        if wider in s.space.knobs["adapter.targets"].choices:
            why = f"Adapters on {now} leave most of the model as it was: on all linear layers a small rank learns more."
            yield Idea({"adapter.targets": wider}, why, 0.01, 0.5, "probe loss at equal steps, and peak memory")
    yield from _padding(s)
    yield from _idle_memory(s)
    if s.signals.still_falling and (values := s.scaled(RATE, 2)):
        why = "The probe loss still falls at the end: the run was short for this rate."
        watch = "train loss within the first 50 steps; a spike or a rising gradient norm means that it was too much"
        yield Idea(values, why, 0.005, 0.4, watch)


def refine(s: Situation) -> Iterator[Idea]:
    """Fit the adapter's size and what regularises it to what the curves show."""
    if not s.tunes:
        return
    if s.signals.overfitting:
        yield from _overfitting(s)
        return
    if values := s.scaled("adapter.rank", 2):
        why = "No sign of overfitting: twice the rank, at the same scale."
        yield Idea(values, why, 0.003, 0.4, "the gap between probe and train loss; it should not open")
    if s.turns("adapter.rslora") and not flatten(s.space.base)["adapter.rslora"] and s.value("adapter.rank") >= 32:
        why = f"At rank {show(s.value('adapter.rank'))}, dividing by the rank makes updates small: divide by its root."
        yield Idea({"adapter.rslora": True}, why, 0.003, 0.3, "gradient norm and train loss in the first tenth")
    if values := s.scaled("adapter.dropout", 0.0):
        yield Idea(values, "No sign of overfitting: dropout only slows.", 0.002, 0.3, "the gap between probe and train")
    if s.turns("regularization.neftune_alpha") and s.value("regularization.neftune_alpha") == 0:
        why = "Noise on the embeddings helps small sets of answers (NEFTune)."
        yield Idea({"regularization.neftune_alpha": 5.0}, why, 0.003, 0.3, "probe loss; train loss rises a little")
    if s.turns("adapter.dora") and not flatten(s.space.base)["adapter.dora"]:
        why = "Direction and magnitude learnt apart (DoRA): nearer to a full fine-tune at low ranks."
        yield Idea({"adapter.dora": True}, why, 0.002, 0.25, "probe loss at equal steps against tokens per second")


def less_memory(s: Situation, effect: Effect) -> Iterator[Idea]:
    """Answer a config that ran out of memory where a smaller batch was not enough, cheapest remedy first."""
    if not s.tunes:
        return
    said = f"Proposal {effect.number} ran out of memory"
    flat = flatten(effect.config)
    without_meaning = idle(flat, s.space.knobs)
    batch = effect.config.batch
    remedies: list[tuple[str, Value, str]] = [
        ("gradient_checkpointing", True, "compute activations again, for about a third more time"),
        ("optim.name", "adamw_8bit", "hold the optimizer's states in 8 bits"),
        ("quantization", "nf4_double", "hold the frozen weights in 4 bits"),
        ("batch.sequence_length", batch.sequence_length // 2, "shorter sequences"),
    ]
    for name, value, what in remedies:
        knob = s.space.knobs.get(name)
        if knob is None or name in without_meaning or flat.get(name) == value or value not in knob.choices:
            continue
        if name == "optim.name" and not str(flat[name]).startswith("adamw"):
            continue
        yield Idea({**effect.diff, name: value}, f"{said}: {what}.", 0.005, 0.35, "peak memory, and tokens per second")


def forgetting(s: Situation) -> Iterator[Idea]:
    """Answer a guard score that rose over that of the untouched base model."""
    rise = guard_rise(s.space.history, s)
    if rise is None or rise <= FORGOTTEN:
        return
    said = f"The guard's score is {rise:.1%} above the untouched base's: general knowledge is lost."
    if values := s.scaled(RATE, 0.5):
        yield Idea(values, f"{said} Half the rate.", 0.001, 0.4, GUARD)
    if s.turns("sampling.general_fraction"):
        share = min(0.5, s.value("sampling.general_fraction") + 0.1)
        knob = s.space.knobs["sampling.general_fraction"]
        yield Idea({knob.name: tidy(knob, share)}, f"{said} Mix general text in, {share:.0%}.", 0.001, 0.4, GUARD)
    if values := s.scaled("adapter.rank", 0.5):
        yield Idea(values, f"{said} Half the rank can move less.", 0.001, 0.3, GUARD)
    if s.turns("method") and s.space.base.method == "full":
        why = f"{said} An adapter leaves the base as it is, at about ten times the rate."
        rate = tidy(s.space.knobs[RATE], 10 * s.value(RATE)) if s.turns(RATE) else None
        yield Idea({"method": "lora"} | ({} if rate is None else {RATE: rate}), why, 0.001, 0.4, GUARD)


def guard_rise(history: History, s: Situation) -> float | None:
    """Return how far the incumbent's guard score is above the untouched base's, as a share; None if not known."""
    untouched = None if history.reference is None else history.reference.guard_score
    trial = telling(history).get(s.space.base)
    if not untouched or trial is None or trial.guard_score is None:
        return None
    return trial.guard_score / untouched - 1


def _usual_rate(s: Situation) -> Iterator[Idea]:
    span = usual_rates(s.space.history.task, s.space.base.method)
    if span is None or not s.turns(RATE):
        return
    low, high = span
    now = s.value(RATE)
    if low / 3 <= now <= high * 3:  # what a sweep finds on its own
        return
    start = low if now < low else high
    why = f"{show(now)} is far from what {s.space.base.method} training usually takes, {show(low)} to {show(high)}."
    watch = "loss falls within 50 steps" if s.space.base.method == "lora" else "the whole curve, not only its end"
    yield Idea({RATE: tidy(s.space.knobs[RATE], start)}, why, 0.01, 0.5, watch)


def _padding(s: Situation) -> Iterator[Idea]:
    lengths = s.space.history.lengths
    if s.turns("batch.packing") and not s.space.base.batch.packing:
        wasted = None if lengths is None else padding_share(s.space.base, lengths)
        if wasted is not None and wasted < LITTLE_PADDING:
            return
        said = "rows of short documents are mostly" if wasted is None else f"{wasted:.0%} of the positions are"
        why = f"Without packing, {said} padding: fill them."
        yield Idea({"batch.packing": True}, why, 0.005, 0.4, "tokens per second, and probe loss at the end")


def _idle_memory(s: Situation) -> Iterator[Idea]:
    """Use memory that lies idle: activations kept instead of computed again, then more sequences at once."""
    peak, there = s.signals.peak_memory_bytes, s.space.history.device_memory_bytes
    if s.space.history.device in (None, "cpu") or peak is None or not there or peak > ROOMY * there:
        return
    said = f"Only {peak / there:.0%} of the memory is used"
    if s.turns("gradient_checkpointing") and s.space.base.gradient_checkpointing:
        why = f"{said}: keep the activations instead of computing them again."
        yield Idea(
            {"gradient_checkpointing": False}, why, 0.005, 0.4, "peak memory, and a third more tokens per second"
        )
    more, fewer = s.scaled("batch.per_device", 2), s.scaled("batch.accumulation", 0.5)
    if more and fewer:
        why = f"{said}: more sequences at once and fewer passes, the same effective batch."
        yield Idea({**more, **fewer}, why, 0.003, 0.3, "tokens per second, and peak memory")


def _overfitting(s: Situation) -> Iterator[Idea]:
    said = "The probe loss rises while the train loss falls: overfitting."
    watch = "the gap between probe and train loss"
    if s.turns("adapter.dropout") and s.value("adapter.dropout") < 0.1:
        yield Idea({"adapter.dropout": 0.1}, f"{said} Dropout before the adapters.", 0.005, 0.4, watch)
    if values := s.scaled("adapter.rank", 0.5):
        yield Idea(values, f"{said} Half the rank learns less by heart.", 0.005, 0.4, watch)
    if s.turns("sampling.fraction") and s.value("sampling.fraction") < 1:
        yield Idea({"sampling.fraction": 1.0}, f"{said} All of the data comes back less often.", 0.005, 0.4, watch)
    if s.turns("regularization.label_smoothing") and s.value("regularization.label_smoothing") == 0:
        yield Idea({"regularization.label_smoothing": 0.05}, f"{said} Targets with some doubt.", 0.003, 0.3, watch)
    if values := s.scaled(RATE, 0.5):
        yield Idea(values, f"{said} Half the rate sees the data at a calmer pace.", 0.003, 0.3, watch)
