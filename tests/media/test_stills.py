"""Pictures in files of their own."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageOps

from stella.errors import ClipError
from stella.media.stills import read_mask, read_picture


def test_pictures_are_jpeg_or_png_whatever_they_are_called(tmp_path: Path) -> None:
    """PIL knows more formats, and starts Ghostscript for one of them."""
    image = Image.fromarray(np.full((4, 6, 3), 90, np.uint8))
    for kind in ("JPEG", "PNG"):
        image.save(tmp_path / "a.png", kind)
        assert torch.equal(read_picture(tmp_path / "a.png"), torch.full((3, 4, 6), 90, dtype=torch.uint8))
    for kind in ("EPS", "BMP"):
        image.save(tmp_path / "a.png", kind)
        with pytest.raises(ClipError, match="damaged picture"):
            read_picture(tmp_path / "a.png")


STORED = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
SHOWN = [np.flip(STORED, 1), np.rot90(STORED, 2), np.flip(STORED, 0), STORED.transpose(1, 0, 2)]  # orientations 2 to 5
SHOWN += [np.rot90(STORED, -1), np.rot90(STORED.transpose(1, 0, 2), 2), np.rot90(STORED)]  # 6 to 8


def oriented(orientation: int, **more: str | float) -> Image.Exif:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    for name, value in more.items():
        exif[ExifTags.Base[name]] = value
    return exif


@pytest.mark.parametrize(("orientation", "shown"), [*enumerate([STORED, *SHOWN], 1)])
def test_a_picture_and_its_mask_are_turned_as_they_are_shown(
    tmp_path: Path, orientation: int, shown: np.ndarray
) -> None:
    """Phones store a picture as the sensor saw it, and beside it how it was held."""
    path, exif = tmp_path / "a.png", oriented(orientation)
    Image.fromarray(STORED).save(path, exif=exif)
    assert np.array_equal(read_picture(path).permute(1, 2, 0).numpy(), shown)
    mask = (STORED[..., 0] > 30).astype(np.uint8)
    for image in (Image.fromarray(255 * mask), palette(mask)):
        image.save(path, exif=exif)
        assert np.array_equal(read_mask(path).numpy(), shown[..., 0] > 30)


def palette(mask: np.ndarray) -> Image.Image:
    image = Image.fromarray(mask)
    image.putpalette([0, 0, 0, 9, 9, 9])
    return image


def test_damaged_exif_is_no_reason_to_refuse_a_picture(tmp_path: Path) -> None:
    path, exif = tmp_path / "a.jpg", oriented(6, Make="maker", XResolution=72.0).tobytes()
    image = Image.fromarray(STORED)
    image.save(path, exif=exif)
    assert read_picture(path).shape == (3, 6, 4)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"maker\0", b"maker\xff").replace(exif[6:10], b"none"))  # no TIFF any more
    assert read_picture(path).shape == (3, 4, 6)
    field = bytes.fromhex("011a0005")  # a resolution, which is a fraction and no text
    assert field in data
    path.write_bytes(data.replace(field, bytes.fromhex("011a0007")))
    with pytest.raises(TypeError):
        ImageOps.exif_transpose(Image.open(path))
    assert read_picture(path).shape == (3, 6, 4)
