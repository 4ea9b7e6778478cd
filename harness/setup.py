"""How a study comes to be: what `overnight init` does, apart from `harness.study` because it needs the encoder.

The order is by cost: what a person can have mistyped is checked before a byte of data is read. The folder is built
under a hidden name beside its place and renamed when it is complete, so that bad input, a full disk or ``kill -9``
leaves no half study.
"""

from __future__ import annotations

import datetime
import errno
import importlib.resources
import os
import re
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from frozen.corpus import SplitSizes
from frozen.formats import Source, SourceError, readable_bytes
from frozen.timer import Budget
from frozen.tokens import Prepared, prepare
from harness import disk, files, origin
from harness.config import TrialConfig, Value
from harness.errors import BadInput
from harness.ledger import Ledger
from harness.memory import Gauge
from harness.paths import DEMO, RUNS, StudyPaths, cache_folder, folder_of
from harness.policy import Policy, find_policy, find_program, packaged_prices
from harness.rows import StudyRow
from harness.seal import Seal
from harness.study import METRICS, Study, build, load
from harness.studyfile import SMALLEST_VOCABULARY, Asked, DataSource, Evaluation, StudyFile, check_choice, named

TASKS = ("pretrain",)
MODELS = ("fresh",)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
Say = Callable[[str], None]

VOCABULARIES = ((2_000_000, 1024), (50_000_000, 2048), (1_000_000_000, 8192))
"""Bytes of text up to which a tokenizer of that size is trained; more text gets `LARGEST_VOCABULARY`."""
LARGEST_VOCABULARY = 32768
LEAST_SECONDS = 1.0
"""How many steps fit into seconds is only known when they run; into less than this no schedule fits on any machine."""
LARGEST_VAL_BYTES = 1 << 19
"""Half a megabyte of val: scoring stays short beside training, and the sample of text is the same for every config."""
LARGEST_PROBE_BYTES = 1 << 15
SHOWN_REJECTIONS = 5
"""Places in the sources that are named on the screen; the report in the study has more."""

DEMO_BUDGET = "1.2e11flop"
DEMO_TEXT_BYTES = 3_000_000
DEMO_LEAST_BYTES = 1_000_000
DEMO_EVALUATION = Evaluation(context=128, stride=96, probe_bytes=6_000, val_bytes=64_000, holdout_bytes=64_000)
DEMO_VOCABULARY = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What `create` was asked for, unchecked."""

    root: Path
    runs: Path
    policy: str
    data: tuple[str, ...]
    budget: str
    task: str
    model: str
    baseline: dict[str, Value]
    vocabulary: int | None
    evaluation: Evaluation | None
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """A request of which everything but the contents of the data was found usable."""

    file: StudyFile
    policy_file: Path
    text_bytes: int
    """Size of the sources on the disk."""


def create(
    name_or_path: str | Path,
    *,
    policy: str,
    data: Sequence[str | Path],
    budget: str,
    task: str = "pretrain",
    model: str = "fresh",
    runs: Path = RUNS,
    baseline: Mapping[str, Value] | None = None,
    vocabulary: int | None = None,
    evaluation: Evaluation | None = None,
    seed: int = 0,
    progress: Say = lambda text: None,
) -> Study:
    """Make a study: check the request, prepare and seal the data, publish the folder whole.

    ``data`` holds paths or ``NAME=PATH``; ``vocabulary`` and ``evaluation`` are derived from the amount of text if
    absent. `BadInput`, `UnknownKnob` or `BadValue`: something in the request cannot be used, and nothing was made.
    """
    request = Request(
        root=folder_of(name_or_path, runs),
        runs=runs,
        policy=policy,
        data=tuple(os.fspath(source) for source in data),
        budget=budget,
        task=task,
        model=model,
        baseline=dict(baseline or {}),
        vocabulary=vocabulary,
        evaluation=evaluation,
        seed=seed,
    )
    return _made(request, progress)


def _made(request: Request, say: Say) -> Study:
    """Make the study, or raise `BadInput` and leave nothing behind."""
    checked = check(request)
    with _tidy(cache_folder(request.runs), request.runs, request.root.parent), _said(request.root):
        prepared = _prepare(request, checked, say)
        return _publish(request, checked, prepared, say)


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


# --- checks that need no data ------------------------------------------------------------------------------------


def check(request: Request) -> Checked:
    """Check everything but the contents of the data; derive what was left open. `BadInput` says what is wrong."""
    _check_name(request.root)
    check_choice("task", request.task, TASKS)
    check_choice("model", request.model, MODELS)
    sources, text_bytes = _sources(request.data)
    policy_file = find_policy(request.policy)
    policy = Policy.load(
        policy_file, [source.name for source in sources], [source.name for source in sources if source.general]
    )
    baseline = policy.baseline(request.baseline)
    try:
        budget = Budget.parse(request.budget)
    except ValueError as error:
        raise BadInput(str(error)) from error
    if budget.kind == "seconds" and budget.amount < LEAST_SECONDS:
        raise BadInput(f"a budget of {budget} is too small: a trial needs at least {LEAST_SECONDS:g} s for its steps")
    vocabulary = request.vocabulary if request.vocabulary is not None else _vocabulary(text_bytes)
    if vocabulary < SMALLEST_VOCABULARY:
        raise BadInput(
            f"a vocabulary of {vocabulary} is too small: all bytes and some merges need {SMALLEST_VOCABULARY}"
        )
    refusal = policy.too_few_steps(baseline, budget, vocabulary, None)
    if refusal is not None:
        raise BadInput(f"the baseline does not fit its budget: {refusal.reason}")
    _check_device(policy, baseline, request, vocabulary)
    missing = disk.shortfall_bytes(request.root.parent, 4 * text_bytes)
    if missing:
        raise BadInput(
            f"the disk of {request.root.parent} is nearly full: {disk.readable(missing)} are missing to prepare the"
            f" data and keep {disk.readable(disk.RESERVE_BYTES)} in reserve"
        )
    asked = Asked(
        task="pretrain",
        model="fresh",
        policy=request.policy,
        budget=str(budget),
        vocabulary=vocabulary,
        seed=request.seed,
        data=tuple(sources),
    )
    evaluation = request.evaluation or _evaluation(text_bytes, baseline)
    file = StudyFile.parse(StudyFile(study=asked, baseline=request.baseline, eval=evaluation).model_dump(mode="json"))
    return Checked(file=file, policy_file=policy_file, text_bytes=text_bytes)


def _check_device(policy: Policy, baseline: TrialConfig, request: Request, vocabulary: int) -> None:
    """Refuse what would crawl on this machine's device, or cannot fit it."""
    device = origin.device()
    slow = policy.slow_precision(baseline, request.baseline, device)
    if slow is not None:
        raise BadInput(slow)
    memory = origin.device_memory_bytes(device)
    gauge = Gauge(vocabulary=vocabulary, base=None, on_gpu=device != "cpu", memory_bytes=memory)
    misfit = gauge.misfit(baseline)
    if misfit is not None:
        raise BadInput(f"the baseline does not fit this machine: {misfit}")


