"""A model in use: what it can be loaded from, and vectors that are the same however they are asked for."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.media_files import CLIPS, tone, write, write_video
from helpers.phone import phone_files
from helpers.small import quick
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import stella
from stella.cli import app
from stella.config import resolve, to_tree
from stella.data.folder import Folder
from stella.data.stream import StreamConfig
from stella.embed import Embeddings, Model, caveat
from stella.embed.progress import Shown
from stella.errors import ClipError, ConfigError, StellaError
from stella.evaluate.retrieval import embed as evaluated
from stella.media.inputs import Inputs, derived
from stella.model import weights
from stella.model.avm import AVM
from stella.model.cav import CAV, CAVConfig
from stella.runs.build import build_method, check
from stella.runs.config import RunConfig, model_config, settle
from stella.runs.loop import pretrain

CONFIG = CAVConfig(
    image_size=32, spec_frames=96, mel_bins=128, frames=2, dim=16, depth=2, fusion_from=1, heads=2, dec_dim=8,
    dec_depth=1, dec_heads=2,
)  # fmt: skip
INPUTS = Inputs(1.0, 32, 40, 2, 0.6, 96)
GRID = sorted(CLIPS.glob("*.mpg"))


def small() -> Model:
    torch.manual_seed(0)
    return Model(CAV(CONFIG), AVM(CONFIG.dim, CONFIG.heads), INPUTS)


@pytest.fixture(scope="module")
def model() -> Model:
    return small()


def same(a: Embeddings | None, b: Embeddings | None) -> bool:
    assert a is not None and b is not None
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("vectors", "start", "end"))


# ---- vectors


def test_vectors_are_unit_float32_with_true_seconds(model: Model) -> None:
    v = model.embed_video(GRID[0])
    assert v.vectors.dtype == torch.float32 and v.vectors.shape == (3, 16) == (len(v), model.dim)
    assert torch.allclose(v.vectors.norm(dim=1), torch.ones(3), atol=1e-6)
    assert v.start.dtype == v.end.dtype == torch.float64
    assert v.start.tolist() == pytest.approx([0, 1, 2], abs=0.05) and v.end.tolist() == pytest.approx(
        [1, 2, 3], abs=0.05
    )
    half = model.embed_video(GRID[0], overlap=0.5)
    assert half.start.tolist() == pytest.approx([0, 0.5, 1, 1.5, 2], abs=0.05)
    assert torch.equal(half.vectors[::2][:2], v.vectors[:2])


def test_the_same_vector_alone_in_a_list_in_any_batch_and_decoded_once(model: Model) -> None:
    alone = [(model.embed_video(p), model.embed_audio(p)) for p in GRID[:3]]
    for batch in (1, 2, 32):
        videos, sounds = model.embed_video(GRID[:3], batch=batch), model.embed_audio(list(GRID[:3]), batch=batch)
        assert all(same(a, v) and same(b, s) for (a, b), v, s in zip(alone, videos, sounds, strict=True))
    assert all(same(a, b) for a, b in zip(alone[1], model.embed_both(GRID[1]), strict=True))
    assert all(same(a, b) for a, b in zip(alone[1], small().embed_both(str(GRID[1]), progress=True), strict=True))
    assert model.embed_video([]) == []


def test_a_batch_of_another_size_gives_the_same_vectors_to_rounding(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU windows go in batches: here the same code on a CPU."""
    alone = model.embed_both(GRID[0], overlap=0.7)
    monkeypatch.setattr("stella.embed.model._Queue.add", _add_in_batches)
    together = model.embed_both(GRID[0], overlap=0.7)
    for a, b in zip(alone, together, strict=True):
        assert a is not None and b is not None and torch.equal(a.start, b.start)
        assert (a.vectors - b.vectors).abs().max() < 1e-6


def _add_in_batches(self: Any, part: Any, window: Any) -> None:
    self.waiting[window.kind].append((part, window, self.model.tensor(window)))
    if len(self.waiting[window.kind]) == 4:
        self.flush()


