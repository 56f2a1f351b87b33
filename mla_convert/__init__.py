"""mla-convert: turn trained MHA and GQA checkpoints into Multi-head Latent Attention checkpoints.

    from pathlib import Path
    from mla_convert import ConvertOptions, convert_checkpoint

    result = convert_checkpoint("path/to/model", Path("out"), ConvertOptions(lossless=True))
    print(result.manifest.reload_check.relative_error)

Names are imported when they are first used, so that `import mla_convert` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from mla_convert.version import __version__

if TYPE_CHECKING:
    from mla_convert.convert.budget import Goal
    from mla_convert.convert.checkpoint import open_source
    from mla_convert.convert.choose import choose as choose_plan
    from mla_convert.convert.inspection import inspect_source
    from mla_convert.convert.options import ConvertOptions
    from mla_convert.convert.planning import make_plan
    from mla_convert.convert.run import convert as convert_checkpoint
    from mla_convert.decode.absorbed_module import use_absorbed
    from mla_convert.decode.api import mla_decode
    from mla_convert.eval.evaluate import EvalOptions, evaluate
    from mla_convert.manifests.verify import verify_folder

__all__ = [
    "ConvertOptions",
    "EvalOptions",
    "Goal",
    "__version__",
    "choose_plan",
    "convert_checkpoint",
    "evaluate",
    "inspect_source",
    "make_plan",
    "mla_decode",
    "open_source",
    "use_absorbed",
    "verify_folder",
]

# `convert` would be the plainer name, but `mla_convert.convert` is the subpackage.
_HOMES = {
    "ConvertOptions": ("convert.options", "ConvertOptions"),
    "EvalOptions": ("eval.evaluate", "EvalOptions"),
    "Goal": ("convert.budget", "Goal"),
    "choose_plan": ("convert.choose", "choose"),
    "convert_checkpoint": ("convert.run", "convert"),
    "evaluate": ("eval.evaluate", "evaluate"),
    "inspect_source": ("convert.inspection", "inspect_source"),
    "make_plan": ("convert.planning", "make_plan"),
    "mla_decode": ("decode.api", "mla_decode"),
    "open_source": ("convert.checkpoint", "open_source"),
    "use_absorbed": ("decode.absorbed_module", "use_absorbed"),
    "verify_folder": ("manifests.verify", "verify_folder"),
}


if not TYPE_CHECKING:
    # Hidden from type checkers, which would take every name for one that exists.

    def __getattr__(name: str) -> object:
        """Import a public name from where it lives."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, attribute = _HOMES[name]
        found: object = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
        return found


def __dir__() -> list[str]:
    """The public names, imported or not."""
    return sorted(__all__)
