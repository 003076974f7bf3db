"""Where features are kept, and of which clips; that a matching module follows its model."""

import csv
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.downstream import small_weights
from helpers.media_files import write_video
from rich.console import Console

from stella.clip import Batch
from stella.model.avm import AVM
from stella.model.cav import CAV, preset
from stella.model.weights import Loaded
from stella.transfer import features
from stella.transfer.config import features_key, transfer_config
from stella.transfer.features import tabulate
from stella.transfer.predictions import ANSWERS
from stella.transfer.run import transfer

META = torch.device("meta")  # a device that is not the CPU, on every machine


def batches() -> list[Batch]:
    nothing = torch.empty(4, 0)
    return [Batch(nothing, nothing, torch.arange(4 * i, 4 * i + 4)) for i in range(3)]


def columns(batch: Batch) -> dict[str, torch.Tensor]:
    ids = batch.ids[:, None].expand(-1, 8)
    return {"z": ids.float() / 3, "target": batch.ids, "known": ids > 5}


@pytest.mark.parametrize(("free", "place"), [(10_000, "meta"), (1_000, "cpu")])
def test_features_stay_on_the_device_if_a_quarter_of_its_free_memory_holds_them(
    free: int, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 rows of 16 + 8 + 8 bytes are 384: more than a quarter of 1,000."""
    monkeypatch.setattr(features, "free_bytes", lambda device: free)
    found = tabulate(columns, batches(), 12, META)
    assert {column.device.type for column in found.columns.values()} == {place} and len(found) == 12


def test_shared_features_are_files_whatever_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "free_bytes", lambda device: 10**9)
    found = tabulate(columns, batches(), 12, META, folder=tmp_path / "f", keep=True)
    assert found.columns["z"].device.type == "cpu" and (tmp_path / "f" / "z.bin").stat().st_size == 12 * 8 * 2


def test_shared_features_are_on_the_disk_before_another_run_can_find_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(features, "sync_file", lambda path: done.append(path.name))
    monkeypatch.setattr(features, "write_json", lambda path, tree: done.append(path.name))
    tabulate(columns, batches(), 12, META, folder=tmp_path, keep=True)
    assert sorted(done[:3]) == ["known.bin", "target.bin", "z.bin"] and done[3:] == ["table.json"]


def test_features_in_memory_are_not_taken_for_files(tmp_path: Path) -> None:
    """The folder of a run that was killed may be there already."""
    for _ in range(2):
        found = tabulate(columns, batches(), 12, torch.device("cpu"), folder=tmp_path)
        assert found.columns["target"].tolist() == list(range(12)) and not list(tmp_path.iterdir())


def test_rows_are_what_was_computed() -> None:
    found = tabulate(columns, batches(), 15, torch.device("cpu"))  # 3 clips could not be used
    some = found.rows(torch.tensor([7, 0]))
    assert (
        len(found) == 12 and some["target"].tolist() == [7, 0] and some["known"].tolist() == [[True] * 8, [False] * 8]
    )
    assert some["z"].dtype == torch.float32 and torch.equal(
        some["z"], torch.tensor([7 / 3, 0])[:, None].half().float().expand(2, 8)
    )


def test_features_are_shared_by_runs_that_compute_the_same() -> None:
    def key(seed: int, digest: str, *more: str) -> str:
        config = transfer_config("classify", None, [f"seed={seed}", f"weights.digest={digest}", *more])
        return features_key(config, "train", "clips")

    assert key(0, "abc") == key(1, "abc") != key(0, "abd")
    assert key(0, "") != key(1, "")  # random weights
    assert key(0, "abc", "stream.augment=true") != key(1, "abc", "stream.augment=true")  # crops


def test_a_matching_module_goes_where_its_model_goes() -> None:
    """`localise` left it on the CPU."""
    config = preset("tiny", image_size=32, spec_frames=64)
    model, avm = Loaded(CAV(config), AVM(config.dim, config.heads), {}, []).to(META)
    places: set[Any] = {p.device.type for part in (model, avm) if part is not None for p in part.parameters()}
    assert places == {"meta"} and avm is not None
    assert Loaded(CAV(config), None, {}, []).to("cpu")[1] is None


def test_shared_features_are_of_the_clips_that_a_run_has(tmp_path: Path) -> None:
    """Test clips are seen in windows: what wraps them must not hide which they are. No batch is left out."""
    file = small_weights(tmp_path / "w.safetensors")
    for number in range(6):
        write_video(tmp_path / "train" / "ab"[number % 2] / f"{number}.mp4", seed=number)

    def go(run: str, tests: int, *more: str) -> Path:
        for number in range(tests):
            write_video(tmp_path / "test" / "ab"[number % 2] / f"{20 - number}.mp4", seed=20 - number)
        data = {"source": "folder", "path": str(tmp_path / "train"), "eval_path": str(tmp_path / "test")}
        values = [f"weights.source={file}", "stream.epochs=1", "stream.batch_size=4", "train.device=cpu", *more]
        transfer(transfer_config("classify", data, values), tmp_path / run, console=Console(file=io.StringIO()))
        return tmp_path / run

    def answers(run: Path) -> list[dict[str, str]]:
        return list(csv.DictReader((run / ANSWERS).open(encoding="utf-8")))

    shared = (f"features={tmp_path / 'features'}", "views=1", "stream.augment=true")
    go("first", 2, *shared, "stream.drop_last=true")
    second, own = go("second", 4, *shared), go("own", 4, *shared[1:])
    assert [row["clip"] for row in answers(second)] == [row["clip"] for row in answers(own)]
    assert len(answers(own)) == 4 and answers(second) == answers(own)