def test_an_embedding_is_what_evaluation_compares(model: Model) -> None:
    source = Folder(CLIPS, INPUTS.plan())
    found = evaluated(model.cav, source, StreamConfig(batch_size=1, size=32, spec_frames=96))
    for row, name in enumerate(source.files[:3]):
        video, sound = model.embed_both(CLIPS / name)
        assert video is not None and sound is not None
        assert torch.equal(video.vectors[0], found.v[row]) and torch.equal(sound.vectors[0], found.a[row])


def test_arrays_are_embedded_as_files_are(model: Model, tmp_path: Path) -> None:
    audio = tone(2.4, 48000, 2)
    path = write(tmp_path / "a.wav", None, audio, audio_codec="pcm_f32le", rate=48000, layout="stereo")
    file, array = model.embed_audio([path, (audio, 48000)])
    assert torch.equal(file.vectors[0], array.vectors[0]) and torch.equal(file.start, array.start)
    assert (file.vectors - array.vectors).abs().max() < 0.02
    frames = np.random.default_rng(0).integers(0, 256, (50, 40, 40, 3), dtype=np.uint8)
    vectors = model.embed_video((frames, 25))
    assert len(vectors) == 2 and same(vectors, model.embed_video((torch.from_numpy(frames).permute(0, 3, 1, 2), 25.0)))


def test_a_short_file_is_one_window_padded_as_in_training(model: Model, tmp_path: Path) -> None:
    path = write_video(tmp_path / "short.mp4", 0.5)
    video, sound = model.embed_both(path)
    assert video is not None and sound is not None and len(video) == len(sound) == 1
    assert (video.start.item(), video.end.item()) == (0.0, pytest.approx(0.5, abs=0.07))
    found = evaluated(model.cav, Folder(tmp_path, INPUTS.plan()), StreamConfig(batch_size=1, size=32, spec_frames=96))
    assert torch.equal(video.vectors, found.v) and torch.equal(sound.vectors, found.a)


def test_phone_files_and_real_clips_go_through(model: Model, tmp_path: Path) -> None:
    files = [*phone_files(tmp_path, 1.5).values(), *GRID]
    for path in files:
        video, sound = model.embed_both(path)
        assert video is not None and sound is not None and len(video) >= 2 <= len(sound), path
        assert video.vectors.isfinite().all() and sound.vectors.isfinite().all()
    silent = write_video(tmp_path / "silent.mp4", 1.0, sound=False)
    video, sound = model.embed_both(silent)
    assert video is not None and sound is None


# ---- what cannot be


def test_bad_files_are_told_in_one_sentence(model: Model, tmp_path: Path) -> None:
    text = tmp_path / "text.mp4"
    text.write_text("this is no video")
    (tmp_path / "empty.mp4").touch()
    silent = write_video(tmp_path / "silent.mp4", 1.0, sound=False)
    sound = write(tmp_path / "sound.wav", None, tone(1.0, 16000), audio_codec="pcm_s16le")
    cases = [
        (lambda: model.embed_video(tmp_path / "none.mp4"), "missing file; check the path"),
        (lambda: model.embed_both(text), "not a media file"),
        (lambda: model.embed_video(tmp_path / "empty.mp4"), "empty file"),
        (lambda: model.embed_video(tmp_path), "not a regular file"),
        (lambda: model.embed_audio(silent), "no audio track; it has no sound to embed"),
        (lambda: model.embed_video(sound), "no video track; it has no picture to embed"),
        (lambda: model.localise(silent), "no window with picture and sound"),
        (lambda: model.embed_video([GRID[0], text]), "text.mp4: not a media file"),
    ]
    for call, told in cases:
        with pytest.raises(ClipError, match=told) as caught:
            call()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("what", [np.zeros(16000), None, 5, (np.zeros(16000), "fast"), [np.zeros(16000)]])
def test_what_is_neither_a_file_nor_an_array_with_its_rate_is_refused(model: Model, what: Any) -> None:
    with pytest.raises(StellaError, match=r"give a path, or an array with its rate as \(waveform, 48000\)"):
        model.embed_audio(what)


