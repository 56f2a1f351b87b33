"""Time and peak memory of a step."""

from __future__ import annotations

import mmap
import subprocess
import sys
import time

import psutil
import pytest

from mla_convert.bench.usage import UsageMeter

# Filled, because zeroed memory that nobody has touched is not resident.
MEGABYTES_64 = 64 << 20
ALLOCATE = "import sys, time; block = bytearray(b'x') * (64 << 20); time.sleep(float(sys.argv[1]))"


def test_a_peak_that_is_gone_at_the_end_is_seen() -> None:
    before = psutil.Process().memory_info().rss
    # A mapping of its own: the heap may have as much resident already and hand it out again.
    with UsageMeter() as meter, mmap.mmap(-1, MEGABYTES_64) as block:
        block.write(b"x" * MEGABYTES_64)
        time.sleep(0.4)

    assert meter.usage.peak_rss_bytes >= before + MEGABYTES_64 * 0.9
    assert meter.usage.seconds >= 0.4


def test_children_count() -> None:
    before = psutil.Process().memory_info().rss
    with UsageMeter() as meter:
        subprocess.run([sys.executable, "-c", ALLOCATE, "0.5"], check=True, capture_output=True)

    assert meter.usage.peak_rss_bytes >= before + MEGABYTES_64


def test_another_process_is_watched_alone() -> None:
    own = bytearray(b"x") * (MEGABYTES_64 * 2)
    command = [sys.executable, "-c", ALLOCATE, "0.5"]
    with (
        subprocess.Popen(command, stdout=subprocess.DEVNULL) as process,
        UsageMeter(process.pid) as meter,
    ):
        process.wait()

    assert MEGABYTES_64 <= meter.usage.peak_rss_bytes < len(own)


def test_an_error_passes_through_and_the_sampling_stops() -> None:
    meter = UsageMeter()
    with pytest.raises(ValueError, match="mine"), meter:
        raise ValueError("mine")

    assert meter.usage.seconds > 0
    assert not meter._thread.is_alive()
