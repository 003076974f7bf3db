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
from stella.media.fbank import LENGTH, SHIFT, fbank
from stella.report.fonts import save

LONGEST = 110  # characters of a title; of a longer name its end is shown
SHEETS = (".png", ".jpg", ".pdf", ".svg")


def contact_sheet(
    clips: Sequence[Clip], path: Path, title: str, titles: Sequence[str] = (), times: Tensor | None = None
) -> None:
    """Write a picture with a row for each clip: its frames with the sounding object outlined, and its spectrogram with
    the events marked. `titles` stand above the rows (none: their classes). `times` are those of the frames in seconds,
    if known."""
    from matplotlib.figure import Figure

    frames = len(clips[0].video)
    tallest = max(clip.video.shape[-2] / clip.video.shape[-1] for clip in clips)
    height = max(1.0, 1.45 * tallest) + 0.42  # with its title above and the times below
    figure = Figure(figsize=(1.45 * frames + 4.2, height * len(clips) + 0.4), layout="constrained")
    figure.suptitle(title, fontsize=11)
    above = titles or [clip.labels.name or clip.id for clip in clips]
    for part, clip, name in zip(figure.subfigures(len(clips), 1, squeeze=False).flat, clips, above, strict=True):
        shown = plain(name)
        shown = shown if len(shown) <= LONGEST else f"…{shown[1 - LONGEST :]}"
        part.suptitle(shown, x=0.005, ha="left", fontsize=8)
        row = part.subplots(1, frames + 1, width_ratios=[1.0] * frames + [2.9], squeeze=False)[0]
        for i, axis in enumerate(row[:frames]):
            axis.imshow(clip.video[i].permute(1, 2, 0).numpy())
            if clip.labels.mask is not None and clip.labels.mask[i].any():
                axis.contour(clip.labels.mask[i].float().numpy(), levels=[0.5], colors="white", linewidths=1.2)
            if times is not None:
                axis.set_xlabel(f"{times[i]:.2f} s", fontsize=7, labelpad=4)
            axis.set(xticks=[], yticks=[])
        _spectrogram(row[frames], clip)
    save(figure, path)


def _spectrogram(axis: Any, clip: Clip) -> None:
    seconds = len(clip.audio) / SAMPLE_RATE
    steps = max(1, (len(clip.audio) - LENGTH) // SHIFT + 1)
    spec = fbank(clip.audio[None], frames=steps)[0]  # [time, mel]
    axis.imshow(spec.T.numpy(), origin="lower", aspect="auto", extent=(0, seconds, 0, spec.shape[1]), cmap="magma")
    if clip.labels.events is not None:
        part = seconds / len(clip.labels.events)
        for i in torch.nonzero(clip.labels.events)[:, 0].tolist():
            axis.axvspan(i * part, (i + 1) * part, 0.95, 1, color="#4cc9f0")
    axis.set(yticks=[], xlim=(0, seconds))
    axis.tick_params(labelsize=7)
    axis.xaxis.set_major_formatter("{x:g} s")
    axis.set_ylabel("mel", fontsize=7)


def film(scenes: Scenes, indices: Sequence[int], path: Path, fps: int = 25) -> None:
    """Write these clips one after another as an mp4, small ones enlarged."""
    zoom = max(1, 384 // scenes.size.pixels)
    frames = [scenes.film(index, fps).repeat_interleave(zoom, 2).repeat_interleave(zoom, 3) for index in indices]
    _, sound = scenes.tensors(indices)
    encode(path, torch.cat(frames), sound.flatten(), fps)
