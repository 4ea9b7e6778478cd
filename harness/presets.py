"""Studies that many people begin with, as data: ``policies/presets/*.toml``. The command overrides every key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError

import policies
from harness.config import Section, Task, Value, explain, nearest
from harness.errors import BadInput
from harness.toml import read_toml, refuse_unknown_keys


class Preset(Section):
    """One file: what `overnight init --preset NAME` asks for where the command says nothing else."""

    description: str
    """One sentence: what is trained on what, and how."""
    task: Task
    policy: str
    budget: str
    model: str
    revision: str | None = None
    data: tuple[str, ...]
    """Each as on the command line."""
    format: tuple[str, ...] = ()
    column: tuple[str, ...] = ()
    subset: tuple[str, ...] = ()
    split: tuple[str, ...] = ()
    baseline: dict[str, Value] = Field(default_factory=dict)
    eval: dict[str, int | float | str] = Field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file; `BadInput` names the key that does not fit."""
        return read_toml(path, cls.parse)

    @classmethod
    def parse(cls, table: Mapping[str, Any]) -> Self:
        """Check what is already read from TOML."""
        refuse_unknown_keys(cls, table, "")
        try:
            return cls.model_validate(table)
        except ValidationError as error:
            raise BadInput(explain(error)) from error

    def completed(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of `harness.setup.create`: what is wanted, and from here what is left open.

        Options of the data are the preset's where the command gives none of that kind, also for the command's own data.
        """
        mine: dict[str, Any] = {name: getattr(self, name) for name in ("task", "policy", "budget", "model", "data")}
        if self.revision is not None and "model" not in wanted:
            mine["revision"] = self.revision
        options = {
            name: list(given) for name in ("format", "column", "subset", "split") if (given := getattr(self, name))
        }
        return (
            mine
            | dict(wanted)
            | {
                "options": options | dict(wanted["options"]),
                "baseline": self.baseline | dict(wanted["baseline"]),
                "eval_keys": self.eval | dict(wanted["eval_keys"]),
            }
        )


def presets() -> dict[str, Path]:
    """Return the files of the presets that come with us, by name."""
    assert policies.__file__ is not None
    folder = Path(policies.__file__).parent / "presets"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def find_preset(name: str) -> Preset:
    """Return a preset given by its name, or by the path of a file; `BadInput` lists the names."""
    if name.endswith(".toml"):
        return Preset.read(Path(name))
    known = presets()
    if name not in known:
        raise BadInput(f"no preset {name!r}{nearest(name, known)}; there are {', '.join(known)}")
    return Preset.read(known[name])
