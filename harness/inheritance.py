"""What a new study takes over from an earlier one: the question it asked, and its best config as the new baseline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.base import Base
from harness.config import Value, difference
from harness.errors import BadInput
from harness.queries import Reader
from harness.sizes import BaseFacts
from harness.sources import GUARD_NAME
from harness.study import Study
from harness.studyfile import FRESH


def inherited(old: Study, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `harness.setup.create`: what is wanted now, and from ``old`` what is left open.

    On the same task, model and data the evaluation stays what it was. The base model is the copy in the old study,
    which may be the only one left. The old seal as a whole is not asked: after an upgrade it is broken, and this is
    the way on; the digests of the base model are.
    """
    asked = old.file.study
    task = wanted.get("task", asked.task)
    if task != asked.task and "policy" not in wanted:
        raise BadInput(
            f"study {old.name} was for the task {asked.task}, and its policy with it: for {task} give --policy as well"
        )
    same_model = wanted.get("model", asked.model) == asked.model and "revision" not in wanted
    of_data = [text for texts in wanted["options"].values() for text in texts if not text.startswith(f"{GUARD_NAME}=")]
    same_data = not (wanted.keys() & {"data", "general"})
    result: dict[str, Any] = {
        "policy": str(old.paths.policy_toml),
        "budget": asked.budget,
        "task": asked.task,
        "model": asked.model,
    }
    if "data" not in wanted:
        if of_data:
            raise BadInput("with --from, options of the data are inherited with it: give --data to change them")
        result["data"] = [source for source in asked.data if not source.general]
    if "general" not in wanted:
        result["general"] = [source for source in asked.data if source.general]
    if "guard" not in wanted and old.file.eval.guard is not None:
        result["guard"] = old.file.eval.guard
    if same_model and asked.model != FRESH:
        result["base"] = kept_base(old)
    if same_model and same_data and task == asked.task:
        result["evaluation"] = old.file.eval
        if asked.model == FRESH:
            result["vocabulary"] = asked.vocabulary
    return result | dict(wanted) | {"baseline": _best(old) | wanted["baseline"]}


def kept_base(old: Study) -> Base:
    """Return the base model that a study holds, with the digests under which it was sealed."""
    folder = old.paths.base
    prefix = str(Path(folder).relative_to(old.paths.root)) + "/"
    sealed = {
        name.removeprefix(prefix): digest
        for name, digest in old.seal.manifest.data.items()
        if name.startswith(prefix) and not name.endswith("/base.json")
    }
    remedy = f"it is no longer the model that study {old.name} was sealed with: name it again with --model"
    return Base(folder=folder, facts=BaseFacts.read(folder), digests=sealed, remedy=remedy)


def _best(old: Study) -> dict[str, Value]:
    """Return the best config of a study as knobs that differ from its policy's defaults."""
    with Reader(old.paths.ledger) as reader:
        incumbent = reader.incumbent()
    best = incumbent.config if incumbent is not None else old.baseline
    return difference(old.policy.baseline({}), best)
