from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from mla_convert.decode.abi import DecodeCall, DecodeOutput, SparseSelection, check_call
from mla_convert.decode.reference import ReferenceBackend
from mla_convert.decode.rows import RowFormat
from mla_convert.decode.torch_backend import TorchBackend
from mla_convert.errors import InputRefused
from tests.decode.calls import POISON, Shape, errors, make_call
from tests.tolerances import DECODE_FLOAT32, DECODE_LSE, DECODE_ROUNDED_OUTPUT, FLOAT64_ALGEBRA

WIDTHS = st.sampled_from([16, 72, 96, 144, 152, 384, 512, 1024])
ROPES = st.sampled_from([0, 8, 24, 40, 48, 64])
FORMS = ("float32", "float16", "bfloat16", "fp8")
LENGTHS = (0, 1, 127, 128, 129, 1000)


def form_of(kind: str, width: int, rope: int) -> RowFormat:
    if kind == "fp8":
        return RowFormat.grouped_fp8(width, rope)
    return RowFormat.plain(width, rope, kind)  # type: ignore[arg-type]


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    return Shape(
        form=form_of(draw(st.sampled_from(FORMS)), draw(WIDTHS), draw(ROPES)),
        lengths=draw(st.lists(st.sampled_from([0, 1, 2, 5, 33, 127, 128, 129, 1000]), min_size=1, max_size=5)),
        heads=draw(st.sampled_from([1, 9, 14, 28])),
        queries=draw(st.integers(1, 8)),
        page_size=draw(st.sampled_from([1, 3, 16, 37, 64])),
        causal=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=150, deadline=None)
@given(shapes(), st.sampled_from([1 << 12, 1 << 16, 1 << 20]))
def test_any_shape_beside_the_float64_reference(shape: Shape, chunk_bytes: int) -> None:
    call = make_call(shape)

    out, lse = errors(call, TorchBackend(chunk_bytes).run(call))

    assert out <= DECODE_FLOAT32
    assert lse <= DECODE_LSE


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("rope", [16, 24, 32])
@pytest.mark.parametrize("rank", [64, 96, 144, 256])
@pytest.mark.parametrize("heads", [9, 14, 28])
def test_case_25_every_shape_that_a_converter_produces(heads: int, rank: int, rope: int, page_size: int) -> None:
    shape = Shape(RowFormat.plain(rank, rope, "float32"), (70, 3, 0), heads, queries=2, page_size=page_size)
    call = make_call(shape)
    backend = TorchBackend()

    assert backend.unfit(call) is None
    out, lse = errors(call, backend.run(call))
    assert out <= DECODE_FLOAT32
    assert lse <= DECODE_LSE


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", [TorchBackend(), TorchBackend(1 << 13), ReferenceBackend()])
def test_case_26_ragged_lengths_and_the_lse(dtype: torch.dtype, backend: TorchBackend | ReferenceBackend) -> None:
    call = make_call(Shape(RowFormat.plain(64, 16, "float32"), LENGTHS, heads=9, queries=1, query_dtype=dtype))

    found = backend.run(call)

    assert found.lse.dtype == torch.float32
    assert found.out.dtype == dtype
    assert torch.equal(found.out[0], torch.zeros_like(found.out[0]))
    assert bool(torch.isneginf(found.lse[0]).all())
    rows = call.pool[call.block_table[1, 0].item(), 0]  # one visible row: the LSE is its score, e its base
    expected = call.q[1, 0].double() @ rows.double() * call.scale
    assert torch.allclose(found.lse[1, 0].double(), expected, rtol=0, atol=DECODE_LSE)
    out, lse = errors(call, found)
    assert out <= DECODE_ROUNDED_OUTPUT[str(dtype).removeprefix("torch.")]
    assert lse <= DECODE_LSE


def test_a_float64_query_is_answered_in_float64() -> None:
    call = make_call(Shape(RowFormat.plain(72, 24, "float32"), (40, 200), 3, 4, query_dtype=torch.float64))

    found = TorchBackend(1 << 12).run(call)

    assert found.lse.dtype == torch.float64
    out, lse = errors(call, found)
    assert max(out, lse) <= FLOAT64_ALGEBRA


