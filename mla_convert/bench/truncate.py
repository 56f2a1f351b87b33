"""A source cut to its first layers, for measurements of what depth costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mla_convert.convert.checkpoint import DERIVED_SUFFIX, SourceCheckpoint
from mla_convert.convert.checkpoint_writer import ShardWriter, write_json
from mla_convert.convert.sidecars import copy_sidecars
from mla_convert.errors import UsageFault


def truncate_source(source: SourceCheckpoint, layers: int, folder: Path) -> Path:
    """Write the first layers of a source, its embedding, last norm and head, and its tokenizer.

    Args:
        source: An opened source.
        layers: How many to keep.
        folder: Where to; made here.

    Raises:
        UsageFault: If there are not so many.
    """
    if not 1 <= layers <= source.num_layers:
        raise UsageFault("the source has not so many layers", expected=f"1 to {source.num_layers}", found=str(layers))
    folder.mkdir(parents=True)
    config: dict[str, Any] = json.loads((source.location.folder / "config.json").read_text(encoding="utf-8"))
    by_layer = {
        name: value[:layers]
        for name, value in config.items()
        if isinstance(value, list) and name == "layer_types" and len(value) == source.num_layers
    }
    write_json(folder / "config.json", {**config, **by_layer, "num_hidden_layers": layers})
    shards = ShardWriter(folder)
    for name in sorted(source.files.names):
        if not name.endswith(DERIVED_SUFFIX) and _layer_of(name) < layers:
            shards.add(name, source.files.read(name))
    shards.finish()
    copy_sidecars(source.location.folder, folder)
    return folder


def _layer_of(name: str) -> int:
    """Layer of a tensor, -1 outside of all."""
    number = name.partition("model.layers.")[2].partition(".")[0]
    return int(number) if number else -1
