"""Copies of the attention module with one named fault each: the pitfalls of seed 2, section 5."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from mla_convert.mla import attention, stock_factors
from tests.mla.attention_stock import Modules

REAL = Modules(attention, stock_factors)
SOURCES: Mapping[str, str] = {
    "attention": Path(attention.__file__).read_text(encoding="utf-8"),
    "stock": Path(stock_factors.__file__).read_text(encoding="utf-8"),
}


@dataclass(frozen=True)
class Pitfall:
    """One fault.

    Attributes:
        where: Which of the two modules is damaged.
        right: A text that stands in its source exactly once.
        wrong: What stands there instead.
        caught_by: The rows of the test table that seed 2 holds it to.
    """

    where: str
    right: str
    wrong: str
    caught_by: tuple[str, ...]


PITFALLS: Mapping[str, Pitfall] = {
    "s01 values before keys in kv_b_proj": Pitfall(
        "stock",
        "return by_head[:, :nope_width], by_head[:, nope_width:]",
        "return by_head[:, -nope_width:], by_head[:, :-nope_width]",
        ("mla_golden",),
    ),
    "s02 rotary rows of the query first": Pitfall(
        "attention",
        "nope, rope = query[..., : factors.nope_width], query[..., factors.nope_width :]",
        "nope, rope = query[..., -factors.nope_width :], query[..., : -factors.nope_width]",
        ("hand_example", "mla_golden"),
    ),
    "s03 the shared rotary key is not rotated": Pitfall(
        "attention",
        "return LatentRows(latent, factors.rope.turn(rope, positions))",
        "return LatentRows(latent, factors.rope.turn(rope, 0 * positions))",
        ("scores_see_relative_position_only",),
    ),
    "s04 the latent is cached before its norm": Pitfall(
        "attention",
        "latent = rms_norm(latent, factors.latent_norm.weight, factors.latent_norm.eps)",
        "pass",
        ("hand_example", "mla_golden"),
    ),
    "s05 the scale of the content key alone": Pitfall(
        "attention",
        "return mscale * mscale / math.sqrt(nope_width + rope_width)",
        "return mscale * mscale / math.sqrt(nope_width)",
        ("mla_golden", "validation"),
    ),
    "s06 the rotary key in another layout than the query": Pitfall(
        "attention",
        "return LatentRows(latent, factors.rope.turn(rope, positions))",
        "return LatentRows(latent, Rope(factors.rope.frequencies, not factors.rope.interleaved, "
        "factors.rope.amplitude).turn(rope, positions))",
        ("mla_golden",),
    ),
    "s07 absorbing with the value rows": Pitfall(
        "attention",
        "query = absorb_query(nope, factors.w_uk)",
        "query = absorb_query(nope, factors.w_uv)",
        ("absorbed_decode_equals_naive",),
    ),
    "s08 the cache returns only the new chunk": Pitfall(
        "attention",
        "return LatentRows(torch.cat([self.latent, new.latent], dim=1), torch.cat([self.rope, new.rope], dim=1))",
        "return new",
        ("cache_chunks_equal_full_forward",),
    ),
    "s09 the absorbed form drops the padding mask": Pitfall(
        "attention",
        "    query = absorb_query(nope, factors.w_uk)",
        "    keep = None\n    query = absorb_query(nope, factors.w_uk)",
        ("padding_mask_and_fully_masked_rows",),
    ),
    "s10 W_O of another head in the product": Pitfall(
        "attention",
        'return torch.einsum("hDv,hvc->hDc", w_o, w_uv)',
        'return torch.einsum("hDv,hvc->hDc", w_o.roll(1, 0), w_uv)',
        ("absorbed_decode_equals_naive",),
    ),
    "s11 a detached latent": Pitfall(
        "attention",
        "return LatentRows(latent, factors.rope.turn(rope, positions))",
        "return LatentRows(latent.detach(), factors.rope.turn(rope, positions))",
        ("gradcheck_through_the_latent",),
    ),
}


def damaged(pitfall: Pitfall) -> dict[str, str]:
    """Both sources, one of them with the fault; the text to replace must be there exactly once."""
    source = SOURCES[pitfall.where]
    assert source.count(pitfall.right) == 1, f"{pitfall.right!r} stands {source.count(pitfall.right)} times"
    return {**SOURCES, pitfall.where: source.replace(pitfall.right, pitfall.wrong)}


@contextmanager
def imported(sources: Mapping[str, str]) -> Iterator[Modules]:
    """Both modules from their sources under other names; the second one imports the first one's copy."""
    names = {"attention": "mutated_attention", "stock": "mutated_stock"}
    try:
        first = _load(names["attention"], sources["attention"])
        second = _load(
            names["stock"], sources["stock"].replace("from mla_convert.mla.attention", "from mutated_attention")
        )
        yield Modules(first, second)
    finally:
        for name in names.values():
            sys.modules.pop(name, None)


def _load(name: str, source: str) -> ModuleType:
    spec = importlib.util.spec_from_loader(name, loader=None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their own module up
    exec(compile(source, name, "exec"), module.__dict__)
    return module
