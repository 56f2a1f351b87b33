from __future__ import annotations

from dataclasses import replace

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
PROCESSES = 3


def part_of(whole: DecodeCall, first: int, last: int) -> DecodeOutput:
    """One rank's pages of every sequence, attended to without the others."""
    held = (whole.seq_lens - PAGE * first).clamp(0, PAGE * (last - first))
    return TorchBackend().run(replace(whole, block_table=whole.block_table[:, first:last], seq_lens=held))


def work(rank: int, folder: str) -> None:
    """One of three processes; the first two of them are also a group of two."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=PROCESSES)
    for ranks in SPLITS:
        group = dist.new_group(list(range(ranks)))
        if rank < ranks:
            torch.save(answer(rank, ranks, group), f"{folder}/{ranks}-{rank}.pt")
    dist.destroy_process_group()


def answer(rank: int, ranks: int, group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    output = part_of(make_call(SHAPE), *SPLITS[ranks][rank])
    merged = merge_outputs_across_ranks(output, group)
    mean = output.out.clone()  # the mutant: averaged rank-local outputs
    dist.all_reduce(mean, group=group)
    scores, values = wide_scores()
    shares = [30 * number // (ranks - 1) for number in range(ranks)]
    own = slice(shares[rank - 1], shares[rank]) if rank else slice(0, 0)
    exact, exact_lse = merge_across_ranks(PartialState.of_scores(scores[:, own], values[own]), group).normalised()
    return {"out": merged.out, "lse": merged.lse, "mean": mean / ranks, "exact": exact, "exact_lse": exact_lse}


def wide_scores() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    scores = 40 * torch.randn(4, 30, generator=generator, dtype=torch.float64)
    return scores, torch.randn(30, 5, generator=generator, dtype=torch.float64)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, torch.Tensor]]]:
    """What each process of each group found; real gloo processes, started once."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(work, args=(str(folder),), nprocs=PROCESSES)
    return {
        ranks: [torch.load(folder / f"{ranks}-{rank}.pt", weights_only=True) for rank in range(ranks)]
        for ranks in SPLITS
    }


@pytest.mark.parametrize("ranks", list(SPLITS))
def test_processes_that_share_a_history_agree_with_one_that_has_it_all(
    answers: dict[int, list[dict[str, torch.Tensor]]], ranks: int
) -> None:
    """Rank 0 holds nothing."""
    whole = make_call(SHAPE)

    for found in answers[ranks]:
        out, lse = errors(whole, DecodeOutput(found["out"], found["lse"]))
        assert out <= DECODE_FLOAT32
        assert lse <= DECODE_LSE
        assert torch.equal(found["out"], answers[ranks][0]["out"])


@pytest.mark.parametrize("ranks", list(SPLITS))
def test_states_merge_exactly_across_processes(answers: dict[int, list[dict[str, torch.Tensor]]], ranks: int) -> None:
    scores, values = wide_scores()

    for found in answers[ranks]:
        expected = torch.softmax(scores, -1) @ values
        assert torch.allclose(found["exact"], expected, rtol=0, atol=FLOAT64_ALGEBRA)
        assert torch.allclose(found["exact_lse"], torch.logsumexp(scores, -1), rtol=0, atol=FLOAT64_ALGEBRA)


@pytest.mark.parametrize("ranks", list(SPLITS))
def test_averaging_the_ranks_outputs_is_wrong(answers: dict[int, list[dict[str, torch.Tensor]]], ranks: int) -> None:
    """Seed 1, 0x0C says so; the check above would see it."""
    whole = make_call(SHAPE)

    for found in answers[ranks]:
        assert errors(whole, DecodeOutput(found["mean"], found["lse"]))[0] > 1e4 * DECODE_FLOAT32