def test_the_order_of_pages_changes_nothing() -> None:
    call = make_call(Shape(RowFormat.plain(96, 24, "float32"), (129, 300, 7), 14, 3))
    order = torch.randperm(call.pool.shape[0])
    inverse = torch.argsort(order)
    known = (call.block_table >= 0) & (call.block_table < len(order))
    moved = torch.where(known, inverse[call.block_table.clamp(0, len(order) - 1).long()], call.block_table.long())
    other = replace(call, pool=call.pool[order], block_table=moved)
    in_a_row = replace(call, pool=call.pool[call.block_table[1, :19].long()], block_table=torch.arange(19)[None])
    alone = replace(call, q=call.q[1:2], seq_lens=call.seq_lens[1:2])

    first, second = TorchBackend().run(call), TorchBackend().run(other)
    assert torch.equal(first.out, second.out)
    assert torch.equal(first.lse, second.lse)
    gathered = TorchBackend().run(replace(alone, block_table=call.block_table[1:2]))
    sliced = TorchBackend().run(replace(alone, pool=in_a_row.pool, block_table=in_a_row.block_table))
    assert torch.equal(gathered.out, sliced.out)


def test_the_size_of_a_chunk_changes_only_rounding() -> None:
    call = make_call(Shape(RowFormat.plain(144, 48, "bfloat16"), (1000, 129, 5), 9, 4, page_size=64))

    whole = TorchBackend(1 << 30).run(call)

    for chunk_bytes in (1, 1 << 12, 1 << 15):
        part = TorchBackend(chunk_bytes).run(call)
        assert torch.allclose(part.out, whole.out, rtol=0, atol=DECODE_FLOAT32)
        assert torch.allclose(part.lse, whole.lse, rtol=0, atol=DECODE_LSE)


def test_scores_far_apart_stay_exact_across_chunks() -> None:
    """Running maxima that jump by hundreds, up and down, and weights that would be subnormal."""
    call = make_call(Shape(RowFormat.plain(16, 8, "float32"), (200,), 3, page_size=16))
    steep = replace(call, scale=30.0)

    out, lse = errors(steep, TorchBackend(1 << 10).run(steep))

    assert out <= DECODE_FLOAT32
    assert lse <= DECODE_LSE * 1000  # the scores themselves are of order 1000


def test_queries_before_the_first_row_see_nothing() -> None:
    """A causal call of four queries over two rows: the first two stand before any key."""
    call = make_call(Shape(RowFormat.plain(16, 8, "float32"), (2,), 3, queries=4))

    found = TorchBackend().run(call)

    assert torch.isneginf(found.lse[0, :, 0]).tolist() == [True, True, False, False]
    assert errors(call, found)[0] <= DECODE_FLOAT32


@pytest.mark.parametrize("backend", [TorchBackend(), ReferenceBackend()])
@pytest.mark.parametrize("entry", POISON)
def test_a_visible_row_without_a_page_is_refused(backend: TorchBackend | ReferenceBackend, entry: int) -> None:
    call = make_call(Shape(RowFormat.plain(16, 8, "float32"), (40,), 2))
    table = call.block_table.clone()
    table[0, 1] = entry

    with pytest.raises(InputRefused, match="no page of the pool"):
        backend.run(replace(call, block_table=table))


