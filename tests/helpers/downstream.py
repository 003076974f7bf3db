"""Downstream runs of a small model."""

import io
from pathlib import Path

import torch
from rich.console import Console

from stella.model import weights
from stella.model.avm import AVM
from stella.model.cav import CAV, preset
from stella.runs.training import RunResult
from stella.transfer.config import transfer_config
from stella.transfer.run import transfer


def small_weights(path: Path) -> Path:
    """A model of a few patches, with a matching module."""
    torch.manual_seed(0)
    config = preset("tiny", image_size=32, spec_frames=64)
    weights.save(path, CAV(config), AVM(config.dim, config.heads))
    return path


def go(task: str, file: Path | str, run: Path, *values: str, again: bool = False) -> RunResult:
    """A run of a task on scenes, with these settings."""
    config = transfer_config(task, None, [f"weights.source={file}", *values])
    return transfer(config, run, resume=again, console=Console(file=io.StringIO()))
