"""Classification of clips (AVC), one class each or several (AudioSet), and of their segments (AVE): a class, or
background, for each second.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from stella.clip import Batch, Clip, Labels, Source, clip_of, labels_of, location_of, names_of
from stella.data.downstream import Parts
from stella.data.views import has_windows
from stella.errors import StellaError, number_of, some_of
from stella.model.heads import classifier
from stella.transfer.base import Columns, Downstream, joint_means
from stella.transfer.metrics import accuracy, mean_average_precision

WINDOWS = (0.0, 1 / 3, 2 / 3, 1.0)  # where a test clip's frames come from: from 0, 2, 4 and 6 s of ten


class Classify(Downstream):
    """Cross-entropy on the means of the joint tokens. A test clip's answer is the mean over four windows."""

    title = "Classification"
    figure = "accuracy"

    def setup(self) -> None:
        self.number = {name: number for number, name in enumerate(self.data.classes)}
        for part in (self.data.validation, self.data.test):
            self.targets(torch.arange(len(part)), part)  # refuses unknown classes before the first step
        self.head = classifier(self.model.config.dim, len(self.data.classes), self.options.probe).to(self.device)

    def clips(self, source: Source, test: bool = False) -> Source:
        return Windows(source) if test and has_windows(source) else source

    def columns_of(self, batch: Batch, source: Source) -> Columns:
        clip = batch.ids % (source.each if isinstance(source, Windows) else len(source))
        return {"z": joint_means(self.model, batch), "target": self.targets(batch.ids, source), "clip": clip}

    def targets(self, ids: Tensor, source: Source) -> Tensor:
        names = names_of(source, ids.cpu())
        if unknown := {name for name in names if name not in self.number}:
            raise StellaError(f"no training clip has the class {', '.join(map(str, unknown))}; leave its clips out")
        return torch.tensor([self.number[str(name)] for name in names], device=ids.device)

    def objective_of(self, columns: Columns) -> dict[str, Tensor]:
        return {"cross_entropy": F.cross_entropy(self.head(columns["z"]), columns["target"])}

    def judged(self, columns: Columns) -> Columns:
        return {"scores": self.head(columns["z"]).softmax(1), "target": columns["target"], "clip": columns["clip"]}

    def shown(self, columns: Columns) -> Columns:
        return {"scores": self.head(columns["z"]).softmax(1)}

    def figures(self, judged: Columns) -> dict[str, float]:
        scores, target = over_windows(judged)
        one_hot = F.one_hot(target, len(self.number)).bool()
        return {"accuracy": accuracy(scores, target), "map": mean_average_precision(scores, one_hot)}


def unlearnt(parts: Parts, target: Tensor) -> list[str]:
    """A line if some classes have training clips, but none that could be used; `target` is of those that could."""
    size = len(parts.classes)
    found = target.any(0) if target.ndim > 1 else torch.bincount(target, minlength=size).bool()
    missing = [name for name, known in zip(parts.classes, found.tolist(), strict=True) if not known]
    told = f"{len(missing)} of {number_of(size, 'class')} ({some_of(missing, 5)})"
    return [f"without a training clip that can be used: {told}"] if missing else []


def untested(parts: Parts) -> list[str]:
    """A line if no test clip has some of the classes."""
    rows = range(len(parts.test))
    found: set[str | None] = set(names_of(parts.test, rows))
    if parts.several:
        found.update(name for labels in labels_of(parts.test, rows) for name in labels.others)
    missing = [name for name in parts.classes if name not in found]
    of = number_of(len(parts.classes), "class")
    return [f"without test clips: {len(missing)} of {of} ({some_of(missing, 5)})"] if missing else []


def over_windows(judged: Columns) -> tuple[Tensor, Tensor]:
    """The scores of each clip, summed over its windows, which ranks as the mean does; and its target."""
    clips, place = torch.unique(judged["clip"], return_inverse=True)
    scores, target = judged["scores"].float(), judged["target"]
    sums = scores.new_zeros(len(clips), scores.shape[1]).index_add_(0, place, scores)
    return sums, target.new_empty(len(clips), *target.shape[1:]).index_copy_(0, place, target)


class MultiLabel(Classify):
    """Classification where a clip may have several classes: binary cross-entropy for each. Classes that no training
    clip has are left out."""

    title = "Multi-label classification"
    figure = "map"

    def targets(self, ids: Tensor, source: Source) -> Tensor:
        target = torch.zeros(len(ids), len(self.number), dtype=torch.bool)
        for row, labels in zip(target, labels_of(source, ids.cpu()), strict=True):
            row[[self.number[name] for name in (labels.name, *labels.others) if name in self.number]] = True
        return target.to(ids.device)

    def objective_of(self, columns: Columns) -> dict[str, Tensor]:
        scores, target = self.head(columns["z"]), columns["target"]
        return {"cross_entropy": F.binary_cross_entropy_with_logits(scores, target.to(scores.dtype))}

    def judged(self, columns: Columns) -> Columns:
        return {**self.shown(columns), "target": columns["target"], "clip": columns["clip"]}

    def shown(self, columns: Columns) -> Columns:
        return {"scores": self.head(columns["z"]).sigmoid()}

    def figures(self, judged: Columns) -> dict[str, float]:
        return {"map": mean_average_precision(*over_windows(judged))}


class Events(Classify):
    """Classification of segments, each a clip of its own: segment accuracy."""

    title = "Event localisation"

    def clips(self, source: Source, test: bool = False) -> Source:
        return source


class Windows:
    """Every clip four times, with the frames of four windows: clip i of window w is w·N + i."""

    def __init__(self, source: Source) -> None:
        self.source, self.each = source, len(source)

    def __len__(self) -> int:
        return len(WINDOWS) * self.each

    def __getitem__(self, index: int) -> Clip:
        return clip_of(self.source, index % self.each, WINDOWS[index // self.each])

    def class_of(self, index: int) -> str | None:
        return names_of(self.source, [index % self.each])[0]

    def labels(self, index: int) -> Labels:
        return labels_of(self.source, [index % self.each])[0]

    def location(self, index: int) -> str:
        return location_of(self.source, index % self.each)
