"""Where the time of a step goes: functions that stand for a stage are timed inside it, replayed steps included."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from stella.bench.steps import WARM_UPS, advance, make_trainer, settle_draws
from stella.methods import initial
from stella.methods import stella as stepped
from stella.model.cav import CAV
from stella.runs.config import RunConfig
from stella.train.device import Clock

STAGES = {  # of what is called on the method in a step
    **dict.fromkeys(("draw", "after_step", "follow"), "memory"),
    **dict.fromkeys(("scores", "choose"), "select"),
    **dict.fromkeys(("virtual_weights", "clip_losses", "gradients"), "look ahead"),
    "matching": "avm",
    "clip_parts": "forward",
}
PLACES: dict[tuple[Any, str], str] = {
    (stepped, "score"): "score",
    (initial, "score"): "score",
    (initial, "matching_loss"): "avm",
    (CAV, "pretrain"): "forward",
    (CAV, "forward"): "look ahead",  # by `functional_call`
    (torch.autograd, "backward"): "backward",
}


@dataclass
class Span:
    stage: str
    start: Any
    inside: "Span | None"  # of another stage, which then counts without this one
    end: Any = None


def stages_ms(config: RunConfig) -> dict[str, float]:
    """Milliseconds of each stage of a step, in the graph where there is one: a second recording, which takes some
    percent longer for the marks in it."""
    trainer = make_trainer(config)
    method, clock = trainer.method, Clock(trainer.runtime.device)
    spans: list[Span] = []
    inside: list[Span] = []

    def timed(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **more: Any) -> Any:
            span = Span(stage, clock.mark(inside=True), inside[-1] if inside else None)
            spans.append(span)
            inside.append(span)
            out = function(*args, **more)
            span.end = clock.mark(inside=True)
            inside.pop()
            return out

        return run

    whole = trainer.compute

    def step(batches: Any) -> Any:
        spans.clear()
        return timed("other", whole)(batches)

    for name, stage in STAGES.items():
        if name in dir(method):
            setattr(method, name, timed(stage, getattr(method, name)))
    trainer.optimizer.step = timed("optimiser", trainer.optimizer.step)  # type: ignore[method-assign]
    trainer.replace_compute(step)
    originals = {place: getattr(*place) for place in PLACES}
    try:
        for place, stage in PLACES.items():
            setattr(*place, timed(stage, originals[place]))
        settle_draws(trainer)
        advance(trainer, WARM_UPS + 2)
    finally:
        for place, original in originals.items():
            setattr(*place, original)
    found: dict[str, float] = {}
    for span in spans:
        ms = clock.ms(span.start, span.end)
        found[span.stage] = found.get(span.stage, 0.0) + ms
        if span.inside is not None:
            found[span.inside.stage] -= ms
    other = found.pop("other")
    return {stage: ms for stage, ms in found.items() if ms >= 0.01} | {"other": other}
