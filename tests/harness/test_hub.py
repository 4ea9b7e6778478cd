"""The Hub's client against a hub on this machine that answers as the real one does."""

from __future__ import annotations

import http.server
import json
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from harness import hub
from harness.errors import BadInput

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """What the server says: a status for everything, or the files of one repository."""

    address: str = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """Return a running hub, which the client is pointed at, and an empty cache."""
    told = FakeHub()

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, format: str, *arguments: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            told.asked.append(self.path)
            path = self.path.partition("?")[0]
            if told.status != 200:
                return self.answer(told.status, b"{}", told.headers)
            if "/resolve/" in path:
                name = path.rpartition("/")[2]
                etag = {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT}
                return self.answer(200, told.files[name], etag)
            if "/tree/" in path:
                tree = [
                    {"type": "file", "path": name, "size": len(text), "oid": name} for name, text in told.files.items()
                ]
                return self.answer(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})
            siblings = [{"rfilename": name, "size": len(text)} for name, text in told.files.items()]
            table = {"id": "org/name", "sha": COMMIT, "siblings": siblings, "tags": [], "downloads": 0}
            return self.answer(200, json.dumps(table).encode(), {"Content-Type": "application/json"})

        def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    told.address = f"http://127.0.0.1:{server.server_address[1]}"
    point_at(monkeypatch, tmp_path, told.address)
    yield told
    server.shutdown()
    server.server_close()


def point_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, address: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_PROGRESS_BARS", True)


GATED = {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"}
UNKNOWN = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}


@pytest.mark.parametrize(
    ("status", "headers", "said"),
    [
        (404, UNKNOWN, "the Hub knows no model org/name, or it is private: check the name"),
        (401, UNKNOWN, "the Hub knows no model org/name, or it is private: check the name"),
        (403, GATED, "the model org/name is gated: accept its terms on"),
        (401, GATED, "the model org/name is gated: accept its terms on"),
        (404, {"X-Error-Code": "RevisionNotFound"}, "the model org/name has no revision 'v9'"),
        (403, {}, "HTTP 403"),
        (418, {}, "the Hub answered for the model org/name with HTTP 418"),
    ],
)
def test_what_the_hub_refuses_is_said(fake: FakeHub, status: int, headers: dict[str, str], said: str) -> None:
    """Cause and remedy, whichever call it was that failed."""
    fake.status, fake.headers = status, headers
    with pytest.raises(BadInput, match=re.escape(said)) as caught:
        hub.fetch_model("org/name", "v9")
    assert "Traceback" not in str(caught.value)
    with pytest.raises(BadInput, match="data set org/name"):
        hub.data_set_commit("org/name", "v9")


def test_a_hub_that_nobody_answers_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A closed port and the switch to work offline are told apart."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    point_at(monkeypatch, tmp_path, address)
    with pytest.raises(BadInput, match=rf"model org/name is not on this machine, and the Hub at {address} cannot be"):
        hub.fetch_model("org/name", None)
    with pytest.raises(BadInput, match=r"data set org/name .* cannot be reached"):
        hub.data_set_commit("org/name", None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(BadInput, match="HF_HUB_OFFLINE is set"):
        hub.fetch_model("org/name", None)
    with pytest.raises(BadInput, match="HF_HUB_OFFLINE is set"):
        hub.data_set_commit("org/name", None)


def test_only_what_runs_no_code_is_fetched(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned to a commit; no Python, no pickles, no folders; and found again when the Hub is gone."""
    names = ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "merges.txt")
    others = ("modeling_x.py", "pytorch_model.bin", "onnx/model.safetensors", "consolidated.safetensors", "README.md")
    fake.files = {name: name.encode() for name in (*names, *others)}
    snapshot = hub.fetch_model("org/name", "main")
    assert snapshot.commit == COMMIT
    assert sorted(path.name for path in snapshot.folder.iterdir()) == sorted(names)
    assert (snapshot.folder / "tokenizer.json").read_bytes() == b"tokenizer.json"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert hub.fetch_model("org/name", COMMIT) == snapshot


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("config.json", "pytorch_model.bin"), "has no safetensors; pickled weights"),
        (("adapter_config.json", "adapter_model.safetensors"), "is an adapter, not a model"),
        (("README.md", "notes.json"), "is no model"),
    ],
)
def test_what_is_no_model_is_refused_before_its_weights_come(fake: FakeHub, names: tuple[str, ...], said: str) -> None:
    """Nothing is downloaded that cannot be used."""
    fake.files = dict.fromkeys(names, b"{}")
    with pytest.raises(BadInput, match=said):
        hub.fetch_model("org/name", None)
    assert not [path for path in fake.asked if path.endswith((".bin", ".safetensors"))]


def test_a_data_set_has_a_commit_and_a_size(fake: FakeHub) -> None:
    """Its files' bytes, without its card."""
    fake.files = {"data.jsonl": b"x" * 100, "README.md": b"y" * 50}
    assert hub.data_set_commit("org/name", None) == (COMMIT, 100)


@pytest.mark.parametrize("text", ["gpt2", "a/b", "a/b.c-d_e"])
def test_ids(text: str) -> None:
    """What could be the name of a repository."""
    assert hub.is_id(text)


@pytest.mark.parametrize("text", ["a/b/c", "a--b", "../x", "", "ä/b", "/a", "a/", "a b"])
def test_no_ids(text: str) -> None:
    """What could not."""
    assert not hub.is_id(text)
