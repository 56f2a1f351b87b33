"""`mla-convert convert` as it is typed."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import typer

from mla_convert import tolerances
from mla_convert.cli import convert as cli_convert
from mla_convert.cli import frontier as cli_frontier
from mla_convert.cli import inspect as cli_inspect
from mla_convert.cli import verify as cli_verify
from mla_convert.cli.convert_options import MEMORY_BUDGET
from mla_convert.cli.main import build_app, run
from mla_convert.convert.budget import Goal
from mla_convert.convert.checkpoint_writer import HEADER_ROOM
from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.states import MEMORY_BUDGET_BYTES
from mla_convert.manifests.models import load
from mla_convert.manifests.verify import verify_folder
from tests.conftest import PicoFactory
from tests.eval.helpers import write_text

HIGH = ("--rope-policy", "high", "--qk-rope-head-dim", "4", "--kv-lora-rank", "12")
WIDE = ("--qk-rope-head-dim", "4", "--kv-lora-rank", "12")
PLAN_FILE = """
qk-rope-head-dim: 6
kv_lora_rank: 20
calibration_tokens: 96
calibration_window: 48
factorization: split
"""


@dataclass(frozen=True)
class Ran:
    """One finished command line."""

    code: int
    output: str
    messages: str
    folder: Path

    @property
    def object(self) -> dict[str, Any]:
        """Standard output as one JSON object."""
        found: dict[str, Any] = json.loads(self.output)
        return found


def run_convert(source: Path, out: Path, *arguments: str) -> Ran:
    output, messages = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(messages):
        code = run(["convert", str(source), str(out), *arguments])
    return Ran(code, output.getvalue(), messages.getvalue(), out)


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(folder.rglob("*"))}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder that does not exist yet, for the whole module."""
    folder = tmp_path_factory.mktemp("cache") / "not-yet"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLA_CONVERT_CACHE", str(folder))
        patch.setenv("COLUMNS", "100")
        yield folder


