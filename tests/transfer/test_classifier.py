"""A trained classifier on files."""

import csv
import io
import json
from pathlib import Path
from shutil import copytree

import pytest
import torch
from helpers.learning import config_for, in_rounds, packed
from helpers.media_files import write_video
from rich.console import Console
from typer.testing import CliRunner

from stella.cli import app
from stella.clip import Batch
from stella.errors import ClipError, StellaError
from stella.files import read_json, read_lines, write_json
from stella.media.decode import decode
from stella.model import weights
from stella.model.cav import CAV, preset
from stella.transfer.base import joint_means
from stella.transfer.classifier import Classifier, classify_each
from stella.transfer.config import transfer_config
from stella.transfer.run import transfer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("classifier")
    torch.manual_seed(0)
    weights.save(root / "w.safetensors", CAV(preset("tiny", image_size=32, spec_frames=64)))
    for number in range(12):
        (root / "videos" / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        write_video(root / "videos" / "ab"[number % 2] / f"{number}.mp4", seed=number)
    values = [f"weights.source={root / 'w.safetensors'}", "stream.epochs=2", "stream.batch_size=4", "train.device=cpu"]
    data = {"source": "folder", "path": str(root / "videos"), "eval_share": 0.4}
    config = transfer_config("classify", data, [*values, "head.probe=true", "train.lr=0.1"])
    assert transfer(config, root / "run", console=Console(file=io.StringIO())).finished
    return root / "run"


def test_the_answer_for_a_window_is_the_heads_for_the_same_clip(run: Path, tmp_path: Path) -> None:
    judge, file = Classifier(run, "cpu"), write_video(tmp_path / "new.mp4", seed=99)
    answers = judge(file)
    assert judge.classes == ["a", "b"] and not judge.several
    assert answers.start.tolist() == pytest.approx([0.0, 0.36], abs=0.05)  # the last window ends with the file
    assert (answers.end - answers.start).tolist() == pytest.approx([0.64, 0.64], abs=0.01)
    for scores, start in zip(answers.scores, answers.start.tolist(), strict=True):
        clip = decode(file, judge.inputs.plan(start))
        spectrogram = judge.inputs.spectrogram(clip.audio[None], torch.tensor([len(clip.audio)]))
        batch = Batch(judge.inputs.crop(clip.video[None]), spectrogram, torch.zeros(1))
        expected = judge.head(joint_means(judge.model, batch))[0].softmax(0)
        torch.testing.assert_close(scores, expected, atol=2e-3, rtol=0)
    torch.testing.assert_close(answers.mean, answers.scores.mean(0))
    judge.several = True  # as of clips that may have several classes: no longer shares of one
    assert judge(file).scores.sum(1).ne(1).all()


def test_the_command_writes_every_score_and_names_what_it_skips(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    write_video(folder / "new [red].mp4", seed=99)
    write_video(folder / "mute.mp4", sound=False)
    given = ["classify", str(run), str(folder), "--device", "cpu", "--out"]
    shown = CliRunner().invoke(app, [*given, str(tmp_path / "a.csv")])
    assert shown.exit_code == 1 and "new [red].mp4" in shown.output and "1 file; 1 skipped" in shown.output
    assert "no window with picture and sound" in " ".join(shown.output.split())
    rows = list(csv.DictReader((tmp_path / "a.csv").open(encoding="utf-8")))
    answers = Classifier(run, "cpu")(folder / "new [red].mp4")
    assert [row["file"] for row in rows] == [str(folder / "new [red].mp4")] * 2
    for row, scores in zip(rows, answers.scores.tolist(), strict=True):
        assert [float(row[name]) for name in "ab"] == pytest.approx(scores, abs=1e-4)
        assert row["predicted"] == "ab"[scores[1] > scores[0]]
    (folder / "new [red].mp4").unlink()
    none = CliRunner().invoke(app, [*given, str(tmp_path / "b.csv")])
    assert none.exit_code and not (tmp_path / "b.csv").exists()


def test_a_classifier_on_a_learner_outlives_its_next_round(run: Path, tmp_path: Path) -> None:
    """And the tables that its run wrote, which a command may write over."""
    home = tmp_path / "HOME"
    first, second = packed(tmp_path / "packed", [20, 20])
    assert in_rounds(home, first, config_for(first), watch=False).exit_code == 0
    data = {"source": "folder", "path": str(run.parent / "videos"), "eval_share": 0.4}
    values = [f"weights.source={home}", "stream.epochs=1", "stream.batch_size=4", "train.device=cpu"]
    own, file = tmp_path / "run", write_video(tmp_path / "new.mp4", seed=99)
    assert transfer(transfer_config("classify", data, values), own, console=Console(file=io.StringIO())).finished
    before = Classifier(own, "cpu")(file).scores
    assert in_rounds(home, second, config_for(first), watch=False).exit_code == 0
    for table in own.glob("*.csv"):
        table.unlink()
    assert torch.equal(Classifier(own, "cpu")(file).scores, before)
    assert not (run / "model.safetensors").exists()  # of other weights no copy is kept


def test_classes_and_clips_that_cannot_be_used_are_told(run: Path, tmp_path: Path) -> None:
    copytree(run.parent / "videos", tmp_path / "videos")
    (tmp_path / "videos" / "c").mkdir()
    (tmp_path / "videos" / "c" / "broken.mp4").write_bytes(b"no video")
    values = [f"weights.source={run.parent / 'w.safetensors'}", "stream.epochs=1", "stream.batch_size=4"]
    config = transfer_config(
        "classify", {"source": "folder", "path": str(tmp_path / "videos"), "eval_share": 0.4}, values
    )
    assert transfer(config, tmp_path / "run", console=Console(file=(said := io.StringIO()), width=400)).finished
    assert "without a training clip that can be used: 1 of 3 classes (c)" in said.getvalue()
    assert "skipped clips: 1 " in said.getvalue() and "skipped.jsonl names them" in said.getvalue()


def test_other_folders_are_refused(run: Path, tmp_path: Path) -> None:
    for name, content in (("config.json", read_json(run / "config.json")), ("metrics.jsonl", None)):
        if content is not None:
            write_json(tmp_path / name, content)
    with pytest.raises(StellaError, match="is not a finished run of stella transfer classify"):
        Classifier(tmp_path)
    write_json(tmp_path / "config.json", read_json(run / "config.json") | {"task": "segment"})
    with pytest.raises(StellaError, match="is not a finished run of stella transfer classify"):
        Classifier(tmp_path)
    earlier = copytree(run, tmp_path / "earlier")
    lines = read_lines(run / "metrics.jsonl")
    (earlier / "metrics.jsonl").write_text("".join(json.dumps(line | {"classes": None}) + "\n" for line in lines))
    with pytest.raises(StellaError, match="did not keep the names of its classes"):
        Classifier(earlier)
    [(_, bad)] = classify_each(Classifier(run, "cpu"), [tmp_path / "missing.mp4"])
    assert isinstance(bad, ClipError)
