"""From a configuration to its method, and the checks before anything is built."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial

import torch

from stella import methods
from stella.columns import bytes_per_clip, capacity_for
from stella.config import build
from stella.data.stream import StreamConfig
from stella.data.tasks import Tasks
from stella.errors import ConfigError, StellaError
from stella.methods import Method
from stella.model import weights
from stella.model.avm import AVM
from stella.model.cav import CAV, preset
from stella.model.grow import check_grows, grown
from stella.peers import ALONE, Peers
from stella.runs.config import RunConfig, machine, model_config
from stella.train.device import free_bytes


def check(config: RunConfig, started: bool = False, unbounded: bool = False, peers: Peers = ALONE) -> None:
    """Refuse an impossible method, hyper-parameter, weight file or memory before anything is built or written.

    Of a stream that is `unbounded`, as a learner's, the memory may be filled up.
    """
    method = methods.find(config.method)
    if config.args and not fields(method.Config):
        unknown = ", ".join(f"args.{name}" for name in config.args)
        raise ConfigError(f"unknown key {unknown}: {config.method} takes no arguments; leave it out")
    sizes, own = model_config(config), build(method.Config, config.args, "args.")
    method.check(sizes, own, config.objective)
    if config.model.weights and not started:
        if config.model.grow:
            check_grows(weights.read_config(config.model.weights), sizes)
        else:
            weights.check_fits(config.model.weights, sizes)
    columns = method.stored_columns(sizes, own, config.memory)
    device = machine(config.train).device
    if columns is not None:
        capacity = capacity_for(columns, clips=config.memory.clips, bytes=config.memory.bytes)
        place, each = "cpu" if config.memory.device == "cpu" else device, bytes_per_clip(columns)
        if capacity * each > free_bytes(place) and not unbounded:  # the data may be fewer
            capacity = min(capacity, passes(config.data.train_tasks(cache=False), config.stream))
        here = peers.neighbours if str(place) == "cpu" else 1  # processes that share this place
        check_fits(capacity * each * here // peers.count, place)


def without_effect(config: RunConfig, values: Sequence[str]) -> list[str]:
    """A sentence on those of these `key.sub=value` that set the memory of a method that has none."""
    method, given = methods.find(config.method), [value for value in values if value.startswith("memory.")]
    if not given or method.columns(preset("tiny"), build(method.Config, config.args, "args.")) is not None:
        return []
    return [f"without effect: {', '.join(given)}, since {config.method} has no rehearsal memory"]


def passes(tasks: Tasks, stream: StreamConfig) -> int:
    """How many clips a stream brings, each as often as it has epochs."""
    return stream.epochs * sum(len(source) for _, source in tasks)


def check_fits(memory: int, device: torch.device | str) -> None:
    """Refuse a rehearsal memory of more bytes than the device has free."""
    if memory > (free := free_bytes(device)):
        raise StellaError(
            f"the rehearsal memory would take {memory / 1e9:,.2f} GB and {device} has {free / 1e9:,.2f} GB free; "
            "set memory.clips or memory.bytes lower"
        )


def build_method(
    config: RunConfig,
    device: torch.device,
    initial: bool = True,
    max_clips: int | None = None,
    tell: Callable[[list[str]], None] = lambda notes: None,
) -> Method:
    """The method on its model, with `config.model.weights` if `initial`; other initial weights come from the seed.

    Its memory takes no more room than for `max_clips`, as many as the stream will bring (none: any number). `tell` is
    given the decisions of the import of the weights.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(config.seed)
        model = CAV(model_config(config)).to(device)
        load = _loader(config) if initial else None
        notes = load(model, None) if load else []
        method = methods.build(
            config.method, model, config.args, config.objective, config.memory, config.seed, max_clips
        )
        method = method.to(device)
        if load and method.avm is not None:
            notes = load(model, method.avm)
        tell(notes)
        return method


def _loader(config: RunConfig) -> Callable[[CAV, AVM | None], list[str]] | None:
    """Fills a model and a matching module with the initial weights, if there are any; returns notes."""
    file = config.model.weights
    if not file or not config.model.grow:
        return partial(weights.load_into, file) if file else None
    found = grown(file, model_config(config), config.seed)

    def fill(model: CAV, avm: AVM | None) -> list[str]:
        model.load_state_dict(found.model.state_dict())
        if avm is not None and found.avm is not None:
            avm.load_state_dict(found.avm.state_dict())
        return found.notes

    return fill
