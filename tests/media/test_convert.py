"""Decoded audio becomes one waveform, each piece at its own time."""

from fractions import Fraction

import av
import pytest
from helpers.media_files import tone

from stella.media.convert import JITTER, Sound


@pytest.mark.parametrize(("late", "gap"), [(0.03, False), (0.2, True)])
def test_a_gap_in_the_sound_stays_one_and_jitter_makes_none(late: float, gap: bool) -> None:
    assert (late > JITTER) == gap
    sound = Sound(0.0, 2.0)
    for begin in (0.0, 0.5 + late):
        frame = av.AudioFrame.from_ndarray(tone(0.5, 16_000), format="fltp", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = 16_000, round(begin * 16_000), Fraction(1, 16_000)
        sound.add(frame, 1 / 16_000)
    found = sound.waveform()
    assert len(found) == pytest.approx(16_000 + (late * 16_000 if gap else 0), abs=1)
    assert (abs(found[8_000:11_200]).max() < 0.01) == gap
