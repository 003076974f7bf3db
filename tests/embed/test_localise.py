"""Where a sound comes from: maps against ground truth, pointing game and AUC against naive versions, and the film."""

import shlex
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from helpers.disk import small_disk
from helpers.media_files import CLIPS, level_frame, tone, write, write_video
from helpers.phone import phone_files
from helpers.videos import Videos
from typer.testing import CliRunner

import stella
from stella.cli import app
from stella.data.folder import Folder
from stella.data.scenes import Scenes
from stella.data.scenes.export import export
from stella.data.skipped import Skipped
from stella.embed import Model
from stella.embed.film import _copy_sound, _frames, write_film
from stella.embed.matching import train_matching
from stella.errors import ClipError, StellaError
from stella.evaluate.matching import auc, pointing, regions
from stella.media.decode import decode
from stella.media.inputs import Inputs
from stella.media.windows import windows
from stella.model.avm import score
from stella.model.cav import CAV, preset
from stella.selection import importance

CLIP = sorted(CLIPS.glob("*.mpg"))[0]


@pytest.fixture(scope="module")
def model() -> Model:
    return stella.load("base-wide", "cpu")


def cases() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 6, (40, 12), generator=gen).float()  # with ties
    inside = torch.rand(40, 12, generator=gen) < 0.3
    return scores, inside, ~inside & (torch.rand(40, 12, generator=gen) < 0.8)


def test_auc_counts_pairs() -> None:
    scores, inside, outside = cases()
    for row, i, o, found in zip(scores.tolist(), inside, outside, auc(scores, inside, outside).tolist(), strict=True):
        pairs = [(a, b) for a, x in zip(row, i, strict=True) if x for b, y in zip(row, o, strict=True) if y]
        expected = sum((a > b) + 0.5 * (a == b) for a, b in pairs) / len(pairs) if pairs else float("nan")
        assert found == pytest.approx(expected, nan_ok=True)


def test_the_pointing_game_looks_at_the_top_patch_of_both_regions() -> None:
    scores, inside, outside = cases()
    scores = scores + torch.rand(scores.shape, generator=torch.Generator().manual_seed(1)) / 10  # no ties
    for row, i, o, found in zip(scores, inside, outside, pointing(scores, inside, outside).tolist(), strict=True):
        known = [n for n in range(12) if i[n] or o[n]]
        top = max(known, key=lambda n: float(row[n]))
        expected = float(bool(i[top])) if i.any() and o.any() else float("nan")
        assert found == pytest.approx(expected, nan_ok=True)


def test_maps_are_the_modules_importance_and_find_the_sounding_object(model: Model, tmp_path: Path) -> None:
    """On rendered scenes: the maps of their files against where the object is."""
    scenes, assigned = Scenes("base", "eval", 6), model.avm
    assert assigned is not None
    areas = []
    for index, path in enumerate(export(scenes, tmp_path)):
        maps = model.localise(path)
        assert maps.heat.shape == (1, 4, 96, 96) and maps.heat.min() == 0 and maps.heat.max() == 1
        assert maps.times[0].tolist() == pytest.approx([0.32, 0.96, 1.6, 2.24], abs=0.03)
        assert maps.sound.shape == maps.seconds.shape == (1, 16) and 0 <= maps.sound.min() <= maps.sound.max() == 1
        inside, outside = regions(scenes.labels(index), model.cav.config)
        patches = torch.nn.functional.avg_pool2d(maps.heat[0], 16).flatten()  # [Lv]
        areas.append(auc(patches[None], inside[None], outside[None]).item())
        clip = decode(path, model.inputs.plan())
        audio = model.inputs.spectrogram(clip.audio[None], torch.tensor([len(clip.audio)]))
        video = model.inputs.crop(clip.video[None])
        qk = score(model.cav, assigned, model.cav.patches_a(audio), model.cav.patches_v(video)).qk
        scores = importance(qk.q_a, qk.k_v, assigned.beta)[0]
        assert scores[patches.argmax()] > 0.95 * scores.max()  # two patches may be level
    assert np.mean(areas) > 0.65


