"""Heads, the embedded tasks, what can be had without looking, and where weights come from."""

import io
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.small import quick, use_tasks
from rich.console import Console
from safetensors import safe_open
from typer.testing import CliRunner

from stella.cli import app
from stella.clip import BACKGROUND, Batch, Clip, Labels, Source, labels_of, names_of
from stella.data.downstream import Parts, masked
from stella.data.scenes import TASKS, Scenes, ScenesConfig, classes
from stella.data.scenes.audit import class_cues
from stella.data.scenes.source import TENTHS, SceneSegments
from stella.data.stream import StreamConfig, evaluation_batches
from stella.errors import ClipError, StellaError
from stella.evaluate.retrieval import embed, task_recall
from stella.model.avm import AVM, score
from stella.model.cav import CAV, preset
from stella.model.heads import MaskDecoder, classifier
from stella.rng import generator
from stella.runs.loop import pretrain
from stella.transfer import localise
from stella.transfer.base import Options, joint_means
from stella.transfer.ceilings import ceilings
from stella.transfer.classify import WINDOWS, Classify, Windows, untested
from stella.transfer.config import WeightsConfig
from stella.transfer.metrics import f_curve, f_measure, iou, mean_average_precision, mean_iou
from stella.transfer.results import downstream_rows
from stella.transfer.retrieval import Retrieval
from stella.transfer.run import resume
from stella.transfer.segment import Segment
from stella.transfer.tasks import task_of
from stella.transfer.weights import open_weights

SIZES = {"image_size": 32, "spec_frames": 64}
STREAM = StreamConfig(batch_size=8, size=32, spec_frames=64)


@pytest.fixture(scope="module")
def model() -> CAV:
    torch.manual_seed(0)
    return CAV(preset("tiny", **SIZES))


def batch(clips: int = 3, channels: int = 3) -> Batch:
    gen = generator("transfer")
    video = torch.randint(0, 256, (clips, 4, channels, 32, 32), generator=gen, dtype=torch.uint8)
    return Batch(video, torch.randn(clips, 64, 128, generator=gen), torch.arange(clips))


# ---- heads


def test_the_classifier_is_the_published_one() -> None:
    kinds = [type(layer).__name__ for layer in classifier(8, 5).children()]
    assert kinds == ["Linear", "Tanh", "Linear", "LayerNorm", "GELU", "Linear"]
    probe = classifier(8, 5, probe=True)
    assert isinstance(probe, torch.nn.Linear) and probe.weight.shape == (5, 16)


def test_the_classifier_takes_means_of_the_joint_tokens_after_the_norm(model: CAV) -> None:
    some = batch()
    with torch.no_grad():
        x = torch.cat(
            [
                model.encode_a(model.patches_a(some.audio)) + model.inter_pos_embed_a,
                model.encode_v(model.patches_v(some.video)) + model.inter_pos_embed_v,
            ],
            1,
        )
        out = model.norm(model.blocks_u.joint(x))
        length = model.config.patches_a
        expected = torch.cat([out[:, :length].mean(1), out[:, length:].mean(1)], 1)
        assert torch.allclose(joint_means(model, some), expected, atol=1e-5)
        stages = model.fuse_stages(
            model.encode_a(model.patches_a(some.audio)), model.encode_v(model.patches_v(some.video))
        )
        assert len(stages) == 2 and torch.allclose(model.norm(stages[-1]), out, atol=1e-5)


def test_masks_come_out_at_the_size_of_the_picture_and_hear_the_sound() -> None:
    torch.manual_seed(0)
    decoder = MaskDecoder(24, 224, channels=8)
    first, last, sound = torch.randn(2, 3, 14, 14, 24), torch.randn(2, 3, 14, 14, 24), torch.randn(2, 24)
    logits, fine = decoder(first, last, sound)
    assert logits.shape == (2, 3, 224, 224) and fine.shape == (2, 3, 8, 56, 56)
    other, _ = decoder(first, last, sound.roll(1, 0))
    assert not torch.allclose(logits, other)
    moved, _ = decoder(first.flip(0), last.flip(0), sound.flip(0))  # clips do not see each other
    assert torch.allclose(moved.flip(0), logits, atol=1e-4)
    assert MaskDecoder(768, 224).channels == 256


