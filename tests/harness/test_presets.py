from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from harness import cli
from harness.errors import BadInput
from harness.policy import Policy, find_policy, packaged_policies
from harness.presets import Preset, find_preset, presets
from harness.sources import data_sources

NOTHING: dict[str, Any] = {"options": {}, "baseline": {}, "eval_keys": {}}


@pytest.mark.parametrize("name", presets())
def test_every_preset_is_right(name: str) -> None:
    """It reads, its data are sources, and its policy has the task and every knob that it sets."""
    preset = find_preset(name)
    (source,) = data_sources(preset.data, [], preset.completed(NOTHING)["options"])
    assert source.hub is not None
    if preset.policy not in packaged_policies():
        pytest.skip(f"policy {preset.policy} is not there")
    path = find_policy(preset.policy)
    assert preset.task in tomllib.loads(path.read_text()).get("tasks", [])
    policy = Policy.load(path, [source.name])
    assert policy.baseline(preset.baseline)


def test_the_command_goes_before_the_preset() -> None:
    """Every key is overridden on its own; knobs and options one by one."""
    preset = find_preset("quotes")
    wanted = {"model": "./tiny", "data": ["q=quotes.csv"], "budget": "10s"} | NOTHING
    wanted |= {"options": {"format": ["csv"]}, "baseline": {"batch.per_device": 2}}
    told = preset.completed(wanted)
    assert (told["model"], told["data"], told["budget"], told["task"]) == (
        "./tiny",
        ["q=quotes.csv"],
        "10s",
        "continue",
    )
    assert told["options"] == {"column": ["quote"], "format": ["csv"]}
    assert told["baseline"]["batch.per_device"] == 2
    assert told["baseline"]["batch.packing"] is False


def test_presets_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """With what each stands for."""
    assert cli.main(["init", "--preset", "list"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for name in presets():
        assert f"{name}: {find_preset(name).description}." in printed
    assert "--model openai-community/gpt2" in printed


def test_mistakes_are_named(tmp_path: Path) -> None:
    """A mistyped preset, or a key in one."""
    with pytest.raises(BadInput, match=r"no preset 'quote'; did you mean 'quotes'"):
        find_preset("quote")
    path = tmp_path / "mine.toml"
    path.write_text("modell = 1\n")
    with pytest.raises(BadInput, match=re.escape("mine.toml: unknown key 'modell'; did you mean 'model'?")):
        find_preset(str(path))
    path.write_text('model = "x"\n')
    with pytest.raises(BadInput, match=r"mine\.toml: .*Field required"):
        Preset.read(path)
