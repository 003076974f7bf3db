"""Pictures in files of their own."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from stella.errors import ClipError
from stella.media.stills import read_picture


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
