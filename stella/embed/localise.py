"""Heat maps: which patches of a video the sound attends to, and which moments of the sound the video attends to.

Read from the matching module's attention at its temperature β, the importance of Eq. 1 and 2. (The cosine of a video
patch and the mean sound points away from the source: on scenes its AUC is below one half.)
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from stella.errors import ClipError
from stella.media.inputs import PER_SECOND, Inputs
from stella.media.windows import Window
from stella.model.avm import AVM, score
from stella.model.cav import CAV
from stella.selection import importance


@dataclass(frozen=True)
class Maps:
    """Heat maps of n windows. 1 is a window's most important place, 0 its least important one."""

    heat: Tensor  # float32 [n, T, H, W], over the centre square of each frame, in the model's pixels
    times: Tensor  # float64 [n, T], the second at which each frame is shown
    sound: Tensor  # float32 [n, S], importance of the sound's time steps
    seconds: Tensor  # float64 [n, S], the second at which each step begins
    start: Tensor  # float64 [n]
    end: Tensor  # float64 [n]

    def __len__(self) -> int:
        return len(self.heat)

    def __repr__(self) -> str:
        n, frames, height, width = self.heat.shape
        return f"Maps({n} windows of {frames} frames, {height} × {width})"


@torch.inference_mode()
def localise(cav: CAV, avm: AVM, inputs: Inputs, path: Path, found: Iterable[Window]) -> Maps:
    """Maps of the windows in which there are both picture and sound, from windows at the same times."""
    rows = [_maps(cav, avm, inputs, video, audio) for video, audio in pairs(found)]
    if not rows:
        raise ClipError(path, "no window with picture and sound", "a heat map needs both: give another file")
    rows.sort(key=lambda row: float(row[-2]))
    return Maps(*(torch.stack(column) for column in zip(*rows, strict=True)))


def pairs(found: Iterable[Window]) -> Iterator[tuple[Window, Window]]:
    """The windows of picture and of sound that begin at the same time."""
    waiting: dict[float, dict[str, Window]] = {}
    for window in found:
        pair = waiting.setdefault(window.start, {})
        pair[window.kind] = window
        if len(pair) == 2:
            del waiting[window.start]
            yield pair["video"], pair["audio"]


def _maps(cav: CAV, avm: AVM, inputs: Inputs, video: Window, audio: Window) -> tuple[Tensor, ...]:
    device = next(cav.parameters()).device
    pixels = inputs.crop(video.data[None]).to(device)
    spectrogram = inputs.spectrogram(audio.data[None], torch.tensor([len(audio.data)])).to(device)
    qk = score(cav, avm, cav.patches_a(spectrogram), cav.patches_v(pixels)).qk
    on_video = importance(qk.q_a, qk.k_v, avm.beta).cpu().view(1, *cav.config.grid_v)  # [1, T, rows, columns]
    on_audio = importance(qk.q_v, qk.k_a, avm.beta).cpu().view(cav.config.grid_a).sum(1)  # [steps]
    heat = unit_range(F.interpolate(on_video, size=pixels.shape[-2:], mode="bilinear", align_corners=False)[0])
    step = cav.config.patch_size / PER_SECOND
    kept = torch.arange(len(on_audio)) * step < len(audio.data) / 16_000  # the rest is padding
    sound = torch.where(kept, unit_range(torch.where(kept, on_audio, on_audio[kept].min())), 0.0)
    seconds = audio.start + step * torch.arange(len(on_audio), dtype=torch.float64)
    times = torch.tensor([*video.times], dtype=torch.float64)
    ends = (torch.tensor(value, dtype=torch.float64) for value in (video.start, video.end))
    return (heat, times, sound, seconds, *ends)


def unit_range(x: Tensor) -> Tensor:
    """Stretched to 0…1; all zero if it is constant."""
    low, high = x.min(), x.max()
    return (x - low) / (high - low).clamp_min(torch.finfo(torch.float32).tiny)
