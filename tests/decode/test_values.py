"""Tables and lengths that point outside of a pool are refused by every backend that reads on the host."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mla_convert.decode.abi import Backend, DecodeCall, SparseSelection
from mla_convert.decode.reference import ReferenceBackend
from mla_convert.decode.rows import RowFormat
from mla_convert.decode.torch_backend import TorchBackend
from mla_convert.decode.triton_backend import TritonBackend
from mla_convert.decode.values import check_values
from mla_convert.errors import InputRefused
from tests.decode.calls import Shape, make_call

BACKENDS = [TorchBackend(), ReferenceBackend(), TritonBackend(interpret=True)]


def dense(lengths: list[int], table: list[list[int]]) -> DecodeCall:
    call = make_call(Shape(RowFormat.plain(16, 8, "float32"), (5,), page_size=4))
    return replace(
        call,
        pool=torch.zeros(10, 4, 24),
        block_table=torch.tensor(table, dtype=torch.int32).reshape(1, -1),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
    )


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize(
    ("lengths", "table", "where"),
    [
        ([20], [[0, 1]], "seq_lens"),
        ([9], [[8, 9]], "seq_lens"),
        ([-1], [[0, 1]], "seq_lens"),
        ([1], [[]], "seq_lens"),
        ([7], [[-1, 1]], "block_table"),
        ([7], [[0, 10]], "block_table"),
        ([7], [[100_000_000, 1]], "block_table"),
    ],
)
def test_rows_outside_of_table_or_pool_are_refused(
    backend: Backend, lengths: list[int], table: list[list[int]], where: str
) -> None:
    with pytest.raises(InputRefused) as caught:
        backend.run(dense(lengths, table))
    assert caught.value.where == where


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize(
    ("index", "length", "where"), [(40, 1, "indices"), (-1, 1, "indices"), (0, 3, "lengths"), (0, -1, "lengths")]
)
def test_a_selection_outside_of_the_pool_is_refused(backend: Backend, index: int, length: int, where: str) -> None:
    chosen = SparseSelection(torch.full((1, 1, 2), index), torch.full((1, 1), length, dtype=torch.int32))
    call = replace(dense([5], [[0, 1]]), causal=False, sparse=chosen)
    with pytest.raises(InputRefused) as caught:
        backend.run(call)
    assert caught.value.where == where


def test_what_no_query_sees_may_be_anything() -> None:
    check_values(dense([4], [[9, -5]]))
    check_values(dense([0], [[-1, 99]]))
    wild = torch.tensor([[[3, 10**12]]])
    chosen = SparseSelection(wild, torch.ones(1, 1, dtype=torch.int32))
    check_values(replace(dense([5], [[0, 1]]), causal=False, sparse=chosen))
