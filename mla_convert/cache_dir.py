"""Where derived, re-creatable files are kept between runs, and how a folder gets there whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_root() -> Path:
    """Folder for cached statistics, source logits and unpacked models.

    `MLA_CONVERT_CACHE` overrides the default, `$XDG_CACHE_HOME/mla-convert` (`~/.cache/mla-convert`).
    Everything below it is keyed by digest and may be deleted at any time.
    """
    override = os.environ.get("MLA_CONVERT_CACHE")
    if override:
        return Path(override).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mla-convert"


@contextmanager
def fill_once(folder: Path) -> Iterator[Path]:
    """A working folder that becomes `folder` when the block ends well, and vanishes when it does not.

    Where another run was faster, its folder stays: a cache folder's name is the digest of what it holds.

    Args:
        folder: Final path, in an existing or new parent.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    working = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield working
        try:
            os.replace(working, folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(working, ignore_errors=True)
