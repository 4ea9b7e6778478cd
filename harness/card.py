"""The model card of a full run: what the model is, how it came to be, what is proven and what is not."""

from __future__ import annotations

import json

from harness.ablation import ablation
from harness.conditions import meaningful
from harness.config import TrialConfig
from harness.fullrun import FullRun
from harness.queries import Reader
from harness.records import BASELINE, Guard, unit_of
from harness.report import words
from harness.study import Study
from harness.upgrade import TOOL_CHANGED

ELSEWHERE = [
    "`adapter_config.json` names the study's own copy of the base model. On another machine, put the base model's name",
    "or folder there; it must be the revision and the digest above.",
    "",
]


def model_card(study: Study, reader: Reader, run: FullRun) -> str:
    """Return the card as Markdown with the front matter that model hubs read.

    It names no license: that of a base model and of the data binds the owner, and nobody here has read it.
    """
    best, baseline = run.best, run.baseline
    lines = [
        *_front(study, reader.trial(best.trial).config),
        f"# {study.paths.name}: full run of the best lineage",
        "",
        f"Task `{study.file.study.task}`, budget `{run.budget}`, trial {best.trial} of the study's ledger. It was",
        f"trained beside the study's baseline under the same budget (trial {baseline.trial}).",
        *_segments(run),
        "",
        *(["The search kept no change: this is the baseline itself.", ""] if run.node == BASELINE else []),
        *_scores(study, run),
        "",
        "One seed each: the improvement at this budget carries the noise of a single run. The holdout was looked at",
        f"{len(reader.events('holdout_look'))} times in this study, all looks are in the ledger.",
        "",
        *_based(study, reader.trial(best.trial).config, run),
        *reproductions(reader, run.node),
        "## Lineage",
        "",
    ]
    chain, budget = reader.best_lineage(), str(study.budget)
    taken_out = {step.node: step for step in ablation(chain, reader.trials(), reader.noise(), budget) or ()}
    for standing in chain:
        changes = ", ".join(f"`{name}` = {value}" for name, value in standing.diff.items()) or "the baseline"
        score = f"{standing.score:.4f}" if standing.score is not None else "not scored"
        after = "" if standing.start is None else f", from the checkpoint of node {standing.start}"
        lines.append(f"- node {standing.node}: {changes} (mean {score} over {len(standing.scores)} seeds{after})")
        if standing.node in taken_out:
            lines.append(f"  - without it: {words.without(taken_out[standing.node])}")
    lines += ["", "## Config", "", "| knob | value |", "| --- | --- |"]
    lines += [f"| `{name}` | {value} |" for name, value in meaningful(reader.trial(best.trial).config).items()]
    lines += ["", "## Seal", "", f"`{reader.trial(best.trial).seal}`", "", *other_tool(reader, best.trial)]
    return "\n".join(lines)


def _segments(run: FullRun) -> list[str]:
    """Return how a schedule was trained; nothing where it was one config in one piece."""
    if run.segments == 1:
        return []
    return [
        f"It was trained in {run.segments} segments with an equal share of the budget each, one for every node of",
        "the lineage below, in that order. Each goes on with the weights of the one before it, with a fresh optimizer",
        "and a learning rate that anneals within the segment. The config below is that of the last one. The baseline",
        "was trained in one piece, annealing once, as its owner would have: how much of a difference is due to the",
        "restarts alone, these figures do not say.",
    ]


def _front(study: Study, config: TrialConfig) -> list[str]:
    """Return the front matter."""
    lines = ["---", f"library_name: {'peft' if config.method == 'lora' else 'transformers'}"]
    lines.append("pipeline_tag: text-generation")
    if study.base is not None:
        lines.append(f"base_model: {json.dumps(study.base.name)}")
    return [*lines, "tags: [overnight, hyperparameter-search]", "---"]


