"""Who may run: locks that a dead owner does not hold."""

import pytest

from harness.errors import StudyLocked
from harness.locks import driver_lives, driver_lock
from harness.paths import StudyPaths


def test_only_a_held_lock_means_a_living_driver(bare_study: StudyPaths) -> None:
    """A lock file without its owner, as kill -9 leaves it, is no running driver."""
    assert not driver_lives(bare_study)
    with driver_lock(bare_study):
        assert driver_lives(bare_study)
        assert driver_lives(bare_study)
    assert bare_study.lock.exists()
    assert not driver_lives(bare_study)


def test_a_second_driver_is_refused(bare_study: StudyPaths) -> None:
    """One study has one driver; the message says how to end the other one."""
    with driver_lock(bare_study), pytest.raises(StudyLocked, match="overnight stop night"), driver_lock(bare_study):
        pass