@pytest.fixture(scope="module")
def lossless(pico: PicoFactory, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """`convert --lossless --json`. Read only."""
    return run_convert(pico(), tmp_path_factory.mktemp("lossless") / "out", "--lossless", "--json")


@pytest.fixture(scope="module")
def replaced(pico: PicoFactory, lossless: Ran, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A calibrated plan from a file, one option of it overridden, over another checkpoint. Read only."""
    folder = tmp_path_factory.mktemp("calibrated")
    shutil.copytree(lossless.folder, folder / "out")
    (folder / "out" / "stale.txt").touch()
    (folder / "plan.yaml").write_text(PLAN_FILE, encoding="utf-8")
    text = write_text(folder / "text.txt", 400, seed=2)
    options = ("--config", str(folder / "plan.yaml"), "--kv-lora-rank", "26", "--calibration", str(text))
    return run_convert(pico("llama", kv_heads=2), folder / "out", *options, "--overwrite")


def test_json_holds_the_plan_the_identity_and_the_evidence(lossless: Ran, pico: PicoFactory) -> None:
    found, manifest = lossless.object, load(lossless.folder)

    assert lossless.code == 0
    assert verify_folder(lossless.folder, pico()).ok
    assert found["folder"] == str(lossless.folder)
    assert found["plan_id"] == manifest.method.plan_id
    assert found["canonical_mla_id"] == manifest.canonical_mla_id
    assert found["plan"]["lossless"] is True
    assert found["reload_check"] == manifest.reload_check.model_dump(mode="json")
    assert found["reload_check"]["passed"] is True
    assert found["layer_errors"]["key_map_error"]["worst"] < 1e-9
    assert found["layer_errors"]["weighted_key_error"] is None
    assert found["cache"]["target"] == {"numbers_per_token_per_layer": 32, "bytes_per_token": 512, "dtype": "float32"}
    phases = found["phase_seconds"]
    assert phases.keys() == {"forward", "statistics", "closed_form", "reload_check"}
    assert phases["forward"] == {"wall": 0, "cpu": 0}
    assert 0 < phases["closed_form"]["wall"] < found["seconds"] - phases["reload_check"]["wall"]
    assert phases["reload_check"]["cpu"] > 0


def test_json_prints_one_object_and_the_preview_beside_it(lossless: Ran) -> None:
    assert lossless.output.count("\n}\n") == 1
    assert "widths         kv_lora_rank 16, qk_rope_head_dim 16" in lossless.messages


def test_the_preview_says_what_is_then_done(lossless: Ran, pico: PicoFactory, tmp_path: Path) -> None:
    dry = run_convert(pico(), tmp_path / "out", "--lossless", "--dry-run", "--json").object

    done = lossless.object
    assert dry["dry_run"] is True
    assert dry["plan"] == done["plan"]
    assert dry["plan_id"] == done["plan_id"]
    assert dry["files"] == done["files"] == sorted(path.name for path in lossless.folder.iterdir())
    written = (lossless.folder / "model.safetensors").stat().st_size
    # What is left is the header, and norms and biases.
    assert dry["weight_bytes"] <= written <= dry["weight_bytes"] + HEADER_ROOM + 8192


def test_a_plan_file_is_read_and_the_command_line_overrides_it(replaced: Ran) -> None:
    manifest = load(replaced.folder)

    assert replaced.code == 0
    assert manifest.identity.architecture.kv_lora_rank == 26
    assert manifest.identity.architecture.qk_rope_head_dim == 6
    assert manifest.method.factorization == "split"
    assert manifest.calibration is not None
    assert (manifest.calibration.tokens, manifest.calibration.window_length) == (96, 48)


def test_an_overwritten_folder_keeps_nothing_of_what_was_there(replaced: Ran) -> None:
    assert not (replaced.folder / "stale.txt").exists()
    assert {path.name for path in replaced.folder.parent.iterdir()} == {"out", "plan.yaml", "text.txt"}


def test_the_result_for_a_reader(replaced: Ran) -> None:
    manifest = load(replaced.folder)

    assert manifest.canonical_mla_id in replaced.output
    assert f"max |Δlogit| {manifest.reload_check.max_abs_logit_error:.2g}" in replaced.output
    errors = [layer.weighted_value_error for layer in manifest.layers]
    worst = max(error for error in errors if error is not None)
    assert f"worst {worst:.3g} in layer {errors.index(worst)}" in replaced.output


def test_the_preview_comes_before_the_work_on_standard_error(replaced: Ran) -> None:
    for expected in (
        "engine",
        "64 → 32 numbers per token and layer (50.0%)",
        "1,024 → 512 bytes per token (float32)",
        "split, weighting output, gamma measured",
        "96 tokens in windows of 48",
        "epsilon route",
        "(replaced)",
        "mla_manifest.json",
    ):
        assert expected in replaced.messages
        assert expected not in replaced.output or expected == "engine"
    preview = replaced.messages[: replaced.messages.index("mla_manifest.json")]
    assert max(map(len, preview.splitlines())) <= 100


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_dry_run_writes_nothing_at_all(pico: PicoFactory, tmp_path: Path, flags: tuple[str, ...]) -> None:
    text = write_text(tmp_path / "text.txt", 400, seed=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLA_CONVERT_CACHE", str(tmp_path / "cache"))
        before = listing(tmp_path), listing(pico())
        options = ("--qk-rope-head-dim", "4", "--kv-lora-rank", "12", "--calibration", str(text))
        done = run_convert(pico(), tmp_path / "deep" / "out", *options, "--dry-run", *flags)

    assert done.code == 0
    assert (listing(tmp_path), listing(pico())) == before
    assert done.object["cache"]["target"]["bytes_per_token"] == 256 if flags else "512 → 256 bytes" in done.output


# Each: the arguments after SOURCE and OUT, the exit code, and a part of the message.
REFUSALS: dict[str, tuple[tuple[str, ...], int, str]] = {
    "no widths": ((), 2, "no widths given"),
    "one width": (("--kv-lora-rank", "12"), 2, "no widths given"),
    "lossless and widths": (("--lossless", "--kv-lora-rank", "12"), 2, "sets both widths itself"),
    "odd rope": (("--rope-policy", "high", "--qk-rope-head-dim", "3", "--kv-lora-rank", "12"), 2, "a multiple of 2"),
    "rank too large": ((*HIGH[:-1], "29"), 2, "expected 1 to 28"),
    "rank 0": ((*HIGH[:-1], "0"), 2, ""),
    "unknown profile": ((*HIGH, "--profile", "vllm"), 2, ""),
    "unknown policy": ((*HIGH, "--rope-policy", "best"), 2, ""),
    "unknown dtype": ((*HIGH, "--dtype", "int8"), 2, ""),
    "unknown option": ((*HIGH, "--rank", "8"), 2, ""),
    "policy without text": (("--qk-rope-head-dim", "4", "--kv-lora-rank", "12"), 2, "needs calibration text"),
    "lossless with text": (("--lossless", "--calibration", "x"), 2, "--calibration has no effect with --lossless"),
    "lossless with policy": (("--lossless", "--rope-policy", "high"), 2, "--rope-policy has no effect"),
    "lossless with recipe": (("--lossless", "--recipe", "transmla"), 2, "--recipe has no effect with --lossless"),
    "recipe and policy": (("--recipe", "mha2mla", *HIGH), 2, "expected --rope-policy 2-norm; found --rope-policy high"),
    # Equal to the default, and still not what the recipe says.
    "recipe and default": (("--recipe", "care", "--factorization", "joint"), 2, "contradict --recipe care"),
    "recipe without text": (("--recipe", "elitekv", *WIDE), 2, "greedy needs calibration text"),
    "recipe with idle text": (("--recipe", "x-ecomla", *WIDE, "--calibration", "x"), 2, "measures nothing on text"),
    "unknown recipe": ((*HIGH, "--recipe", "best"), 2, ""),
    "fold without rorope": ((*HIGH, "--freqfold", "2"), 2, "--freqfold is for --rope-policy rorope"),
    "gamma without text": ((*HIGH, "--gamma", "measured"), 2, "--gamma has no effect without calibration text"),
    "tokens without text": ((*HIGH, "--calibration-tokens", "64"), 2, "--calibration-tokens has no effect"),
    "padding in words": ((*HIGH, "--pad-cache", "512x64"), 2, "expected RANK+ROPE"),
    "padding too narrow": ((*HIGH, "--pad-cache", "8+4"), 2, "at least 12+4"),
    "revision of a folder": ((*HIGH, "--revision", "main"), 2, "--revision is for a Hub id"),
    "no plan file": ((*HIGH, "--config", "nowhere.yaml"), 2, "unreadable YAML"),
    "a profile to come": ((*HIGH, "--profile", "full"), 4, "not available yet"),
    "no such text": ((*HIGH, "--calibration", "nowhere.txt"), 4, "no such text"),
}


@pytest.mark.parametrize("extra", [(), ("--dry-run",), ("--json",)], ids=["run", "dry", "json"])
@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_has_its_exit_code_and_writes_nothing(
    pico: PicoFactory, tmp_path: Path, case: str, extra: tuple[str, ...]
) -> None:
    arguments, code, message = REFUSALS[case]
    before = listing(pico())

    done = run_convert(pico(), tmp_path / "out", *arguments, *extra)

    assert done.code == code
    assert message in done.messages
    assert list(tmp_path.iterdir()) == []
    assert listing(pico()) == before
    if "--json" in extra:
        assert done.object["error"]["exit_code"] == code
    else:
        assert done.output == ""


@pytest.mark.parametrize("extra", [(), ("--dry-run",)])
def test_what_a_profile_cannot_carry_ends_with_four(pico: PicoFactory, tmp_path: Path, extra: tuple[str, ...]) -> None:
    grouped, biased = pico("llama", kv_heads=2), pico("qwen2")
    engine = (*HIGH, "--profile", "engine", *extra)

    assert "one component per frequency" in run_convert(grouped, tmp_path / "out", *engine).messages
    done = run_convert(biased, tmp_path / "out", *engine)
    assert (done.code, list(tmp_path.iterdir())) == (4, [])
    assert "q_proj.bias" in done.messages


@pytest.mark.parametrize("extra", [(), ("--dry-run",)])
def test_an_output_folder_that_is_in_the_way_is_refused(
    pico: PicoFactory, tmp_path: Path, extra: tuple[str, ...]
) -> None:
    source = tmp_path / "above" / "source"
    shutil.copytree(pico(), source)
    shutil.copy(source / "config.json", source.parent / "config.json")
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "precious.txt").touch()
    before = listing(tmp_path)

    for out, flags, message in (
        (notes, (), "the output folder exists"),
        (notes, ("--overwrite",), "--overwrite replaces checkpoints only"),
        (notes / "precious.txt", ("--overwrite",), "is not a folder"),
        (source, (), "the output folder exists"),
        (source, ("--overwrite",), "must not be the source"),
        (source / "inside", (), "must not be the source"),
        (source.parent, ("--overwrite",), "must not be the source"),
    ):
        done = run_convert(source, out, *HIGH, *flags, *extra)
        assert (done.code, message in done.messages) == (2, True), (out, flags)
    assert listing(tmp_path) == before


def test_a_source_that_is_not_there_or_not_reachable(tmp_path: Path) -> None:
    assert run_convert(tmp_path / "nowhere", tmp_path / "out", *HIGH).code == 4
    with contextlib.redirect_stderr(io.StringIO()):
        assert run(["convert", "nobody/no-such-model", str(tmp_path / "out"), *HIGH]) == 5
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("extra", [(), ("--dry-run",)])
def test_a_full_disk_ends_with_five_before_anything_is_written(
    pico: PicoFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: tuple[str, ...]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=1000))

    done = run_convert(pico(), tmp_path / "out", *HIGH, *extra)

    assert (done.code, list(tmp_path.iterdir())) == (5, [])
    assert "not enough disk space" in done.messages


def test_files_that_do_not_compute_what_was_converted_end_with_three_and_are_deleted(
    pico: PicoFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tolerances.RELOAD_RELATIVE, "float32", 0.0)

    done = run_convert(pico(), tmp_path / "out", *HIGH, "--json")

    assert (done.code, list(tmp_path.iterdir())) == (3, [])
    assert done.object["error"]["kind"] == "check-failed"


def test_a_padded_plan_says_what_it_holds(pico: PicoFactory, tmp_path: Path) -> None:
    done = run_convert(pico(), tmp_path / "out", *HIGH, "--pad-cache", "20+8", "--dry-run")

    assert "kv_lora_rank 20, qk_rope_head_dim 8, filled up from 12+4" in done.output


def test_a_wrong_key_of_a_plan_file_is_refused_with_its_line(pico: PicoFactory, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("lossless: true\nprofil: hf\n", encoding="utf-8")

    done = run_convert(pico(), tmp_path / "out", "--config", str(tmp_path / "plan.yaml"), "--json")

    assert done.code == 2
    error = done.object["error"]
    assert error["where"].endswith("plan.yaml, line 2")
    assert (error["found"], error["remedy"]) == ("profil", "The nearest is profile.")


def test_every_option_but_the_files_own_can_stand_in_a_plan_file() -> None:
    hints = set(get_type_hints(cli_convert.command)) - set(cli_convert.NOT_IN_PLAN_FILE)

    assert {field.name for field in fields(ConvertOptions)} <= hints
    goals, measured = {field.name for field in fields(Goal)}, {"measure", "measure_tokens"}
    others = {"revision", "dry_run", "overwrite", "memory_budget"} | goals | measured
    assert hints - {field.name for field in fields(ConvertOptions)} == others


def test_choices_and_defaults_are_those_of_the_conversion() -> None:
    command = cli_convert.command
    hints, wanted = get_type_hints(command), get_type_hints(ConvertOptions)
    defaults = dict(zip(list(hints)[3:-1], command.__defaults__ or (), strict=True))
    for field in fields(ConvertOptions):
        assert choices(hints[field.name]) == choices(wanted[field.name]), field.name
        # None stands for "not given" where the conversion has another word for that.
        assert defaults[field.name] in (field.default, None), field.name


def choices(hint: Any) -> set[str]:
    if get_origin(hint) is Literal:
        return set(get_args(hint))
    return {choice for part in get_args(hint) for choice in choices(part)}


@pytest.mark.parametrize(
    "module", [cli_convert, cli_frontier, cli_inspect, cli_verify], ids=lambda module: module.__name__
)
def test_the_examples_are_command_lines_that_parse(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.yaml").write_text("lossless: true", encoding="utf-8")
    app: Any = typer.main.get_command(build_app())
    for line in module.EXAMPLES.strip().splitlines():
        program, name, *arguments = shlex.split(line)
        assert program == "mla-convert"
        app.commands[name].make_context(name, arguments)


def test_the_memory_budget_changes_no_result(lossless: Ran, pico: PicoFactory, tmp_path: Path) -> None:
    small = run_convert(pico(), tmp_path / "out", "--lossless", "--memory-budget", "0", "--json").object

    assert lossless.object["reload_check"]["whole_model"] is True
    assert small["reload_check"]["whole_model"] is False
    assert small["canonical_mla_id"] == lossless.object["canonical_mla_id"]
    assert run_convert(pico(), tmp_path / "other", "--lossless", "--memory-budget", "inf", "--json").code == 2
    assert MEMORY_BUDGET * 1024**3 == MEMORY_BUDGET_BYTES
