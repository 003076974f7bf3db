"""Contact sheets: frames and spectrograms of clips in one picture. Films of scenes, with sound."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stella.clip import SAMPLE_RATE, Clip
from stella.data.scenes import Scenes
from stella.errors import plain
from stella.media.encode import encode
from stella.media.fbank import fbank

SHEETS = (".png", ".jpg", ".pdf", ".svg")


def contact_sheet(clips: Sequence[Clip], path: Path, title: str, times: Tensor | None = None) -> None:
    """Write a picture with a row for each clip: its frames with the sounding object outlined, and its spectrogram with
    the events marked. `times` are those of the frames in seconds, if known."""
    from matplotlib.figure import Figure

    frames = len(clips[0].video)
    figure = Figure(figsize=(1.45 * frames + 4.2, 1.72 * len(clips) + 0.5), layout="constrained")
    axes = figure.subplots(len(clips), frames + 1, width_ratios=[1.0] * frames + [2.9], squeeze=False)
    figure.suptitle(plain(title), fontsize=11, parse_math=False)
    for row, clip in zip(axes, clips, strict=True):
        for i, axis in enumerate(row[:frames]):
            axis.imshow(clip.video[i].permute(1, 2, 0).numpy())
            if clip.labels.mask is not None and clip.labels.mask[i].any():
                axis.contour(clip.labels.mask[i].float().numpy(), levels=[0.5], colors="white", linewidths=1.2)
            if times is not None:
                axis.set_xlabel(f"{times[i]:.2f} s", fontsize=7, labelpad=1)
            axis.set(xticks=[], yticks=[])
        row[0].set_title(plain(clip.labels.name or clip.id), fontsize=8, loc="left", parse_math=False)
        _spectrogram(row[frames], clip)
    figure.savefig(path, dpi=110)


def _spectrogram(axis: Any, clip: Clip) -> None:
    seconds = len(clip.audio) / SAMPLE_RATE
    spec = fbank(clip.audio[None], frames=round(seconds * 100))[0]  # [time, mel]
    axis.imshow(spec.T.numpy(), origin="lower", aspect="auto", extent=(0, seconds, 0, spec.shape[1]), cmap="magma")
    if clip.labels.events is not None:
        part = seconds / len(clip.labels.events)
        for i in torch.nonzero(clip.labels.events)[:, 0].tolist():
            axis.axvspan(i * part, (i + 1) * part, 0.95, 1, color="#4cc9f0")
    axis.set(yticks=[], xlim=(0, seconds))
    axis.tick_params(labelsize=7)
    axis.set_ylabel("mel", fontsize=7)


def film(scenes: Scenes, indices: Sequence[int], path: Path, fps: int = 25) -> None:
    """Write these clips one after another as an mp4, small ones enlarged."""
    zoom = max(1, 384 // scenes.size.pixels)
    frames = [scenes.film(index, fps).repeat_interleave(zoom, 2).repeat_interleave(zoom, 3) for index in indices]
    _, sound = scenes.tensors(indices)
    encode(path, torch.cat(frames), sound.flatten(), fps)
