"""What a downstream run's best model says of a few test clips, as a picture."""

from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from stella.clip import BACKGROUND, Clip, names_of
from stella.config import build
from stella.data.downstream import Parts
from stella.errors import StellaError
from stella.media.augment import center_crop
from stella.report.fonts import save
from stella.report.sheet import _spectrogram
from stella.runs.folder import RunFolder
from stella.transfer.config import TransferConfig
from stella.transfer.run import PREDICTIONS

BEST = 3  # classes named


def predictions_sheet(run: Path, out: Path) -> Path:
    """Write a picture with a row for each clip: frames with predicted masks or maps, or the classes named."""
    folder = RunFolder(run)
    file = folder.root / PREDICTIONS
    if not file.exists():
        raise StellaError(f"{run} has no predictions to draw; only classify, events, segment and localise keep them")
    config = build(TransferConfig, folder.read_config())
    said = safetensors.torch.load(file.read_bytes())
    parts = config.data.downstream(config.task)
    if config.task == "events":
        return _draw_events(parts, said, out)
    clips = [parts.test[int(row)] for row in said["rows"]]
    return _draw_clips(clips, said, parts, config, out)


def _draw_clips(clips: list[Clip], said: dict[str, Tensor], parts: Parts, config: TransferConfig, out: Path) -> Path:
    lines = BEST + 1 if "scores" in said else 1
    figure, axes = _axes(len(clips), len(clips[0].video), f"{config.task}: {_short(config.weights.source)}", lines)
    shown = None
    for number, (clip, row) in enumerate(zip(clips, axes, strict=True)):
        video = center_crop(clip.video[None], config.stream.size)[0]
        for i, axis in enumerate(row[:-1]):
            axis.imshow(video[i].permute(1, 2, 0).numpy())
            axis.set(xticks=[], yticks=[])
            if "maps" in said:
                values = said["maps"][number, i].float()
                least, most = (0.0, 1.0) if config.task == "segment" else (float(values.min()), float(values.max()))
                side = video.shape[-1] - 0.5
                look: dict[str, Any] = {"extent": (-0.5, side, side, -0.5), "interpolation": "bilinear"}
                scaled = (values - least) / max(most - least, 1e-12)
                shown = axis.imshow(scaled.numpy(), cmap="inferno", alpha=0.55, vmin=0, vmax=1, **look)
            if clip.labels.mask is not None and clip.labels.mask[i].any():
                mask = (clip.labels.mask[i] * 255).to(video.dtype).expand(1, 1, 3, -1, -1)
                outline = center_crop(mask, config.stream.size)[0, 0, 0].float().numpy()
                axis.contour(outline, levels=[127], colors="white", linewidths=1.2)
        place: dict[str, Any] = {"xytext": (0, 4), "textcoords": "offset points", "fontsize": 7.5, "va": "bottom"}
        title = row[0].annotate(_title(clip, said, number, parts), (0, 1), xycoords="axes fraction", **place)
        title.set_in_layout(False)  # it may be wider than its frame
        _spectrogram(row[-1], clip)
    if shown is not None:
        bar = figure.colorbar(shown, ax=axes[:, -1], shrink=0.4, ticks=[0, 1])
        bar.ax.set_yticklabels(["0", "1"] if config.task == "segment" else ["least", "most"], fontsize=7)
    save(figure, out)
    return out


def _short(source: str) -> str:
    return "/".join(Path(source).parts[-3:])


def _title(clip: Clip, said: dict[str, Tensor], number: int, parts: Parts) -> str:
    if "scores" not in said:
        return f"{clip.labels.name or clip.id} (outlined; colour: predicted)"
    best = said["scores"][number].topk(min(BEST, len(parts.classes)))
    named = [f"{100 * float(p):3.0f}%  {parts.classes[int(i)]}" for p, i in zip(*best, strict=True)]
    true = [clip.labels.name, *clip.labels.others] if parts.several else [clip.labels.name]
    return "\n".join([f"true: {', '.join(map(str, true))}", *named])


def _draw_events(parts: Parts, said: dict[str, Tensor], out: Path) -> Path:
    """A strip for each clip: the true class of each segment above, the predicted one below."""
    from matplotlib.figure import Figure

    rows = said["rows"].view(-1, parts.segments)
    answers = said["scores"].argmax(1).view(rows.shape)
    figure = Figure(figsize=(9, 0.85 * len(rows) + 0.4), layout="constrained")
    axes = figure.subplots(len(rows), 1, squeeze=False)[:, 0]
    for axis, clip, answer in zip(axes, rows.tolist(), answers.tolist(), strict=True):
        true = names_of(parts.test, clip)
        own = next((name for name in true if name != BACKGROUND), BACKGROUND)
        for k, (name, number) in enumerate(zip(true, answer, strict=True)):
            right = name == parts.classes[number]
            axis.barh(1, 1, left=k, color="#4cc9f0" if name != BACKGROUND else "#dddddd", edgecolor="white")
            colour = "#dddddd" if parts.classes[number] == BACKGROUND else "#4cc9f0"
            axis.barh(0, 1, left=k, color=colour, edgecolor="white", hatch="" if right else "///")
        axis.set(yticks=[0, 1], yticklabels=["predicted", "true"], xticks=[], xlim=(0, parts.segments))
        axis.set_title(f"{own} (blue: the class, grey: background, hatched: wrong)", fontsize=7, loc="left")
    save(figure, out)
    return out


def _axes(rows: int, frames: int, title: str, lines: int) -> tuple[Any, Any]:
    """A figure with room for `lines` of text above each row."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    room = 0.06 * lines - 0.02  # inches, on both sides of each of two neighbours, beside the ticks of spectrograms
    layout = ConstrainedLayoutEngine(h_pad=room)
    figure = Figure(figsize=(1.45 * frames + 4.4, (1.65 + 2.4 * room) * rows + 0.5), layout=layout)
    figure.suptitle(title, fontsize=11)
    return figure, figure.subplots(rows, frames + 1, width_ratios=[1.0] * frames + [2.9], squeeze=False)