def sparse_call(kind: str, with_extra: bool, with_sinks: bool) -> DecodeCall:
    """Every query sees other rows of a dense call's pool; what lies past the valid ones is poison."""
    dense = make_call(Shape(form_of(kind, 72, 24), (60, 33), 9, 3, page_size=16))
    generator = torch.Generator().manual_seed(5)

    def select(call: DecodeCall, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = torch.randint(0, most + 1, (2, 3), generator=generator, dtype=torch.int32)
        lengths[0, 0] = 0
        indices = torch.full((2, 3, most), POISON[0], dtype=torch.int64)
        for b in range(2):
            for i in range(3):
                tokens = torch.randperm(int(call.seq_lens[b]), generator=generator)[: int(lengths[b, i])]
                indices[b, i, : len(tokens)] = call.block_table[b, tokens // 16].long() * 16 + tokens % 16
        return indices, lengths

    other = make_call(Shape(form_of(kind, 72, 24), (50, 50), page_size=16, seed=9))
    indices, lengths = select(dense, 30)
    sparse = SparseSelection(indices, lengths)
    if with_extra:
        sparse = replace(
            sparse,
            extra_pool=other.pool,
            **dict(zip(("extra_indices", "extra_lengths"), select(other, 12), strict=True)),
        )
    sinks = torch.randn(9, generator=generator) if with_sinks else None
    call = replace(dense, causal=False, sparse=sparse, sinks=sinks)
    check_call(call)
    return call


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("with_extra", [False, True])
@pytest.mark.parametrize("kind", FORMS)
def test_sparse_selection_beside_the_reference(kind: str, with_extra: bool, with_sinks: bool) -> None:
    call = sparse_call(kind, with_extra, with_sinks)

    for chunk_bytes in (1 << 20, 1 << 11):
        out, lse = errors(call, TorchBackend(chunk_bytes).run(call))
        assert out <= DECODE_FLOAT32
        assert lse <= DECODE_LSE


def test_selecting_the_whole_prefix_is_the_dense_call() -> None:
    dense = replace(make_call(Shape(RowFormat.plain(32, 8, "float32"), (40,), 3, 2)), causal=False)
    tokens = torch.arange(40)
    indices = (dense.block_table[0, tokens // 16].long() * 16 + tokens % 16).expand(1, 2, 40)
    sparse = replace(dense, sparse=SparseSelection(indices, torch.full((1, 2), 40, dtype=torch.int32)))

    expected, found = ReferenceBackend().run(dense), ReferenceBackend().run(sparse)

    assert torch.equal(expected.out, found.out)


@pytest.mark.parametrize("backend", [TorchBackend(), ReferenceBackend()])
def test_a_sink_takes_its_share_and_no_part_of_the_lse(backend: TorchBackend | ReferenceBackend) -> None:
    call = make_call(Shape(RowFormat.plain(32, 8, "float32"), (40, 0), 4))
    sinks = torch.tensor([0.7, -3.0, float("-inf"), float("inf")])

    plain, found = backend.run(call), backend.run(replace(call, sinks=sinks))

    mass = torch.exp(plain.lse[0, 0].double())
    share = mass / (mass + torch.exp(sinks.double()))
    assert torch.allclose(found.out[0, 0].double(), plain.out[0, 0] * share[:, None], rtol=0, atol=DECODE_FLOAT32)
    assert torch.equal(found.lse, plain.lse)
    assert torch.equal(found.out[1], torch.zeros_like(found.out[1]))


def test_the_reference_is_softmax_written_out_by_hand() -> None:
    """Two rows, one head, scores 1 and 0 before a scale of 1/√3: seed 2, section 3, token 1, in latent space."""
    form = RowFormat.plain(1, 2, "float32")
    pool = torch.tensor([[[1.0, 1.0, 1.0], [-1.0, 0.0, -1.0]]])
    query = torch.tensor([[[[0.0, 1.0, 0.0]]]], dtype=torch.float64)
    call = DecodeCall(query, pool, form, torch.tensor([[0]]), torch.tensor([2]), 3**-0.5)

    found = ReferenceBackend().run(call)

    assert found.out.item() == pytest.approx(0.280915, abs=1e-6)
    assert found.lse.item() == pytest.approx(torch.logsumexp(torch.tensor([0.5773503, 0.0]), 0).item(), abs=1e-6)


def test_a_mutant_that_reads_a_page_too_many_is_seen() -> None:
    """The poison bites: reading the row behind a sequence's last gives NaN."""
    call = make_call(Shape(RowFormat.grouped_fp8(32, 8), (17,), 2))

    found: DecodeOutput = ReferenceBackend().run(replace(call, seq_lens=call.seq_lens + 1))

    assert bool(found.out.isnan().all())


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that any operation made; views of what was there do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {part.untyped_storage().data_ptr() for part in args if isinstance(part, torch.Tensor)}
        for part in result if isinstance(result, tuple | list) else [result]:
            if isinstance(part, torch.Tensor) and part.untyped_storage().data_ptr() not in given:
                self.bytes = max(self.bytes, part.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("kind", FORMS)
def test_what_is_held_at_a_time_is_one_chunk_whatever_the_history(kind: str) -> None:
    chunk = 1 << 16
    call = make_call(Shape(form_of(kind, 128, 64), (20_000, 9_000), heads=4, page_size=64))
    history = 20_000 * 192 * 4

    with Largest() as seen:
        TorchBackend(chunk).run(call)

    # A page more than a chunk, and the row in float32 beside the scores of its heads.
    assert seen.bytes <= 2 * chunk + 64 * 192 * 4
    assert seen.bytes < history / 50
