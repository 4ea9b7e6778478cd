"""How a study comes to be: what `overnight init` does, apart from `harness.study` because it needs the encoder.

The order is by cost: what a person can have mistyped is checked before a byte of data is read. The folder is built
under a hidden name beside its place and renamed when it is complete, so that bad input, a full disk or ``kill -9``
leaves no half study.
"""

from __future__ import annotations

import dataclasses
import datetime
import errno
import importlib.resources
import os
import shutil
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from string import Template
from typing import Any

from frozen.corpus import SplitSizes
from frozen.tokens import GivenTokenizer, GuardSource, NewTokenizer, Prepared, prepare
from harness import demomodel, disk, files, origin
from harness.base import Base, prepare_base
from harness.config import Value
from harness.docstrings import docstring_data
from harness.errors import BadInput
from harness.ledger import Ledger
from harness.paths import DEMO, RUNS, StudyPaths, cache_folder, folder_of
from harness.policy import find_policy, find_program, packaged_prices
from harness.request import KINDS, Checked, Plan, Request, Say, check, check_name, check_rows, settle, tasks_of
from harness.rows import StudyRow
from harness.seal import Seal
from harness.sources import as_source
from harness.study import METRICS, Study, build, load
from harness.studyfile import (
    FRESH,
    DataSource,
    Evaluation,
    GuardSet,
)

SHOWN_REJECTIONS = 5
"""Places in the sources that are named on the screen; the report in the study has more."""

DEMO_BUDGET = "1.2e11flop"
DEMO_TEXT_BYTES = 3_000_000
DEMO_LEAST_BYTES = 1_000_000
DEMO_EVALUATION = Evaluation(context=128, stride=96, probe_bytes=6_000, val_bytes=64_000, holdout_bytes=64_000)
DEMO_VOCABULARY = 1024


def create(
    name_or_path: str | Path,
    *,
    policy: str,
    data: Sequence[str | Path | DataSource] = (),
    budget: str | None = None,
    task: str | None = None,
    model: str | None = None,
    revision: str | None = None,
    base: Base | None = None,
    general: Sequence[str | DataSource] = (),
    guard: str | GuardSet | None = None,
    max_regression: float | None = None,
    options: Mapping[str, Sequence[str]] | None = None,
    beta: float | None = None,
    runs: Path = RUNS,
    baseline: Mapping[str, Value] | None = None,
    vocabulary: int | None = None,
    evaluation: Evaluation | None = None,
    eval_keys: Mapping[str, Value] | None = None,
    seed: int = 0,
    progress: Say = lambda text: None,
) -> Study:
    """Make a study: check the request, prepare and seal base model and data, publish the folder whole.

    ``data`` holds sources or SRCs as `harness.sources` reads them, ``options`` theirs. Absent: ``task``, the policy's
    first; ``model``, a fresh one for pretraining; ``vocabulary`` and ``evaluation``, derived from the amount of text
    (``eval_keys`` replaces single ones). ``base`` is a base model that is prepared already, in the place of fetching
    ``model``. Instruction tuning with neither data nor model is the demo on docstrings.

    `BadInput`, `UnknownKnob` or `BadValue`: something in the request cannot be used, and nothing was made.
    """
    request = Request(
        root=folder_of(name_or_path, runs),
        runs=runs,
        policy=policy,
        data=tuple(source if isinstance(source, DataSource) else os.fspath(source) for source in data),
        budget=budget,
        task=task,
        model=model,
        revision=revision,
        base=base,
        general=tuple(general),
        guard=guard,
        max_regression=max_regression,
        options=dict(options or {}),
        beta=beta,
        baseline=dict(baseline or {}),
        vocabulary=vocabulary,
        evaluation=evaluation,
        eval_keys=dict(eval_keys or {}),
        seed=seed,
    )
    return _made(request, progress)


def _made(request: Request, say: Say) -> Study:
    """Make the study, or raise `BadInput` and leave nothing behind."""
    cache = cache_folder(request.runs)
    with _tidy(cache / "models", cache, request.runs, request.root.parent), _said(request.root):
        request = _with_demo(request, say)
        plan = check(request)
        checked = settle(request, plan, _base(request, plan, say), say)
        prepared = _prepare(request, checked, say)
        check_rows(plan, checked, prepared.folder / "train")
        return _publish(request, checked, prepared, say)


def _with_demo(request: Request, say: Say) -> Request:
    """Fill in the demo of fine-tuning where a request for instruction tuning names neither data nor model."""
    task = request.task or tasks_of(find_policy(request.policy))[0]
    if task != "sft" or request.data or request.model is not None or request.base is not None:
        return request
    check_name(request.root)
    model = demomodel.needed_model()
    say("Making the demo of fine-tuning: SmolLM2-135M-Instruct learns to write docstrings like those of this Python.")
    return dataclasses.replace(
        request,
        task=task,
        model=str(model),
        data=(f"docstrings={docstring_data(cache_folder(request.runs))}",),
        options={"format": ["alpaca"]} | dict(request.options),
        budget=request.budget or demomodel.BUDGET,
        baseline=demomodel.KNOBS | dict(request.baseline),
        eval_keys=demomodel.EVALUATION | dict(request.eval_keys),
    )


