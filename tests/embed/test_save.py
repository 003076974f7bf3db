"""A model as a folder, on the hub and as ONNX."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.media_files import CLIPS

import stella
from stella import errors
from stella.embed import Model
from stella.errors import StellaError

CLIP = sorted(CLIPS.glob("*.mpg"))[0]


@pytest.fixture(scope="module")
def model() -> Model:
    return stella.load("base-tiny", "cpu")


def test_a_saved_folder_follows_the_hubs_convention(model: Model, tmp_path: Path) -> None:
    model.save(tmp_path / "a" / "b")
    assert {path.name for path in (tmp_path / "a" / "b").iterdir()} == {"config.json", "model.safetensors", "README.md"}
    config = json.loads((tmp_path / "a" / "b" / "config.json").read_text())
    assert config["fingerprint"] == model.fingerprint and config["inputs"]["duration"] == 2.56
    card = (tmp_path / "a" / "b" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: stella-av\n") and model.fingerprint in card and "2.56 seconds" in card
    again = stella.load(tmp_path / "a" / "b", "cpu")
    assert torch.equal(again.embed_audio(CLIP).vectors, model.embed_audio(CLIP).vectors)
    assert again.extra == model.extra and again.avm is not None
    model.save(tmp_path / "a" / "b")  # over itself


@pytest.mark.parametrize(
    ("file", "what"),
    [
        ("metrics.jsonl", "the folder of a run"),
        ("home.json", "the folder of a learner"),
        ("takeover.json", "the folder of a learner"),
        ("catalogue.sqlite", "an index"),
    ],
)
def test_what_a_folder_holds_is_not_overwritten(file: str, what: str, model: Model, tmp_path: Path) -> None:
    (tmp_path / file).touch()
    for write in (model.save, model.export_onnx):
        with pytest.raises(StellaError, match=f"{tmp_path} is {what}, whose files are its own; save to another folder"):
            write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [file]
    with pytest.raises(StellaError, match="is a file"):
        model.save(tmp_path / file)


def test_a_folder_of_onnx_encoders_is_not_taken_for_a_run(model: Model, tmp_path: Path) -> None:
    model.save(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "video.onnx")
    with pytest.raises(StellaError, match=r"holds ONNX encoders and no weights; name the folder that save\(\) wrote"):
        stella.load(tmp_path)


def test_the_hubs_methods_work_without_the_hub(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    model.save(tmp_path)
    assert Model.from_pretrained(tmp_path, device="cpu").fingerprint == model.fingerprint
    sent: dict[str, Any] = {}

    def upload(self: Any, *, repo_id: str, folder_path: Any, **_: Any) -> str:
        sent.update(repo=repo_id, files={path.name for path in Path(folder_path).iterdir()})
        return "sent"

    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload)
    created = lambda self, repo_id, **_: huggingface_hub.RepoUrl(f"https://huggingface.co/{repo_id}")  # noqa: E731
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", created)
    model.push_to_hub("me/stella")
    assert sent["repo"] == "me/stella" and sent["files"] == {"config.json", "model.safetensors", "README.md"}


def test_a_missing_extra_is_told(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = errors.importlib.import_module

    def absent(name: str) -> Any:
        if name in ("huggingface_hub", "onnx"):
            raise ImportError(name)
        return plain(name)

    monkeypatch.setattr(errors.importlib, "import_module", absent)
    with pytest.raises(StellaError, match=r"pip install '\.\[hub\]'"):
        model.push_to_hub("me/stella")
    with pytest.raises(StellaError, match=r"pip install '\.\[onnx\]'"):
        model.export_onnx(tmp_path)


@pytest.mark.slow
def test_both_encoders_give_the_same_vectors_in_onnx(model: Model, tmp_path: Path) -> None:
    import onnxruntime

    from stella.media.windows import windows

    model.export_onnx(tmp_path)
    found = list(windows(CLIP, model.inputs))
    for kind, embedded in zip(("video", "audio"), model.embed_both(CLIP), strict=True):
        assert embedded is not None
        inputs = torch.cat([model.tensor(window) for window in found if window.kind == kind])
        session = onnxruntime.InferenceSession(tmp_path / f"{kind}.onnx")
        for batch in (inputs, inputs[:1], inputs.repeat(3, *[1] * (inputs.dim() - 1))):
            [vectors] = session.run(None, {kind: batch.numpy()})
            expected = embedded.vectors.numpy()[np.arange(len(batch)) % len(inputs)]
            assert np.abs(vectors - expected).max() <= 1e-4
