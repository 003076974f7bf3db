"""A process of a run on noise: torchrun … ranks.py FOLDER METHOD TASKS [resume] [KEY=VALUE …].

Its number is left in a file.
"""

import os
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from helpers.small import noise_tasks, quick, use_tasks
from stella.cli import _refuse
from stella.errors import StellaError
from stella.runs.loop import pretrain


def main(folder: Path, method: str, tasks: int) -> int:
    torch.set_num_threads(1)
    (folder.parent / f"{folder.name}.{os.environ['RANK']}.pid").write_text(str(os.getpid()))
    with pytest.MonkeyPatch.context() as patch:
        use_tasks(patch, noise_tasks(("one", "two", "three")[:tasks]))
        more = [word for word in sys.argv if "=" in word]
        config = quick(method, "train.checkpoint_minutes=0", "train.patience_minutes=0.2", "stream.epochs=2", *more)
        try:
            return pretrain(config, folder, resume="resume" in sys.argv, console=Console()).exit_code
        except StellaError as error:
            _refuse(str(error))
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