def create_demo(runs: Path = RUNS, progress: Say = lambda text: None) -> Study:
    """Make the demo study on the text of this interpreter's own standard library: no download, no key."""
    return create(
        DEMO,
        policy="demo",
        data=[f"stdlib={demo_text(runs)}"],
        budget=DEMO_BUDGET,
        runs=runs,
        vocabulary=DEMO_VOCABULARY,
        evaluation=DEMO_EVALUATION,
        progress=progress,
    )


def demo_text(runs: Path, library: Path | None = None) -> Path:
    """Return a folder with modules of the interpreter's standard library, in order of name, a few megabytes.

    It is a copy below the cache, so that the study's source is one folder that stays as it was.
    """
    library = library or Path(sysconfig.get_path("stdlib"))
    target = cache_folder(runs) / f"stdlib-{sysconfig.get_python_version()}"
    if target.is_dir():
        return target
    chosen, total = [], 0
    for module in sorted(library.glob("*.py")):
        if total < DEMO_TEXT_BYTES and module.is_file():
            chosen.append(module)
            total += module.stat().st_size
    if total < DEMO_LEAST_BYTES:
        raise BadInput(f"the demo needs the source of Python's standard library, and {library} holds {total} bytes")
    with _said(runs):
        aside = target.with_name(f".{target.name}.{os.getpid()}")
        aside.mkdir(parents=True)
        try:
            for module in chosen:
                shutil.copyfile(module, aside / module.name)
            with suppress(FileExistsError):  # another process was quicker
                aside.rename(target)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return target


def _base(request: Request, plan: Plan, say: Say) -> Base | None:
    """Return the prepared base model, or None for a fresh one."""
    if plan.model == FRESH:
        return None
    base = request.base or prepare_base(plan.model, request.revision, cache_folder(request.runs), say)
    facts = base.facts
    at = f" at {facts.revision[:12]}" if facts.revision else ""
    say(
        f"Base model {facts.name}{at}: {facts.architecture}, {facts.parameters / 1e6:.1f} million parameters,"
        f" context {facts.context or 'unbounded'}, {disk.readable(facts.weight_bytes)} of weights."
    )
    for note in facts.notes:
        say(f"Note on the base model: {note}")
    return base


# --- data and folder ---------------------------------------------------------------------------------------------


def _prepare(request: Request, checked: Checked, say: Say) -> Prepared:
    file = checked.file
    sizes = SplitSizes(
        probe_bytes=file.eval.probe_bytes, val_bytes=file.eval.val_bytes, holdout_bytes=file.eval.holdout_bytes
    )
    cache = cache_folder(request.runs)
    cache.mkdir(parents=True, exist_ok=True)
    vocabulary = file.study.vocabulary
    base, guard = checked.base, file.eval.guard
    say(f"Reading and encoding {disk.readable(checked.text_bytes)} of data.")
    try:
        prepared = prepare(
            [as_source(source) for source in file.study.data],
            sizes,
            NewTokenizer(vocabulary) if base is None else GivenTokenizer(base.folder, vocabulary),
            cache,
            say,
            kind=KINDS[file.study.task],
            guard=None if guard is None else GuardSource(as_source(guard), guard.bytes),
        )
    except ValueError as error:  # `SourceError` is one
        raise BadInput(str(error)) from error
    for name, found in prepared.report["rejected"].items():
        if found["rejected"]:
            say(_left_out(name, found, StudyPaths(request.root).data_report))
    for name in file.sources:
        say(_recognised(name, prepared.report))
        _say_duplicates(name, prepared.report, say)
    return prepared


def _recognised(name: str, report: Mapping[str, Any]) -> str:
    """Say what a source was taken for, why, and how much of it there is."""
    read = report["read"][name]
    found = report.get("sources", {}).get(name, {})
    form = f"read as {found['format']} ({found['why']}), " if found.get("format") and found.get("why") else ""
    notes = "".join(f"; {note}" + (f" ({count})" if count else "") for note, count in found.get("notes", {}).items())
    return f"Source {name}: {form}{read['documents']} documents, {disk.readable(read['bytes'])}{notes}."


