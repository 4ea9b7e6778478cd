import base64
import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.errors import SealBroken
from harness.paths import StudyPaths
from harness.seal import Code, Seal
from harness.upgrade import inspect, installed_digests, is_truthful, tool_of


@pytest.fixture
def sealed(bare_study: StudyPaths, code: Code) -> Seal:
    """Return the seal of a study under a copy of our code, as overnight 1.0 made it."""
    old = dataclasses.replace(code, tool=lambda: "1.0", versions=lambda: {"torch": "2.13"})
    return Seal.take(bare_study, code=old)


def reloaded(sealed: Seal, paths: StudyPaths, tool: str = "2.0", torch: str = "2.13") -> Seal:
    now = dataclasses.replace(sealed.code, tool=lambda: tool, versions=lambda: {"torch": torch})
    return Seal.load(paths, recorded=sealed.digest, recorded_tool="1.0", code=now)


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


def texts(changes: tuple[object, ...]) -> list[str]:
    return [str(change) for change in changes]


def installed(code: Code) -> dict[str, str]:
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in code.files().items()}


def test_the_same_tool_is_no_upgrade(sealed: Seal, bare_study: StudyPaths) -> None:
    """Where nothing changed there is nothing to tell apart, whatever version number the same code carries."""
    for tool in ("1.0", "2.0"):
        seal = reloaded(sealed, bare_study, tool)
        found = inspect(seal, thorough=True)
        assert (found.faults, found.upgrade) == ((), None)
        assert tool_of(seal, thorough=True).seal == sealed.digest


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (append, "frozen/timer.py has changed"),
        (Path.unlink, "frozen/timer.py is missing"),
        (lambda path: shutil.copy(path, path.with_name("more.py")), "frozen/more.py was added"),
    ],
)
def test_changed_code_is_an_upgrade_only_under_another_version(
    sealed: Seal, bare_study: StudyPaths, damage: Callable[[Path], object], said: str
) -> None:
    """One byte is tampering under the version that sealed, and an upgrade under another one; named either way."""
    damage(sealed.code.root / "frozen" / "timer.py")
    same = inspect(reloaded(sealed, bare_study, "1.0"), thorough=True)
    assert (texts(same.faults), same.upgrade) == ([said], None)
    with pytest.raises(SealBroken, match=said):
        tool_of(reloaded(sealed, bare_study, "1.0"), thorough=True)
    other = inspect(reloaded(sealed, bare_study), thorough=True)
    assert other.faults == ()
    assert str(other.upgrade) == f"overnight 1.0 sealed the study, this is overnight 2.0: {said}"


def test_other_packages_are_an_upgrade_that_explains_no_changed_code(sealed: Seal, bare_study: StudyPaths) -> None:
    """Another torch is named; under it a changed file of ours is still tampering."""
    seal = reloaded(sealed, bare_study, "1.0", torch="2.14")
    found = inspect(seal, thorough=True)
    assert found.faults == ()
    assert str(found.upgrade) == "overnight 1.0 sealed the study with other packages: torch is 2.14, not 2.13"
    append(sealed.code.root / "frozen" / "timer.py")
    assert texts(inspect(seal, thorough=True).faults) == ["frozen/timer.py has changed"]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda paths, code: append(paths.split("val") / "tokens.bin"), "data/val/tokens.bin has changed"),
        (lambda paths, code: append(paths.tokenizer / "tokenizer.json"), "data/tokenizer/tokenizer.json has changed"),
        (lambda paths, code: append(paths.policy_toml), "policy.toml has changed"),
        (lambda paths, code: paths.study_toml.write_text("[study]\n"), r"study.toml \[study\] has changed"),
        (
            lambda paths, code: (code.root / "frozen/more.py").symlink_to(code.root / "frozen/timer.py"),
            "frozen/more.py is a symbolic link",
        ),
        (
            lambda paths, code: write(code.root / "frozen/__pycache__/more.cpython-311.pyc"),
            "frozen/__pycache__/more.cpython-311.pyc was added",
        ),
    ],
)
def test_no_upgrade_explains_another_question(
    sealed: Seal, bare_study: StudyPaths, damage: Callable[[StudyPaths, Code], object], said: str
) -> None:
    """Data, tokenizer, rules, links and bytecode are faults under every version, beside what the upgrade changed."""
    append(sealed.code.root / "frozen" / "timer.py")
    damage(bare_study, sealed.code)
    with pytest.raises(SealBroken, match=f"{said}; frozen/timer.py has changed") as caught:
        tool_of(reloaded(sealed, bare_study), thorough=True)
    assert "overnight 1.0 sealed it, this is overnight 2.0" in str(caught.value)


