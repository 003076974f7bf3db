"""The backbone of a downstream task: of a run (last, slow, after a task), of a weight file, shipped, or random."""

from pathlib import Path

import torch

from stella.errors import StellaError
from stella.files import file_hash
from stella.model import weights
from stella.model.cav import CAV, preset
from stella.runs.folder import RunFolder
from stella.transfer.config import WeightsConfig

RANDOM = "random:"


def open_weights(config: WeightsConfig, seed: int) -> tuple[weights.Loaded, str]:
    """The model, with its matching module if it has one, and the digest of its file."""
    if config.source.startswith(RANDOM):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = CAV(preset(config.source.removeprefix(RANDOM)))
        return weights.Loaded(model, None, {}, []), ""
    path = weights.find(_file(config))
    loaded = weights.load(path)
    found = file_hash(path)
    if config.digest and config.digest != found:
        raise StellaError(f"{path} is not the file that this run was started with; restore it, or start a new run")
    return loaded, found


def _file(config: WeightsConfig) -> Path | str:
    source = config.source
    if not source:
        raise StellaError("no model was given; name a run, a weight file, shipped weights or random:PRESET")
    if source in weights.shipped() or not Path(source).is_dir():
        if config.after is not None or config.slow:
            raise StellaError(
                f"{source} is not a run, so it has no slow weights and none after a task; give a run's folder"
            )
        return source
    folder = RunFolder(source)
    if config.after is not None:
        path, why = folder.task_weights(config.after - 1), _kept(folder)
    elif config.slow:
        path, why = folder.slow_weights, "train it with train.ema"
    else:
        return source  # `weights.find` says if it is no run, or is not finished
    if not path.exists():
        raise StellaError(f"{source} has no {path.relative_to(folder.root)}; {why}")
    return path


def _kept(folder: RunFolder) -> str:
    """After which tasks a run has weights, or how it comes to have them."""
    after = sorted(int(file.stem.removeprefix("after-")) for file in folder.task_weights(0).parent.glob("after-*"))
    if not after:
        return "train it with train.keep_task_weights=true"
    tasks = f"tasks {after[0]} to {after[-1]}" if len(after) > 1 else f"task {after[0]}"
    return f"it has the weights after {tasks}"
