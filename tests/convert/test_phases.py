"""Time by phase."""

from __future__ import annotations

import subprocess
import sys
import time

from mla_convert.convert.phases import Seconds

SPIN = "import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass"


def test_a_span_is_a_difference_of_points() -> None:
    assert Seconds(3, 5) - Seconds(1, 2) + Seconds(1, 1) == Seconds(3, 4)


def test_sleep_is_no_work() -> None:
    started = Seconds.now()
    time.sleep(0.2)
    spent = Seconds.now() - started

    assert spent.wall >= 0.2
    assert spent.cpu < 0.1


def test_work_of_a_child_counts_once_it_has_ended() -> None:
    started = Seconds.now()
    subprocess.run([sys.executable, "-c", SPIN], check=True)

    assert (Seconds.now() - started).cpu >= 0.2
