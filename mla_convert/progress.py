"""Progress with an estimated time, on standard error, for work of more than two seconds."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from tqdm import tqdm

SHOW_AFTER_SECONDS = 2.0
T = TypeVar("T")


def track(items: Iterable[T], label: str, total: int | None = None, unit: str = "layer") -> Iterator[T]:
    """Yield `items` under a bar that appears only once the work has taken two seconds.

    Args:
        items: What is worked through.
        label: What the work is called in front of the bar.
        total: Number of items where `items` has no length.
        unit: Name of one item.
    """
    return iter(
        tqdm(items, desc=label, total=total, unit=unit, delay=SHOW_AFTER_SECONDS, file=sys.stderr, disable=None)
    )


def bar(total: int, label: str, unit: str = "layer") -> tqdm[Any]:
    """A bar that its user moves and that can say how the work goes (`set_postfix_str`)."""
    return tqdm(desc=label, total=total, unit=unit, delay=SHOW_AFTER_SECONDS, file=sys.stderr, disable=None)
