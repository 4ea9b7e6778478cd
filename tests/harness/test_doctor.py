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


@pytest.mark.usefixtures("quick")
def test_what_fine_tuning_can_use_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Present or how to get it; a search does without, so neither is a fault."""

    def version(name: str) -> str:
        if name == "gguf":
            raise doctor.PackageNotFoundError(name)
        return "1.2.3"

    monkeypatch.setattr(doctor, "version", version)
    monkeypatch.setattr(doctor, "demo_model", lambda: None)
    found = {finding.what: finding for finding in doctor.examine(tmp_path, {})}
    assert found["fine-tuning"].state == found["demo model"].state == "ok"
    assert "bitsandbytes 1.2.3; schedulefree 1.2.3; no gguf" in found["fine-tuning"].text
    assert "`make demo-model`" in found["demo model"].text
    model = tmp_path / "small.gguf"
    model.write_bytes(b"x" * 2000)
    monkeypatch.setattr(doctor, "demo_model", lambda: model)
    found = {finding.what: finding for finding in doctor.examine(tmp_path, {})}
    assert found["demo model"].text == "small.gguf (2.0 kB)"
