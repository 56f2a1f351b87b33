from __future__ import annotations

from datetime import datetime, timedelta
from importlib import metadata

from mla_convert.manifests.environment import Environment, capture, installed_versions


def test_capture_records_versions_machine_and_command() -> None:
    env = capture(["mla-convert", "convert", "a b"])
    assert env.command == ("mla-convert", "convert", "a b")
    assert env.packages["torch"] == metadata.version("torch")
    assert env.packages["pydantic"] == metadata.version("pydantic")
    assert env.cpu_count >= 1
    assert env.memory_bytes > 1 << 20
    assert env.python.startswith("3.")


def test_times_are_utc_and_finish_comes_after_start() -> None:
    env = capture([])
    assert env.finished is None
    done = env.finish()
    assert done.started == env.started
    assert done.finished is not None
    start, end = datetime.fromisoformat(done.started), datetime.fromisoformat(done.finished)
    assert start.utcoffset() == timedelta(0) == end.utcoffset()
    assert start <= end


def test_a_package_that_is_not_installed_is_left_out() -> None:
    assert installed_versions(["pydantic", "no-such-distribution"]) == {"pydantic": metadata.version("pydantic")}


def test_it_round_trips() -> None:
    env = capture(["x"]).finish()
    assert Environment.model_validate_json(env.model_dump_json()) == env
