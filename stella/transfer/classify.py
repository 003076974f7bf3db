"""Classification of clips (AVC), and of their segments (AVE): a class, or background, for each second."""

import torch
import torch.nn.functional as F
from torch import Tensor

from stella.clip import Batch, Clip, Source, clip_of, location_of, names_of
from stella.data.views import has_windows
from stella.errors import StellaError
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
        self.head = classifier(self.model.config.dim, len(self.number), self.options.probe).to(self.device)

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
        clips, place = torch.unique(judged["clip"], return_inverse=True)
        scores = torch.zeros(len(clips), len(self.number), device=clips.device)
        scores.index_add_(0, place, judged["scores"].float())  # the sum over windows ranks as the mean does
        target = torch.empty_like(clips).index_copy_(0, place, judged["target"])
        one_hot = F.one_hot(target, len(self.number)).bool()
        return {"accuracy": accuracy(scores, target), "map": mean_average_precision(scores, one_hot)}


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

    def location(self, index: int) -> str:
        return location_of(self.source, index % self.each)