def test_the_audio_attention_is_that_over_all_positions() -> None:
    """The shortcut equals attention with T·s² keys that are all the same audio token."""
    torch.manual_seed(0)
    hear = MaskDecoder(12, 32, channels=8).hear[0]
    x, sound = torch.randn(2, 3, 8, 4, 4), torch.randn(2, 12)
    flat = x.flatten(0, 1)
    query = hear.query(flat).view(2, 3, 8, 16).permute(0, 1, 3, 2).reshape(2, 48, 8)
    value = hear.value(flat).view(2, 3, 8, 16).permute(0, 1, 3, 2).reshape(2, 48, 8)
    keys = hear.key(sound)[:, None].expand(-1, 48, -1)
    seen = (query @ keys.mT / 8**0.5) @ value / 48  # [2, 48, 8]
    seen = seen.view(2, 3, 16, 8).permute(0, 1, 3, 2).reshape(6, 8, 4, 4)
    assert torch.allclose(hear(x, sound), hear.norm(flat + hear.out(seen)).view_as(x), atol=1e-5)


# ---- tasks


def test_only_frames_with_a_known_mask_are_trained_on_and_judged(model: CAV) -> None:
    parts = Parts(*(Scenes("task1", split, 4) for split in ("train", "validation", "eval")))
    task = Segment(model, parts, Options(), 0)
    some = batch(2, 5)
    some.video[:, :, 4] = 0
    some.video[0, 1, 4] = 255
    columns = task.columns_of(some, task.source)
    assert columns["known"].tolist() == [[False, True, False, False], [False] * 4]
    assert torch.equal(columns["mask"], some.video[:, :, 3] > 127)  # a crop blurs the border of a mask
    with torch.no_grad():
        before = task.objective_of(columns)["cross_entropy"]
        columns["mask"][1] ^= True
        columns["mask"][0, 2] ^= True
        assert task.objective_of(columns)["cross_entropy"] == before
        assert task.judged(columns)["iou"].shape == (1,)
        columns["mask"][0, 1] ^= True
        assert task.objective_of(columns)["cross_entropy"] != before
        first = Segment(model, parts, Options(mask_frames=1), 0)
        first.head.load_state_dict(task.head.state_dict())
        one = {**columns, "known": torch.ones_like(columns["known"])}
        alone = {name: value[:, :1] if name != "sound" else value for name, value in one.items()}
        assert torch.allclose(first.objective_of(one)["cross_entropy"], task.objective_of(alone)["cross_entropy"])
        aligned = Segment(model, parts, Options(align=0.5), 0).objective_of(columns)
        assert aligned["align"] > 0


