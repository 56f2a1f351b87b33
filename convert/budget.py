"""How wide a cache may be: from a share, bytes, a width or a loss to numbers per token and layer."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from mla_convert.convert.checkpoint import SourceCheckpoint
from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.planning import legal_rope_step, norm_route, output_dtype
from mla_convert.errors import UsageFault

# A width that follows from a share or from bytes is even; one that is given is taken as it is.
WIDTH_STEP = 2


@dataclass(frozen=True)
class Goal:
    """What a plan is to be chosen for, in place of its two widths; exactly one field is set.

    Attributes:
        width: Numbers per token and layer.
        budget: Most numbers per token and layer, as a share of the source's.
        cache_bytes: Most bytes per token, all layers, in the output dtype.
        max_kl: Largest predicted `KL(source ‖ target)`, nats per token.
    """

    width: int | None = None
    budget: float | None = None
    cache_bytes: int | None = None
    max_kl: float | None = None

    def __str__(self) -> str:
        """As options of the command line."""
        if self.width is not None:
            return f"--width {self.width}"
        if self.budget is not None:
            return f"--budget {self.budget * 100:.10g}%"
        return f"--cache-bytes {self.cache_bytes}" if self.cache_bytes is not None else f"--max-kl {self.max_kl:g}"


@dataclass(frozen=True)
class WidthLimits:
    """Legal widths of one source and set of options, and what they cost.

    Attributes:
        lowest: Narrowest legal width.
        highest: Widest one that carries something.
        source: Numbers that the source caches per token and layer.
        bytes_per_number: Bytes that one number per token and layer takes, all layers together.
    """

    lowest: int
    highest: int
    source: int
    bytes_per_number: int

    def bytes_of(self, width: int) -> int:
        """Cache bytes per token of a width."""
        return width * self.bytes_per_number


def width_limits(source: SourceCheckpoint, options: ConvertOptions) -> WidthLimits:
    """Legal widths, from headers alone; whether a profile carries a split of one is asked when it is planned."""
    shape, dtype = source.shape, output_dtype(source, options)
    channel = 1 if norm_route(options, dtype) == "constant" else 0
    step, everything = legal_rope_step(shape, options.rope_policy), 2 * shape.num_kv_heads * shape.pairs
    widest = max(rope + shape.useful_rank(rope) for rope in range(step, everything + 1, step))
    itemsize: int = getattr(torch, dtype).itemsize
    return WidthLimits(step + 1 + channel, widest + channel, shape.cached_numbers, source.num_layers * itemsize)


def goal_width(goal: Goal, limits: WidthLimits) -> int:
    """The width that a goal other than `max_kl` stands for.

    Raises:
        UsageFault: If it is out of range, with the legal range in the goal's own unit.
    """
    lowest, highest = limits.lowest, limits.highest
    if goal.width is not None:
        if not lowest <= goal.width <= highest:
            raise UsageFault("--width is out of range", expected=f"{lowest} to {highest}", found=str(goal.width))
        return goal.width
    # Rounded up to what gives an even width.
    narrowest = lowest + lowest % WIDTH_STEP
    if goal.budget is not None:
        smallest, largest = narrowest / limits.source, highest / limits.source
        # A share such as 29 % of 100 is 28.999… in binary.
        width = int(goal.budget * limits.source + 1e-9)
        if not narrowest <= width <= highest:
            raise UsageFault(
                "--budget is out of range",
                expected=f"{smallest:.1%} to {largest:.1%} of the source's {limits.source} numbers per token and layer",
                found=f"{goal.budget * 100:.10g}%",
            )
    else:
        assert goal.cache_bytes is not None  # `max_kl` has no width of its own
        width = goal.cache_bytes // limits.bytes_per_number
        if not narrowest <= width <= highest:
            raise UsageFault(
                "--cache-bytes is out of range",
                expected=f"{limits.bytes_of(narrowest):,} to {limits.bytes_of(highest):,} bytes per token, "
                f"{limits.bytes_per_number} for each number of the width",
                found=f"{goal.cache_bytes:,}",
            )
    return width - width % WIDTH_STEP


def parse_share(text: str, where: str) -> float:
    """`25%` as 0.25.

    Raises:
        UsageFault: For anything else.
    """
    found = re.fullmatch(r"(\d{1,6}(?:\.\d+)?)\s*%", text.strip())
    if found is None:
        raise UsageFault("not a percentage", expected="a share such as 25%", found=text, where=where)
    return float(found[1]) / 100


def parse_widths(text: str, limits: WidthLimits) -> tuple[int, ...]:
    """`192,128,25%` as widths, widest first, each once.

    Raises:
        UsageFault: For a part that is neither a width nor a share, or is out of range.
    """
    found = set()
    for part in text.split(","):
        item = part.strip()
        goal = Goal(width=int(item)) if item.isdecimal() else Goal(budget=parse_share(item, "--widths"))
        found.add(goal_width(goal, limits))
    return tuple(sorted(found, reverse=True))
