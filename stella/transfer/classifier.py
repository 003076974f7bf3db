"""A classifier that `stella transfer classify` trained, on files of any length."""

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from stella.clip import Batch
from stella.config import build
from stella.embed.load import device_for
from stella.embed.localise import pairs
from stella.embed.translate import is_learner
from stella.errors import ClipError, StellaError
from stella.files import whole
from stella.media.windows import Window, windows
from stella.model import weights
from stella.model.heads import classifier
from stella.runs.folder import RunFolder
from stella.transfer.base import joint_means
from stella.transfer.config import TransferConfig, inputs_of
from stella.transfer.run import BEST
from stella.transfer.weights import open_weights


@dataclass(frozen=True)
class Answers:
    """The scores of consecutive windows of one file: shares that add up to 1, or a probability for each class."""

    scores: Tensor  # float32 [N, C]
    start: Tensor  # float64 [N], seconds from the beginning of the file
    end: Tensor  # float64 [N]

    @property
    def mean(self) -> Tensor:
        """Of the whole file, [C]."""
        return self.scores.mean(0)


class Classifier:
    """The backbone and the head of a finished run; `classes` name the scores."""

    def __init__(self, run: Path | str, device: str | torch.device | None = None) -> None:
        if is_learner(run):
            raise StellaError(f"{run} is a learner; name the folder of a run of stella transfer classify {run}")
        folder = RunFolder(run)
        tree = folder.read_config()
        if tree.get("task") != "classify" or folder.end is None:
            raise StellaError(f"{run} is not a finished run of stella transfer classify; name the folder of one")
        if not folder.end.get("classes"):
            raise StellaError(
                f"{run} is of an earlier version, which did not keep the names of its classes; train it again"
            )
        config, place = build(TransferConfig, tree), device_for(device)
        self.classes: list[str] = folder.end["classes"]
        self.several = folder.end["figure"] == "map"  # whether a clip may have several of them
        self.inputs = inputs_of(config)
        own = folder.weights.exists()  # trained, or of a learner, which has learnt since
        loaded = weights.load(folder.weights) if own else open_weights(config.weights, config.seed)[0]
        self.model = loaded.model.eval().requires_grad_(False).to(place)
        state = safetensors.torch.load((folder.root / BEST).read_bytes())
        head = {name.removeprefix("head."): value for name, value in state.items() if name.startswith("head.")}
        self.head = classifier(self.model.config.dim, len(self.classes), config.head.probe)
        self.head.load_state_dict(head)
        self.head.eval().requires_grad_(False).to(place)
        self.device = place

    @torch.inference_mode()
    def __call__(self, path: Path | str, overlap: float = 0.0) -> Answers:
        """The answers for a file, which must have picture and sound."""
        found = windows(path, self.inputs, overlap=overlap, aligned=True)
        rows = [(self._scores(video, audio), video.start, video.end) for video, audio in pairs(found)]
        if not rows:
            raise ClipError(Path(path), "no window with picture and sound", "a class needs both: give another file")
        scores, start, end = zip(*sorted(rows, key=lambda row: row[1]), strict=True)
        times = (torch.tensor(each, dtype=torch.float64) for each in (start, end))
        return Answers(torch.stack(scores).cpu(), *times)

    def _scores(self, video: Window, audio: Window) -> Tensor:
        pixels = self.inputs.crop(video.data[None]).to(self.device)
        spectrogram = self.inputs.spectrogram(audio.data[None], torch.tensor([len(audio.data)])).to(self.device)
        batch = Batch(pixels, spectrogram, torch.zeros(1, dtype=torch.int64))
        logits: Tensor = self.head(joint_means(self.model, batch))[0].float()
        return logits.sigmoid() if self.several else logits.softmax(0)


def classify_each(
    judge: Classifier, files: Sequence[Path], overlap: float = 0.0
) -> Iterator[tuple[Path, Answers | ClipError]]:
    """The answers for each file, or why there are none."""
    for file in files:
        try:
            yield file, judge(file, overlap)
        except ClipError as error:
            yield file, error


def write_csv(out: Path, classes: Sequence[str], found: Iterable[tuple[Path, Answers]]) -> None:
    """A row for each window: file, seconds, the best class, and the score of every class."""
    with whole(out) as fresh, fresh.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["file", "start", "end", "predicted", *classes])
        for path, answers in found:
            for scores, *times in zip(answers.scores, answers.start.tolist(), answers.end.tolist(), strict=True):
                shown = [f"{value:.4f}" for value in scores.tolist()]
                table.writerow([path, *(f"{time:.2f}" for time in times), classes[int(scores.argmax())], *shown])
