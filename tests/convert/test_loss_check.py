"""The loss from parts of the vocabulary is the loss from all of it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from mla_convert.convert.loss_check import next_token_loss
from tests.tolerances import LOGITS_FLOAT32


@pytest.mark.parametrize("rows", [1, 7, 40, 97, 200])
def test_parts_of_the_vocabulary_add_up(rows: int) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(1, 11, 97, generator=generator) * 20
    ids = torch.randint(0, 97, (1, 12), generator=generator)
    expected = float(nn.functional.cross_entropy(logits[0], ids[0, 1:]))

    assert next_token_loss(logits.split(rows, dim=-1), ids) == pytest.approx(expected, rel=LOGITS_FLOAT32 / 10)


def test_a_token_that_no_part_holds_is_no_number() -> None:
    assert math.isnan(next_token_loss([torch.zeros(1, 1, 4)], torch.tensor([[0, 4]])))
