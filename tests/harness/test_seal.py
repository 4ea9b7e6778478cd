import ast
import json
import os
import py_compile
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import frozen
from harness.errors import BadInput, SealBroken
from harness.paths import StudyPaths
from harness.seal import FOLDERS, MODULES, Code, Seal


def write(relative: str, content: bytes = b"x = 1\n") -> Callable[[Path], object]:
    def damage(root: Path) -> None:
        (root / relative).parent.mkdir(parents=True, exist_ok=True)
        (root / relative).write_bytes(content)

    return damage


def forge_bytecode(root: Path) -> None:
    """Put bytecode of another source beside ``frozen/__init__.py`` that import would take for its own."""
    source = root / "frozen" / "__init__.py"
    honest = source.read_bytes()
    status = source.stat()
    source.write_bytes(b"pass  # forged".ljust(len(honest), b"#")[: len(honest)])
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    py_compile.compile(str(source), doraise=True)
    source.write_bytes(honest)
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))


def forge_unchecked_bytecode(root: Path) -> None:
    other = root / "other.py"
    other.write_text("score = 0.001\n")
    target = Path(py_compile.compile(str(other), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH) or "")
    cache = root / "frozen" / "__pycache__"
    cache.mkdir()
    shutil.move(target, cache / target.name.replace("other", "__init__"))


def flip_and_restore_time(root: Path) -> None:
    path = root / "frozen" / "__init__.py"
    status, data = path.stat(), bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def swap_for_link(root: Path) -> None:
    path = root / "harness" / "jobs" / "job.py"
    path.rename(root / "elsewhere.py")
    path.symlink_to(root / "elsewhere.py")


def swap_folder_for_link(root: Path) -> None:
    (root / "frozen").rename(root / "thawed")
    (root / "frozen").symlink_to(root / "thawed")


def break_syntax_and_restore_time(root: Path) -> None:
    path = root / "frozen" / "__init__.py"
    cached = f"__init__.{sys.implementation.cache_tag}.pyc"
    py_compile.compile(str(path), str(root / "frozen" / "__pycache__" / cached))
    status, data = path.stat(), bytearray(path.read_bytes())
    data[:1] = b"("
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


CODE_DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped": (flip_and_restore_time, "frozen/__init__.py has changed"),
    "no syntax": (break_syntax_and_restore_time, "frozen/__init__.py has changed"),
    "added": (write("frozen/x.py"), "frozen/x.py was added"),
    "sitecustomize": (write("frozen/sitecustomize.py"), "frozen/sitecustomize.py was added"),
    "package": (write("frozen/deep/er/__init__.py"), "frozen/deep/er/__init__.py was added"),
    "extension": (write("harness/config.abi3.so"), "harness/config.abi3.so was added"),
    "shadow package": (write("harness/config/__init__.py"), "harness/config was added"),
    "orphan bytecode": (
        write("frozen/__pycache__/x.cpython-311.pyc"),
        "frozen/__pycache__/x.cpython-311.pyc was added",
    ),
    "odd bytecode": (write("frozen/__pycache__/__init__.pyc"), "frozen/__pycache__/__init__.pyc was added"),
    "sourceless": (write("frozen/x.pyc"), "frozen/x.pyc was added"),
    "forged": (forge_bytecode, "is not the compiled __init__.py"),
    "unchecked": (forge_unchecked_bytecode, "is not the compiled __init__.py"),
    "missing": (lambda root: (root / "harness/records.py").unlink(), "harness/records.py is missing"),
    "link": (swap_for_link, "harness/jobs/job.py is a symbolic link"),
    "linked folder": (swap_folder_for_link, "frozen is a symbolic link"),
    "linked cache": (
        lambda root: (root / "frozen/__pycache__").symlink_to(root / "harness"),
        "frozen/__pycache__ is not a folder",
    ),
}