def test_a_missing_file_is_told_in_one_error(model: Model, tmp_path: Path) -> None:
    """A traceback that begins with the system's own error says the same thing twice."""
    for call in (model.embed_video, model.localise, stella.load):
        with pytest.raises(StellaError, match="check the path") as caught:
            call(tmp_path / "none.mp4")
        assert caught.value.__cause__ is None and caught.value.__suppress_context__


def test_settings_out_of_range_are_refused(model: Model) -> None:
    with pytest.raises(StellaError, match="batch=0 must be at least 1"):
        model.embed_video(GRID[0], batch=0)
    with pytest.raises(StellaError, match="overlap=1 is the share"):
        model.embed_video(GRID[0], overlap=1)
    for device in ("cuda:77", "tpu"):
        with pytest.raises(StellaError, match=f"device={device} is not here; leave it out, or set cpu"):
            stella.load("base-tiny", device=device)


# ---- loading


def test_a_model_is_loaded_from_a_name_a_file_a_run_and_a_saved_folder(tmp_path: Path) -> None:
    shipped = stella.load("base-tiny")
    assert shipped.inputs == Inputs(2.56, 96, 96, 4, None, 256) and shipped.avm is not None
    shipped.save(tmp_path / "saved")
    loaded = [stella.load(tmp_path / "saved"), stella.load(str(tmp_path / "saved" / "model.safetensors"))]
    assert {m.fingerprint for m in loaded} == {shipped.fingerprint}
    expected = shipped.embed_video(GRID[0])
    assert all(same(m.embed_video(GRID[0]), expected) for m in loaded)


def test_a_run_writes_how_its_inputs_are_made_and_can_be_used_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "videos"
    for number in range(4):
        write_video(folder / f"{number}.mp4", 1.0, seed=number)
    values = [
        "data.source=folder",
        f"data.path={folder}",
        f"data.eval_path={folder}",
        "data.duration=0.64",
        "data.pixels=32",
        "data.frames=2",
    ]
    config = resolve(RunConfig, None, [*values, "method=finetune", "stream.batch_size=4", "train.device=cpu"])
    assert pretrain(config, tmp_path / "run").finished
    model = stella.load(tmp_path / "run")
    assert model.inputs == Inputs(0.64, 32, 37, 2, 4.0, 64) and not model.notes[1:]
    assert len(model.embed_video(folder / "0.mp4")) == 2
    with pytest.raises(StellaError, match="has no matching module"):
        model.localise(folder / "0.mp4")
    further = settle(resolve(RunConfig, None, [*values[:2], "method=finetune", f"model.weights={tmp_path / 'run'}"]))
    check(further)
    method = build_method(further, torch.device("cpu"))
    assert all(torch.equal(a, b) for a, b in zip(method.model.parameters(), model.cav.parameters(), strict=True))


def test_a_run_on_scenes_says_of_real_files_that_it_knows_none(tmp_path: Path) -> None:
    """As the shipped weights do; not what a learner makes of the user's own clips."""
    config = to_tree(settle(resolve(RunConfig, None, ["method=finetune", "data.source=scenes"])))
    other = config | {"data": {"source": "folder", "path": "videos"}}
    shipped = config | {"model": config["model"] | {"weights": "base-tiny"}}
    bare = stella.load("base-tiny", "cpu")
    for name, extra in {
        "scenes": {"config": config},
        "learner": {"config": config, "round": 1},
        "videos": {"config": other},
        "long": {"config": shipped | {"data": other["data"]}, "steps": 100},
        "short": {"config": shipped | {"data": other["data"]}, "steps": 99},
        "new": {"config": shipped | {"data": other["data"]}, "steps": 1, "round": 1},
        "grown": stella.load("base-wide", "cpu").extra,
    }.items():
        (tmp_path / name).mkdir()
        weights.save(tmp_path / name / weights.FILE, bare.cav, None, extra)
    run = str(tmp_path / "scenes")
    assert caveat(run, ["dog.mp4"]).startswith(f"{run} knows rendered scenes, not the world")
    assert caveat("base-tiny", ["dog.mp4"]) and not caveat(run, ["scenes-0-task1-eval-000000.mp4"])
    assert not any(caveat(str(tmp_path / name), ["dog.mp4"]) for name in ("learner", "videos", "gone", "long"))
    assert all(caveat(str(tmp_path / name), ["dog.mp4"]) for name in ("short", "new", "grown"))
    assert not caveat("", ["dog.mp4"])