def test_windows_without_sound_are_left_out_and_others_keep_their_seconds(model: Model) -> None:
    maps = model.localise(CLIP, overlap=0.5)
    assert maps.start.tolist() == pytest.approx([0, 0.44]) and maps.end.tolist() == pytest.approx([2.56, 3.0])
    assert (maps.seconds[1, 0], maps.times[1, 0]) == (pytest.approx(0.44), pytest.approx(0.76))
    assert len(maps) == 2 and maps.heat.isfinite().all()


@pytest.mark.parametrize(  # the sound lasts from 0 to 6, and the clock of a ts begins later than 0
    ("suffix", "first", "last"), [("mp4", 2, 3), ("mkv", 2, 3), ("mp4", 0, 1), ("mp4", 1, 6), ("ts", 1, 6)]
)
def test_the_maps_of_a_moment_are_those_of_its_window_also_where_the_picture_comes_late_or_ends_early(
    model: Model, tmp_path: Path, suffix: str, first: float, last: float
) -> None:
    times = [first + n / 25 for n in range(round(25 * (last - first)))]
    path = write(
        tmp_path / f"a.{suffix}", [level_frame(100 + n) for n in range(len(times))], tone(6, 16_000), times=times
    )
    maps = model.localise(path)
    for n, start in enumerate(maps.start.tolist()):
        if start + model.inputs.duration > last + 0.1:  # `localise` lets the last window end with the picture
            assert n == 0 == start
        one = model.localise_moment(path, start)
        assert torch.equal(one.heat[0], maps.heat[n]) and torch.equal(one.sound[0], maps.sound[n])
        assert one.times[0].tolist() == pytest.approx(maps.times[n].tolist(), abs=1e-6)
        assert one.seconds[0].tolist() == maps.seconds[n].tolist()
        assert (one.start[0], one.end[0]) == (maps.start[n], pytest.approx(maps.end[n].item(), abs=1e-6))
    assert maps.times.min() > first - 0.03 and maps.times.max() < last + 0.03


def test_a_model_without_a_matching_module_is_named_as_it_was_given(tmp_path: Path, monkeypatch: Any) -> None:
    """So that the command which the message gives works."""
    bare = stella.load("base-tiny", "cpu")
    bare.avm = None
    bare.save(tmp_path / "my runs" / "ch")
    monkeypatch.chdir(tmp_path)
    for given in ("my runs/ch", tmp_path / "my runs" / "ch" / "model.safetensors"):
        with pytest.raises(StellaError, match="has no matching module") as refused:
            stella.load(given, "cpu").localise(CLIP)
        told = shlex.split(str(refused.value))
        assert told[told.index("--model") + 1] == str(given)
        assert stella.load(told[told.index("--model") + 1], "cpu").name in ("ch", "model")
    with pytest.raises(StellaError, match="--model base-tiny --train-on"):
        bare.localise(CLIP)


