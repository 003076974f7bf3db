import multiprocessing

import numpy as np
import pytest
import torch
from helpers.videos import Videos

from stella.media.codecs import decode_flac, decode_jpegs, encode_flac, encode_jpegs

av = pytest.importorskip("av")


def test_jpegs_keep_smooth_pictures_their_order_and_their_colours() -> None:
    coarse = torch.rand(5, 3, 3, 4, generator=torch.Generator().manual_seed(0)) * 200
    smooth = torch.nn.functional.interpolate(coarse, (48, 64), mode="bilinear").round().to(torch.uint8)
    files = encode_jpegs(smooth)
    assert len(files) == 5 and all(file.startswith(b"\xff\xd8") for file in files)
    frames = decode_jpegs(files)
    error = frames.float() - smooth.float()
    assert frames.shape == smooth.shape and error.abs().mean() < 3
    assert error.mean().abs() < 0.6  # not darker, as with the fast colour conversion
    assert torch.equal(decode_jpegs([files[3], files[1]]), frames[[3, 1]])
    assert decode_jpegs(files[:2], size=24).shape == (2, 3, 24, 32)


def test_noise_that_looks_like_the_beginning_of_a_frame() -> None:
    """FFmpeg 8 gives a piece of this file's last frame once more."""
    waveform = Videos(6)[5].audio
    assert torch.allclose(decode_flac(encode_flac(waveform)), waveform, rtol=0, atol=1 / 32768)


def test_flac_keeps_sixteen_bits_and_clips_the_rest() -> None:
    waveform = torch.rand(20_000, generator=torch.Generator().manual_seed(0)) * 2 - 1
    waveform[:2] = torch.tensor([1.5, -1.5])
    back = decode_flac(encode_flac(waveform))
    assert back.shape == waveform.shape and back.dtype == torch.float32
    assert back[:2].tolist() == [32767 / 32768, -1.0]
    assert torch.allclose(back[2:], waveform[2:], atol=0.51 / 32768)
    assert torch.equal(decode_flac(encode_flac(back)), back)


def test_a_fork_of_a_process_that_scales_frames_with_threads_does_not_hang() -> None:
    av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8), format="rgb24").reformat(format="yuvj420p")
    child = multiprocessing.get_context("fork").Process(target=_encode_and_decode, daemon=True)
    child.start()
    child.join(20)
    hung = child.is_alive()
    child.kill()
    child.join()
    assert not hung and child.exitcode == 0


def _encode_and_decode() -> None:
    torch.set_num_threads(1)
    decode_jpegs(encode_jpegs(torch.zeros(2, 3, 48, 64, dtype=torch.uint8)), size=24)
