"""The downstream tasks by name, and the figure that each reports first."""

from stella.transfer.base import Downstream
from stella.transfer.classify import Classify, Events
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
FIRST = {name: task.figure for name, task in TASKS.items()} | {"localise": FIGURE}
