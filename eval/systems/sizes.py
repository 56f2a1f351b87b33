"""How much the two suites measure."""

from __future__ import annotations

from dataclasses import dataclass

from mla_convert.errors import InputRefused
from mla_convert.eval.suite_context import SuiteName

# One new token has no time per output token.
LEAST_NEW_TOKENS = 2


@dataclass(frozen=True)
class Cell:
    """One workload: `batch` prompts of equal length that start together, run `repeats` times by each model."""

    prompt_tokens: int
    batch: int
    repeats: int


@dataclass(frozen=True)
class Sizes:
    """All workloads. Each prompt length is among them at batch 1, which the objective is taken from.

    Attributes:
        cells: From small to large, so that little is held when the small ones are measured.
        new_tokens: Tokens that each request gets.
    """

    cells: tuple[Cell, ...]
    new_tokens: int

    def __post_init__(self) -> None:
        alone = {cell.prompt_tokens for cell in self.cells if cell.batch == 1}
        if not alone or any(cell.prompt_tokens not in alone for cell in self.cells):
            raise ValueError("each prompt length must be measured at batch 1")
        if self.new_tokens < LEAST_NEW_TOKENS:
            raise ValueError(f"at least {LEAST_NEW_TOKENS} new tokens are needed")

    @property
    def warm_up(self) -> Cell:
        """The smallest workload of one request."""
        return min((cell for cell in self.cells if cell.batch == 1), key=lambda cell: cell.prompt_tokens)


# Seconds of prefill grow with prompt × batch: the largest of both together would take as long as all the rest.
QUICK = Sizes((Cell(128, 1, 3), Cell(512, 1, 2), Cell(128, 4, 2)), new_tokens=8)
FULL = Sizes(
    (Cell(128, 1, 3), Cell(512, 1, 2), Cell(2048, 1, 2), Cell(128, 4, 2), Cell(512, 4, 2), Cell(128, 8, 2)),
    new_tokens=32,
)


def sizes_for(suite: SuiteName, positions: int) -> Sizes:
    """The workloads of a suite, prompts cut to what the model has positions for; equal ones once.

    Args:
        suite: `quick` or `full`.
        positions: `max_position_embeddings`.

    Raises:
        InputRefused: If not even a prompt of one token fits.
    """
    wanted = QUICK if suite == "quick" else FULL
    longest = positions - wanted.new_tokens
    if longest < 1:
        raise InputRefused(
            "the model has too few positions to measure its speed",
            expected=f"more than {wanted.new_tokens}",
            found=str(positions),
            where="max_position_embeddings",
        )
    cells: dict[tuple[int, int], Cell] = {}
    for cell in wanted.cells:
        prompt = min(cell.prompt_tokens, longest)
        cells.setdefault((prompt, cell.batch), Cell(prompt, cell.batch, cell.repeats))
    return Sizes(tuple(cells.values()), wanted.new_tokens)
