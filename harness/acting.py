"""The commands that make or change something, from init to report, and the one that serves a coding agent.

Each checks what a person wrote before it touches anything; what is heavy is imported only by the command that needs it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from harness.config import Value, explain
from harness.errors import BadInput, BadValue, CheckFailed, WrongUse
from harness.inbox import Message, Pause, Resume, Stop, post
from harness.limits import Limits
from harness.locks import driver_lives
from harness.paths import DEMO, StudyPaths, folder_of, names
from harness.queries import Reader
from harness.reading import chosen, console, put
from harness.records import BASELINE, Guard, unit_of

if TYPE_CHECKING:
    from rich.console import Console

    from frozen.timer import Budget
    from harness.ablation import Step
    from harness.fullrun import FullRun, Reproduction
    from harness.study import Study
    from harness.studyfile import Agent, GuardSet

OPTIONS = ("format", "column", "subset", "split")
"""Of a data source."""
NOTHING_KEPT = "The search has kept no change, so its best config is the baseline"
DEMO_PROPOSALS = 10
"""Proposals that one `overnight run` of the demo decides."""


def init(arguments: argparse.Namespace) -> int:
    """Make a study: from scratch, as a preset describes it, or with what an earlier one found."""
    from harness import setup, study

    out = console()
    if arguments.preset == "list":
        return _list_presets(out)
    if arguments.study is None:
        raise BadInput("a new study needs a name: `overnight init NAME …`")
    if arguments.preset is not None and arguments.origin is not None:
        raise BadInput("--preset and --from are two ways to begin: choose one")
    wanted: dict[str, Any] = {
        name: getattr(arguments, name)
        for name in (
            "policy",
            "data",
            "budget",
            "task",
            "model",
            "revision",
            "general",
            "guard",
            "max_regression",
            "beta",
        )
    }
    wanted = {name: value for name, value in wanted.items() if value not in (None, [])}
    wanted["options"] = {name: given for name in OPTIONS if (given := getattr(arguments, name))}
    wanted["eval_keys"] = assignments(arguments.eval_keys)
    wanted["baseline"] = assignments(arguments.knobs)
    if arguments.origin is not None:
        from harness.inheritance import inherited

        wanted = inherited(study.load(chosen(arguments.origin).root), wanted)
    elif arguments.preset is not None:
        from harness.presets import find_preset

        wanted = find_preset(arguments.preset).completed(wanted)
    if "policy" not in wanted:
        raise BadInput("a new study needs --policy, or --from a study that has one, or a --preset")
    made = setup.create(arguments.study, progress=lambda text: out.print(text, markup=False), **wanted)
    out.print(f"Study {made.name} is made in {made.paths.root}. `overnight run {arguments.study}` starts the search.")
    return 0


def _list_presets(out: Console) -> int:
    from harness.presets import Preset, presets

    for name, path in presets().items():
        preset = Preset.read(path)
        out.print(
            f"{name}: {preset.description}. --policy {preset.policy} --task {preset.task} --model {preset.model}"
            f" --data {' '.join(preset.data)} --budget {preset.budget}",
            markup=False,
        )
    return 0


def run(arguments: argparse.Namespace) -> int:
    """Search until a total is reached or the owner ends it; then show what came of it."""
    from harness import notify
    from harness.live import screen
    from harness.output import lasting
    from harness.search import search

    out = console(lasting(sys.stdout))
    study, is_demo = _study_to_run(arguments.study)
    limits = _limits(arguments, study, is_demo=is_demo)
    notify.check(study.file.notify.urls)
    with screen(out, study.paths, limits, plain=arguments.plain) as view:
        stopped = search(study, limits=limits, agent=_agent(arguments, study), cold=arguments.cold, view=view)
    said = _show_result(study.paths, out)
    ended = f"{study.paths.name}: {stopped.reason}"
    if not notify.tell(study.file.notify.urls, title=ended, text=said):
        out.print("Not every address of [notify] urls in study.toml could be told.")
    return stopped.exit_code


def _study_to_run(name: str | None) -> tuple[Study, bool]:
    """Return the named study, or the demo, made now if this is the first time."""
    from harness import study

    if name is not None:
        return study.load(name), False
    out = console()
    if DEMO in names():
        out.print(f"Going on with the demo study in {folder_of(DEMO)} instead of starting over.")
        return study.load(DEMO), True
    out.print("Making the demo study: a small model on the text of this machine's own Python library.")
    from harness import setup  # the encoder, which only a new study needs

    return setup.create_demo(progress=out.print), True


def _agent(arguments: argparse.Namespace, study: Study) -> Agent:
    """Return who proposes: what the command says goes before what study.toml says, key by key."""
    names = ("proposer", "llm", "max_usd", "max_tokens")
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    try:
        return type(study.file.agent).model_validate(study.file.agent.model_dump() | given)
    except ValidationError as error:
        raise BadValue(explain(error)) from error


def _limits(arguments: argparse.Namespace, study: Study, *, is_demo: bool) -> Limits:
    """Return what ends the search: what the command says goes before what study.toml says."""
    written = study.file.run
    given = (arguments.trials, arguments.hours, arguments.until, arguments.proposals)
    if any(limit is not None for limit in given):
        trials, hours, until, proposals = given
    else:
        trials, hours, until, proposals = written.trials, written.hours, written.until, None
        if is_demo and trials is None and hours is None and until is None:
            proposals = DEMO_PROPOSALS
    moment = None if until is None else next_moment(until, datetime.datetime.now().astimezone())
    return Limits(trials=trials, hours=hours, until=moment, proposals=proposals)


def next_moment(clock: str, now: datetime.datetime) -> datetime.datetime:
    """Return the next time that an aware local clock shows ``HH:MM``; tomorrow's, if today's has passed."""
    hour, minute = (int(part) for part in clock.split(":"))
    moment = now.replace(hour=hour, minute=minute, second=0, microsecond=0)
    return moment if moment > now else moment + datetime.timedelta(days=1)


def _show_result(paths: StudyPaths, out: Console) -> str:
    """Print the ledger, the best lineage and where the report lies; return the answer in one sentence."""
    from harness.report import summary, table
    from harness.report.page import write_report

    with Reader(paths.ledger) as reader:
        facts = summary.gather(reader, driver_lives=False)
        write_report(paths, reader, paths.report_html, driver_lives=False)
    out.print()
    out.print(table.ledger(facts, out.width))
    out.print()
    out.print(table.lineage(facts, out.width))
    out.print()
    out.print(table.headline(facts), style="bold")
    out.print(f"Report: {paths.report_html}", soft_wrap=True)
    return table.headline(facts)


def propose(arguments: argparse.Namespace) -> int:
    """Queue a proposal, after the same gate that every proposer passes."""
    from harness import proposing, study

    made = study.load(chosen(arguments.study).root)
    wish = proposing.Wish(
        diff=assignments(arguments.knobs),
        why=arguments.why,
        source=arguments.source,
        watch=arguments.watch,
        parent=arguments.parent,
        predicted_change=arguments.predict,
        confidence=arguments.confidence,
        abort_above=arguments.abort_above,
        abort_after=arguments.abort_after,
    )
    console().print(proposing.send(made, proposing.check(made, wish)))
    return 0


def assignments(texts: list[str]) -> dict[str, Value]:
    """Return knobs and values of ``KNOB=VALUE`` texts: a JSON number or boolean is one, all else is a word."""
    diff: dict[str, Value] = {}
    for text in texts:
        name, equals, raw = text.partition("=")
        name, raw = name.strip(), raw.strip()
        if not (equals and name and raw):
            raise BadValue(f"{text!r} is not KNOB=VALUE, e.g. optim.learning_rate=1e-3")
        if name in diff:
            raise BadValue(f"{name} is set twice")
        try:
            value = json.loads(raw)
        except ValueError:
            value = raw
        if isinstance(value, float) and not math.isfinite(value):
            raise BadValue(f"{name} = {raw} is not a finite number")
        diff[name] = value if isinstance(value, bool | int | float | str) else raw
    return diff


def pause(arguments: argparse.Namespace) -> int:
    """Ask the running search to begin no further trial."""
    return _ask(arguments, Pause(), "It pauses after the running trial; `overnight resume` goes on.")


def resume(arguments: argparse.Namespace) -> int:
    """Ask the paused search to go on."""
    return _ask(arguments, Resume(), "It goes on.")


def stop(arguments: argparse.Namespace) -> int:
    """Ask the running search to end."""
    return _ask(arguments, Stop(), "It ends the running trial, which runs again later, writes the report and goes.")


def _ask(arguments: argparse.Namespace, message: Message, answer: str) -> int:
    paths = chosen(arguments.study)
    if not driver_lives(paths):
        raise WrongUse(f"no search of study {paths.name} is running, so there is nothing to {message.kind}")
    post(paths, message)
    console().print(answer)
    return 0


def replay(arguments: argparse.Namespace) -> int:
    """Reproduce the incumbent, or train it as a full run beside the baseline."""
    from harness import study
    from harness.live import screen
    from harness.output import lasting
    from harness.replay import replay as replayed

    out = console(lasting(sys.stdout))
    made = study.load(chosen(arguments.study).root)
    budget = _full_budget(arguments, made)
    if arguments.merge and budget is None:
        raise WrongUse("--merge belongs to a full run: give it a budget with --seconds, --tokens or --epochs")
    if budget is not None:
        _refuse_too_few_steps(made, budget)
    with screen(out, made.paths, Limits(), plain=False) as view:
        result = replayed(made, budget, view, ablate=arguments.ablate, merge=arguments.merge, cold=arguments.cold)
    if _is_baseline(made):
        out.print(f"{NOTHING_KEPT}: what was replayed is the baseline.", soft_wrap=True)
    out.print(_reproduced(result.reproduction), soft_wrap=True)
    for line in _missed(made, result.reproduction):
        out.print(line, soft_wrap=True)
    if not result.reproduction.agrees:
        raise CheckFailed("the best config did not reproduce: its new score is outside what the noise allows")
    unit = unit_of(made.metric, made.file.study.task)
    lines = _ablated(result.ablation, unit) if result.ablation is not None else []
    for line in lines + (_full(result.full, unit, made.file.eval.guard) if result.full else []):
        out.print(line, soft_wrap=True)
    return 0


def _full_budget(arguments: argparse.Namespace, made: Study) -> Budget | None:
    from frozen.timer import Budget

    if arguments.epochs is not None:
        from harness.replay import budget_of_epochs

        return budget_of_epochs(made, arguments.epochs)
    for text, unit in ((arguments.seconds, "s"), (arguments.tokens, "tok")):
        if text is not None:
            try:
                return Budget.parse(text if not text[-1:].isdigit() and unit == "s" else text + unit)
            except ValueError as error:
                raise BadValue(str(error)) from error
    return None


def _refuse_too_few_steps(made: Study, budget: Budget) -> None:
    """Refuse a full run of hardly any steps before anything is run for it."""
    from harness.policy import Refusal
    from harness.segments import shares

    with Reader(made.paths.ledger) as reader:
        baseline, chain = reader.baseline(), reader.best_lineage()
    if baseline is None:
        return
    segments = chain if made.policy.continues else chain[-1:]
    if budget.kind == "tokens" and budget.amount < len(segments):
        raise BadValue(f"the full run is too short: {budget} cannot be shared by {len(segments)} segments")
    parts = [(baseline.config, budget), *zip((s.config for s in segments), shares(budget, len(segments)), strict=True)]
    for config, share in parts:
        refusal = made.policy.too_few_steps(config, share, made.vocabulary, made.base, made.lengths)
        if isinstance(refusal, Refusal):
            raise BadValue(f"the full run is too short, give it a larger budget: {refusal.reason}")


def _is_baseline(made: Study) -> bool:
    """Tell whether nothing was kept, so that the best config is the baseline."""
    with Reader(made.paths.ledger) as reader:
        incumbent = reader.incumbent()
    return incumbent is not None and incumbent.node == BASELINE


def _missed(made: Study, shown: Reproduction) -> Iterator[str]:
    """Say which other seeds did not agree: whoever replays until one agrees must not forget the others."""
    with Reader(made.paths.ledger) as reader:
        node = next(event.data["node"] for event in reader.events("reproduced") if event.data["trial"] == shown.trial)
        events = [event.data for event in reader.events("reproduced") if event.data["node"] == node]
    outside = [data for data in events if not data["agrees"] and data["trial"] != shown.trial]
    if outside:
        scores = ", ".join(f"trial {data['trial']} with {data['score']:.4f}" for data in outside)
        yield f"Of {len(events)} seeds of this config so far {len(outside)} lay outside: {scores}."


def _reproduced(result: Reproduction) -> str:
    said = "agrees with" if result.agrees else "DIFFERS from"
    return (
        f"Trial {result.trial} scored {result.score:.4f} and {said} the ledger's {result.expected:.4f}"
        f" (one more seed lies within ± {result.tolerance:.4f} in 99 of 100 cases)."
    )


def _ablated(steps: tuple[Step, ...], unit: str) -> list[str]:
    from harness.report import words

    lines = [f"The best config without each of its steps, in {unit} (positive: the step still helps):"]
    for step in steps:
        knobs = ", ".join(f"{words.short(knob)} back to {words.value(value)}" for knob, value in step.back.items())
        lines.append(f"  {words.node(step.node)}{f' ({knobs})' if knobs else ''}: {words.without(step)}")
    return lines


def _full(result: FullRun, unit: str, guard: GuardSet | None) -> list[str]:
    from harness.report import words

    best, baseline = result.best, result.baseline
    is_baseline = result.node == BASELINE
    what = "of the baseline" if is_baseline else f"node {result.node} beside the baseline"
    lines = [f"Full run with {result.budget}, {what}, in {unit}:"]
    if result.segments > 1:
        lines.append(
            f"  (the best in {result.segments} segments along the lineage with an equal share each, the baseline in one"
            " piece)"
        )
    named = (("baseline", baseline),) if is_baseline else (("baseline", baseline), ("best", best))
    for name, scores in named if result.base is None else (("base", result.base), *named):
        val = f"{scores.val:.4f}{words.beside(None, scores.val_accuracy)}"
        holdout = f"{scores.holdout:.4f}{words.beside(None, scores.holdout_accuracy)}"
        lines.append(f"  {name:9} val {val}, holdout {holdout} (trial {scores.trial})")
    if not is_baseline:
        gap = words.gap(baseline.holdout - best.holdout)
        lines.append(f"  on the holdout the best config is {gap} than the baseline; one seed each.")
    elif result.base is not None:
        gap = words.gap(result.base.holdout - best.holdout)
        lines.append(f"  on the holdout the baseline is {gap} than the untouched base; one seed.")
    if guard is not None and result.base is not None and result.base.guard is not None:
        limit = Guard(reference=result.base.guard, max_regression=guard.max_regression)
        lines += [
            f"  guard set, bits per byte against the untouched base: {name} {words.guarded(limit, scores.guard)}"
            for name, scores in named
        ]
    lines.append(f"Model: {result.model}")
    if result.merged is not None:
        lines.append(f"Merged: {result.merged.folder} ({words.merged(result.merged)})")
    return lines


def verify(arguments: argparse.Namespace) -> int:
    """Check everything that the study promises; exit code 1 unless all of it, the tool included, is as it was."""
    from harness import study
    from harness.verify import verify as verified

    findings = verified(study.load(chosen(arguments.study).root))
    if arguments.json:
        put([{"what": found.what, "ok": found.ok, "state": found.state, "text": found.text} for found in findings])
    else:
        out = console()
        for found in findings:
            label = found.state if found.ok else found.state.upper()
            out.print(f"{label:7}  {found.what}: {found.text}", soft_wrap=True)
    return 0 if all(found.ok for found in findings) else CheckFailed.exit_code


def report(arguments: argparse.Namespace) -> int:
    """Write the report."""
    from harness.report.page import write_report

    paths = chosen(arguments.study)
    target = Path(arguments.output) if arguments.output is not None else paths.report_html
    if not target.parent.is_dir():
        raise BadInput(f"cannot write {target}: there is no folder {target.parent}")
    if target.is_dir():
        raise BadInput(f"cannot write {target}: it is a folder, -o names a file")
    lives = driver_lives(paths)
    with Reader(paths.ledger) as reader:
        write_report(paths, reader, target, driver_lives=lives)
    console().print(f"Report: {target}", soft_wrap=True)
    return 0


def mcp(arguments: argparse.Namespace) -> int:
    """Serve a coding agent until it hangs up."""
    from harness import study

    made = study.load(chosen(arguments.study).root)
    try:
        from harness.mcp import serve
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "mcp":
            raise
        raise WrongUse("the MCP server needs a package more: `pip install 'mcp>=2.3,<3'`") from error
    serve(made)
    return 0