def write(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"forged")


def test_a_search_stays_refused(sealed: Seal, bare_study: StudyPaths) -> None:
    """An upgrade ends the search of a study, and the way on is named."""
    append(sealed.code.root / "frozen" / "timer.py")
    with pytest.raises(SealBroken, match=r"frozen/timer\.py has changed .*`overnight init NEW --from night`"):
        reloaded(sealed, bare_study).verify()


def test_an_upgrade_is_held_against_its_installer(sealed: Seal, bare_study: StudyPaths) -> None:
    """A byte that was changed after the new version was installed is tampering, and so is a file it did not bring."""
    append(sealed.code.root / "frozen" / "timer.py")
    brought = installed(sealed.code)
    seal = reloaded(sealed, bare_study)
    assert inspect(seal, thorough=True, installed=brought).faults == ()
    append(sealed.code.root / "frozen" / "timer.py")
    shutil.copy(sealed.code.root / "frozen" / "timer.py", sealed.code.root / "frozen" / "more.py")
    assert texts(inspect(seal, thorough=True, installed=brought).faults) == [
        "frozen/more.py is no part of overnight 2.0 as it was installed",
        "frozen/timer.py is not what overnight 2.0 installed",
    ]


def test_the_installers_digests_are_read(sealed: Seal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list that pip leaves beside a package holds the digests of its files, in another spelling than ours."""
    wanted = installed(sealed.code)
    record = tmp_path / "site" / "overnight-2.0.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: overnight\nVersion: 2.0\n")
    spelled = {n: base64.urlsafe_b64encode(bytes.fromhex(d)).decode().rstrip("=") for n, d in wanted.items()}
    lines = [f"{name},sha256={digest},9" for name, digest in spelled.items()]
    (record / "RECORD").write_text("\n".join([*lines, "frozen/__pycache__/timer.cpython-311.pyc,,"]) + "\n")
    monkeypatch.syspath_prepend(record.parent)
    assert installed_digests() == wanted


def test_a_rewritten_version_is_named(sealed: Seal, bare_study: StudyPaths) -> None:
    """Who makes tampering look like an upgrade by another version in the manifest is contradicted by the ledger."""
    document = json.loads(bare_study.seal_json.read_text())
    bare_study.seal_json.write_text(json.dumps(document | {"tool": "0.9"}))
    append(sealed.code.root / "frozen" / "timer.py")
    found = inspect(reloaded(sealed, bare_study, "1.0"), thorough=True)
    assert texts(found.faults) == ["seal.json names overnight 0.9, but the ledger recorded 1.0"]


def test_the_new_seal_is_that_of_what_runs(sealed: Seal, bare_study: StudyPaths) -> None:
    """Under another tool a row's seal is the one that a study made now would have, and its facts prove it."""
    append(sealed.code.root / "frozen" / "timer.py")
    seal = reloaded(sealed, bare_study, torch="2.14")
    tool = tool_of(seal, thorough=True)
    facts = json.loads(json.dumps(tool.facts()))
    assert is_truthful(sealed.manifest, facts)
    assert not is_truthful(sealed.manifest, facts | {"versions": {"torch": "2.15"}})
    assert not is_truthful(sealed.manifest, facts | {"code": 3})
    assert not is_truthful(sealed.manifest, {})
    assert not is_truthful(tool.manifest, facts)
    assert tool.seal == Seal.take(bare_study, code=seal.code).digest != sealed.digest
