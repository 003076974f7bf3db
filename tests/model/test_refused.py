"""Weight files that are damaged, hostile or of other sizes."""

import argparse
import dataclasses
import json
import math
import os
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import TOY, cav_mae, mae, release, written
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from stella.errors import StellaError
from stella.model.avm import AVM
from stella.model.cav import CAV
from stella.model.weights import WeightsError, describe, load, load_into, save


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# ---- checkpoints as others write them, filled with noise


def test_a_misfit_names_missing_left_over_and_shapes_and_changes_nothing(tmp_path: Path) -> None:
    s = release()
    del s["backbone.transformer.norm.bias"]
    s["backbone.transformer.surprise"] = torch.zeros(3)
    s["backbone.transformer.modality_a"] = torch.zeros(1, 1, 7)
    model = CAV(TOY)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(WeightsError) as caught:
        load_into(written(tmp_path, s), model)
    message = str(caught.value)
    assert "missing: norm.bias" in message
    assert "left over: surprise" in message
    assert "of another shape: modality_a (file [7], model [24])" in message
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_misfit_in_the_matching_module_leaves_the_backbone_alone(tmp_path: Path) -> None:
    s = release()
    del s["avmatching_module.norm_a.bias"]
    model, avm = CAV(TOY), AVM(24, 3)
    before = model.norm.weight.clone()
    with pytest.raises(WeightsError, match=r"does not fit the matching module: missing: norm_a\.bias"):
        load_into(written(tmp_path, s), model, avm)
    assert torch.equal(model.norm.weight, before)