def _say_duplicates(name: str, report: dict[str, Any], say: Say) -> None:
    """Say how much of a source was there already; `BadInput` if it adds nothing: its weight would turn nothing."""
    read = report["read"][name]["texts"]
    used = {split: sources.get(name, {"texts": 0})["texts"] for split, sources in report["splits"].items()}
    dropped = read - sum(used.values())
    if not used["train"]:
        raise BadInput(
            f"source {name} adds nothing to train on: {dropped} of its {read} texts are duplicates of other texts,"
            " or of what scores are made on; leave it out"
        )
    quotes = report.get("dropped", {}).get(name, {}).get("quotes a held-out text", {"texts": 0})["texts"]
    if quotes:
        say(f"Source {name}: {quotes} texts repeat most of a text that scores are made on; left out of train.")
    if dropped - quotes:
        say(f"Source {name}: {dropped - quotes} of {read} texts are duplicates of others and left out.")


def _left_out(name: str, found: dict[str, Any], report: Path) -> str:
    """Say what of a source did not become text; a few malformed rows are no error, but nobody may miss them."""
    first = "; ".join(f"{item['where']}: {item['reason']}" for item in found["first"][:SHOWN_REJECTIONS])
    more = found["rejected"] - SHOWN_REJECTIONS
    rest = f"; and {more} more, see {report}" if more > 0 else ""
    return f"Left out of source {name}, {found['rejected']} in all: {first}{rest}."


def _publish(request: Request, checked: Checked, prepared: Prepared, say: Say) -> Study:
    """Build the folder aside and give it its name."""
    root = request.root
    root.parent.mkdir(parents=True, exist_ok=True)
    _sweep(root)
    aside = StudyPaths(root.with_name(f".{root.name}.{os.getpid()}"))
    aside.root.mkdir()
    try:
        files.link_tree(prepared.folder, aside.root / "data")
        if checked.base is not None:
            checked.base.link(aside.base)
        # Little text gives a smaller vocabulary than was asked for.
        asked = checked.file.study.model_copy(update={"vocabulary": prepared.vocabulary})
        file = checked.file.model_copy(update={"study": asked})
        files.write_whole(aside.policy_toml, checked.policy_file.read_text(encoding="utf-8"))
        files.write_whole(aside.program_md, find_program(checked.policy_file).read_text(encoding="utf-8"))
        files.write_whole(aside.prices_toml, packaged_prices().read_text(encoding="utf-8"))
        files.write_whole(aside.agents_md, guide(root.name))
        files.write_whole(aside.study_toml, file.render())
        for folder in (aside.inbox, aside.trials, aside.lineage):
            folder.mkdir()
        say("Sealing data, code and rules.")
        seal = Seal.take(aside)
        if checked.base is not None:
            checked.base.check_sealed(seal.manifest.data)
        study = build(aside, file, seal)
        Ledger.create(aside.ledger, study=_row(root.name, study)).close()
        try:
            aside.root.rename(root)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise BadInput(f"{root} appeared while the study was made: choose another name") from error
            raise
        files.sync_folder(root.parent)
    finally:
        shutil.rmtree(aside.root, ignore_errors=True)
    return load(root)


def guide(name: str) -> str:
    """Return what a coding agent is told that comes upon the folder of the study of this name."""
    text = importlib.resources.files("policies").joinpath("coding_agents.md").read_text(encoding="utf-8")
    return Template(text).substitute(name=name)


def _sweep(root: Path) -> None:
    """Remove what a killed `create` of the same study left: its folder names a process that is no more."""
    for left in root.parent.glob(f".{root.name}.*"):
        number = left.name.rpartition(".")[2]
        if number.isdigit() and not Path("/proc", number).exists():
            shutil.rmtree(left, ignore_errors=True)


def _row(name: str, study: Study) -> StudyRow:
    commit = origin.commit()
    return StudyRow(
        name=name,
        task=study.file.study.task,
        model=study.file.study.model,
        metric=METRICS[study.file.study.task],
        seed=study.file.study.seed,
        budget=str(study.budget),
        seal=study.seal.digest,
        policy=study.paths.policy_toml.read_text(encoding="utf-8"),
        versions=origin.versions(),
        git_commit=commit.digest if commit else None,
        git_dirty=commit.dirty if commit else None,
        device=study.device,
        created=datetime.datetime.now(datetime.UTC),
    )


@contextmanager
def _said(folder: Path) -> Iterator[None]:
    """Say in words that a disk is full or a folder cannot be written."""
    try:
        yield
    except OSError as error:
        if error.errno not in disk.NOT_WRITABLE:
            raise
        where = error.filename or folder
        raise BadInput(f"{where} cannot be written: {disk.NOT_WRITABLE[error.errno]}; nothing was made") from error


@contextmanager
def _tidy(*folders: Path) -> Iterator[None]:
    """Remove the folders that were made on the way, innermost first, if what was to be in them failed."""
    made = [folder for folder in folders if not folder.exists()]
    try:
        yield
    except BaseException:
        for folder in made:
            with suppress(OSError):  # not there, or not empty: somebody else's
                folder.rmdir()
        raise
