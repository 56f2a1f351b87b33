"""Written checkpoints damaged in the ways that other converters get wrong, and what the reload check says of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mla_convert.convert import reload_check, reload_child
from mla_convert.convert.reload_check import check_reload
from mla_convert.convert.reload_child import ReloadReport
from mla_convert.errors import CheckFailed
from tests.convert.conftest import Converted
from tests.convert.support import load_stock, logits_of, random_ids, read_json, relative_difference

ATTENTION = "model.layers.{layer}.self_attn."


@dataclass(frozen=True)
class Sizes:
    """Widths of a written folder, from its configuration."""

    heads: int
    rank: int
    rope: int
    nope: int
    value: int


@dataclass(frozen=True)
class Mutant:
    """A written folder being damaged: its tensors by name, and its configuration."""

    state: dict[str, Tensor]
    config: dict[str, Any]

    @property
    def sizes(self) -> Sizes:
        names = ("num_attention_heads", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        return Sizes(*(self.config[name] for name in names))

    def change(self, part: str, new: Callable[[Tensor], Tensor], layers: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        """Replace `self_attn.<part>` of some layers."""
        for layer in layers:
            name = ATTENTION.format(layer=layer) + part
            self.state[name] = new(self.state[name].clone()).contiguous()


Damage = Callable[[Mutant], None]


def damaged(done: Converted, target: Path, damage: Damage) -> Path:
    """A copy of a written folder with the damage done."""
    shutil.copytree(done.folder, target)
    weights = target / "model.safetensors"
    mutant = Mutant(load_file(weights), read_json(target / "config.json"))
    damage(mutant)
    save_file({name: value.clone() for name, value in mutant.state.items()}, weights, metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(mutant.config), encoding="utf-8")
    return target


def verdict(done: Converted, folder: Path) -> ReloadReport:
    """What the reload check's own comparison finds."""
    return reload_child.compare(folder, done.probe)


def blame(done: Converted, target: Path, damage: Damage) -> str:
    """What the gate names: the first layer and tensor that differ."""
    folder = damaged(done, target, damage)
    expected = load_file(done.probe / "expected.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reload_check, "_run_child", reload_child.compare)
        with pytest.raises(CheckFailed) as caught:
            check_reload(
                folder,
                done.probe,
                done.plan,
                read_json(done.probe / "settings.json")["softmax_scale"],
                expected["ids"],
                expected["logits"],
            )
    assert caught.value.exit_code == 3
    return str(caught.value.where)


def half_split(rows: Tensor) -> Tensor:
    """Interleaved rotary rows x_0 y_0 x_1 y_1 … in the source's order x_0 x_1 … y_0 y_1 …."""
    return torch.cat([rows[0::2], rows[1::2]])


def rotary(rank: int, rows: Tensor, new: Tensor) -> Tensor:
    """`kv_a_proj_with_mqa` with other rotary rows."""
    return torch.cat([rows[:rank], new])


def error(done: Converted) -> float:
    """max |Δlogit| over max |logit| against the source on tokens that the conversion has not seen."""
    ids = random_ids(97, 2, 70, seed=5)
    return relative_difference(logits_of(load_stock(done.folder), ids), logits_of(load_stock(done.source), ids))