def test_the_film_has_the_map_over_it_and_keeps_its_sound(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stella.embed.film.SHORT_SIDE", 192)
    [path] = export(Scenes("base", "eval", 1), tmp_path / "scenes")
    maps = model.localise(path)
    assert write_film(model, maps, path, tmp_path / "heat.mp4") == 64
    with av.open(str(tmp_path / "heat.mp4")) as film:
        assert film.duration / 1e6 == pytest.approx(2.56, abs=0.1)
        frames = [frame.to_ndarray(format="rgb24") for frame in film.decode(video=0)]
    assert len(frames) == 64 and frames[0].shape[0] > 192 + 150
    hot = np.unravel_index(int(maps.heat[0, 2].argmax()), (96, 96))
    cold = np.unravel_index(int(maps.heat[0, 2].argmin()), (96, 96))
    shown = frames[40].astype(int)  # the third frame that the model sees
    red = [shown[16 + 2 * y, 160 + 2 * x, 0] for y, x in (hot, cold)]
    assert red[0] > 180 and red[0] > red[1] + 60
    before, after = (of_sound(each) for each in (path, tmp_path / "heat.mp4"))
    length = min(len(before), len(after))
    assert length > 38_000 and np.corrcoef(before[:length], after[:length])[0, 1] > 0.9


def test_a_film_tolerates_a_broken_packet_at_the_end_alone(tmp_path: Path) -> None:
    """As windows do, of whose maps it is made."""
    data, path = CLIP.read_bytes(), tmp_path / "clip.mpg"
    path.write_bytes(data[: len(data) // 2])  # in the middle of a packet
    assert len(list(windows(path, Inputs(1.0, 32, 36, 2, None, 100), ["video"]))) > 0
    assert len(list(_frames(path, 25.0, 0.0))) > 30
    path.write_bytes(data[: len(data) // 2] + bytes(3000) + data[len(data) // 2 + 3000 :])
    with pytest.raises(ClipError, match="unreadable file"):
        list(_frames(path, 25.0, 0.0))


def test_a_film_has_at_most_25_frames_a_second(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stella.embed.film.SHORT_SIDE", 48)
    path = write(tmp_path / "fast.mp4", [level_frame(n) for n in range(50)], tone(1, 16_000), fps=50)
    assert write_film(model, model.localise(path), path, tmp_path / "heat.mp4") == 25


def test_a_film_goes_into_a_new_folder_and_what_goes_wrong_there_is_not_the_videos_fault(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stella.embed.film.SHORT_SIDE", 48)
    path = write(tmp_path / "dog.mp4", [level_frame(n) for n in range(50)], tone(2, 16_000))
    out, maps = tmp_path / "new" / "films" / "heat.mp4", model.localise(path)
    assert write_film(model, maps, path, out) == 50
    with small_disk(4096), pytest.raises(StellaError, match=r"heat.mp4 cannot be written \(.*check the folder"):
        write_film(model, maps, path, out)
    assert out.stat().st_size > 4096  # the one before
    gone = tmp_path / "dog.mp4" / "heat.mp4"  # a file is no folder
    with pytest.raises(OSError, match=r"dog\.mp4"):
        write_film(model, maps, path, gone)


def test_the_sound_of_a_film_begins_where_the_file_begins(tmp_path: Path) -> None:
    """A file's clock may begin anywhere, as that of a recorded broadcast."""
    frames, sound = [level_frame(n) for n in range(25)], tone(1, 48_000)
    times = [2 + n / 25 for n in range(25)]
    path = write(tmp_path / "a.mkv", frames, sound, times=times, rate=48_000, audio_start=2.0)
    with av.open(str(tmp_path / "film.mkv"), "w") as film:
        _copy_sound(path, film, film.add_stream("aac", rate=48_000, layout="stereo"))
    with av.open(str(path)) as before, av.open(str(tmp_path / "film.mkv")) as after:
        assert before.start_time > 1e6
        first = next(after.decode(audio=0))
        assert float(first.pts * first.time_base) == pytest.approx(0, abs=0.1)


def of_sound(path: Path) -> np.ndarray:
    inputs = stella.load("base-tiny", "cpu").inputs
    return next(w.data.numpy() for w in windows(path, inputs, ["audio"]))


@pytest.mark.slow
def test_films_of_phone_files(model: Model, tmp_path: Path) -> None:
    for path in phone_files(tmp_path).values():
        assert write_film(model, model.localise(path), path, tmp_path / "heat.mp4") > 20
        with av.open(str(tmp_path / "heat.mp4")) as film:
            assert film.duration / 1e6 == pytest.approx(3.0, abs=0.25) and film.streams.audio


def test_a_matching_module_is_trained_on_a_frozen_backbone() -> None:
    sizes = {"image_size": 32, "spec_frames": 64, "frames": 2}
    config = preset("tiny", dim=32, heads=2, depth=2, fusion_from=1, dec_depth=0, **sizes)
    source = Videos(3, width=32)

    def trained(steps: int, seed: int = 0) -> tuple[Model, float]:
        torch.manual_seed(0)
        model = Model(CAV(config), None, Inputs(0.64, 32, 37, 2, None, 64))
        return model, train_matching(model, source, steps, lr=3e-3, seed=seed)

    assert trained(3)[1] == trained(3)[1] != trained(3, seed=1)[1]
    model, loss = trained(80)
    assert model.avm is not None and loss < 0.5  # by chance 0.69
    torch.manual_seed(0)
    assert model.fingerprint == Model(CAV(config), None, model.inputs).fingerprint
    assert len(model.localise(CLIP)) == 5
    with pytest.raises(StellaError, match="needs two clips"):
        train_matching(model, Scenes("base", "train", 1), 1)


@pytest.mark.parametrize(("clips", "bad"), [(4, {1}), (18, {0, 5, 11}), (30, set(range(0, 30, 3)))])
def test_a_matching_module_is_trained_on_the_good_clips_of_a_folder(clips: int, bad: set[int]) -> None:
    model, skipped = stella.load("base-tiny", "cpu"), Skipped()
    train_matching(model, Videos(clips, frames=4, bad=frozenset(bad)), 3, skipped=skipped)
    assert len(skipped) == len(bad)
    few = Videos(clips, frames=4, bad=frozenset(range(1, clips)))
    with pytest.raises(StellaError, match=rf"^1 of {clips} clips can be used \(.*\) and a matching module needs 2"):
        train_matching(model, few, 3)


def test_the_command_trains_a_module_saves_it_and_writes_the_film(tmp_path: Path) -> None:
    for number in range(4):
        write_video(tmp_path / "videos" / f"{number}.mp4", 1.0, seed=number)
    (tmp_path / "videos" / "bad.mp4").write_text("no video")
    bare = stella.load("base-tiny", "cpu")
    bare.avm = None
    bare.save(tmp_path / "bare")
    film, run = tmp_path / "heat.mp4", CliRunner()
    args = ["localise", str(tmp_path / "videos" / "0.mp4"), "--model", str(tmp_path / "bare"), "--out", str(film)]
    refused = run.invoke(app, args)
    assert isinstance(refused.exception, StellaError) and "--train-on FOLDER" in str(refused.exception)
    more = ["--train-on", str(tmp_path / "videos"), "--steps", "2", "--save", str(tmp_path / "full")]
    done = run.invoke(app, [*args, *more])
    assert done.exit_code == 0 and "10 frames, 1 window" in done.output, done.output
    assert "bad.mp4: not a media file; it is damaged" in " ".join(done.output.split())
    assert done.output.count("knows rendered scenes, not the world") == 1  # its backbone was trained on them alone
    shipped = run.invoke(app, [*args[:2], "--model", "base-tiny", "--out", str(film)])
    assert shipped.output.count("base-tiny knows rendered scenes, not the world") == 1
    assert film.exists() and stella.load(tmp_path / "full").avm is not None
    wrong = run.invoke(app, [*args[:2], "--out", "heat.gif"])
    assert isinstance(wrong.exception, StellaError) and "must end in .mp4" in str(wrong.exception)
    assert Folder(tmp_path / "videos").files  # nothing was written among the videos


def test_a_film_does_not_replace_its_video(tmp_path: Path) -> None:
    video = tmp_path / "dog.mp4"
    video.write_bytes(CLIP.read_bytes())
    with pytest.raises(StellaError, match="is the video itself; choose another name"):
        CliRunner().invoke(
            app, ["localise", str(video), "--out", str(tmp_path / "." / "dog.mp4")], catch_exceptions=False
        )
    assert video.read_bytes() == CLIP.read_bytes()
