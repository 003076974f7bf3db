"""Pictures, masks and sounds in files of their own, as several benchmarks store a clip."""

import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stella.errors import ClipError, require
from stella.media.decode import Plan, decode_track

FORMATS = ("JPEG", "PNG")  # of the benchmarks; others of PIL start programs
BAD_EXIF = (ArithmeticError, AttributeError, LookupError, OSError, SyntaxError, TypeError, ValueError, struct.error)


def read_picture(path: Path) -> Tensor:
    """uint8 [3, H, W]."""
    return torch.from_numpy(np.array(_image(path).convert("RGB"))).permute(2, 0, 1).contiguous()


def scaled(picture: Tensor, size: int) -> Tensor:
    """uint8 [3, H, W] with a short side of `size`."""
    height, width = picture.shape[-2:]
    scale = size / min(height, width)
    shape = max(size, round(height * scale)), max(size, round(width * scale))
    return F.interpolate(picture[None], shape, mode="bilinear", antialias=True)[0]


def squeezed(pictures: Tensor) -> Tensor:
    """uint8 [T, 3, H, W] → [T, 3, S, S], the whole picture as a square of its short side."""
    side = min(pictures.shape[-2:])
    return F.interpolate(pictures, (side, side), mode="bilinear", antialias=True)


def read_mask(path: Path) -> Tensor:
    """bool [H, W]: one bit for each pixel. In a picture with a palette every colour but the first is the mask."""
    image = _image(path)
    pixels = np.array(image) > 0 if image.mode == "P" else np.array(image.convert("L")) > 127
    return torch.from_numpy(pixels)


def _image(path: Path) -> Any:
    """A picture as it is shown: turned as its EXIF orientation says."""
    image, turn = require("PIL.Image"), require("PIL.ImageOps").exif_transpose
    try:
        found = image.open(path, formats=FORMATS)
        found.load()
    except FileNotFoundError:
        raise ClipError(path, f"missing {_kind(path)}", "check the path, or leave the clip out") from None
    except (OSError, SyntaxError, ValueError) as error:  # what PIL raises of damaged files
        raise ClipError(path, "damaged picture", "fetch it again or leave the clip out") from error
    with suppress(*BAD_EXIF):  # what PIL raises of damaged EXIF; the pixels are whole
        turn(found, in_place=True)
    return found


def _kind(path: Path) -> str:
    return "mask" if "mask" in str(path.parent) else "picture"


def read_sound(path: Path, duration: float, start: float = 0.0) -> Tensor:
    """float32 [S] at 16 kHz mono, `duration` seconds of an audio file (or of a video's audio track)."""
    return decode_track(path, Plan(start, duration, span=None), "audio")
