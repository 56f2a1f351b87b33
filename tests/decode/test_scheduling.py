"""Scheduler metadata is good for one key: each thing that invalidates it is refused by name."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from mla_convert.decode.abi import DecodeCall, SparseSelection
from mla_convert.decode.ladder import LadderCase, build
from mla_convert.decode.scheduling import Schedule, ScheduleKey, require_same_key
from mla_convert.decode.tiles import TileConfig
from mla_convert.errors import InputRefused

BASE = LadderCase(dtype="float32", lengths=(5, 20), heads=2, tokens=2)
SPARSE = replace(BASE, causal=False, top_k=9, extra_top_k=6)
TILE = TileConfig(16, 32, 4, 2)


def schedule(call: DecodeCall) -> Schedule:
    return Schedule(ScheduleKey.of(call), 2, TILE)


def selection(call: DecodeCall) -> SparseSelection:
    assert call.sparse is not None
    return call.sparse


def test_the_same_shape_and_lengths_may_use_it_again() -> None:
    schedule(build(BASE)).require(build(BASE, seed=1))
    schedule(build(SPARSE)).require(build(SPARSE, seed=1))


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("batch", replace(BASE, lengths=(5, 20, 0))),
        ("queries", replace(BASE, tokens=1)),
        ("heads", replace(BASE, heads=3)),
        ("page_size", replace(BASE, page_size=8)),
        ("causal", replace(BASE, causal=False)),
        ("form", replace(BASE, fp8=True)),
        ("table_width", replace(BASE, lengths=(5, 40))),
        ("lengths", replace(BASE, lengths=(6, 20))),
    ],
)
def test_what_invalidates_a_dense_schedule(field: str, other: LadderCase) -> None:
    with pytest.raises(InputRefused, match=f"{field} = "):
        schedule(build(BASE)).require(build(other))


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("top_k", replace(SPARSE, top_k=8)),
        ("extra_top_k", replace(SPARSE, extra_top_k=5)),
        ("extra_top_k", replace(SPARSE, extra_top_k=0)),
    ],
)
def test_what_invalidates_a_sparse_schedule(field: str, other: LadderCase) -> None:
    made, used = ScheduleKey.of(build(SPARSE)), ScheduleKey.of(build(other))
    # One field at a time: a narrower selection has other lengths and no second page size as well.
    with pytest.raises(InputRefused, match=f"{field} = "):
        require_same_key(made, replace(made, **{field: getattr(used, field)}))


def test_a_changed_value_of_the_selections_lengths_is_refused() -> None:
    call = build(SPARSE)
    shorter = replace(selection(call), lengths=selection(call).lengths - 1)
    shorter_extra = replace(selection(call), extra_lengths=torch.zeros(2, 2, dtype=torch.int32))

    with pytest.raises(InputRefused, match=r"found lengths = "):
        schedule(call).require(replace(call, sparse=shorter))
    with pytest.raises(InputRefused, match="extra_lengths = "):
        schedule(call).require(replace(call, sparse=shorter_extra))


def test_another_page_size_of_the_second_pool_is_refused() -> None:
    call = build(SPARSE)
    pool = selection(call).extra_pool
    assert pool is not None
    whole = pool.reshape(1, -1, pool.shape[-1])

    with pytest.raises(InputRefused, match="extra_page_size = "):
        schedule(call).require(replace(call, sparse=replace(selection(call), extra_pool=whole)))


def test_a_query_of_another_dtype_is_refused() -> None:
    call = build(BASE)

    with pytest.raises(InputRefused, match="dtype = "):
        schedule(call).require(replace(call, q=call.q.double()))


def test_every_field_of_the_key_decides() -> None:
    key = ScheduleKey.of(build(SPARSE))

    for field in fields(ScheduleKey):
        with pytest.raises(InputRefused, match=f"{field.name} = "):
            require_same_key(key, replace(key, **{field.name: object()}))
