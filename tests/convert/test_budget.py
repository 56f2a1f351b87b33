"""Widths from shares, bytes and back: arithmetic and ranges."""

from __future__ import annotations

import pytest

from mla_convert.convert.budget import Goal, WidthLimits, goal_width, parse_share, parse_widths, width_limits
from mla_convert.convert.checkpoint import open_source
from mla_convert.convert.inspection import target_cache
from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.planning import make_plan
from mla_convert.errors import UsageFault
from tests.conftest import PicoFactory

# SmolLM2-135M: 384 numbers in each of 30 layers, float32.
SMOLLM2 = WidthLimits(lowest=3, highest=384, source=384, bytes_per_number=120)


@pytest.mark.parametrize(
    ("goal", "width"),
    [
        (Goal(width=192), 192),
        (Goal(width=3), 3),
        (Goal(width=101), 101),
        (Goal(budget=0.5), 192),
        (Goal(budget=0.25), 96),
        (Goal(budget=1.0), 384),
        (Goal(budget=0.333), 126),  # 127.87 numbers, even
        (Goal(cache_bytes=23_040), 192),
        (Goal(cache_bytes=23_039), 190),
        (Goal(cache_bytes=4096), 34),
    ],
    ids=str,
)
def test_a_goal_is_a_width_that_does_not_exceed_it(goal: Goal, width: int) -> None:
    assert goal_width(goal, SMOLLM2) == width


@pytest.mark.parametrize(
    ("goal", "message"),
    [
        (Goal(width=2), "expected 3 to 384; found 2"),
        (Goal(width=385), "expected 3 to 384; found 385"),
        (Goal(budget=0.01), "expected 1.0% to 100.0% of the source's 384 numbers per token and layer; found 1%"),
        (Goal(budget=1.01), "found 101%"),
        (Goal(cache_bytes=479), "expected 480 to 46,080 bytes per token, 120 for each number of the width; found 479"),
        (Goal(cache_bytes=46_200), "found 46,200"),
    ],
    ids=str,
)
def test_what_is_out_of_range_is_refused_with_the_range_in_its_own_unit(goal: Goal, message: str) -> None:
    with pytest.raises(UsageFault) as caught:
        goal_width(goal, SMOLLM2)

    assert message in str(caught.value)


def test_a_share_that_binary_numbers_miss_is_not_one_too_few() -> None:
    limits = WidthLimits(lowest=3, highest=100, source=100, bytes_per_number=4)

    assert [goal_width(Goal(budget=parse_share(f"{share}%", "")), limits) for share in (28, 56, 58)] == [28, 56, 58]


@pytest.mark.parametrize("text", ["25", "25 percent", "-5%", "%", "a%", "1e1%"])
def test_what_is_no_percentage_is_refused(text: str) -> None:
    with pytest.raises(UsageFault, match="not a percentage"):
        parse_share(text, "--budget")


def test_a_list_of_widths_and_shares() -> None:
    assert parse_widths("96, 50%,128,192,25%", SMOLLM2) == (192, 128, 96)
    with pytest.raises(UsageFault, match="--width is out of range"):
        parse_widths("96,400", SMOLLM2)
    with pytest.raises(UsageFault, match="not a percentage"):
        parse_widths("96,,128", SMOLLM2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_bytes_are_those_of_the_dtype_that_is_written(pico: PicoFactory, dtype: str) -> None:
    source = open_source(str(pico(kv_heads=2)))
    options = ConvertOptions(dtype=dtype, profile="hf", calibration=("text",))
    limits = width_limits(source, options)

    itemsize = 4 if dtype == "float32" else 2
    assert limits.bytes_per_number == 4 * itemsize  # four layers
    width = goal_width(Goal(cache_bytes=40 * 4 * itemsize), limits)
    assert width == 40
    plan = make_plan(source, ConvertOptions(**{**vars(options), "qk_rope_head_dim": 10, "kv_lora_rank": width - 10}))
    assert target_cache(source, plan).bytes_per_token == limits.bytes_of(width)


@pytest.mark.parametrize(("dtype", "channel"), [("float32", 0), ("float16", 1)])
def test_the_range_is_that_of_the_plans(pico: PicoFactory, dtype: str, channel: int) -> None:
    """A constant channel is stored, so it is part of the width."""
    source = open_source(str(pico(kv_heads=2)))
    options = {"dtype": dtype, "profile": "hf", "calibration": ("text",)}
    limits = width_limits(source, ConvertOptions(**options))

    assert (limits.lowest, limits.highest) == (3 + channel, 64 + channel)
    for rope, rank in ((2, 1 + channel), (64, channel), (32, 32 + channel)):
        wanted = ConvertOptions(**options, qk_rope_head_dim=rope, kv_lora_rank=rank)
        if rank > channel:
            assert make_plan(source, wanted).useful_rank == rank - channel


def test_policies_of_whole_heads_start_wider(pico: PicoFactory) -> None:
    source = open_source(str(pico(kv_heads=2)))

    assert width_limits(source, ConvertOptions(rope_policy="high")).lowest == 5