class Cut:
    """Clips whose frames tell their window."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Clip:
        return self.clip(index, 0.5)

    def clip(self, index: int, window: float) -> Clip:
        level = round(255 * window)
        video = torch.full((4, 3, 32, 32), level, dtype=torch.uint8)
        return Clip(str(index), video, torch.ones(8000), Labels("ab"[index % 2]))


def test_a_test_clip_is_judged_by_the_mean_over_four_windows(model: CAV) -> None:
    task = Classify(model, Parts(Cut(), Cut(), Cut(), ("a", "b")), Options(), 0)
    source = task.clips(Cut(), test=True)
    assert len(source) == 6 * len(WINDOWS) and len(task.clips(Cut())) == 6
    levels = {int(b.video[i, 0, 0, 0, 0]) for b in evaluation_batches(source, STREAM) for i in range(len(b))}
    assert levels == {0, 85, 170, 255}
    judged = {
        "clip": torch.tensor([0, 1, 0, 1]),
        "target": torch.tensor([0, 1, 0, 1]),
        "scores": torch.tensor([[0.4, 0.6], [0.5, 0.5], [0.9, 0.1], [0.6, 0.4]]),
    }
    assert task.figures(judged)["accuracy"] == 50  # clip 0 is right on average, clip 1 is not


@pytest.mark.parametrize("part", ["validation", "test"])
def test_a_class_without_training_clips_is_refused_before_the_first_step(model: CAV, part: str) -> None:
    parts = Parts(Cut(), Cut(), Cut(), ("a", "b"))
    other = [Clip("", torch.empty(0), torch.empty(0), Labels("c"))]
    with pytest.raises(StellaError, match="no training clip has the class c"):
        Classify(model, replace(parts, **{part: other}), Options(), 0)


def test_retrieval_measures_what_evaluation_measures(model: CAV) -> None:
    source = Scenes("task1", "eval", 12)
    task = Retrieval(model, Parts(source, source, source), Options(frozen=False), 0)
    with torch.no_grad():
        rows = (task.columns_of(each, source) for each in evaluation_batches(source, STREAM))
        found = task.measure(rows)
    expected = task_recall([embed(model, source, STREAM)])
    assert found["a2v_5"] == expected["a2v"]["5"][0] and found["v2a_10"] == expected["v2a"]["10"][0]


def test_localisation_reads_the_attention_or_cosines(model: CAV) -> None:
    some, avm = batch(), AVM(model.config.dim, model.config.heads, beta=0.1)
    with torch.no_grad():
        qk = score(model, avm, model.patches_a(some.audio), model.patches_v(some.video)).qk
        logits = torch.einsum("bhqd,bhkd->bhqk", qk.q_a, qk.k_v) / qk.q_a.shape[-1] ** 0.5  # temperature 1
        expected = logits.softmax(-1).mean((1, 2)).view(3, 4, 2, 2)
        assert torch.allclose(localise.sound_maps(model, avm, some), expected, atol=1e-6)
        v = model.fuse_v(model.encode_v(model.patches_v(some.video)))
        a = model.represent_a(some.audio)[:, None].expand_as(v)
        cosine = torch.nn.functional.cosine_similarity(v, a, dim=2).view(3, 4, 2, 2)
        assert torch.allclose(localise.sound_maps(model, None, some), cosine, atol=1e-5)


def test_localisation_counts_frames_that_sound() -> None:
    scenes = Scenes("task1", "eval", 3)
    frames = masked(scenes, sounding=True).tensors([0, 1, 2])[0]  # type: ignore[attr-defined]
    for index in range(3):
        events = scenes.labels(index).events
        assert events is not None
        counts = [bool(events[int((t + 0.5) / 4 * 10)]) for t in range(4)]
        assert (frames[index, :, 4].flatten(1).amax(1) > 0).tolist() == counts


class Several:
    """The first clips of a source, each with these classes."""

    def __init__(self, source: Source, names: list[str]) -> None:
        self.source, self.names = source, names

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Clip:
        return replace(self.source[index], labels=self.labels(index))

    def clip(self, index: int, window: float) -> Clip:
        return self[index]

    def labels(self, index: int) -> Labels:
        name, *others = self.names[index].split()
        return Labels(name, others=tuple(others))


def test_a_clip_of_several_classes_is_judged_in_each(model: CAV) -> None:
    """By the formulas of binary cross-entropy and of the mean average precision; `?` is a class of no training clip."""
    scenes, classes = Scenes("task1", "eval", 4), ("a", "b", "c")
    parts = Parts(
        *(Several(scenes, names.split(",")) for names in ("a b,c,b,a", "a", "c ?,a b,b,?")), classes, several=True
    )
    kind = task_of("classify", parts)
    assert kind.figure == "map" and task_of("classify", replace(parts, several=False)) is Classify
    task = kind(model, parts, Options(probe=True), 0)
    assert task.targets(torch.arange(4), parts.train).int().tolist() == [[1, 1, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0]]
    z = torch.randn(4, 2 * model.config.dim, generator=generator("tags"))
    target = task.targets(torch.arange(4), parts.test)
    assert target.int().tolist() == [[0, 0, 1], [1, 1, 0], [0, 1, 0], [0, 0, 0]]
    p = task.head(z).sigmoid()
    expected = -torch.where(target, p, 1 - p).log().mean()
    torch.testing.assert_close(task.objective_of({"z": z, "target": target})["cross_entropy"], expected)
    assert torch.equal(task.shown({"z": z})["scores"], p)
    windows = torch.rand(16, 3, generator=generator("windows"))
    judged = {"scores": windows, "target": target.repeat(4, 1), "clip": torch.arange(4).repeat(4)}
    mean = windows.view(4, 4, 3).mean(0)
    assert task.figures(judged) == {"map": pytest.approx(mean_average_precision(mean, target))}
    source = task.clips(parts.test, test=True)
    assert isinstance(source, Windows) and labels_of(source, [5])[0].others == ("b",)  # clip 1 of window 1
    assert ceilings("classify", parts, 32) == {"chance": pytest.approx(100 * (1 + 2 + 1) / 3 / 4)}


def test_figures_of_masks_are_those_of_all_pictures_or_means_over_batches_as_in_avsbench(model: CAV) -> None:
    parts = Parts(*(Scenes("task1", split, 4) for split in ("train", "validation", "eval")))
    gen = generator("masks")
    logits, masks = torch.randn(7, 8, 8, generator=gen), torch.rand(7, 8, 8, generator=gen) < 0.3
    masks[6] = False
    judged = {"iou": iou(logits, masks), "f": f_curve(logits, masks)}
    found = Segment(model, parts, Options(), 0).figures(judged)
    assert found == {"miou": pytest.approx(mean_iou(logits, masks)), "f": pytest.approx(f_measure(judged["f"]))}
    batches = [slice(0, 3), slice(3, 6), slice(6, 7)]
    expected = {
        "miou": sum(mean_iou(logits[rows], masks[rows]) for rows in batches) / 3,
        "f": sum(f_measure(f_curve(logits[rows], masks[rows])) for rows in batches) / 3,  # the last has no object: 0
    }
    by_batches = Segment(model, parts, Options(mean_of=3), 0).figures(judged)
    assert by_batches == pytest.approx(expected) and by_batches["miou"] != pytest.approx(found["miou"])


def test_classes_without_test_clips_are_named() -> None:
    scenes = Scenes("task1", "eval", 4)
    parts = Parts(scenes, scenes, Several(scenes, ["a", "b c"]), tuple("abcdefghij"), several=True)
    assert untested(parts) == ["without test clips: 7 of 10 classes (d, e, f, g, h and 2 more)"]
    assert not untested(replace(parts, classes=tuple("abc")))


# ---- the embedded data


def test_parts_share_no_clip_and_novel_shares_no_class() -> None:
    config = ScenesConfig(clips=8, eval_clips=8)
    parts = config.downstream("classify")
    audio = torch.cat([part.tensors(range(8))[1] for part in (parts.train, parts.validation, parts.test)])  # type: ignore[attr-defined]
    assert len(audio.unique(dim=0)) == 24
    known = [kind for task in (*TASKS, "base") for kind in classes(task)]
    novel = classes("novel")
    assert len(novel) == 16 and not {(k.look, k.action) for k in novel} & {(k.look, k.action) for k in known}
    assert {k.look for k in novel} == {k.look for task in TASKS for k in classes(task)}
    assert not {k.look for k in novel} & {k.look for k in classes("wide-360")}
    assert len(config.downstream("retrieval").train) == 8


def test_tenths_are_clips_of_their_own() -> None:
    scenes = Scenes("task2", "train", 3)
    tenths = SceneSegments(scenes)
    frames, audio = tenths.tensors([17, 4, 13])
    assert frames.shape == (3, 4, 3, 96, 96) and audio.shape == (3, 40_960)
    clip, whole = tenths[17], scenes[1]
    assert torch.equal(clip.video, frames[0]) and torch.equal(clip.audio, audio[0])
    middle = slice(18_432, 18_432 + 4_096)
    assert torch.equal(audio[0, middle], whole.audio[7 * 4_096 : 8 * 4_096]) and not audio[0, :18_432].any()
    assert whole.labels.events is not None
    own = [whole.labels.name if sounds else BACKGROUND for sounds in whole.labels.events]
    assert names_of(tenths, range(TENTHS, 2 * TENTHS)) == own and len(tenths) == 30


def test_ceilings_are_what_their_names_say() -> None:
    config = ScenesConfig(tasks=("task1", "task2"), clips=24, eval_clips=8)
    found = ceilings("classify", config.downstream("classify"), 84)
    assert found == {"chance": 12.5, "majority": 12.5}
    parts = config.downstream("events")
    names = Counter(names_of(parts.test, range(len(parts.test))))
    found = ceilings("events", parts, 84)
    assert found["majority"] == 100 * names[BACKGROUND] / len(parts.test) and found["class"] > 40
    some = [row for row in range(len(parts.test)) if row not in (0, 1, 2, 15)]  # the others were skipped
    left = [names_of(parts.test, [row])[0] for row in some]
    fewer = ceilings("events", parts, 84, some)
    assert fewer["majority"] == 100 * left.count(BACKGROUND) / len(some) and fewer["class"] > 40
    assert ceilings("retrieval", config.downstream("retrieval"), 84, range(6))["chance"] == pytest.approx(100 * 12 / 18)
    found = ceilings("segment", config.downstream("segment"), 84)
    assert found["empty"] == 0 and 5 < found["constant"] < 40 and found["class"] > 0
    found = ceilings("localise", config.downstream("localise"), 84)
    assert 5 < found["disc"] < 40 and set(found) == {"disc", "constant", "class"}
    assert ceilings("retrieval", config.downstream("retrieval"), 84)["chance"] == pytest.approx(100 * 16 / 3 / 16)
    cues = class_cues()
    assert cues["look"] == pytest.approx(100 / 3) and cues["sound"] == 50


# ---- weights and the command


def test_weights_after_every_task_are_kept_in_half_precision(tmp_path: Path, monkeypatch: Any) -> None:
    use_tasks(monkeypatch)
    config = quick("finetune", "train.keep_task_weights=true", "train.ema=0.9")
    assert pretrain(config, tmp_path / "run", console=Console(file=io.StringIO())).finished
    files = sorted((tmp_path / "run" / "weights").iterdir())
    assert [path.name for path in files] == [f"after-{n}.safetensors" for n in (1, 2, 3)]
    with safe_open(files[0], "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.float16}  # noqa: SIM118
    run = str(tmp_path / "run")
    last, after, slow = (
        open_weights(WeightsConfig(run, number, slow), 0)[0].model
        for number, slow in ((None, False), (3, False), (None, True))
    )
    assert all(
        torch.equal(p.half(), q)
        for p, q in zip(last.state_dict().values(), after.half().state_dict().values(), strict=True)
    )
    assert not torch.equal(last.modality_a, slow.modality_a)
    with pytest.raises(
        StellaError, match=r"has no weights/after-4\.safetensors; it has the weights after tasks 1 to 3"
    ):
        open_weights(WeightsConfig(run, after=4), 0)
    for path in files:
        path.unlink()
    with pytest.raises(StellaError, match=r"has no weights/after-1\.safetensors; train it with train\.keep_task_weigh"):
        open_weights(WeightsConfig(run, after=1), 0)
    with pytest.raises(StellaError, match="run of stella pretrain; continue it with stella pretrain --resume"):
        resume(run)


def test_a_folder_that_is_no_run_and_a_run_that_is_not_finished_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(StellaError, match=r"is a folder without model\.safetensors; give a finished run"):
        open_weights(WeightsConfig(str(tmp_path)), 0)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(StellaError, match="is not finished and has no weights yet; continue it with"):
        open_weights(WeightsConfig(str(tmp_path)), 0)


def test_the_command_line(tmp_path: Path) -> None:
    cli, run = CliRunner(), tmp_path / "run"
    small = ["data.tasks=['task1']", "data.clips=4", "data.eval_clips=4", "stream.epochs=1", "train.device=cpu"]
    done = cli.invoke(app, ["transfer", "classify", "base-tiny", *small, "--probe", "--run", str(run), "--seed", "3"])
    assert done.exit_code == 0, done.output
    assert "on 4 test clips (accuracy by chance 25.0" in done.output.replace("\n", " ")
    assert (run / "predictions.png").stat().st_size > 20_000
    again = cli.invoke(app, ["transfer", "--resume", str(run)])
    assert again.exit_code == 0 and "on 4 test clips" in again.output.replace("\n", " ")
    [row] = downstream_rows(tmp_path)
    assert row["task"] == "classify" and row["seed"] == 3 and row["probe"] is True and row["backbone"] == "frozen"
    assert row["command"].startswith("stella transfer classify base-tiny ") and "head.probe=True" in row["command"]
    other = cli.invoke(app, ["transfer", "--resume", str(run), "--seed", "4", "--trained"])
    assert isinstance(other.exception, StellaError) and "leave --frozen, --seed out" in str(other.exception)
    nothing = cli.invoke(app, ["transfer"])
    assert isinstance(nothing.exception, StellaError) and "name a task and a model" in str(nothing.exception)


class Broken:
    """Clips of which one has no mask and one cannot be read."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Clip:
        if index == 2:
            raise ClipError("file", "damaged picture", "fetch it again")
        mask = torch.zeros(1, 8, 8, dtype=torch.bool)
        mask[0, 2:6, 2:6] = True
        labels = Labels("a") if index == 3 else Labels("a", mask=mask)
        return Clip(str(index), torch.zeros(1, 3, 8, 8, dtype=torch.uint8), torch.ones(800), labels)


