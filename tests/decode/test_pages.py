from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from mla_convert.decode.abi import DecodeCall
from mla_convert.decode.pages import PagedLatentCache
from mla_convert.decode.pool import OutOfPages
from mla_convert.decode.rows import RowFormat, decode, encode
from mla_convert.decode.store import NO_PAGE
from mla_convert.decode.torch_backend import TorchBackend
from mla_convert.errors import CheckFailed, InputRefused
from tests.decode.caches import FORM, LAYERS, Rows, append, make_cache, rows_for
from tests.tolerances import DECODE_FLOAT32


def joined(rows: Rows, layer: int) -> torch.Tensor:
    return torch.cat(rows[layer], dim=-1)


@dataclass(frozen=True)
class Snapshot:
    """Everything committed: tables, lengths, reference counts, rows."""

    tables: dict[int, tuple[int, ...]]
    lengths: dict[int, int]
    references: list[int]
    rows: dict[int, list[torch.Tensor]]

    @classmethod
    def of(cls, cache: PagedLatentCache, *sequences: int) -> Snapshot:
        return cls(
            {sequence: cache.pages_of(sequence) for sequence in sequences},
            {sequence: cache.length(sequence) for sequence in sequences},
            [cache.allocator.references(page) for page in range(cache.allocator.pages)],
            {sequence: [cache.read(sequence, layer) for layer in range(cache.layers)] for sequence in sequences},
        )

    def same(self, other: Snapshot) -> bool:
        rows_same = all(
            torch.equal(mine, theirs)
            for sequence in self.rows
            for mine, theirs in zip(self.rows[sequence], other.rows[sequence], strict=True)
        )
        return rows_same and (self.tables, self.lengths, self.references) == (
            other.tables,
            other.lengths,
            other.references,
        )


@pytest.mark.parametrize("form", [FORM, RowFormat.grouped_fp8(9, 4), RowFormat.plain(8, 0, "bfloat16")])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_prefill_in_chunks_equals_one_pass_bit_for_bit(page_size: int, form: RowFormat) -> None:
    rows = rows_for(23, form)
    cache = make_cache(80, page_size, form)
    whole, by_transaction, by_write = (cache.new_sequence(name) for name in ("whole", "chunks", "writes"))

    append(cache, whole, rows)
    for start, stop in ((0, 1), (1, 8), (8, 8), (8, 16), (16, 23)):
        append(cache, by_transaction, [(c_kv[start:stop], k_rope[start:stop]) for c_kv, k_rope in rows])
    with cache.begin({by_write: range(23)}) as transaction:
        for start, stop in ((0, 5), (5, 23)):
            for layer, (c_kv, k_rope) in enumerate(rows):
                transaction.write(layer, c_kv[start:stop], k_rope[start:stop])
        transaction.commit()

    for layer, (c_kv, k_rope) in enumerate(rows):
        expected = decode(form, encode(form, c_kv, k_rope))
        for sequence in (whole, by_transaction, by_write):
            assert torch.equal(cache.read(sequence, layer), expected)


def test_rows_appear_with_the_commit_only() -> None:
    cache = make_cache()
    sequence = cache.new_sequence("r")
    append(cache, sequence, rows_for(3))
    before = Snapshot.of(cache, sequence)
    rows = rows_for(4)

    transaction = cache.begin({sequence: range(3, 7)})
    for layer, (c_kv, k_rope) in enumerate(rows):
        transaction.write(layer, c_kv, k_rope)

    assert cache.view([sequence]).seq_lens.tolist() == [3]
    assert transaction.view(1).seq_lens.tolist() == [7]
    assert torch.equal(cache.read(sequence, 0), before.rows[sequence][0])
    transaction.commit()
    assert cache.view([sequence]).seq_lens.tolist() == [7]
    assert torch.equal(cache.read(sequence, 2)[3:], joined(rows, 2))


