"""What a person names as data on the command line, made into the sources of a study.

A SRC is a file, a folder, or a data set on the Hub: ``PATH``, ``hub:ORG/NAME``, ``hub:ORG/NAME@REVISION``, or a bare
``ORG/NAME`` that is no local path; ``NAME=`` before any of them names the source. Options of a source (format, column,
subset, split) are ``VALUE``, for every source of ``--data``, or ``NAME=VALUE``, for one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from frozen.formats import Format, Source, SourceError, readable_bytes
from harness import hub
from harness.config import explain, nearest
from harness.errors import BadInput
from harness.studyfile import DataSource, GuardSet, check_choice, named

HUB = "hub:"
GUARD_NAME = "guard"
"""What the guard set is called where options are given."""
OPTIONS = ("format", "column", "subset", "split")
FILE_SUFFIX = re.compile(r"\.(txt|text|md|json|jsonl|ndjson|csv|tsv|parquet|arrow|gz|zst|py|html?|xml|rst|toml|ya?ml)$")
"""An ORG/NAME that ends like this is a file that is not there, not a data set."""


def data_sources(
    data: Sequence[str | DataSource], general: Sequence[str | DataSource], options: Mapping[str, Sequence[str]]
) -> tuple[DataSource, ...]:
    """Return the sources of a study in order; `BadInput` names the one that cannot be used.

    ``options`` maps each of `OPTIONS` to texts; those for the guard set are left to `guard_set`.
    """
    if not data:
        raise BadInput("a study needs data: --data FILE, FOLDER or hub:ORG/NAME, also several times, also as NAME=FILE")
    found: list[DataSource] = []
    for text in (*data, *general):
        taken = {source.name for source in found}
        is_general = len(found) >= len(data)
        made = text if isinstance(text, DataSource) else _parsed(text, taken)
        if made.name in taken:
            raise BadInput(f"two sources are named {made.name!r}")
        found.append(made.model_copy(update={"general": is_general or made.general}))
    names = [source.name for source in found]
    if GUARD_NAME in names:
        raise BadInput(f"a source cannot be named {GUARD_NAME!r}: options of that name are for the guard set")
    chosen = dict(_assigned(options, names))
    return tuple(
        _with_options(source, {key: value for (name, key), value in chosen.items() if name == source.name or (
            name is None and not source.general and (source.name, key) not in chosen)})
        for source in found
    )  # fmt: skip


def guard_set(
    guard: str | GuardSet, max_regression: float | None, default_bytes: int, options: Mapping[str, Sequence[str]]
) -> GuardSet:
    """Return the guard set; its options are those given as ``guard=VALUE``."""
    if isinstance(guard, GuardSet):
        return guard if max_regression is None else guard.model_copy(update={"max_regression": max_regression})
    source = _parsed(f"{GUARD_NAME}={guard}" if "=" not in guard else guard, set())
    mine = {
        key: text.partition("=")[2]
        for key, texts in options.items()
        for text in texts
        if text.startswith(f"{GUARD_NAME}=")
    }
    source = _with_options(source, mine)
    table = source.model_dump(exclude={"name", "general"})
    table |= {"bytes": default_bytes}
    try:
        return GuardSet.model_validate(table | {"max_regression": 0.05 if max_regression is None else max_regression})
    except ValidationError as error:
        raise BadInput(f"--guard: {explain(error)}") from error


def _parsed(text: str, taken: set[str]) -> DataSource:
    """Return one source of a SRC; what is local must be there, what is on the Hub is asked for later."""
    name, place = named(text, taken)
    repository, revision = _hub(place)
    table: dict[str, Any] = {"path": place}
    if repository is not None:
        table = {"hub": repository, "revision": revision}
        if place == text:  # no name was given: take the repository's
            name, _ = named(repository.rpartition("/")[2], taken)
    else:
        _check_path(text, place)
    try:
        return DataSource.model_validate({"name": name} | table)
    except ValidationError as error:
        raise BadInput(f"{name!r} cannot be the name of a source: letters, digits, dash, underscore") from error


def _hub(place: str) -> tuple[str | None, str | None]:
    """Return id and revision of a data set on the Hub, or (None, None) for a local path."""
    marked = place.startswith(HUB)
    repository, _, revision = place.removeprefix(HUB).partition("@")
    if marked and not hub.is_id(repository):
        raise BadInput(f"{place!r} names no data set on the Hub: write hub:ORG/NAME, or hub:ORG/NAME@REVISION")
    folder, slash, _ = repository.partition("/")
    if marked or (
        slash
        and hub.is_id(repository)
        and not FILE_SUFFIX.search(repository.lower())
        and not os.path.lexists(place)
        and not Path(folder).exists()
    ):
        return repository, revision or None
    return None, None


def _check_path(text: str, place: str) -> None:
    if not place.strip():
        raise BadInput(f"the source {text!r} names no file or folder")
    try:
        Path(place).stat()
    except (OSError, ValueError) as error:
        hint = f" (a data set on the Hub is hub:{place})" if hub.is_id(place) and "/" in place else ""
        raise BadInput(f"there is no readable file or folder {place!r}{hint}") from error


def _assigned(
    options: Mapping[str, Sequence[str]], names: Sequence[str]
) -> Iterable[tuple[tuple[str | None, str], str]]:
    """Yield ((source or None for all, option), value)."""
    seen: set[tuple[str | None, str]] = set()
    for key, texts in options.items():
        for text in texts:
            name, equals, value = text.partition("=")
            place = (name if equals else None, key)
            if place in seen:
                raise BadInput(f"--{key} is given twice for {place[0] or 'all sources'}")
            seen.add(place)
            if equals and name == GUARD_NAME:
                continue
            if equals and name not in names:
                raise BadInput(f"--{key} {text}: there is no source {name!r}{nearest(name, names)}")
            yield place, value if equals else text


def refuse_guard_options(options: Mapping[str, Sequence[str]], remedy: str = " here") -> None:
    """Raise `BadInput` for an option of the guard set where there is none."""
    for key in OPTIONS:
        for text in options.get(key, ()):
            if text.startswith(f"{GUARD_NAME}="):
                raise BadInput(f"--{key} {text} is an option of the guard set, and there is none{remedy}")


def _with_options(source: DataSource, options: Mapping[str, str]) -> DataSource:
    if not options:
        return source
    if "format" in options:
        check_choice(f"source {source.name}: format", options["format"], get_args(Format))
    if source.path is not None and "subset" in options:
        raise BadInput(f"source {source.name} is on this machine: --subset is for data sets on the Hub")
    try:
        return DataSource.model_validate(source.model_dump() | dict(options))
    except ValidationError as error:
        raise BadInput(f"source {source.name}: {explain(error)}") from error


def as_source(source: DataSource | GuardSet) -> Source:
    """Return what the encoder reads."""
    return Source(
        name=source.name if isinstance(source, DataSource) else GUARD_NAME,
        path=None if source.path is None else Path(source.path),
        hub=source.hub,
        revision=source.revision,
        subset=source.subset,
        split=source.split,
        format=source.format,
        column=source.column,
        general=source.general if isinstance(source, DataSource) else False,
    )


def size_of(source: Source) -> int:
    """Return the bytes of a source's files, on the disk or on the Hub (often compressed there)."""
    if source.hub is not None:
        return hub.data_set_commit(source.hub, source.revision)[1]
    try:
        return readable_bytes(source)
    except SourceError as error:
        raise BadInput(str(error)) from error


def pinned(source: DataSource) -> tuple[DataSource, int]:
    """Return a source with the commit that is read, and the bytes of its files."""
    if source.hub is None:
        return source, size_of(as_source(source))
    commit, size = hub.data_set_commit(source.hub, source.revision)
    return source.model_copy(update={"revision": commit}), size