@pytest.mark.parametrize("damage", CODE_DAMAGE)
def test_damage_to_code_is_named(bare_study: StudyPaths, code: Code, damage: str) -> None:
    """Whatever changes, vanishes or appears among the sealed code breaks the seal, and is named."""
    seal = Seal.take(bare_study, code=code)
    seal.verify()
    act, said = CODE_DAMAGE[damage]
    act(code.root)
    for attempt in (seal, Seal.load(bare_study, recorded=seal.digest, code=code)):
        with pytest.raises(SealBroken) as caught:
            attempt.verify()
        assert said in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda p: (p.split("val") / "tokens.bin").write_bytes(b"val" * 99 + b"vam"),
            "data/val/tokens.bin has changed",
        ),
        (lambda p: (p.split("train") / "more.bin").write_bytes(b""), "data/train/more.bin was added"),
        (lambda p: (p.split("holdout") / "tokens.bin").unlink(), "data/holdout/tokens.bin is missing"),
        (lambda p: (p.tokenizer / "tokenizer.json").write_text("{ }"), "data/tokenizer/tokenizer.json has changed"),
        (lambda p: p.policy_toml.write_text("[proposals]\nmax_changes = 3\n"), "policy.toml has changed"),
        (lambda p: p.policy_toml.unlink(), "policy.toml is missing"),
        (
            lambda p: p.policy_toml.symlink_to(p.policy_toml.rename(p.root / "elsewhere.toml")),
            "policy.toml is a symbolic link",
        ),
        (
            lambda p: p.study_toml.write_text('[study]\ntask = "pretrain"\nbudget = "6s"\n'),
            "study.toml [study] has changed",
        ),
        (lambda p: shutil.rmtree(p.root / "data"), "data/val/tokens.bin is missing"),
    ],
)
def test_damage_to_the_study_is_named(
    bare_study: StudyPaths, change: Callable[[StudyPaths], object], said: str
) -> None:
    """Data, tokenizer, policy and the sealed sections of study.toml are covered."""
    seal = Seal.take(bare_study)
    change(bare_study)
    with pytest.raises(SealBroken) as caught:
        seal.verify(thorough=True)
    assert said in str(caught.value)


def test_open_sections_and_comments_may_change(bare_study: StudyPaths) -> None:
    """The owner may turn what is not sealed, and may respell what is."""
    seal = Seal.take(bare_study)
    bare_study.study_toml.write_text("[run]\ntrials = 9\n[study]  # mine\nbudget = '5s'\ntask = 'pretrain'\n")
    bare_study.program_md.write_text("be bold")
    assert seal.verify(thorough=True) == seal.digest


def test_ordinary_bytecode_passes(bare_study: StudyPaths, code: Code) -> None:
    """What imports write beside the sources is not a change, at any level of optimisation."""
    seal = Seal.take(bare_study, code=code)
    for source in [*code.root.rglob("*.py")]:
        for level in (-1, 0, 1, 2):
            py_compile.compile(str(source), optimize=level, doraise=True)
        py_compile.compile(str(source), invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH, optimize=1)
    (code.root / "frozen/__pycache__/__init__.cpython-399.pyc").write_bytes(b"another version's")
    (code.root / "frozen/__pycache__/__init__.cpython-311.pyc.1234").write_bytes(b"half")
    (code.root / "harness/__pycache__/cli.cpython-311.pyc").write_bytes(b"not sealed")
    assert seal.verify() == seal.digest


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        ("score = 0.001\n", "frozen/__init__.cpython-311.pyc", "is not the compiled __init__.py"),
        ("score = 0.001\n", "frozen/other.cpython-311.pyc", "was added"),
        ("score = 0.001\n", "harness/config.cpython-311.pyc", "is not the compiled config.py"),
    ],
)
def test_forged_bytecode_of_the_children_is_named(
    bare_study: StudyPaths, code: Code, source: str, target: str, said: str
) -> None:
    """The cache from which the children run our modules is looked at too."""
    seal = Seal.take(bare_study, code=code)
    folder = bare_study.bytecode.joinpath(*code.root.parts[1:])
    forged = folder / target.replace("cpython-311", str(sys.implementation.cache_tag))
    file = bare_study.root / "forged.py"
    file.write_text(source)
    forged.parent.mkdir(parents=True)
    py_compile.compile(
        str(file), str(forged), doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
    )
    with pytest.raises(SealBroken, match=said):
        seal.verify()


def test_bytecode_of_the_children_passes(bare_study: StudyPaths, code: Code) -> None:
    """What the children's interpreter writes into its own cache, folders included, is not a change."""
    seal = Seal.take(bare_study, code=code)
    for source in code.root.rglob("*.py"):
        place = bare_study.bytecode.joinpath(*source.parent.parts[1:])
        place.mkdir(parents=True, exist_ok=True)
        name = f"{source.stem}.{sys.implementation.cache_tag}.pyc"
        py_compile.compile(str(source), str(place / name), doraise=True)
    assert seal.verify() == seal.digest