@pytest.mark.parametrize("accepted", range(7))
def test_only_the_accepted_prefix_is_committed(accepted: int) -> None:
    cache = make_cache()
    sequence = cache.new_sequence("r")
    append(cache, sequence, rows_for(3))
    kept = cache.read(sequence, 1)
    rows = rows_for(6)

    with cache.begin({sequence: range(3, 9)}) as transaction:
        for layer, (c_kv, k_rope) in enumerate(rows):
            transaction.write(layer, c_kv, k_rope)
        transaction.commit([accepted])

    assert cache.length(sequence) == 3 + accepted
    assert torch.equal(cache.read(sequence, 1), torch.cat([kept, joined(rows, 1)[:accepted]]))
    assert len(cache.pages_of(sequence)) == -(-(3 + accepted) // 4)
    assert cache.allocator.free == 12 - len(cache.pages_of(sequence))
    correction = rows_for(2)  # a rejected row is written anew, not relabelled
    append(cache, sequence, correction)
    assert torch.equal(cache.read(sequence, 1)[3 + accepted :], joined(correction, 1))


class Fault(Exception):
    """Stands for anything that goes wrong between two layers."""


def fail_after(cache: PagedLatentCache, sequence: int, layers_done: int) -> None:
    with cache.begin({sequence: range(6, 13)}) as transaction:
        for layer, (c_kv, k_rope) in enumerate(rows_for(7)[:layers_done]):
            transaction.write(layer, c_kv, k_rope)
        raise Fault


@pytest.mark.parametrize("layers_done", range(LAYERS + 1))
@pytest.mark.parametrize("shared", [False, True])
def test_a_fault_between_layers_leaves_the_committed_state(layers_done: int, shared: bool) -> None:
    cache = make_cache()
    sequence = cache.new_sequence("r")
    append(cache, sequence, rows_for(6))
    others = [cache.fork(sequence)] if shared else []
    before = Snapshot.of(cache, sequence, *others)

    with pytest.raises(Fault):
        fail_after(cache, sequence, layers_done)

    assert Snapshot.of(cache, sequence, *others).same(before)
    append(cache, sequence, rows_for(7))


@pytest.mark.parametrize("written", [(5, 5, 0), (5, 5, 4), (2, 2, 2), (0, 0, 0)])
def test_a_commit_after_a_crash_between_the_layers_is_refused(written: tuple[int, int, int]) -> None:
    cache = make_cache()
    sequence = cache.new_sequence("r")
    append(cache, sequence, rows_for(2))
    before = Snapshot.of(cache, sequence)
    transaction = cache.begin({sequence: range(2, 7)})
    for layer, count in enumerate(written):
        transaction.write(layer, torch.randn(count, 8), torch.randn(count, 4))

    with pytest.raises(CheckFailed, match="not all written"):
        transaction.commit()

    assert cache.length(sequence) == 2
    transaction.discard()
    assert Snapshot.of(cache, sequence).same(before)


def test_a_prefix_that_every_layer_wrote_can_be_committed() -> None:
    """A prefill that stops after a chunk keeps the chunk."""
    cache = make_cache()
    sequence = cache.new_sequence("r")

    with cache.begin({sequence: range(10)}) as transaction:
        for layer, (c_kv, k_rope) in enumerate(rows_for(6)):
            transaction.write(layer, c_kv, k_rope)
        transaction.commit([6])

    assert cache.length(sequence) == 6


def test_out_of_pages_changes_nothing() -> None:
    cache = make_cache(pages=4)
    first, second = cache.new_sequence("a"), cache.new_sequence("b")
    append(cache, first, rows_for(6))
    append(cache, second, rows_for(4))
    before = Snapshot.of(cache, first, second)

    with pytest.raises(OutOfPages, match="no free page") as fault:
        cache.begin({second: range(4, 8), first: range(6, 9)})

    assert fault.value.found == "1 of 4"
    assert Snapshot.of(cache, first, second).same(before)
    cache.extend(2)
    assert Snapshot.of(cache, first, second).rows[first][0].equal(before.rows[first][0])
    append(cache, first, rows_for(3))


def test_a_refused_row_leaves_the_transaction_usable() -> None:
    cache = make_cache()
    sequence = cache.new_sequence("r")
    transaction = cache.begin({sequence: range(2)})

    with pytest.raises(CheckFailed, match="cannot hold"):
        transaction.write(0, torch.full((2, 8), float("nan")), torch.zeros(2, 4))

    for layer, (c_kv, k_rope) in enumerate(rows_for(2)):
        transaction.write(layer, c_kv, k_rope)
    transaction.commit()
    assert bool(torch.isfinite(cache.read(sequence, 0)).all())


def test_forks_share_pages_until_one_writes_into_the_last() -> None:
    cache = make_cache()
    parent = cache.new_sequence("r")
    append(cache, parent, rows_for(6))
    prefix = cache.read(parent, 0)
    child = cache.fork(parent, "beam 1")
    assert cache.pages_of(child) == cache.pages_of(parent)
    assert cache.allocator.free == 10

    mine, theirs = rows_for(1), rows_for(3)
    append(cache, child, theirs)
    append(cache, parent, mine)

    assert torch.equal(cache.read(parent, 0), torch.cat([prefix, joined(mine, 0)]))
    assert torch.equal(cache.read(child, 0), torch.cat([prefix, joined(theirs, 0)]))
    shared, own = cache.pages_of(child)[0], cache.pages_of(child)[1]
    assert cache.pages_of(parent)[0] == shared
    assert cache.pages_of(parent)[1] != own
    assert cache.allocator.references(shared) == 2
    assert cache.allocator.references(own) == 1
    cache.free(parent)
    assert torch.equal(cache.read(child, 0)[:6], prefix)
    cache.free(child)
    assert cache.allocator.free == 12


def test_a_full_last_page_is_not_copied() -> None:
    cache = make_cache()
    parent = cache.new_sequence("r")
    append(cache, parent, rows_for(8))
    child = cache.fork(parent)

    append(cache, child, rows_for(1))

    assert cache.pages_of(child)[:2] == cache.pages_of(parent)
    assert cache.allocator.free == 9


def test_two_forks_in_one_transaction_do_not_meet() -> None:
    cache = make_cache()
    parent = cache.new_sequence("r")
    append(cache, parent, rows_for(5))
    child = cache.fork(parent)
    rows = rows_for(2)

    with cache.begin({parent: range(5, 6), child: range(5, 6)}) as transaction:
        for layer, (c_kv, k_rope) in enumerate(rows):
            transaction.write(layer, c_kv, k_rope)
        assert transaction.view(0).seq_lens.tolist() == [6, 6]
        transaction.commit()

    for layer in range(LAYERS):
        assert torch.equal(cache.read(parent, layer)[5], joined(rows, layer)[0])
        assert torch.equal(cache.read(child, layer)[5], joined(rows, layer)[1])


def test_reorder_is_what_beam_search_asks_for() -> None:
    cache = make_cache(30)
    beams = [cache.new_sequence(f"beam {place}") for place in range(4)]
    for beam in beams:
        append(cache, beam, rows_for(5))
    held = [cache.read(beam, 1) for beam in beams]

    after = cache.reorder(beams, [2, 0, 0, 2])

    assert len(set(after)) == 4
    for beam, source in zip(after, [2, 0, 0, 2], strict=True):
        assert torch.equal(cache.read(beam, 1), held[source])
    with pytest.raises(InputRefused, match="freed before"):
        cache.length(beams[1])
    for beam in after:
        append(cache, beam, rows_for(1))
        cache.free(beam)
    assert cache.allocator.free == 30


def test_truncate_gives_pages_back_and_keeps_the_prefix() -> None:
    cache = make_cache()
    sequence = cache.new_sequence("r")
    append(cache, sequence, rows_for(11))
    held, fork = cache.read(sequence, 0), cache.fork(sequence)

    cache.truncate(sequence, 6)
    rows = rows_for(2)
    append(cache, sequence, rows)

    assert torch.equal(cache.read(sequence, 0), torch.cat([held[:6], joined(rows, 0)]))
    assert torch.equal(cache.read(fork, 0), held)


def test_misuse_is_refused() -> None:
    cache = make_cache()
    sequence = cache.new_sequence("r")
    append(cache, sequence, rows_for(3))
    with pytest.raises(InputRefused, match="must follow"):
        cache.begin({sequence: range(2, 4)})
    with pytest.raises(InputRefused, match="must follow"):
        cache.begin({sequence: range(4, 5)})
    with pytest.raises(InputRefused, match="no prefix"):
        cache.truncate(sequence, 4)
    transaction = cache.begin({sequence: range(3, 5)})
    for call in (
        lambda: cache.begin({sequence: range(3, 4)}),
        lambda: cache.free(sequence),
        lambda: cache.truncate(sequence, 0),
        lambda: cache.reorder([sequence], [0]),
    ):
        with pytest.raises(InputRefused, match="transaction is open"):
            call()
    with pytest.raises(InputRefused, match="before they are written"):
        transaction.view(0)
    with pytest.raises(InputRefused, match="no place for"):
        transaction.write(0, torch.zeros(3, 8), torch.zeros(3, 4))
    with pytest.raises(InputRefused, match="no prefix"):
        transaction.commit([3])
    transaction.discard()
    for closed in (transaction.discard, transaction.commit, lambda: transaction.view(0)):
        with pytest.raises(InputRefused, match="committed or discarded"):
            closed()
    cache.free(sequence)
    with pytest.raises(InputRefused, match="freed before"):
        cache.free(sequence)


def test_a_pool_is_not_read_as_another_format() -> None:
    flash = RowFormat.flashmla_fp8()
    cache = make_cache(form=flash, layers=1)

    assert cache.pool(0, flash).shape == (12, 4, 656)
    with pytest.raises(InputRefused, match="another format"):
        cache.pool(0, RowFormat.grouped_fp8(512, 64))


def test_decode_steps_of_a_ragged_batch_beside_one_pass() -> None:
    """Views feed a backend; step by step the same rows are seen as in one call with all queries."""
    cache = make_cache(pages=40, page_size=3)
    sequences = [cache.new_sequence(f"r{place}") for place in range(3)]
    for sequence, length in zip(sequences, (0, 4, 9), strict=True):
        append(cache, sequence, rows_for(length))
    queries, backend = torch.randn(3, 5, 2, 12), TorchBackend()
    outputs = []
    for step in range(5):
        spans = {sequence: range(cache.length(sequence), cache.length(sequence) + 1) for sequence in sequences}
        with cache.begin(spans) as transaction:
            for layer, (c_kv, k_rope) in enumerate(rows_for(3)):
                transaction.write(layer, c_kv, k_rope)
            view = transaction.view(1)
            pool = cache.pool(1, FORM)
            call = DecodeCall(queries[:, step : step + 1], pool, FORM, view.block_table, view.seq_lens, 0.3)
            outputs.append(backend.run(call).out)
            transaction.commit()

    view = cache.view(sequences)
    whole = DecodeCall(queries, cache.pool(1, FORM), FORM, view.block_table, view.seq_lens, 0.3)

    assert view.seq_lens.tolist() == [5, 9, 14]
    assert view.block_table[0, 2:].tolist() == [NO_PAGE] * 3
    assert torch.allclose(torch.cat(outputs, dim=1), backend.run(whole).out, rtol=0, atol=DECODE_FLOAT32)


def test_an_order_with_a_place_that_there_is_not_changes_nothing() -> None:
    cache = make_cache()
    first, second = cache.new_sequence("a"), cache.new_sequence("b")
    append(cache, first, rows_for(3))
    append(cache, second, rows_for(3))
    before = cache.residency()

    for order in ([0, 0, 9], [0, -1]):
        with pytest.raises(InputRefused, match="a place without a sequence"):
            cache.reorder([first, second], order)

    assert cache.residency() == before
    cache.free(first)
    cache.free(second)
    assert cache.residency().free == cache.residency().pools


def test_layers_and_numbers_of_pages_that_there_are_not_are_refused() -> None:
    cache = make_cache()
    sequence = cache.new_sequence("a")
    with cache.begin({sequence: range(2)}) as transaction:
        for layer in (-1, LAYERS):
            with pytest.raises(InputRefused, match="no such layer"):
                transaction.write(layer, *rows_for(2)[0])
    for layer in (-1, LAYERS):
        with pytest.raises(InputRefused, match="no such layer"):
            cache.read(sequence, layer)
    with pytest.raises(InputRefused, match="0 or more"):
        cache.extend(-2)
