"""Contact sheets: no text lies on another, or on a picture."""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from matplotlib.text import Text

from stella.data.scenes import Scenes
from stella.report import sheet


@pytest.mark.parametrize("clips", [1, 4])
def test_texts_lie_beside_the_pictures_and_each_other(
    clips: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(sheet, "save", lambda figure, path: drawn.append(figure))
    scenes = Scenes("task1", "eval", clips)
    times = scenes.size.frame_times * scenes.size.duration
    sheet.contact_sheet([scenes[i] for i in range(clips)], tmp_path / "a.png", "the title", times=times)
    [figure] = drawn
    figure.draw_without_rendering()
    texts = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    boxes = {f"{i} {text.get_text()}": text.get_window_extent() for i, text in enumerate(texts)}
    assert sum(name.endswith(" s") for name in boxes) >= 4 * clips  # under every frame
    for (one, a), (other, b) in combinations(boxes.items(), 2):
        assert not a.overlaps(b), (one, other)
    for name, box in boxes.items():
        for axis in figure.axes:
            assert not box.padded(1.5).overlaps(axis.get_window_extent()), name
