"""Pictures of attention: frames with where the sound is found, and the spectrogram beside them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from stella.clip import Clip
from stella.report.fonts import save
from stella.report.sheet import _spectrogram


def attention_sheet(
    clip: Clip, frame: int, rows: Mapping[str, Sequence[Tensor]], columns: Sequence[str], path: Path
) -> None:
    """Write a picture of one frame of a clip, with its maps in a row for each method and a column for each moment.

    Maps are [H, W] of any size, each scaled from its own least to its own largest value, as the colour bar says. The
    white line is the sounding object.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.5 * (len(columns) + 2) + 2.4, 1.75 * len(rows) + 0.6), layout="constrained")
    widths = [1.0] * (len(columns) + 1) + [1.8]
    axes = figure.subplots(len(rows), len(columns) + 2, width_ratios=widths, squeeze=False)
    figure.suptitle(clip.labels.name or clip.id, fontsize=10)
    picture = clip.video[frame].permute(1, 2, 0).numpy()
    height, width = picture.shape[:2]
    shown = None
    for (label, maps), row in zip(rows.items(), axes, strict=True):
        for i, axis in enumerate(row[:-1]):
            axis.imshow(picture)
            if i:
                values = maps[i - 1].float().numpy()
                scaled = (values - values.min()) / max(float(np.ptp(values)), 1e-12)
                look = {"extent": (-0.5, width - 0.5, height - 0.5, -0.5), "interpolation": "bilinear"}
                shown = axis.imshow(scaled, cmap="inferno", alpha=0.6, vmin=0, vmax=1, **look)
            if clip.labels.mask is not None and clip.labels.mask[frame].any():
                axis.contour(clip.labels.mask[frame].float().numpy(), levels=[0.5], colors="white", linewidths=1.2)
            axis.set(xticks=[], yticks=[])
            axis.set_title(columns[i - 1] if i else "frame", fontsize=8)
        row[0].set_ylabel(label, fontsize=9)
        _spectrogram(row[-1], clip)
    if shown is not None:
        bar = figure.colorbar(shown, ax=axes[:, -2], shrink=0.8, ticks=[0, 1])
        bar.ax.set_yticklabels(["least", "most"], fontsize=7)
    save(figure, path)
