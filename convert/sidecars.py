"""Files that travel beside the weights: tokenizer, templates, generation settings, licences."""

from __future__ import annotations

import shutil
from pathlib import Path

SIDECAR_PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.jinja",
    "chat_template*",
    "additional_chat_templates/*",
    "generation_config.json",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "USE_POLICY*",
)


def copy_sidecars(source: Path, target: Path) -> tuple[str, ...]:
    """Copy tokenizer, templates, generation settings and licences byte for byte; returns their POSIX paths."""
    found = sorted({path for pattern in SIDECAR_PATTERNS for path in source.glob(pattern) if path.is_file()})
    for path in found:
        destination = target / path.relative_to(source)
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, destination)
    return tuple(path.relative_to(source).as_posix() for path in found)
