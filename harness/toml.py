"""Reads the files that a person edits: whatever is wrong with one is a sentence that names the file and the key."""

from __future__ import annotations

import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from harness.config import nearest
from harness.errors import BadInput

Parsed = TypeVar("Parsed")


def read_toml(path: Path, parse: Callable[[Mapping[str, Any]], Parsed]) -> Parsed:
    """Return what ``parse`` makes of the file's table; `BadInput`, also of ``parse``, names the file."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadInput(f"{path} is not valid TOML: {error}") from error
    try:
        return parse(table)
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from error


def refuse_unknown_keys(model: type[BaseModel], table: Mapping[str, Any], where: str) -> None:
    """Raise `BadInput` with the nearest name for a key of a TOML table that a model does not have, at any depth."""
    fields = model.model_fields
    for key, value in table.items():
        if key not in fields:
            raise BadInput(f"unknown key {where + key!r}{nearest(key, fields)}")
        kind = fields[key].annotation
        may_be_left_out = typing.get_origin(kind) in (typing.Union, types.UnionType)
        for inner in typing.get_args(kind) if may_be_left_out else (kind,):
            if isinstance(value, Mapping) and isinstance(inner, type) and issubclass(inner, BaseModel):
                refuse_unknown_keys(inner, value, f"{where}{key}.")
