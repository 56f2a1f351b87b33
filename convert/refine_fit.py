"""Fitting parameters by gradient descent: relative step sizes, a held-out check, the best state kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

BETAS = (0.9, 0.98)
WARMUP_SHARE = 0.05
BACKTRACK = 1 / 3


@dataclass(frozen=True)
class FitSettings:
    """How long and how fast to fit.

    Attributes:
        steps: Optimizer steps.
        batch: Windows per step.
        rate: Adam's largest step as a share of each tensor's root mean square.
        checks: How often the held-out loss is looked at, evenly over the steps.
        seed: Of the order of the windows.
    """

    steps: int
    batch: int
    rate: float
    checks: int
    seed: int


@dataclass(frozen=True)
class FitTrace:
    """What a fit did to the loss on windows that it was not fitted to.

    Attributes:
        before: At the start.
        after: Of the state that was kept.
        kept_step: Step after which that state was; 0 is the start.
    """

    before: float
    after: float
    kept_step: int


@dataclass(frozen=True)
class FitWindows:
    """What layers are fitted to and judged by.

    Attributes:
        ids: (N + M, T) int64: the user's windows, then those that the source wrote.
        given: N, at least two.
    """

    ids: Tensor
    given: int

    def split(self, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Numbers of the windows to fit to and of those to judge by, which are all the user's."""
        train, held = split_windows(self.given, seed)
        return (*train, *range(self.given, self.ids.shape[0])), held


def fit(
    module: nn.Module,
    loss: Callable[[Sequence[int]], Tensor],
    train: Sequence[int],
    held: Sequence[int],
    settings: FitSettings,
    report: Callable[[int, float], None] | None = None,
) -> FitTrace:
    """Fit the parameters of `module` that require a gradient, and leave it in its best state.

    Adam (Kingma and Ba, 2015) with a step size relative to each tensor and a cosine schedule. The state that is best
    on `held` is kept, and the start is one of the candidates: a fit never ends worse there than it began. A check that
    finds it worse than the start goes back to the best and on with steps a third as large, since what is nearly right
    bears smaller ones only.

    Args:
        module: Changed in place.
        loss: Mean loss over the windows of the given numbers, to be differentiated.
        train: Numbers of the windows to fit to.
        held: Numbers of the windows to judge by.
        settings: See `FitSettings`.
        report: Called with the step and the held-out loss at every check.
    """
    optimizer = _optimizer(module, settings.rate)
    order = _epochs(train, settings.batch, settings.seed)
    checks = {math.ceil(settings.steps * number / settings.checks) for number in range(1, settings.checks + 1)}
    before = best = _held_loss(loss, held, settings.batch)
    kept, state, share = 0, _copy(module), 1.0
    for step in range(1, settings.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = group["rate"] * _schedule(step, settings.steps) * share
        optimizer.zero_grad(set_to_none=True)
        windows = next(order)
        for window in windows:  # one at a time: the gradient's memory is that of one window
            (loss([window]) / len(windows)).backward()
        optimizer.step()
        if step in checks:
            now = _held_loss(loss, held, settings.batch)
            if report is not None:
                report(step, now)
            if now < best:
                best, kept, state = now, step, _copy(module)
            elif now > before:
                module.load_state_dict(state, strict=True)
                share *= BACKTRACK
    module.load_state_dict(state, strict=True)
    return FitTrace(before, best, kept)


def split_windows(count: int, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Numbers of the windows to fit to and of those to judge by: one in eight, at least one.

    Args:
        count: Windows in all, at least two.
        seed: Of the draw.
    """
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    held = max(1, count // 8)
    return tuple(sorted(order[held:])), tuple(sorted(order[:held]))


def _optimizer(module: nn.Module, rate: float) -> torch.optim.Adam:
    groups = []
    for parameter in module.parameters():
        if parameter.requires_grad:
            scale = float(parameter.detach().square().mean().sqrt())
            # A tensor of zeros has no scale of its own and stays.
            groups.append({"params": [parameter], "lr": rate * scale, "rate": rate * scale})
    return torch.optim.Adam(groups, betas=BETAS)


def _schedule(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine to zero."""
    warmup = max(1, round(steps * WARMUP_SHARE))
    return min(1.0, step / warmup) * (1 + math.cos(math.pi * (step - 1) / steps)) / 2


def _epochs(numbers: Sequence[int], batch: int, seed: int) -> Iterator[list[int]]:
    """Batches without end; every window comes once before any comes again."""
    generator = torch.Generator().manual_seed(seed)
    waiting: list[int] = []
    while True:
        while len(waiting) < batch:
            waiting += [numbers[index] for index in torch.randperm(len(numbers), generator=generator).tolist()]
        yield waiting[:batch]
        waiting = waiting[batch:]


@torch.no_grad()
def _held_loss(loss: Callable[[Sequence[int]], Tensor], held: Sequence[int], batch: int) -> float:
    total = 0.0
    for start in range(0, len(held), batch):
        windows = held[start : start + batch]
        total += float(loss(windows)) * len(windows)
    return total / len(held)


def _copy(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}
