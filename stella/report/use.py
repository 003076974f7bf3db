"""A search in pictures: the sound that was asked for, the moments found, and where in the best one it comes from."""

import io
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stella.clip import Clip
from stella.embed.localise import Maps
from stella.report.sheet import draw_spectrogram


@dataclass(frozen=True)
class Used:
    """A query by sound, with what was found for it."""

    asked: Clip
    found: Sequence[tuple[Clip, float]]  # the best clips with their scores
    rank: int  # of the clip that the sound belongs to, from 1
    among: int
    heat: Maps  # of the clip that was asked for

    @property
    def sentence(self) -> str:
        own = "its own film comes first" if self.rank == 1 else f"its own film is number {self.rank}"
        return f"The sound of {self.asked.labels.name}: {own} of {self.among}."


def picture(used: Used) -> bytes:
    """A PNG: the sound, its own frame with the heat map, and the frames found. A white line is around what sounds."""
    from matplotlib.figure import Figure

    columns = len(used.found) + 2
    figure = Figure(figsize=(1.7 * columns + 1.4, 2.0), layout="constrained")
    axes = figure.subplots(1, columns, width_ratios=[1.8] + [1.0] * (columns - 1))
    draw_spectrogram(axes[0], used.asked)
    axes[0].set_title("the sound", fontsize=8)
    _frame(axes[1], used.asked, outline=True)
    values = used.heat.heat[0, used.heat.heat.shape[1] // 2].numpy()
    side = used.asked.video.shape[-1] - 0.5
    axes[1].imshow(values, cmap="inferno", alpha=0.55, extent=(-0.5, side, side, -0.5), vmin=0, vmax=1)
    axes[1].set_title("where it comes from", fontsize=8)
    for number, ((clip, score), axis) in enumerate(zip(used.found, axes[2:], strict=True), 1):
        _frame(axis, clip)
        own = clip.id == used.asked.id
        axis.set_title(f"found {number}: {score:.2f}{', its own' if own else ''}", fontsize=8)
        axis.spines[:].set(visible=own, color="#00865f", linewidth=3)
    file = io.BytesIO()
    figure.savefig(file, dpi=110, format="png")
    return file.getvalue()


def section(uses: Sequence[Used]) -> list[dict[str, str]]:
    """What the page shows of them."""
    return [{"sentence": used.sentence, "image": b64encode(picture(used)).decode()} for used in uses]


def _frame(axis: Any, clip: Clip, outline: bool = False) -> None:
    middle = len(clip.video) // 2
    axis.imshow(clip.video[middle].permute(1, 2, 0).numpy())
    axis.set(xticks=[], yticks=[])
    if outline and clip.labels.mask is not None and clip.labels.mask[middle].any():
        axis.contour(clip.labels.mask[middle].float().numpy(), levels=[0.5], colors="white", linewidths=1.2)