def _check_name(root: Path) -> None:
    if not NAME.fullmatch(root.name):
        name = root.name or os.fspath(root)
        raise BadInput(f"{name!r} cannot be the name of a study: letters, digits, dot, dash and underscore")
    if root.exists() or root.is_symlink():
        raise BadInput(f"{root} is there already: choose another name, or `overnight run {root.name}` to go on with it")


def _sources(data: tuple[str, ...]) -> tuple[list[DataSource], int]:
    if not data:
        raise BadInput("a study needs data: --data FILE or FOLDER, also several times, also as NAME=PATH")
    sources: list[DataSource] = []
    total = 0
    for text in data:
        name, path = named(text, {source.name for source in sources})
        if not path.strip():
            raise BadInput(f"the source {text!r} names no file or folder")
        try:
            Path(path).stat()
        except (OSError, ValueError) as error:
            raise BadInput(f"there is no readable file or folder {path!r}") from error
        try:
            sources.append(DataSource(name=name, path=path))
        except ValueError as error:
            raise BadInput(f"{name!r} cannot be the name of a source: letters, digits, dash, underscore") from error
        try:
            total += readable_bytes(Source(name=name, path=Path(path)))
        except SourceError as error:
            raise BadInput(str(error)) from error
    return sources, total


def _vocabulary(text_bytes: int) -> int:
    return next((size for limit, size in VOCABULARIES if text_bytes <= limit), LARGEST_VOCABULARY)


def _evaluation(text_bytes: int, baseline: TrialConfig) -> Evaluation:
    """Derive the evaluation's constants: a tenth of the text for val and for holdout each, the baseline's context."""
    tenth = max(1, min(text_bytes // 10, LARGEST_VAL_BYTES))
    context = baseline.batch.sequence_length
    return Evaluation(
        context=context,
        stride=max(1, context // 2),
        probe_bytes=max(1, min(text_bytes // 40, LARGEST_PROBE_BYTES)),
        val_bytes=tenth,
        holdout_bytes=tenth,
    )


# --- data and folder ---------------------------------------------------------------------------------------------


def _prepare(request: Request, checked: Checked, say: Say) -> Prepared:
    file = checked.file
    sources = [Source(name=s.name, path=Path(s.path or ""), format=s.format) for s in file.study.data]
    sizes = SplitSizes(
        probe_bytes=file.eval.probe_bytes, val_bytes=file.eval.val_bytes, holdout_bytes=file.eval.holdout_bytes
    )
    cache = cache_folder(request.runs)
    cache.mkdir(parents=True, exist_ok=True)
    say(f"Reading and encoding {disk.readable(checked.text_bytes)} of text.")
    try:
        prepared = prepare(sources, sizes, file.study.vocabulary, cache, say)
    except ValueError as error:  # `SourceError` is one
        raise BadInput(str(error)) from error
    for name, found in prepared.report["rejected"].items():
        if found["rejected"]:
            say(_left_out(name, found, StudyPaths(request.root).data_report))
    for name in file.sources:
        _say_duplicates(name, prepared.report, say)
    return prepared


def _say_duplicates(name: str, report: dict[str, Any], say: Say) -> None:
    """Say how much of a source was there already; `BadInput` if it adds nothing: its weight would turn nothing."""
    read = report["read"][name]["texts"]
    used = {split: sources.get(name, {"texts": 0})["texts"] for split, sources in report["splits"].items()}
    dropped = read - sum(used.values())
    if not used["train"]:
        raise BadInput(
            f"source {name} adds nothing to train on: {dropped} of its {read} texts are duplicates of other texts;"
            " leave it out"
        )
    if dropped:
        say(f"Source {name}: {dropped} of {read} texts are duplicates of others and left out.")


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
        study = build(aside, file, Seal.take(aside))
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
