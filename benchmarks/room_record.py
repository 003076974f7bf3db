"""The folder of a run of `room.py`, as `pretrain` writes it: `stella reproduce` finds the run finished."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from stella.config import to_tree
from stella.data.scenes import TASKS
from stella.evaluate.forgetting import summary
from stella.evaluate.pairs import plane
from stella.evaluate.retrieval import Embeddings
from stella.files import Lines, write_bytes, write_json
from stella.model import weights
from stella.runs.config import RunConfig, inputs_of
from stella.runs.environment import environment
from stella.runs.folder import RunFolder
from stella.train.device import Runtime

UNKNOWN = ("classes", "avm_accuracy", "avm_accuracy_by_task", "importance_ratio", "auc", "pointing", "pointing_chance")


class Record:
    """Writes the lines and weights of one run; what `room.py` does not measure is None."""

    def __init__(self, root: Path, config: RunConfig, place: Runtime) -> None:
        self.folder, self.config = RunFolder(root), config
        self.names = list(config.data.tasks or TASKS)
        self.evaluations: list[dict[str, Any]] = []
        root.mkdir(parents=True, exist_ok=True)
        self.folder.cut(0)
        self.facts = environment(place)
        write_json(self.folder.environment, self.facts)
        write_json(self.folder.config, to_tree(config))

    def evaluated(self, task: int, found: Mapping[str, Any], method: Any, step: int) -> None:
        """`found` is what was measured of the working weights; of the slow ones under `slow`."""
        held = {"memory_by_task": self._by_task(method), "memory_distinct": None}
        line = {"kind": "evaluation", "task": task, "step": step, "tasks": self.names, **dict.fromkeys(UNKNOWN)}
        self.evaluations.append(line | found | held)
        if self.config.train.keep_task_weights:
            path = self.folder.task_weights(task)
            path.parent.mkdir(exist_ok=True)
            self._weights(path, method.eval_model, method.avm, {"task": task})

    def _by_task(self, method: Any) -> list[int] | None:
        each = self.config.data.clips  # type: ignore[union-attr]
        if method.memory is None:
            return None
        counts: list[int] = (method.memory.ids.cpu() // each).bincount(minlength=len(self.names)).tolist()
        return counts

    def ended(self, method: Any, counters: Any, pairs: Embeddings) -> None:
        scores = summary(self.evaluations)
        slow = [line | line["slow"] for line in self.evaluations if "slow" in line]
        if slow:
            scores["slow"] = summary(slow)
        if self.config.train.keep_task_weights:
            self._weights(self.folder.weights, method.eval_model, method.avm, {"scores": scores})
        write_json(self.folder.pairs, plane(self.names[0], pairs))
        end = {"kind": "end", "step": counters.step, "clips": counters.clips, "skipped_steps": counters.skipped}
        self._lines([*self.evaluations, end | scores])

    def _weights(self, path: Path, model: Any, avm: Any, more: Mapping[str, Any]) -> None:
        extra = {"config": to_tree(self.config), "commit": self.facts["commit"], **more}
        write_bytes(path, weights.packed(model, avm, extra, inputs_of(self.config), torch.float16))

    def _lines(self, lines: Sequence[Mapping[str, Any]]) -> None:
        metrics = Lines(self.folder.metrics)
        for line in lines:
            metrics.write(line)
        metrics.sync()
        metrics.close()