def test_an_unfinished_run_and_a_strange_folder_are_told(tmp_path: Path) -> None:
    with pytest.raises(StellaError, match=r"is a folder without model\.safetensors; give a finished run"):
        stella.load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(StellaError, match="is not finished and has no weights yet; continue it with"):
        stella.load(tmp_path)
    (tmp_path / "config.json").write_text('{"task": "classify"}')
    with pytest.raises(StellaError, match="is a downstream run without weights of its own; name the model"):
        stella.load(tmp_path)
    with pytest.raises(StellaError, match=r"cannot be read .*weights that ship: base-small, base-tiny"):
        stella.load("nowhere")
    with pytest.raises(StellaError, match=r"load takes a shipped name \(base-small.* or the path of .*; 3 is neither"):
        stella.load(3)  # type: ignore[arg-type]


def test_weights_that_do_not_state_their_inputs_are_told(tmp_path: Path) -> None:
    weights.save(tmp_path / "a.safetensors", CAV(CONFIG))
    model = stella.load(tmp_path / "a.safetensors")
    assert model.inputs == derived(32, 96, 2) and "derived from its sizes" in model.notes[-1]
    weights.save(tmp_path / "b.safetensors", CAV(CONFIG), inputs=replace(INPUTS, pixels=64))
    with pytest.raises(StellaError, match="have other sizes than its model"):
        stella.load(tmp_path / "b.safetensors")


def test_a_damaged_statement_of_inputs_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    weights.save(path, CAV(CONFIG), inputs=INPUTS)
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["stella"])
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    header["inputs"]["pixles"] = 3
    save_file(tensors, path, {"stella": json.dumps(header)})
    with pytest.raises(StellaError, match=r"damaged header .*pixles"):
        stella.load(path)


def test_a_fingerprint_tells_models_apart_whose_vectors_differ() -> None:
    model, other = small(), small()
    assert model.fingerprint == other.fingerprint and len(model.fingerprint) == 64
    with torch.no_grad():
        other.cav.norm_a.bias += 1e-3
    assert Model(other.cav, None, INPUTS).fingerprint != model.fingerprint
    assert Model(model.cav, None, replace(INPUTS, span=None)).fingerprint != model.fingerprint
    assert Model(model.cav, None, INPUTS).fingerprint == model.fingerprint  # no vector depends on the matching module


def test_importing_stella_is_quick_and_needs_no_torch() -> None:
    script = "import stella, sys; assert not {'torch', 'av', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        _ = stella.lode  # type: ignore[attr-defined]


# ---- sizes follow from the weights


def test_a_run_on_videos_takes_its_sizes_from_the_weights(tmp_path: Path) -> None:
    videos = ["data.source=folder", "data.path=x"]
    settled = settle(resolve(RunConfig, None, [*videos, "model.weights=base-small"]))
    assert settled.model.preset == "small" and model_config(settled).dim == 192
    assert settled.data.inputs() == Inputs(2.56, 96, 110, 4, None, 256)
    assert settle(settled) == settled
    weights.check_fits("base-small", model_config(settled))
    stella.load("base-tiny").save(tmp_path)
    assert settle(resolve(RunConfig, None, [*videos, f"model.weights={tmp_path}"])).model.preset == "tiny"


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("model.preset=base", "dim was 96 and is now 768"),
        ("data.pixels=224", "image_size was 96 and is now 224"),
        ("data.duration=10.24", "spec_frames was 256 and is now 1024"),
        ("data.frames=8", "frames was 4 and is now 8"),
    ],
)
def test_sizes_that_are_given_and_do_not_fit_the_weights_are_refused(value: str, told: str) -> None:
    values = ["data.source=folder", "data.path=x", "model.weights=base-tiny", value]
    with pytest.raises(StellaError, match=rf"base-tiny.* does not fit this run: .*{told}.*leave out"):
        weights.check_fits("base-tiny", model_config(settle(resolve(RunConfig, None, values))))


