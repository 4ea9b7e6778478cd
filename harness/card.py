"""The model card of a full run: what the model is, how it came to be, what is proven and what is not."""

from __future__ import annotations

from harness.ablation import ablation
from harness.config import flatten
from harness.fullrun import FullRun
from harness.queries import Reader
from harness.records import BASELINE
from harness.report import words
from harness.study import Study
from harness.upgrade import TOOL_CHANGED


def model_card(study: Study, reader: Reader, run: FullRun) -> str:
    """Return the card as Markdown with the front matter that model hubs read."""
    best, base = run.best, run.baseline
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [overnight, hyperparameter-search]",
        "---",
        f"# {study.paths.name}: full run of the best lineage",
        "",
        f"Task `{study.file.study.task}`, budget `{run.budget}`, trial {best.trial} of the study's ledger. It was",
        f"trained beside the study's baseline under the same budget (trial {base.trial}).",
        "",
        *(["The search kept no change: this is the baseline itself.", ""] if run.node == BASELINE else []),
        "| bits per byte | val | holdout |",
        "| --- | --- | --- |",
        f"| baseline | {base.val:.4f} | {base.holdout:.4f} |",
        f"| this model | {best.val:.4f} | {best.holdout:.4f} |",
        f"| improvement | {base.val - best.val:+.4f} | {base.holdout - best.holdout:+.4f} |",
        "",
        "One seed each: the improvement at this budget carries the noise of a single run. The holdout was looked at",
        f"{len(reader.events('holdout_look'))} times in this study, all looks are in the ledger.",
        "",
        *reproductions(reader, run.node),
        "## Lineage",
        "",
    ]
    chain, budget = reader.best_lineage(), str(study.budget)
    taken_out = {step.node: step for step in ablation(chain, reader.trials(), reader.noise(), budget) or ()}
    for standing in chain:
        changes = ", ".join(f"`{name}` = {value}" for name, value in standing.diff.items()) or "the baseline"
        score = f"{standing.score:.4f}" if standing.score is not None else "not scored"
        lines.append(f"- node {standing.node}: {changes} (mean {score} over {len(standing.scores)} seeds)")
        if standing.node in taken_out:
            lines.append(f"  - without it: {words.without(taken_out[standing.node])}")
    lines += ["", "## Config", "", "| knob | value |", "| --- | --- |"]
    lines += [f"| `{name}` | {value} |" for name, value in flatten(reader.trial(best.trial).config).items()]
    lines += ["", "## Seal", "", f"`{reader.trial(best.trial).seal}`", "", *other_tool(reader, best.trial)]
    return "\n".join(lines)


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
