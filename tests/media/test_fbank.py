"""`fbank` is Kaldi's, for a whole batch."""

from pathlib import Path

import kaldi_native_fbank as knf
import numpy as np
import pytest
import torch

from stella.errors import StellaError
from stella.media.decode import Plan, decode
from stella.media.fbank import fbank
from stella.rng import generator


def kaldi(waveform: torch.Tensor, mels: int = 128) -> torch.Tensor:
    """[time, mels] from the reference implementation, the clip's mean subtracted first."""
    options = knf.FbankOptions()
    options.frame_opts.samp_freq = 16000
    options.frame_opts.dither = 0
    options.frame_opts.window_type = "hanning"
    options.mel_opts.num_bins = mels
    options.htk_compat = True
    options.use_energy = False
    computer = knf.OnlineFbank(options)
    computer.accept_waveform(16000, (waveform - waveform.mean()).tolist())
    computer.input_finished()
    return torch.from_numpy(np.stack([computer.get_frame(i) for i in range(computer.num_frames_ready)]))


def noise(*shape: int) -> torch.Tensor:
    return 0.1 * torch.randn(shape, generator=generator(0, "noise", *shape))


@pytest.mark.parametrize("mels", [128, 40])
@pytest.mark.parametrize("waveforms", [noise(3, 40960), noise(1, 16000) + 0.25, torch.zeros(1, 16000)])
def test_noise_an_offset_and_silence_equal_kaldi(waveforms: torch.Tensor, mels: int) -> None:
    spec = fbank(waveforms, frames=1 + (waveforms.shape[1] - 400) // 160, mels=mels, normalise=False)
    for ours, waveform in zip(spec, waveforms, strict=True):
        torch.testing.assert_close(ours, kaldi(waveform, mels), atol=1e-3, rtol=0)


def test_speech_equals_kaldi(speech: Path) -> None:
    """Single precision limits both where a filter holds almost nothing: Kaldi itself is off by up to 1.1e-3 there."""
    waveform = decode(speech, Plan(0, 10, 1)).audio
    theirs = kaldi(waveform)
    ours = fbank(waveform[None], frames=len(theirs), normalise=False)[0]
    torch.testing.assert_close(
        fbank(waveform[None], frames=len(theirs))[0], (theirs + 5.081) / 4.4849, atol=1e-3, rtol=0
    )
    error = (ours - theirs).abs()
    assert (error > 1e-3).float().mean() < 2e-4 and error.max() < 3e-3


def test_padding_is_zero_before_normalisation_and_the_paper_s_numbers_after() -> None:
    waveforms = noise(2, 16000)
    plain, normal = fbank(waveforms, normalise=False), fbank(waveforms)
    assert plain.shape == normal.shape == (2, 1024, 128)
    assert plain[:, 97].abs().min() > 0 and plain[:, 98:].abs().max() == 0
    torch.testing.assert_close(normal, (plain + 5.081) / 4.4849)


def test_long_clips_are_cut() -> None:
    waveforms = noise(1, 48000)
    torch.testing.assert_close(fbank(waveforms, frames=100), fbank(waveforms, frames=298)[:, :100])


def test_lengths_hide_what_lies_behind_them() -> None:
    lengths = torch.tensor([16000, 9999, 400, 399, 0])
    waveforms = noise(5, 16000)
    spec = fbank(waveforms, lengths, frames=120, normalise=False)
    for row, waveform, length in zip(spec, waveforms, lengths.tolist(), strict=True):
        count = 1 + (length - 400) // 160 if length >= 400 else 0
        assert row[count:].abs().sum() == 0
        if count:
            torch.testing.assert_close(row[:count], kaldi(waveform[:length]), atol=1e-3, rtol=0)


def test_a_clip_does_not_depend_on_its_neighbours() -> None:
    waveforms = noise(9, 100_000)  # more than is taken at a time
    torch.testing.assert_close(fbank(waveforms, frames=600)[7:8], fbank(waveforms[7:8], frames=600), atol=1e-5, rtol=0)


def test_bad_shapes_are_refused() -> None:
    for bad in (torch.zeros(16000), torch.zeros(1, 399), torch.zeros(0, 16000)):
        with pytest.raises(StellaError, match="fbank takes"):
            fbank(bad)