def test_a_settled_run_does_not_need_its_initial_weights_again(tmp_path: Path) -> None:
    weights.save(tmp_path / "w.safetensors", stella.load("base-tiny").cav)
    settled = settle(resolve(RunConfig, None, [f"model.weights={tmp_path / 'w.safetensors'}"]))
    (tmp_path / "w.safetensors").unlink()
    assert settle(settled) == settled
    with pytest.raises(StellaError, match="cannot be read"):
        settle(quick("finetune", f"model.weights={tmp_path / 'w.safetensors'}"))


def test_scenes_take_the_size_of_the_weights(tmp_path: Path) -> None:
    large = replace(CONFIG, image_size=224, spec_frames=1024, frames=4)
    weights.save(tmp_path / "w.safetensors", CAV(large), inputs=Inputs(10.24, 224, 224, 4, None, 1024))
    settled = settle(resolve(RunConfig, None, [f"model.weights={tmp_path / 'w.safetensors'}", "model.preset=tiny"]))
    assert settled.data.label == "scenes-full" and settled.data.inputs().pixels == 224
    with pytest.raises(ConfigError, match=r"unknown data\.size"):
        resolve(RunConfig, None, ["data.size=vast"])


# ---- the command


def test_the_command_writes_vectors_and_lists_bad_files(tmp_path: Path) -> None:
    videos = tmp_path / "videos"
    write_video(videos / "a.mp4", 3.0)
    write(videos / "b.wav", None, tone(1.0, 16000), audio_codec="pcm_s16le")
    run, base = CliRunner(), stella.load("base-tiny")
    expected = [base.embed_both(videos / name) for name in ("a.mp4", "b.wav")]
    rows = torch.cat([each.vectors for both in expected for each in both if each is not None])
    for suffix in ("npz", "safetensors"):
        out = tmp_path / "new" / f"v.{suffix}"
        done = run.invoke(app, ["embed", str(videos), "--out", str(out), "--model", "base-tiny"])
        assert done.exit_code == 0 and "2 windows of video and 3 of sound of 2 files" in done.output, done.output
        found = dict(np.load(out)) if suffix == "npz" else {k: t.numpy() for k, t in load_file(out).items()}
        assert np.array_equal(found["vectors"], rows.numpy())
        assert found["file_index"].tolist() == [0, 0, 0, 0, 1] and found["kind"].tolist() == [0, 0, 1, 1, 1]
    (videos / "c.mp4").write_text("no video")
    done = run.invoke(app, ["embed", str(videos), "--out", str(tmp_path / "v.npz"), "--model", "base-tiny"])
    assert done.exit_code == 1 and "skipped" in done.output and "c.mp4: not a media file" in done.output
    for args, told in (
        ([str(videos / "c.mp4")], "none of 1 file could be embedded"),
        ([str(videos), "--out", str(tmp_path / "v.txt")], "must end in .npz or .safetensors"),
        ([str(tmp_path / "none")], "none of 1 file"),
    ):
        done = run.invoke(app, ["embed", "--model", "base-tiny", "--out", str(tmp_path / "x.npz"), *args])
        assert isinstance(done.exception, StellaError) and told in str(done.exception)


def test_what_is_found_prints_in_one_line(tmp_path: Path) -> None:
    model, video = stella.load("base-tiny"), write_video(tmp_path / "film.mp4", 3.0)
    assert repr(model.embed_video(video)) == "Embeddings(2 × 96, 0.0 to 3.0 s)"
    assert repr(model.localise(video)).startswith("Maps(2 windows of 4 frames, 96 × 96")


def test_a_files_name_is_shown_as_it_is_in_the_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with Shown(["cl[red]ip\x1b]0;owned\x07.mp4"], wanted=True) as shown:
        shown.at(0, 1.0)
    out = capsys.readouterr().out
    assert "cl[red]ip" in out and "owned" in out and "\x1b]0" not in out and "\x07" not in out
