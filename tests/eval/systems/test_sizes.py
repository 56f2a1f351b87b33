"""Workloads: the objective's batch of one is always among them, and prompts fit the model."""

from __future__ import annotations

import pytest

from mla_convert.errors import InputRefused
from mla_convert.eval.systems.sizes import FULL, QUICK, Cell, Sizes, sizes_for


@pytest.mark.parametrize("suite", ["quick", "full"])
@pytest.mark.parametrize("positions", [40, 512, 2048, 131072])
def test_prompts_and_answers_fit_the_positions_and_no_workload_comes_twice(suite: str, positions: int) -> None:
    sizes = sizes_for(suite, positions)  # type: ignore[arg-type]

    assert all(cell.prompt_tokens + sizes.new_tokens <= positions for cell in sizes.cells)
    assert len({(cell.prompt_tokens, cell.batch) for cell in sizes.cells}) == len(sizes.cells)
    assert sizes.warm_up.batch == 1
    if positions > 2080:
        assert sizes == (QUICK if suite == "quick" else FULL)


def test_the_suites_reach_the_lengths_and_batches_that_they_promise() -> None:
    assert {cell.prompt_tokens for cell in FULL.cells} == {128, 512, 2048}
    assert {cell.batch for cell in FULL.cells} == {1, 4, 8}
    assert {(cell.prompt_tokens, cell.batch) for cell in QUICK.cells} == {(128, 1), (512, 1), (128, 4)}


def test_a_model_without_room_is_refused() -> None:
    with pytest.raises(InputRefused, match="too few positions"):
        sizes_for("quick", 8)


@pytest.mark.parametrize(("cells", "new_tokens"), [((Cell(8, 2, 1),), 4), ((), 4), ((Cell(8, 1, 1),), 1)])
def test_sizes_without_an_objective_or_a_second_token_are_none(cells: tuple[Cell, ...], new_tokens: int) -> None:
    with pytest.raises(ValueError, match=r"must be measured|are needed"):
        Sizes(cells, new_tokens)
