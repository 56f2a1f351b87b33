"""How numbers and foreign text are shown."""

from __future__ import annotations

import unicodedata

from mla_convert.manifests.evaluation.figure import Figure

SHORT = 28
_CONTROL_PICTURES = 0x2400
_BYTES = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3))


def number(value: float | int | None) -> str:
    """Integers whole, others to four significant digits; a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.4g}" if abs(value) < 10_000 else f"{value:,.0f}"


def percent(share: float) -> str:
    """A share of 1 as a percentage to one decimal."""
    return f"{100 * share:.1f} %"


def bytes_text(count: float) -> str:
    """Bytes in decimal units, to three significant digits."""
    for unit, size in _BYTES:
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.3g} B"


def interval(figure: Figure) -> str:
    """The ends of an interval, or that there is none."""
    if figure.low is None or figure.high is None:
        return "no interval"
    return f"{number(figure.low)} to {number(figure.high)}"


def visible(text: str) -> str:
    """`text` with control, format and surrogate characters made visible, line breaks and tabs kept.

    A model may write anything: a NUL is no HTML, and a right-to-left override would turn what follows around.
    """
    return "".join(map(_visible_character, text))


def _visible_character(character: str) -> str:
    category = unicodedata.category(character)
    if character in "\n\t" or category not in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return character
    code = ord(character)
    if code < 0x20:
        return chr(_CONTROL_PICTURES + code)
    return f"⟨U+{code:04X}⟩"


def short(text: str, length: int = SHORT) -> str:
    """One line of at most `length` characters, with an ellipsis in its middle where something is left out."""
    line = visible(" ".join(text.split()))
    if len(line) <= length:
        return line
    head = (length - 1) // 2
    return f"{line[:head]}…{line[-(length - 1 - head) :]}"
