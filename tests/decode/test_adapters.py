"""FlashMLA's and FlashInfer's adapters beside stand-ins that compute what the packages document, in their layouts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_convert.decode.abi import DecodeCall, DecodeOutput, SparseSelection
from mla_convert.decode.flashinfer import FlashInferBackend, page_lists
from mla_convert.decode.flashmla import FlashMLABackend
from mla_convert.decode.ladder import LadderCase, build, exact
from mla_convert.decode.rows import RowFormat
from tests import tolerances

HOPPER = (9, 0)


@dataclass
class FakeFlashMLA:
    """`flash_mla` as its interface documents it: LSE (B, H, s_q), +inf for a query that sees nothing."""

    seen: dict[str, Any] = field(default_factory=dict)

    def get_mla_metadata(self) -> tuple[object, None]:
        return object(), None

    def flash_mla_with_kvcache(self, **arguments: Any) -> tuple[Tensor, Tensor]:
        self.seen = arguments
        found = exact(self._dense() if arguments.get("indices") is None else self._sparse())
        lse = found.lse.float().masked_fill(found.lse == float("-inf"), float("inf"))
        return found.out.to(arguments["q"].dtype), lse.transpose(1, 2)

    def _dense(self) -> DecodeCall:
        given = self.seen
        assert given["k_cache"].shape[1:] == (64, 1, 576)
        assert given["q"].shape[-1] == 576
        assert given["head_dim_v"] == 512
        assert given["block_table"].dtype == given["cache_seqlens"].dtype == torch.int32
        pool = given["k_cache"].squeeze(2)
        form = RowFormat.plain(512, 64, str(pool.dtype).removeprefix("torch."))  # type: ignore[arg-type]
        table, lengths = given["block_table"], given["cache_seqlens"]
        return DecodeCall(given["q"], pool, form, table, lengths, given["softmax_scale"], given["causal"])

    def _sparse(self) -> DecodeCall:
        given = self.seen
        assert given["q"].shape[2] in (64, 128)
        assert given["causal"] is False
        assert given["is_fp8_kvcache"] is True
        assert given["indices"].dtype == torch.int32
        assert given["topk_length"].shape == given["q"].shape[:1]
        parts = [given["indices"].long(), given["topk_length"][:, None]]
        if "extra_k_cache" in given:
            extra = given["extra_indices_in_kvcache"].long()
            parts += [given["extra_k_cache"].squeeze(2), extra, given["extra_topk_length"][:, None]]
        form = LadderCase(fp8=True, d_c=512, d_r=64).form
        lengths = torch.zeros(len(given["q"]), dtype=torch.int32)
        call = DecodeCall(given["q"], given["k_cache"].squeeze(2), form, lengths[:, None], lengths, 1.0, False)
        selection = SparseSelection(*parts)
        return replace(call, scale=given["softmax_scale"], sparse=selection, sinks=given["attn_sink"])


@dataclass
class FakeFlashInfer:
    """`flashinfer.mla` as documented: CSR pages, base-2 LSE, −5·10⁴ for a query that sees nothing."""

    plan_arguments: dict[str, Any] = field(default_factory=dict)

    def BatchMLAPagedAttentionWrapper(self, workspace: Tensor, *, backend: str) -> FakeFlashInfer:
        assert backend == "auto"
        return self

    def plan(self, **arguments: Any) -> None:
        self.plan_arguments = arguments

    def run(self, *, q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, return_lse: bool) -> Any:
        given = self.plan_arguments
        assert return_lse
        starts = given["kv_indptr"].tolist()
        batch = len(starts) - 1
        tokens = int(given["qo_indptr"][1])
        table = torch.full((batch, max(b - a for a, b in pairwise(starts)) + 1), -1)
        for row, (a, b) in enumerate(pairwise(starts)):
            table[row, : b - a] = given["kv_indices"][a:b]
        pool = torch.cat([ckv_cache, kpe_cache], dim=-1)
        q = torch.cat([q_nope, q_pe], dim=-1).unflatten(0, (batch, tokens))
        form = RowFormat.plain(given["head_dim_ckv"], given["head_dim_kpe"], "bfloat16")
        call = DecodeCall(q, pool, form, table, given["kv_len_arr"], given["sm_scale"], given["causal"])
        found = exact(call)
        lse = (found.lse / math.log(2.0)).clamp_min(-5e4).float()
        return found.out.to(q.dtype).flatten(0, 1), lse.flatten(0, 1)


def near(found: DecodeOutput, call: DecodeCall) -> None:
    expected = exact(call)
    assert found.out.shape == expected.out.shape
    assert (found.out.double() - expected.out).abs().max() <= tolerances.KERNEL_BFLOAT16
    assert torch.equal(found.lse.isinf(), expected.lse == float("-inf"))
    finite = ~found.lse.isinf()
    assert (found.lse.double() - expected.lse)[finite].abs().max() <= tolerances.KERNEL_LSE
    assert torch.all(found.out[~finite] == 0)


def dense(**changes: object) -> DecodeCall:
    base = {"lengths": (0, 1, 70), "heads": 3, "tokens": 2, "d_c": 512, "d_r": 64, "page_size": 64}
    return build(LadderCase(**{**base, **changes}))  # type: ignore[arg-type]


def sparse(**changes: object) -> DecodeCall:
    base = {"fp8": True, "causal": False, "top_k": 64, "sinks": True, "lengths": (0, 30, 90)}
    return dense(**{**base, **changes})


@pytest.mark.parametrize("backend", [FlashMLABackend(), FlashInferBackend()], ids=lambda backend: backend.name)
def test_an_absent_package_is_named(backend: FlashMLABackend | FlashInferBackend) -> None:
    package = {"flashmla": "flash_mla"}.get(backend.name, backend.name)
    assert backend.absent(torch.device("cpu")) == f"{package} is not installed"
    assert backend.unfit(dense()) == f"{package} is not installed"


@pytest.mark.parametrize(("d_c", "d_r", "causal"), [(512, 64, True), (512, 64, False), (144, 48, True), (384, 0, True)])
def test_flashmla_dense(d_c: int, d_r: int, causal: bool) -> None:
    call = dense(d_c=d_c, d_r=d_r, causal=causal)
    backend = FlashMLABackend(FakeFlashMLA(), HOPPER)

    assert backend.unfit(call) is None
    near(backend.run(call), call)
    assert backend.padding(call).latent == 512 - d_c
    assert backend.padding(call).rope == 64 - d_r
    assert backend.padding(call).pool_bytes == (0 if d_c == 512 else call.pool.shape[0] * 64 * 576 * 2)


@pytest.mark.parametrize("extra", [0, 64])
def test_flashmla_sparse(extra: int) -> None:
    call = sparse(extra_top_k=extra)
    fake = FakeFlashMLA()
    backend = FlashMLABackend(fake, (10, 0))

    assert backend.unfit(call) is None
    near(backend.run(call), call)
    assert backend.padding(call).heads == 61
    assert fake.seen["indices"].min() >= 0


@pytest.mark.parametrize(
    ("call", "capability", "reason"),
    [
        (dense(), (8, 0), "sm_90"),
        (dense(page_size=16), HOPPER, "pages of 16"),
        (dense(dtype="float32"), HOPPER, "float32 query"),
        (dense(d_c=528), HOPPER, "wider"),
        (dense(sinks=True), HOPPER, "no sinks"),
        (dense(fp8=True), HOPPER, "rows of ladder-fp8"),
        (sparse(), (12, 0), "sm_90 or sm_100"),
        (sparse(heads=129, lengths=(3,)), HOPPER, "129 heads"),
        (sparse(top_k=40), HOPPER, "multiples of 64"),
        (sparse(d_c=256), HOPPER, "656-byte"),
    ],
)
def test_what_flashmla_cannot_take(call: DecodeCall, capability: tuple[int, int], reason: str) -> None:
    assert reason in str(FlashMLABackend(FakeFlashMLA(), capability).unfit(call))


@pytest.mark.parametrize(("d_c", "d_r", "page"), [(512, 64, 1), (256, 32, 16), (144, 48, 64)])
def test_flashinfer(d_c: int, d_r: int, page: int) -> None:
    call = dense(d_c=d_c, d_r=d_r, page_size=page)
    backend = FlashInferBackend(FakeFlashInfer(), HOPPER)

    assert backend.unfit(call) is None
    near(backend.run(call), call)
    assert (backend.padding(call).latent, backend.padding(call).rope) == (512 - d_c, 64 - d_r)


@pytest.mark.parametrize(
    ("call", "capability", "reason"),
    [
        (dense(), (7, 5), "sm_80"),
        (dense(dtype="float32"), HOPPER, "float32 query"),
        (sparse(), HOPPER, "selections"),
        (dense(sinks=True), HOPPER, "sinks"),
        (dense(fp8=True), HOPPER, "rows of ladder-fp8"),
        (dense(d_r=72), HOPPER, "wider"),
    ],
)
def test_what_flashinfer_cannot_take(call: DecodeCall, capability: tuple[int, int], reason: str) -> None:
    assert reason in str(FlashInferBackend(FakeFlashInfer(), capability).unfit(call))


def test_page_lists_leave_out_the_entries_past_a_sequence() -> None:
    table = torch.tensor([[5, 3, -9], [-9, -9, -9], [7, -9, -9]])

    lists = page_lists(table, torch.tensor([17, 0, 16]), 16)

    assert lists.starts.tolist() == [0, 2, 2, 3]
    assert lists.indices.tolist() == [5, 3, 7]