def test_untouched_files_are_not_read_again(bare_study: StudyPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each trial the seal costs stat calls, but a file just written is read until its clock has moved on."""
    seal = Seal.take(bare_study)
    read: list[int] = []
    digest = __import__("hashlib").file_digest
    monkeypatch.setattr("harness.seal.hashlib.file_digest", lambda f, n: (read.append(1), digest(f, n))[1])
    monkeypatch.setattr("harness.seal.RACY_NS", -(10**18))
    seal.verify()
    first = len(read)
    seal.verify()
    assert len(read) == first
    monkeypatch.setattr("harness.seal.RACY_NS", 10**18)
    seal.verify(thorough=True)
    seal.verify()
    assert len(read) == 3 * first


def test_same_bytes_give_the_same_seal(bare_study: StudyPaths, tmp_path: Path) -> None:
    """The root depends on contents only, so two studies on the same question have the same seal."""
    twin = StudyPaths(tmp_path / "elsewhere" / "twin")
    shutil.copytree(bare_study.root, twin.root)
    assert Seal.take(bare_study).digest == Seal.take(twin).digest


def test_manifest_cannot_be_rewritten(bare_study: StudyPaths, code: Code) -> None:
    """A manifest that was edited, or taken anew after a change, contradicts itself or the ledger."""
    seal = Seal.take(bare_study, code=code)
    (bare_study.split("val") / "tokens.bin").write_bytes(b"easy")
    forged = Seal.take(bare_study, code=code)
    with pytest.raises(SealBroken, match="not the one that the ledger recorded"):
        Seal.load(bare_study, recorded=seal.digest, code=code).verify()
    document = json.loads(bare_study.seal_json.read_text())
    assert document["root"] == forged.digest
    document["data"]["data/val/tokens.bin"] = "0" * 64
    bare_study.seal_json.write_text(json.dumps(document))
    with pytest.raises(SealBroken, match="own root"):
        Seal.load(bare_study, recorded=seal.digest, code=code)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 1, "code": 3}', "\x00"])
def test_broken_manifest_is_named(bare_study: StudyPaths, text: str) -> None:
    """A manifest that cannot be read is a broken seal, not a stack trace."""
    bare_study.seal_json.write_text(text)
    with pytest.raises(SealBroken, match=r"seal\.json"):
        Seal.load(bare_study, recorded=None)


def test_newer_seal_is_refused(bare_study: StudyPaths) -> None:
    """A study of a newer version is not misread."""
    bare_study.seal_json.write_text('{"version": 2}')
    with pytest.raises(BadInput, match="newer version"):
        Seal.load(bare_study, recorded=None)


def test_shadowing_package_is_named(bare_study: StudyPaths, tmp_path: Path) -> None:
    """A folder named frozen that was imported in the place of ours breaks the seal."""
    seal = Seal.take(bare_study)
    shadowed = Seal.load(bare_study, recorded=seal.digest, code=Code(imported=tmp_path / "frozen"))
    with pytest.raises(SealBroken, match="was imported from"):
        shadowed.verify()


def test_links_cannot_be_sealed(bare_study: StudyPaths) -> None:
    """A link among the data would let the sealed bytes live elsewhere."""
    (bare_study.split("val") / "tokens.bin").rename(bare_study.root / "tokens.bin")
    (bare_study.split("val") / "tokens.bin").symlink_to(bare_study.root / "tokens.bin")
    with pytest.raises(SealBroken, match=r"data/val/tokens\.bin cannot be sealed"):
        Seal.take(bare_study)


def test_a_linked_policy_cannot_be_sealed(bare_study: StudyPaths) -> None:
    """Rules that lie elsewhere could change without the study's folder."""
    bare_study.policy_toml.symlink_to(bare_study.policy_toml.rename(bare_study.root / "elsewhere.toml"))
    with pytest.raises(SealBroken, match=r"cannot be sealed: policy\.toml is a symbolic link"):
        Seal.take(bare_study)


def test_sealed_modules_are_all_that_sealed_code_imports() -> None:
    """No score depends on a module of ours that the seal leaves out."""
    root = Code().root
    assert Path(str(frozen.__file__)).parent == root / "frozen"
    sealed = set(MODULES)
    for folder in FOLDERS:
        sealed |= {path.relative_to(root).as_posix() for path in (root / folder).rglob("*.py")}
    for name in sorted(sealed):
        for node in ast.walk(ast.parse((root / name).read_text())):
            modules = []
            if isinstance(node, ast.ImportFrom) and node.module:
                modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            for module in modules:
                if module.split(".")[0] in ("frozen", "harness", "agent", "policies"):
                    path = module.replace(".", "/")
                    wanted = {f"{path}.py", f"{path}/__init__.py"}
                    assert wanted & sealed or not any((root / file).exists() for file in wanted), (name, module)