@pytest.mark.parametrize("make", [cav_mae, release, lambda: mae(True)])
def test_every_tensor_counts(tmp_path: Path, make: Any) -> None:
    """Without any one of a format's tensors that we use, the file is refused."""
    s = make()
    unused = ("cls_token", "blocks_a.0.norm1_a", "blocks_v.0.norm1_a")
    for name in list(s)[:: max(1, len(s) // 25)]:
        if name.startswith(unused) or "avmatching" in name or ("norm1_" in name or "norm2_" in name):
            continue
        with pytest.raises(WeightsError, match="missing: "):
            load_into(written(tmp_path, {k: v for k, v in s.items() if k != name}), CAV(TOY))


class Evil:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("protocol", ["zip", "plain"])
def test_a_pickle_with_code_is_not_run(tmp_path: Path, protocol: str) -> None:
    path, target = tmp_path / "evil.pth", tmp_path / "ran"
    if protocol == "zip":
        torch.save({"model": Evil(target)}, path)
    else:
        path.write_bytes(pickle.dumps({"model": Evil(target)}, protocol=2))
    with pytest.raises(WeightsError, match=r"object \w+\.mkdir .*save its state_dict alone"):
        describe(path)
    assert not target.exists()


def test_a_checkpoint_with_other_objects_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"the Python object argparse\.Namespace.*save its state_dict alone"):
        load_into(written(tmp_path, mae(False), args=argparse.Namespace(lr=1)), CAV(TOY))


BAD = {
    "empty": (b"", "is empty"),
    "text": (b"version https://example.org/spec\noid 123\n", "neither a torch checkpoint nor a whole safetensors"),
    "zip": (b"PK\3\4 and then nothing", "is damaged"),
    "pickle": (b"\x80\x02not a pickle", "is damaged or a pickle of something besides tensors"),
    "a list": (pickle.dumps([1, 2]), "a pickle of something besides tensors"),
    "huge header": (b"\xff" * 64, "neither"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files(tmp_path: Path, name: str) -> None:
    path = tmp_path / "bad.pth"
    path.write_bytes(BAD[name][0])
    for read in (describe, load, lambda p: load_into(p, CAV(TOY))):
        with pytest.raises(WeightsError, match=BAD[name][1]) as caught:
            read(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    for path, told in ((tmp_path / "none.pth", "cannot be read"), (tmp_path, "is a folder without model.safetensors")):
        with pytest.raises(WeightsError, match=told):
            describe(path)
    with pytest.raises(WeightsError, match="cannot be written"):
        save(tmp_path / "no" / "folder.safetensors", CAV(TOY))


@pytest.mark.parametrize("kind", ["safetensors", "pth"])
def test_a_file_cut_anywhere(tmp_path: Path, kind: str) -> None:
    whole = tmp_path / "whole.safetensors"
    if kind == "safetensors":
        save(whole, CAV(TOY))
    else:
        whole = written(tmp_path, release())
    content, cut = whole.read_bytes(), tmp_path / f"cut.{kind}"
    for length in [1, 7, 8, 9, 100, *range(1000, len(content), len(content) // 20), len(content) - 1]:
        cut.write_bytes(content[:length])
        with pytest.raises(WeightsError):
            load_into(cut, CAV(TOY))


def test_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"none of the known formats .* holds layer\.weight"):
        describe(written(tmp_path, {"layer.weight": torch.zeros(2)}))
    torch.save([torch.zeros(2)], tmp_path / "list.pth")
    with pytest.raises(WeightsError, match="no named tensors"):
        describe(tmp_path / "list.pth")


@pytest.mark.parametrize("header", ["{", "[]", '{"config": {"dimension": 3}}', '{"config": {"dim": 10}}'])
def test_damaged_headers(tmp_path: Path, header: str) -> None:
    path = tmp_path / "ours.safetensors"
    save_file({"backbone.norm.weight": torch.zeros(2)}, path, {"stella": header})
    with pytest.raises(StellaError, match="damaged header"):
        describe(path)


def test_names_and_shapes_no_such_file_has(tmp_path: Path) -> None:
    for make, name, shape in (
        (mae, "pos_embed", ()),
        (mae, "blocks.x.norm1.weight", (2,)),
        (cav_mae, "pos_embed_v", (1, 2, 3, 4)),
    ):
        s = (make(True) if make is mae else make()) | {name: torch.zeros(shape)}
        with pytest.raises(WeightsError):
            load_into(written(tmp_path, s), CAV(TOY))


def test_a_parameter_of_another_precision_is_cast(tmp_path: Path) -> None:
    path = tmp_path / "ours.safetensors"
    save(path, CAV(TOY).bfloat16())
    model = CAV(TOY)
    load_into(path, model)
    assert model.norm.weight.dtype == torch.float64
    assert load_file(path)["backbone.norm.weight"].dtype == torch.bfloat16


def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path, bomb = written(tmp_path, release()), tmp_path / "bomb.pth"
    with zipfile.ZipFile(path) as whole, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as out:
        for member in whole.infolist():
            out.writestr(member.filename, whole.read(member))
        out.writestr("archive/data/999", bytes(1 << 24))
    for read in (describe, load, lambda p: load_into(p, CAV(TOY))):
        with pytest.raises(WeightsError, match=r"would unpack to .* torch does not compress"):
            read(bomb)


@pytest.mark.parametrize(
    ("absurd", "says"),
    [
        ({"dim": 3 << 20}, "does not fit its own header"),
        ({"image_size": 16 << 30}, "a header of absurd sizes"),
        ({"spec_frames": 16 << 30}, "does not fit its own header"),
        ({"depth": 1 << 40}, "its header says depth="),
        ({"dec_depth": 10**9}, "its header says depth="),
        ({"avm_heads": 5}, "damaged header"),
        ({"avm_heads": "x"}, "damaged header"),
    ],
)
def test_absurd_sizes_are_refused_before_they_are_built(tmp_path: Path, absurd: dict[str, Any], says: str) -> None:
    path = tmp_path / "ours.safetensors"
    save(path, CAV(TOY), AVM(24, 3))
    header = {"version": 1, "config": dataclasses.asdict(TOY), "avm_heads": 3}
    for key, value in absurd.items():
        (header if key == "avm_heads" else header["config"])[key] = value
    save_file(load_file(path), path, {"stella": json.dumps(header)})
    with pytest.raises(StellaError, match=says):
        load(path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: torch.full_like(t, math.nan), "not finite"),
        (lambda t: torch.full_like(t, 1e300), "not finite in float32"),
        (lambda t: t.to(torch.int8), r"not of floating-point type: norm\.weight \(torch\.int8\)"),
        (lambda t: t > 0, "not of floating-point type"),
        (lambda t: t.to(torch.complex64), "not of floating-point type"),
    ],
)
def test_weights_that_are_no_finite_numbers_are_refused(tmp_path: Path, change: Any, says: str) -> None:
    path, model = tmp_path / "ours.safetensors", CAV(TOY)
    save(path, model)
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["stella"])
        metadata = {"stella": json.dumps({key: header[key] for key in header if key != "crc32"})}  # not mere damage
    state = load_file(path)
    save_file(state | {"backbone.norm.weight": change(state["backbone.norm.weight"])}, path, metadata)
    before = model.norm.weight.clone()
    with pytest.raises(WeightsError, match=says):
        load_into(path, model)
    assert torch.equal(model.norm.weight, before)


def test_one_flipped_bit_in_a_file_of_ours_is_noticed(tmp_path: Path) -> None:
    """In any tensor, and in what the header says of the model."""
    path = tmp_path / "m.safetensors"
    save(path, CAV(TOY), AVM(24, 3), extra={"scores": {"A": 1.5, "F": None}, "name": "é", "odd": {10: 1, 9: (2,)}})
    content = path.read_bytes()
    assert load(path).extra["scores"]["A"] == 1.5
    last = len(content) - 1
    for at in (last, last - 5001, content.index(b'\\"A\\": 1.5') + 9):  # the digit 5 becomes a 4
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(WeightsError, match="checksum"):
            load(path)


def test_one_flipped_bit_in_a_torch_checkpoint_is_noticed(tmp_path: Path) -> None:
    """It is a zip archive, in which every tensor has a checksum that torch itself does not look at."""
    path = tmp_path / "m.pth"
    torch.save({f"backbone.transformer.{k}": v for k, v in CAV(TOY).state_dict().items()}, path)
    content = path.read_bytes()
    at = content.rindex(b"data/0") // 2  # in the middle of the tensors
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    torch.load(path, weights_only=True)
    with pytest.raises(WeightsError, match="checksum"):
        load(path, TOY)


def test_a_torch_checkpoint_without_checksums_is_read(tmp_path: Path) -> None:
    model, path = CAV(TOY), tmp_path / "m.pth"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({f"backbone.transformer.{k}": v for k, v in model.state_dict().items()}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is not None
    found = load(path, TOY).model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
