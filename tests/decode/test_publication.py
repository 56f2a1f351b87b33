from __future__ import annotations

import pytest

from mla_convert.decode.publication import PublicationRecord, rope_digest
from mla_convert.decode.rows import RowFormat
from mla_convert.errors import InputRefused
from tests.decode.caches import FORM, LAYERS, ROPE, append, make_cache, rows_for


def test_the_publication_record_has_every_field() -> None:
    """Seed 1, "Paged and ragged address translation": the list at its end, one assertion a line."""
    form = RowFormat.grouped_fp8(200, 4)
    cache = make_cache(form=form)
    cache.new_sequence("other")
    sequence = cache.new_sequence("request 7")
    append(cache, sequence, rows_for(6, form))

    record = cache.publication(sequence, 2)
    assert (record.cache, record.request, record.sequence) == ("test", "request 7", sequence)
    assert record.layer == 2
    assert (record.first_token, record.tokens) == (0, 6)
    assert [(piece.offset, piece.rows) for piece in record.pages] == [(0, 4), (0, 2)]
    assert tuple(piece.page for piece in record.pages) == cache.pages_of(sequence)
    assert (record.form.name, record.form.version, record.row_stride) == ("fp8-e4m3-group128", 1, 216)
    assert (record.form.latent_dtype, record.form.rope_dtype) == ("float8_e4m3fn", "bfloat16")
    assert (record.scale_dtype, record.form.scale_group, record.form.scales) == ("float32", 128, 2)
    assert record.rope == ROPE
    assert (record.committed_length, record.transaction) == (6, None)

    transaction = cache.begin({sequence: range(6, 11)})
    (provisional,) = cache.provisional(transaction, 0)
    assert (provisional.first_token, provisional.tokens) == (6, 5)
    assert [(piece.offset, piece.rows) for piece in provisional.pages] == [(2, 2), (0, 3)]
    assert (provisional.committed_length, provisional.transaction) == (None, transaction.number)
    transaction.discard()
    with pytest.raises(InputRefused, match="no open transaction"):
        cache.provisional(transaction, 0)


def test_a_record_refuses_a_reader_of_other_rows() -> None:
    cache = make_cache()
    record = cache.publication(cache.new_sequence("r"), 0)

    record.require(FORM, ROPE)
    with pytest.raises(InputRefused, match="another format"):
        record.require(RowFormat.plain(4, 8, "float32"), ROPE)
    with pytest.raises(InputRefused, match="another rotation"):
        record.require(FORM, rope_digest(4, "half-split", {"theta": 10000.0}))
    with pytest.raises(InputRefused, match="either committed or"):
        PublicationRecord(**{**record.__dict__, "transaction": 3})


def test_the_rotation_is_part_of_the_identity() -> None:
    same = rope_digest(64, "interleaved", {"theta": 1e4, "factor": 2.0})

    assert same == rope_digest(64, "interleaved", {"factor": 2.0, "theta": 1e4})
    assert same != rope_digest(32, "interleaved", {"theta": 1e4, "factor": 2.0})
    assert same != rope_digest(64, "half-split", {"theta": 1e4, "factor": 2.0})
    assert same != rope_digest(64, "interleaved", {"theta": 1e4, "factor": 4.0})
    with pytest.raises(InputRefused, match="layout"):
        rope_digest(64, "split", {})


@pytest.mark.parametrize("form", [FORM, RowFormat.grouped_fp8(9, 4)])
def test_the_residency_account_adds_up_to_the_pools(form: RowFormat) -> None:
    cache = make_cache(pages=10, page_size=4, form=form)
    parent = cache.new_sequence("r")
    append(cache, parent, rows_for(6, form))
    child = cache.fork(parent)
    append(cache, child, rows_for(3, form))
    with cache.begin({parent: range(6, 12)}):
        found = cache.residency()

    pools = [cache.pool(layer, form) for layer in range(LAYERS)]
    assert found.pools == sum(pool.nbytes for pool in pools)
    rows = 4 + 2 + (2 + 2) + 1  # shared page, the parent's second, the child's copy of it, the child's third
    assert found.payload == LAYERS * rows * form.payload_bytes
    assert found.scales == LAYERS * rows * 4 * form.scales
    assert found.logical_payload == LAYERS * (6 + 9) * form.payload_bytes
    assert found.provisional == LAYERS * 1 * 4 * form.row_bytes
    assert found.free == LAYERS * 5 * 4 * form.row_bytes
    assert found.metadata == 4 * (2 + 1 + 3 + 1 + 10)


def test_the_cache_holds_latent_rows_and_nothing_else() -> None:
    """Case 18, as far as the cache goes: (d_c + d_R) numbers a token and layer, after 40 tokens, and page padding."""
    cache = make_cache(pages=10, page_size=16)
    sequence = cache.new_sequence("r")
    for _ in range(40):
        append(cache, sequence, rows_for(1))

    found = cache.residency()

    assert found.payload == 40 * (8 + 4) * 4 * LAYERS
    assert found.payload + found.padding == 3 * 16 * (8 + 4) * 4 * LAYERS
