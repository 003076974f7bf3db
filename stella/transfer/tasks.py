"""The downstream tasks by name, and the figure that each reports first."""

from stella.data.downstream import Parts
from stella.transfer.base import Downstream
from stella.transfer.classify import Classify, Events, MultiLabel
from stella.transfer.localise import FIGURE
from stella.transfer.matching import MatchingModule
from stella.transfer.retrieval import Retrieval
from stella.transfer.segment import Segment

TASKS: dict[str, type[Downstream]] = {
    "retrieval": Retrieval,
    "classify": Classify,
    "segment": Segment,
    "events": Events,
    "matching": MatchingModule,
}


def task_of(name: str, parts: Parts) -> type[Downstream]:
    """The task on these clips."""
    return MultiLabel if name == "classify" and parts.several else TASKS[name]


FIRST = {name: task.figure for name, task in TASKS.items()} | {"localise": FIGURE}
