"""What this machine offers a search."""

from pathlib import Path

import pytest

from harness import doctor


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the probe of torch be a program that needs no torch."""
    monkeypatch.setattr(doctor, "PROBE", "print('2.13.0+cpu')")


@pytest.mark.usefixtures("quick")
def test_everything_a_search_needs_is_looked_at(tmp_path: Path) -> None:
    """Nothing that can spoil a night is left out."""
    found = {finding.what for finding in doctor.examine(tmp_path, {})}
    assert found >= {"Python", "torch", "device", "packages", "CPU", "memory", "disk", "sandbox", "keys"}


@pytest.mark.usefixtures("quick")
def test_keys_are_named_and_never_shown(tmp_path: Path) -> None:
    """Present or not is all that is said of a key."""
    text = str(doctor.examine(tmp_path, {"OPENAI_API_KEY": "sk-secret"}))
    assert "OPENAI_API_KEY present" in text
    assert "ANTHROPIC_API_KEY not set" in text
    assert "secret" not in text


def test_a_torch_that_does_not_import_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken build is said in its own last words."""
    monkeypatch.setattr(doctor, "PROBE", "raise ImportError('libcudart.so.13 is gone')")
    torch = next(finding for finding in doctor.examine(tmp_path, {}) if finding.what == "torch")
    assert torch.state == "missing"
    assert "libcudart" in torch.text
