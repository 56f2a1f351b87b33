"""EleutherAI's lm-evaluation-harness over a source and its conversion, one model in memory at a time.

Both run as transformers loads them, in float32. The harness is an extra, imported where it is used.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

from mla_convert.convert.checkpoint import SourceCheckpoint, open_source
from mla_convert.convert.receipts import SourceDigests, digest_of_source
from mla_convert.convert.tokenizer import load_tokenizer
from mla_convert.errors import CheckFailed, EnvironmentFault, InputRefused, UsageFault
from mla_convert.eval.evaluate import check_pair
from mla_convert.eval.loading import load_model
from mla_convert.manifests.digest import FileDigest, digest_file, sha256_file, sha256_json
from mla_convert.manifests.environment import capture
from mla_convert.manifests.evaluation.harness import HarnessMetric, HarnessReceipt, HarnessTask
from mla_convert.manifests.evaluation.receipt import ComparedFiles
from mla_convert.manifests.models import MANIFEST_NAME, ConversionManifest

DISTRIBUTION = "lm_eval"
# Read by `datasets` and `evaluate` as they are imported: what is not on this machine is an error, not a download.
OFFLINE_VARIABLES = ("HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE")
DTYPE = "float32"
# One row of prompts as the harness identifies it.
HASHES = ("doc_hash", "prompt_hash", "target_hash")


@dataclass(frozen=True)
class HarnessOptions:
    """What a user asks for.

    Attributes:
        tasks: Names, groups and tags of the harness.
        task_path: Folder with task files of the user's own, or None.
        limit: Most examples of each task; None for all.
        batch_size: Requests that go through a model at once.
        seed: Of all that the harness draws.

    Raises:
        UsageFault: For no task, or sizes below 1.
    """

    tasks: tuple[str, ...]
    task_path: Path | None = None
    limit: int | None = None
    batch_size: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.tasks or not all(self.tasks):
            raise UsageFault("no task to run", expected="--tasks NAME[,NAME…]")
        for name, value in (("--limit", self.limit), ("--batch-size", self.batch_size)):
            if value is not None and value < 1:
                raise UsageFault(f"{name} is out of range", expected="1 or more", found=str(value))


def run_harness(
    target: Path, source: str, options: HarnessOptions, command: Sequence[str] | None = None
) -> HarnessReceipt:
    """Run tasks on both models.

    Args:
        target: A converted folder.
        source: What it was made from.
        options: What is wanted.
        command: Command line for the record; the process's own by default.

    Raises:
        EnvironmentFault: If lm-eval is not installed, or a task's data is not on this machine.
        UsageFault: For a task that the harness does not know.
        InputRefused: If the folder does not verify, was made from another source, or the task folder is none.
        CheckFailed: If the two models were not given the same prompts.
    """
    version = _require_harness()
    environment = capture(list(command if command is not None else sys.argv))
    files = _task_files(options.task_path)
    opened = open_source(source)
    digests = digest_of_source(opened)
    manifest = check_pair(target, opened, digests)
    with _asked_to_stay_offline():
        manager = _task_manager(options)
        ours = _run(opened.location.folder, options, manager)
        theirs = _run(target, options, manager)
    return HarnessReceipt(
        compared=_compared(opened, digests, target, manifest),
        harness=f"{DISTRIBUTION} {version}",
        asked=options.tasks,
        limit=options.limit,
        batch_size=options.batch_size,
        seed=options.seed,
        dtype=DTYPE,
        offline=_is_offline(),
        tasks=_tasks(ours, theirs),
        metrics=_metrics(ours, theirs),
        task_files=files,
        environment=environment.finish(),
    )


def _require_harness() -> str:
    if util.find_spec(DISTRIBUTION) is None:
        raise EnvironmentFault(
            "EleutherAI's lm-evaluation-harness is not installed",
            where="mla-convert harness",
            remedy="Run: pip install 'mla-convert[harness]'",
        )
    return metadata.version(DISTRIBUTION)


@contextmanager
def _asked_to_stay_offline() -> Iterator[None]:
    """Set those of `OFFLINE_VARIABLES` that are not set."""
    added = [name for name in OFFLINE_VARIABLES if name not in os.environ]
    os.environ.update(dict.fromkeys(added, "1"))
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _is_offline() -> bool:
    """Whether `datasets` downloads nothing. It may have been imported, and have made up its mind, before."""
    import datasets

    return bool(datasets.config.HF_HUB_OFFLINE)


def _task_files(folder: Path | None) -> tuple[FileDigest, ...]:
    if folder is None:
        return ()
    if not folder.is_dir():
        raise InputRefused("no such folder of tasks", where=str(folder))
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return tuple(digest_file(path, path.relative_to(folder).as_posix()) for path in paths)


def _task_manager(options: HarnessOptions) -> Any:
    """The harness's index of tasks, once it is seen that those asked for are in it."""
    from lm_eval.tasks import TaskManager

    path = None if options.task_path is None else str(options.task_path)
    manager = TaskManager(include_path=path)
    known = set(manager.all_tasks)
    unknown = [name for name in options.tasks if name not in known]
    if unknown:
        raise UsageFault(
            "a task that the harness does not know",
            expected="names of lm-eval's tasks, groups or tags, or of those under --task-path",
            found=", ".join(unknown),
            where="--tasks",
        )
    return manager