def _scores(study: Study, run: FullRun) -> list[str]:
    """Return the table of scores on val, the holdout, and the guard set where there is one."""
    best, baseline = run.best, run.baseline
    has_guard, has_pairs = best.guard is not None, best.val_accuracy is not None
    rows = {
        **({} if run.base is None else {"untouched base": run.base}),
        "baseline": baseline,
        "this model": best,
    }
    extra = (["val, pairs right", "holdout, pairs right"] if has_pairs else []) + (["guard"] if has_guard else [])
    lines = [
        f"| {' | '.join([unit_of(study.metric, study.file.study.task), 'val', 'holdout', *extra])} |",
        f"| {' | '.join(['---'] * (3 + len(extra)))} |",
    ]
    for name, scores in rows.items():
        cells = [f"{scores.val:.4f}", f"{scores.holdout:.4f}"]
        cells += [words.percent(scores.val_accuracy), words.percent(scores.holdout_accuracy)] if has_pairs else []
        cells += [words.score(scores.guard)] if has_guard else []
        lines.append(f"| {' | '.join([name, *cells])} |")
    gains = [f"{baseline.val - best.val:+.4f}", f"{baseline.holdout - best.holdout:+.4f}", *([""] * len(extra))]
    lines.append(f"| {' | '.join(['improvement', *gains])} |")
    guard = study.file.eval.guard
    if guard is not None and run.base is not None and run.base.guard is not None and best.guard is not None:
        limit = Guard(reference=run.base.guard, max_regression=guard.max_regression)
        lines += [
            "",
            f"Guard: bits per byte of general-domain text. This model: {words.guarded(limit, best.guard)} against",
        ]
        lines.append(f"the untouched base; the search kept nothing beyond {guard.max_regression:g}, at its own budget.")
    return lines


def _based(study: Study, config: TrialConfig, run: FullRun) -> list[str]:
    """Return what was trained further, how, and how to load the outcome; nothing where a fresh model was trained."""
    base = study.base
    if base is None:
        return []
    is_adapter = config.method == "lora"
    held = "" if config.quantization == "none" else f", its weights held as {config.quantization} while training"
    how = f"a LoRA adapter beside frozen weights{held}" if is_adapter else "all weights"
    loader = (
        "from peft import AutoPeftModelForCausalLM" if is_adapter else "from transformers import AutoModelForCausalLM"
    )
    return [
        "## Base model",
        "",
        f"- name: `{base.name}` ({base.architecture}, {base.parameters:,} parameters)",
        f"- revision: {f'`{base.revision}`' if base.revision else 'none, these are local files'}",
        f"- digest of its weights: `{base.digest}`",
        f"- trained: {how}",
        *(f"- note: {note}" for note in base.notes),
        "- license: not looked at; the base model's own and that of the data bind whoever passes this model on",
        "",
        "```python",
        loader,
        f'model = {loader.rpartition(" ")[2]}.from_pretrained("path/to/this/folder")',
        "```",
        "",
        *(ELSEWHERE if is_adapter else []),
        *(_merged(run) if run.merged is not None else []),
    ]


def _merged(run: FullRun) -> list[str]:
    assert run.merged is not None
    return [
        f"The folder `{run.merged.folder.name}` beside this one is the same model in one piece, for",
        f"`AutoModelForCausalLM`: {words.merged(run.merged)}.",
        "",
    ]


def other_tool(reader: Reader, trial: int) -> list[str]:
    """Return what a reader must know of a trial that another tool ran than the search; nothing if it was the same."""
    sealed, seal = reader.study().seal, reader.trial(trial).seal
    if seal == sealed:
        return []
    event = next(event for event in reader.events(TOOL_CHANGED) if event.data["seal"] == seal)
    return [
        f"The search ran under `{sealed}`, this full run by another tool. {event.text}. Scores of the two are compared",
        "nowhere but in the reproduction above: that it agrees is the proof that this tool gives the search's numbers.",
        "",
    ]


def reproductions(reader: Reader, node: int) -> list[str]:
    """Return what became of every reproduction of a node, also of those that failed."""
    events = [event for event in reader.events("reproduced") if event.data["node"] == node]
    return (
        ["## Reproductions at the search's budget", "", *(f"- {event.text}" for event in events), ""] if events else []
    )
