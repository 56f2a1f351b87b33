from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mla_convert.decode.abi import DecodeCall, DecodeOutput
from mla_convert.decode.distributed import merge_across_ranks, merge_outputs_across_ranks
from mla_convert.decode.merge import PartialState
from mla_convert.decode.rows import RowFormat
from mla_convert.decode.torch_backend import TorchBackend
from tests.decode.calls import Shape, errors, make_call
from tests.tolerances import DECODE_FLOAT32, DECODE_LSE, FLOAT64_ALGEBRA

PAGE = 16
SHAPE = Shape(RowFormat.plain(72, 24, "float32"), (0, 20, 129), heads=9, queries=2, page_size=PAGE, causal=False)
# Pages of each sequence that a rank holds; a rank without rows stands first, where a wrong maximum would spread.
SPLITS = {2: ((0, 0), (0, 9)), 3: ((0, 0), (0, 5), (5, 9))}


def part_of(whole: DecodeCall, first: int, last: int) -> DecodeOutput:
    """One rank's pages of every sequence, attended to without the others."""
    held = (whole.seq_lens - PAGE * first).clamp(0, PAGE * (last - first))
    return TorchBackend().run(replace(whole, block_table=whole.block_table[:, first:last], seq_lens=held))


def work(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    output = part_of(make_call(SHAPE), *SPLITS[ranks][rank])
    merged = merge_outputs_across_ranks(output)
    mean = output.out.clone()  # the mutant: averaged rank-local outputs
    dist.all_reduce(mean)
    generator = torch.Generator().manual_seed(1)
    scores = 40 * torch.randn(4, 30, generator=generator, dtype=torch.float64)
    values = torch.randn(30, 5, generator=generator, dtype=torch.float64)
    shares = [30 * number // (ranks - 1) for number in range(ranks)]
    own = slice(shares[rank - 1], shares[rank]) if rank else slice(0, 0)
    state = merge_across_ranks(PartialState.of_scores(scores[:, own], values[own]))
    torch.save(
        {"out": merged.out, "lse": merged.lse, "mean": mean / ranks, "state": state.normalised()},
        f"{folder}/rank{rank}.pt",
    )
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 3])
def test_processes_that_share_a_history_agree_with_one_that_has_it_all(ranks: int, tmp_path: Path) -> None:
    """Real gloo processes; rank 0 holds nothing."""
    mp.spawn(work, args=(ranks, str(tmp_path)), nprocs=ranks)
    found = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(ranks)]
    whole = make_call(SHAPE)

    for result in found:
        out, lse = errors(whole, DecodeOutput(result["out"], result["lse"]))
        assert out <= DECODE_FLOAT32
        assert lse <= DECODE_LSE
        assert torch.equal(result["out"], found[0]["out"])
        assert errors(whole, DecodeOutput(result["mean"], result["lse"]))[0] > 1e4 * DECODE_FLOAT32
    generator = torch.Generator().manual_seed(1)
    scores = 40 * torch.randn(4, 30, generator=generator, dtype=torch.float64)
    values = torch.randn(30, 5, generator=generator, dtype=torch.float64)
    out, lse = found[0]["state"]
    assert torch.allclose(out, torch.softmax(scores, -1) @ values, rtol=0, atol=FLOAT64_ALGEBRA)
    assert torch.allclose(lse, torch.logsumexp(scores, -1), rtol=0, atol=FLOAT64_ALGEBRA)