def _run(folder: Path, options: HarnessOptions, manager: Any) -> Mapping[str, Any]:
    """The harness's results of one checkpoint, which is loaded here and free afterwards."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    model = HFLM(
        pretrained=load_model(folder), tokenizer=load_tokenizer(folder), batch_size=options.batch_size, backend="causal"
    )
    try:
        results: Mapping[str, Any] | None = lm_eval.simple_evaluate(
            model=model,
            tasks=list(options.tasks),
            task_manager=manager,
            limit=options.limit,
            batch_size=options.batch_size,
            log_samples=True,
            random_seed=options.seed,
            numpy_random_seed=options.seed,
            torch_random_seed=options.seed,
            fewshot_random_seed=options.seed,
        )
    except OSError as error:
        # A file or a data set that is not here; `datasets` has classes of its own, all of them under OSError.
        raise EnvironmentFault(
            "a task's data cannot be read",
            found=(str(error).strip().splitlines() or [type(error).__name__])[0],
            where=", ".join(options.tasks),
            remedy="Data files named in a task are found from the working directory; nothing is downloaded.",
        ) from error
    if results is None:
        raise EnvironmentFault("the harness gave no results", expected="a single process", where="LOCAL_RANK")
    return results


def _compared(
    source: SourceCheckpoint, digests: SourceDigests, target: Path, manifest: ConversionManifest
) -> ComparedFiles:
    return ComparedFiles(
        source=source.location.given,
        source_digest=digests.checkpoint,
        target=str(target),
        manifest_sha256=sha256_file(target / MANIFEST_NAME),
        canonical_mla_id=manifest.canonical_mla_id,
    )


def _tasks(source: Mapping[str, Any], target: Mapping[str, Any]) -> tuple[HarnessTask, ...]:
    found = []
    for task in sorted(source["samples"]):
        ours, theirs = (_prompts_digest(results["samples"][task]) for results in (source, target))
        if ours != theirs:
            raise CheckFailed(
                "the two models were not given the same prompts", expected=ours, found=theirs, where=f"task {task}"
            )
        found.append(
            HarnessTask(
                task=task,
                version=str(source["versions"].get(task)),
                shots=source["n-shot"].get(task),
                examples=int(source["n-samples"][task]["effective"]),
                prompts_digest=ours,
            )
        )
    return tuple(found)


def _prompts_digest(samples: Sequence[Mapping[str, Any]]) -> str:
    return sha256_json(sorted([sample["doc_id"], *(sample[name] for name in HASHES)] for sample in samples))


def _metrics(source: Mapping[str, Any], target: Mapping[str, Any]) -> tuple[HarnessMetric, ...]:
    """The harness names a figure `metric,filter` and its standard error `metric_stderr,filter`."""
    found = []
    for task, ours in sorted(source["results"].items()):
        theirs = target["results"][task]
        for key in sorted(key for key in ours if "," in key):
            metric, _, filtered = key.partition(",")
            if metric.endswith("_stderr"):
                continue
            error = f"{metric}_stderr,{filtered}"
            before, after = _number(ours[key]), _number(theirs[key])
            found.append(
                HarnessMetric(
                    task=task,
                    metric=metric,
                    filter=filtered,
                    higher_is_better=source["higher_is_better"].get(task, {}).get(metric),
                    source=before,
                    source_stderr=_number(ours.get(error)),
                    target=after,
                    target_stderr=_number(theirs.get(error)),
                    difference=None if before is None or after is None else after - before,
                )
            )
    return tuple(found)


def _number(value: object) -> float | None:
    """A finite number as a float; NumPy's numbers are `float` or have `item()`. Else None."""
    plain = value.item() if hasattr(value, "item") else value
    if isinstance(plain, bool) or not isinstance(plain, int | float) or not math.isfinite(plain):
        return None
    return float(plain)
