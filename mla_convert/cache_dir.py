"""Where derived, re-creatable files are kept between runs."""

from __future__ import annotations

import os
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
