"""The Hugging Face Hub as a source of models and data sets: pinned to a commit, and every failure a sentence.

Only what can run no code is fetched: JSON, safetensors, tokenizers and templates. Keys (``HF_TOKEN``, or what
``hf auth login`` stored) are used by the driver for the download and never reach a job.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from harness.errors import BadInput

ID = re.compile(r"(?:[A-Za-z0-9][\w.-]{0,95}/)?[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
SMALL_FILES = ("*.json", "*.jinja", "tokenizer.model", "*.tiktoken", "vocab.txt", "merges.txt", "*.spm", "spiece.model")
WEIGHTS = ("*.safetensors",)
LEFT_OUT = ("*/*", "consolidated*", "optimizer*", "training_args*")
"""Never fetched: what lies in folders (other formats of the same weights), and the authors' own layout beside it."""
COMMIT = re.compile(r"[0-9a-f]{40}")
Kind = Literal["model", "dataset"]


class Snapshot(NamedTuple):
    """A repository at one commit, in the Hub's own cache on this machine."""

    folder: Path
    commit: str


def is_id(text: str) -> bool:
    """Tell whether a text could be the name of a repository."""
    return ID.fullmatch(text) is not None and "--" not in text and ".." not in text


def fetch_model(name: str, revision: str | None) -> Snapshot:
    """Download a model's config and tokenizer, then its weights, unless they are there; `BadInput` says what failed.

    What is no model, or comes as pickles, is refused before any weights are fetched.
    """
    from huggingface_hub import snapshot_download

    def fetch(revision: str | None, patterns: tuple[str, ...]) -> Path:
        with _said("model", name, revision):
            return Path(
                snapshot_download(
                    name,
                    revision=revision,
                    allow_patterns=list(patterns),
                    ignore_patterns=list(LEFT_OUT),
                    endpoint=_endpoint(),
                )
            )

    folder = fetch(revision, SMALL_FILES)
    commit = folder.name
    if not (folder / "config.json").is_file():
        what = "an adapter, not a model: name the base that it was trained on" if _is_adapter(folder) else "no model"
        raise BadInput(f"{name} on the Hub is {what} (it has no config.json)")
    folder = fetch(commit, (*SMALL_FILES, *WEIGHTS))
    if not any(folder.glob("*.safetensors")):
        raise BadInput(
            f"{name} on the Hub has no safetensors; pickled weights (.bin, .pt) run code when they are loaded and are"
            " not fetched: take a revision or a repository that has them"
        )
    return Snapshot(folder, commit)


def _is_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").is_file()


def data_set_commit(name: str, revision: str | None) -> tuple[str, int]:
    """Return the commit of a data set and the bytes of its files; `BadInput` if it cannot be had."""
    from huggingface_hub import HfApi

    with _said("dataset", name, revision):
        found = HfApi(endpoint=_endpoint()).dataset_info(name, revision=revision, files_metadata=True)
    if found.sha is None:
        raise BadInput(f"the Hub names no commit of the data set {name}")
    size = sum(file.size or 0 for file in found.siblings or () if not file.rfilename.startswith((".", "README")))
    return found.sha, size


def _endpoint() -> str | None:
    """Return the address of another hub (a mirror, a company's own), as the Hub's own tools name it."""
    return os.environ.get("HF_ENDPOINT", "").strip() or None


@contextmanager
def _said(kind: Kind, name: str, revision: str | None) -> Iterator[None]:
    """Turn what the Hub's client raises into a sentence with a cause and a remedy."""
    import httpx2
    from huggingface_hub import errors

    what = f"{'data set' if kind == 'dataset' else 'model'} {name}"
    page = f"{_endpoint() or 'https://huggingface.co'}/{'datasets/' if kind == 'dataset' else ''}{name}"
    local = "give a folder that is on this machine, or go online once"
    try:
        yield
    except errors.GatedRepoError as error:
        raise BadInput(
            f"the {what} is gated: accept its terms on {page} and set HF_TOKEN (or `hf auth login`) to a token of that"
            " account"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise BadInput(f"the {what} has no revision {revision!r}: see {page}/commits") from error
    except errors.RepositoryNotFoundError as error:
        raise BadInput(
            f"the Hub knows no {what}, or it is private: check the name"
            f"{'' if os.environ.get('HF_TOKEN') else ', or set HF_TOKEN to see private ones'} ({page})"
        ) from error
    except errors.IncompleteSnapshotError as error:
        raise BadInput(f"the {what} is on this machine in part only, and the Hub cannot be reached: {local}") from error
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, httpx2.TransportError) as error:
        cause = error.__cause__
        if isinstance(cause, errors.HfHubHTTPError):
            raise BadInput(_answered(what, cause)) from error
        offline = _is_offline(error) or _is_offline(cause)
        why = "HF_HUB_OFFLINE is set" if offline else f"the Hub at {_endpoint() or 'huggingface.co'} cannot be reached"
        raise BadInput(f"the {what} is not on this machine, and {why}: {local}") from error
    except errors.HfHubHTTPError as error:
        raise BadInput(_answered(what, error)) from error
    except errors.HFValidationError as error:
        raise BadInput(f"{name!r} cannot be the name of a {what.rpartition(' ')[0]} on the Hub: {error}") from error


def _is_offline(error: Any) -> bool:
    from huggingface_hub.errors import OfflineModeIsEnabled

    return isinstance(error, OfflineModeIsEnabled)


def _answered(what: str, error: Any) -> str:
    """Say what the Hub answered instead of the files."""
    status = error.response.status_code
    if status in (401, 403):
        return f"the Hub lets nobody see the {what} with this token (HTTP {status}): set HF_TOKEN to one that may"
    said = (error.server_message or "").strip().splitlines()
    return f"the Hub answered for the {what} with HTTP {status}{': ' + said[0][:200] if said else ''}; try again later"