def test_bad_clips_do_not_stop_ceilings() -> None:
    found = ceilings("segment", Parts(Broken(), Broken(), Broken()), 8)
    assert found["constant"] == 100 and found["empty"] == 0


class Wide:
    """Clips of two aspect ratios: the mask is at the centre of one, and outside the centre square of the other."""

    def __init__(self, clips: int) -> None:
        self.clips = clips

    def __len__(self) -> int:
        return self.clips

    def __getitem__(self, index: int) -> Clip:
        height, width = ((8, 16), (16, 8))[index % 2]
        mask = torch.zeros(1, height, width)
        mask[0, 2:6, 6:10] = 1.0
        if height > width:
            mask = mask.roll(-4, 1)
        video = torch.zeros(1, 3, height, width, dtype=torch.uint8)
        return Clip(str(index), video, torch.ones(800), Labels("a", mask=mask))


def test_masks_of_any_shape_are_cropped_as_for_the_model() -> None:
    found = ceilings("localise", Parts(Wide(2), Wide(0), Wide(2)), 8)
    assert found == {"disc": pytest.approx(75, abs=25), "constant": 100, "class": 100}
    assert ceilings("segment", Parts(Wide(2), Wide(0), Wide(2)), 8)["empty"] == 50  # nothing is left of one mask


def test_nothing_is_fitted_without_clips_to_train_on() -> None:
    assert set(ceilings("localise", Parts(Wide(0), Wide(0), Wide(2)), 8)) == {"disc"}
