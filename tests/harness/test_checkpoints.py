import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import checkpoints, disk, files
from harness.errors import CheckFailed, StoppedEarly
from harness.paths import StudyPaths

Make = Callable[..., Path]


def test_publishing_twice_is_publishing_once(bare_study: StudyPaths, make_weights: Make) -> None:
    """After a crash the driver publishes again without looking, and the name tells the contents."""
    folder = make_weights(bare_study, 4)
    digest = checkpoints.publish(bare_study, 4, 2)
    assert digest == checkpoints.digest_of(folder) == checkpoints.publish(bare_study, 4, 2, expected=digest)
    published = checkpoints.folder_of(bare_study, 2, digest)
    assert sorted(path.name for path in published.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in bare_study.lineage.iterdir()] == [published.name]


def test_published_checkpoint_survives_pruning(bare_study: StudyPaths, make_weights: Make) -> None:
    """Losers lose their weights and keep config, curve and log; the lineage keeps everything."""
    for trial in (1, 2, 3):
        make_weights(bare_study, trial, b"x" * 1000 * trial)
    digest = checkpoints.publish(bare_study, 2, 1)
    assert checkpoints.prune(bare_study, keep={3}) == 1002
    assert [bare_study.trial(trial).weights.exists() for trial in (1, 2, 3)] == [False, False, True]
    assert bare_study.trial(1).config_json.exists()
    assert checkpoints.digest_of(checkpoints.folder_of(bare_study, 1, digest)) == digest
    assert checkpoints.publish(bare_study, 2, 1, expected=digest) == digest


def test_changed_weights_are_not_published(bare_study: StudyPaths, make_weights: Make) -> None:
    """What is published is what was scored."""
    folder = make_weights(bare_study, 1)
    scored = checkpoints.digest_of(folder)
    (folder / "model.safetensors").write_bytes(b"better weights")
    with pytest.raises(CheckFailed, match="changed after it was scored"):
        checkpoints.publish(bare_study, 1, 1, expected=scored)
    assert not bare_study.lineage.exists()


def test_changed_checkpoint_is_named(bare_study: StudyPaths, make_weights: Make) -> None:
    """One byte in a published file is noticed when it is published again."""
    make_weights(bare_study, 1)
    digest = checkpoints.publish(bare_study, 1, 1)
    file = checkpoints.folder_of(bare_study, 1, digest) / "config.json"
    file.unlink()
    file.write_text("{ }")
    with pytest.raises(CheckFailed, match="has changed since it was published"):
        checkpoints.publish(bare_study, 1, 1)


def test_links_in_a_model_folder_are_refused(bare_study: StudyPaths, make_weights: Make) -> None:
    """A training child cannot make the driver publish a file that the child may not read."""
    folder = make_weights(bare_study, 1)
    (folder / "extra.bin").symlink_to(bare_study.split("holdout") / "tokens.bin")
    with pytest.raises(CheckFailed, match="not a regular file"):
        checkpoints.publish(bare_study, 1, 1)


@pytest.mark.parametrize("make", [lambda folder: None, lambda folder: folder.mkdir(parents=True)])
def test_no_model_is_said(bare_study: StudyPaths, make: Callable[[Path], None]) -> None:
    """A missing or empty folder has no digest."""
    make(bare_study.trial(1).weights)
    with pytest.raises(CheckFailed, match="model folder"):
        checkpoints.digest_of(bare_study.trial(1).weights)


def test_an_interrupted_publication_leaves_no_checkpoint(
    bare_study: StudyPaths, make_weights: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever system call fails, the lineage holds the whole checkpoint or none, and the next attempt succeeds."""
    make_weights(bare_study, 1)
    for name in ("link", "fsync"):
        for turn in range(1, 5):
            calls = [0]
            real = getattr(os, name)

            def fail(
                *args: object,
                turn: int = turn,
                calls: list[int] = calls,
                real: Callable[..., object] = real,
                **kwargs: object,
            ) -> object:
                calls[0] += 1
                if calls[0] == turn:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return real(*args, **kwargs)

            with monkeypatch.context() as patch:
                patch.setattr(f"harness.files.os.{name}", fail)
                try:
                    checkpoints.publish(bare_study, 1, turn)
                except OSError:
                    assert not list(bare_study.lineage.glob(f"{turn:05d}-*")) or name == "fsync"
            digest = checkpoints.publish(bare_study, 1, turn)
            checkpoints.check(checkpoints.folder_of(bare_study, turn, digest), digest)


def test_copies_where_links_are_impossible(
    bare_study: StudyPaths, make_weights: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Across devices the bytes are copied."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    folder = make_weights(bare_study, 1)
    monkeypatch.setattr("harness.files.os.link", refuse)
    digest = checkpoints.publish(bare_study, 1, 1)
    copy = checkpoints.folder_of(bare_study, 1, digest) / "model.safetensors"
    assert copy.read_bytes() == (folder / "model.safetensors").read_bytes()
    assert copy.stat().st_nlink == 1


def test_room_is_made_or_the_search_pauses(
    bare_study: StudyPaths, make_weights: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losers go first; when that is not enough the reason has the numbers."""
    make_weights(bare_study, 1, b"x" * 5000)
    monkeypatch.setattr(
        "harness.disk.free_bytes", lambda folder: 10_000 if bare_study.trial(1).weights.exists() else 15_000
    )
    assert checkpoints.make_room(bare_study, {1}, 4_000, reserve_bytes=6_000) == 0
    assert bare_study.trial(1).weights.exists()
    assert checkpoints.make_room(bare_study, set(), 6_000, reserve_bytes=6_000) == 5002
    with pytest.raises(StoppedEarly, match=r"needs 20\.0 kB .* 11\.0 kB are missing"):
        checkpoints.make_room(bare_study, set(), 20_000, reserve_bytes=6_000)


def test_write_whole_keeps_the_old_file_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk does not cost the file that was there, and nothing is left beside it."""

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "seal.json"
    files.write_whole(path, "old")
    monkeypatch.setattr("harness.files.os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        files.write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_sizes_for_people() -> None:
    """Sizes are read, not counted."""
    assert [disk.readable(size) for size in (0, 999, 1400, 2.5e9, 3e13)] == [
        "0 bytes",
        "999 bytes",
        "1.4 kB",
        "2.5 GB",
        "30.0 TB",
    ]


def test_free_space_of_a_folder_to_be(tmp_path: Path) -> None:
    """Before the folder exists its disk is asked."""
    assert disk.free_bytes(tmp_path / "not" / "yet") > 0
    assert disk.shortfall_bytes(tmp_path, 1 << 60) > 0
