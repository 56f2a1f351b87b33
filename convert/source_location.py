"""Where a source is: a local Hugging Face folder, a GGUF file, or a Hub id. All end as a local folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mla_convert.cache_dir import cache_root
from mla_convert.convert.gguf_source import materialise_gguf
from mla_convert.convert.sidecars import SIDECAR_PATTERNS
from mla_convert.errors import EnvironmentFault, InputRefused

HUB_FILES = ["config.json", "*.safetensors", "*.safetensors.index.json", "*.bin.index.json", *SIDECAR_PATTERNS]

SourceKind = Literal["hf-folder", "hub", "gguf"]


@dataclass(frozen=True)
class SourceLocation:
    """A resolved source.

    Attributes:
        given: What the user wrote.
        kind: What it is.
        folder: Local folder with `config.json` and weights.
        revision: Commit of a Hub snapshot, else None.
    """

    given: str
    kind: SourceKind
    folder: Path
    revision: str | None


def locate_source(given: str, revision: str | None = None) -> SourceLocation:
    """Resolve `given` to a local folder, downloading or unpacking where needed.

    Args:
        given: A folder, a `.gguf` file or a Hub id such as `org/name`.
        revision: Branch, tag or commit of a Hub id.

    Raises:
        InputRefused: If it is none of these.
        EnvironmentFault: If the Hub cannot be reached (or is switched off) and nothing is cached.
    """
    path = Path(given).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputRefused("not a Hugging Face checkpoint", expected="a config.json", found="none", where=str(path))
        return SourceLocation(given, "hf-folder", path.resolve(), None)
    if path.is_file():
        return SourceLocation(given, "gguf", materialise_gguf(path, cache_root()), None)
    if given.count("/") == 1 and not given.startswith((".", "/", "~")):
        folder = _hub_snapshot(given, revision)
        return SourceLocation(given, "hub", folder, folder.name)
    raise InputRefused(
        "no such source",
        expected="a folder with config.json, a .gguf file or a Hub id (org/name)",
        found="nothing at that path",
        where=given,
    )


def _hub_snapshot(repo: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=HUB_FILES))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(repo, revision=revision, allow_patterns=[*HUB_FILES, "*.bin"]))
        return folder
    except (LocalEntryNotFoundError, ConnectionError) as error:
        raise EnvironmentFault(
            "the Hub cannot be reached or offline mode is on, and the model is not in the local cache",
            where=repo,
            remedy="Download it where there is a network, or give a local folder.",
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise InputRefused(f"the Hub refused it: {first_line}", where=repo) from error
