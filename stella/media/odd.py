"""What is odd about a clip that can be decoded: a still picture, a muted track."""

from torch import Tensor

STILL, SILENT = "still picture", "silent"
MOVES = 1.0  # of 255, on average between the first frame and any other
SOUNDS = 1e-3  # of full scale: -60 dB


def silent(audio: Tensor) -> bool:
    """Whether a waveform [S] stays below -60 dB: a muted track."""
    return float(audio.abs().max()) < SOUNDS


def oddities(video: Tensor, audio: Tensor) -> list[str]:
    """Of frames uint8 [T, 3, H, W] and a waveform [S]: `silent`, `still picture`, both or none."""
    found = [SILENT] if silent(audio) else []
    first = video[0].float()
    moves = any(float((video[i].float() - first).abs().mean()) >= MOVES for i in range(len(video) - 1, 0, -1))
    return found if moves or len(video) < 2 else [*found, STILL]
