"""Import and export of weights: MAE ViT-B, CAV-MAE, the STELLA release and our own safetensors with their config.

`load(path)` builds a model, `load_into(path, model, avm)` fills one, `save` writes one, `describe` reports what a file
is. Pickles are read with `weights_only=True`. A file that does not fit is refused as a whole, with missing, unexpected
and mis-shaped tensors listed. What a format does not have keeps its initial values, and the notes say so.
"""

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from stella.config import build, differences, to_tree
from stella.errors import ConfigError, some_of
from stella.files import read_json, write_bytes
from stella.media.inputs import Inputs, derived
from stella.model.avm import AVM
from stella.model.cav import CAV, PRESETS, CAVConfig, preset
from stella.model.layouts import FORMATS, Converted, State, count_blocks, under
from stella.model.tensors import WeightsError, read_metadata, read_safetensors, read_torch

SHIPPED = Path(__file__).parent / "shipped"
FILE = "model.safetensors"  # in the folder of a run or of a saved model
OURS = "stella"  # the metadata key, and the format's name


def shipped() -> list[str]:
    """The names of the weights that come with the package."""
    return sorted(file.stem for file in SHIPPED.glob("*.safetensors"))


def find(name: Path | str) -> Path:
    """The weight file of a shipped name (`base-tiny`), of a folder (a finished run, a saved model), or the file itself.

    Every place that asks for a model asks here.
    """
    path = Path(name)
    if str(name) in shipped():
        return SHIPPED / f"{name}.safetensors"
    if not path.is_dir():
        return path
    if (path / FILE).is_file():
        return path / FILE
    if (path / "home.json").is_file():
        raise WeightsError(f"{name} has learnt nothing yet; let it learn first: stella learn {name} SRC…")
    if (path / "video.onnx").is_file():
        raise WeightsError(f"{name} holds ONNX encoders and no weights; name the folder that save() wrote")
    if (path / "config.json").is_file():
        if "task" in read_json(path / "config.json"):
            raise WeightsError(f"{name} is a downstream run without weights of its own; name the model that it is of")
        raise WeightsError(
            f"{name} is not finished and has no weights yet; continue it with stella pretrain --resume {name}"
        )
    raise WeightsError(f"{name} is a folder without {FILE}; give a finished run, or a folder that save() wrote")


def from_anywhere(name: Path | str) -> str:
    """What `find` takes for the same weights in any folder: a shipped name as it is, of other paths the absolute one.

    As in `find`, a shipped name means the shipped weights, also where a folder is called so.
    """
    return str(name) if str(name) in shipped() or not Path(name).exists() else str(Path(name).resolve())


@dataclass(frozen=True)
class Loaded:
    model: CAV
    avm: AVM | None  # if the file has one
    extra: dict[str, Any]  # given to `save`: recipe, commit, scores
    notes: list[str]  # decisions of the import
    inputs: Inputs | None = None  # how its inputs are made, if the file says so

    def to(self, device: torch.device | str) -> tuple[CAV, AVM | None]:
        """The model and its matching module on a device."""
        return self.model.to(device), None if self.avm is None else self.avm.to(device)


@dataclass(frozen=True)
class WeightFile:
    """What a file is and holds."""

    path: Path
    format: str
    state: State  # under the file's own names
    header: dict[str, Any]  # of our own files, else empty

    @property
    def has_avm(self) -> bool:
        return any(name.startswith(("avm.", "avmatching_module.")) for name in self.state)

    @property
    def extra(self) -> dict[str, Any]:
        return dict(self.header.get("extra", {}))

    @property
    def sizes(self) -> dict[str, Any]:
        """The config of our own files, else what the shapes show (not the heads)."""
        return self.header["config"] if self.header else _sizes(self.state)


def save(
    path: Path | str,
    model: CAV,
    avm: AVM | None = None,
    extra: Mapping[str, Any] | None = None,
    inputs: Inputs | None = None,
) -> None:
    """Write backbone and matching module, with the config, `inputs` and `extra` (JSON values) in the metadata."""
    path = Path(path)
    try:
        write_bytes(path, packed(model, avm, extra, inputs))
    except OSError as error:
        raise WeightsError(f"{path} cannot be written ({error.strerror}); choose another place") from error


def packed(
    model: CAV,
    avm: AVM | None = None,
    extra: Mapping[str, Any] | None = None,
    inputs: Inputs | None = None,
    dtype: torch.dtype | None = None,
) -> bytes:
    """The bytes that `save` writes; `dtype` stores tensors in another precision than the model's."""
    return packed_state(state_of(model, avm), model.config, avm, extra, inputs, dtype)


def state_of(model: CAV, avm: AVM | None = None) -> State:
    """The tensors of a weight file by name."""
    state = {f"backbone.{k}": v for k, v in model.state_dict().items()}
    return state | ({f"avm.{k}": v for k, v in avm.state_dict().items()} if avm else {})


def packed_state(
    state: State,
    config: CAVConfig,
    avm: AVM | None = None,
    extra: Mapping[str, Any] | None = None,
    inputs: Inputs | None = None,
    dtype: torch.dtype | None = None,
) -> bytes:
    """`packed` of a `state_of` that was taken earlier."""
    header: dict[str, Any] = {"version": 1, "config": to_tree(config)}
    header |= {"avm_heads": avm.heads, "avm_beta": avm.beta} if avm else {"avm_heads": None}
    header |= {"inputs": to_tree(inputs)} if inputs else {}
    header = json.loads(json.dumps(header | {"extra": dict(extra or {})}))  # as it is read back
    tensors = {k: v.detach().to("cpu", dtype).contiguous() for k, v in state.items()}
    return safetensors.torch.save(tensors, {OURS: json.dumps(header | {"crc32": _crc32(header, tensors)})})


def _crc32(header: Mapping[str, Any], state: State) -> int:
    """A checksum of a header, without its checksum, and of all tensors with their names."""
    found = zlib.crc32(json.dumps({**header, "crc32": None}, sort_keys=True).encode())
    for name in sorted(state):
        found = zlib.crc32(state[name].reshape(-1).view(torch.uint8).numpy().data, zlib.crc32(name.encode(), found))
    return found


def load(path: Path | str, config: CAVConfig | None = None) -> Loaded:
    """Build the model of a file. Files of others have no config: theirs is `config`, or the paper's (`base`)."""
    file = _open(find(path))
    if config is None:
        config = build(CAVConfig, file.header["config"]) if file.header else PRESETS["base"]
        if file.header:
            _check_header(file, config)
    model = CAV(config)
    avm = None
    if file.has_avm:
        heads, beta = file.header.get("avm_heads") or config.heads, file.header.get("avm_beta", 0.4)
        avm = AVM(config.dim, heads, beta, config.eps)
    return Loaded(model, avm, file.extra, _fill(file, model, avm), _inputs(file.header))


def read_inputs(name: Path | str) -> Inputs | None:
    """How a weight file's inputs are made, from its header or else from its sizes; None for files of others."""
    header = _read_header(find(name))
    return (_inputs(header) or inputs_for(build(CAVConfig, header["config"]))) if header else None


def read_extra(name: Path | str) -> dict[str, Any]:
    """What was given to `save`, from the header; empty for files of others."""
    return dict(_read_header(find(name)).get("extra", {}))


def read_config(name: Path | str) -> CAVConfig:
    """The sizes of a weight file's model; of files of others, which do not say, the paper's (`base`)."""
    header = _read_header(find(name))
    return build(CAVConfig, header["config"]) if header else PRESETS["base"]


def inputs_for(config: CAVConfig) -> Inputs:
    """The inputs of a model of which only the sizes are known."""
    return derived(config.image_size, config.spec_frames, config.frames, config.mel_bins)


def preset_of(name: Path | str) -> str | None:
    """The preset that a weight file's model has, whatever the sizes of its inputs; None if it is none of them."""
    path = find(name)
    if header := _read_header(path):
        config = build(CAVConfig, header["config"])
        sizes = {"image_size": config.image_size, "spec_frames": config.spec_frames, "frames": config.frames}
        return next((each for each in PRESETS if preset(each, **sizes) == config), None)
    dim = _open(path).sizes.get("dim")
    return next((each for each, config in PRESETS.items() if config.dim == dim), None)


def load_into(path: Path | str, model: CAV, avm: AVM | None = None) -> list[str]:
    """Fill a model (and matching module) from any known file; returns the decisions of the import."""
    return _fill(_open(find(path)), model, avm)


def describe(path: Path | str) -> WeightFile:
    return _open(find(path))


# ---- reading


def check_fits(name: Path | str, config: CAVConfig) -> None:
    """Refuse a file that cannot be read, or one of ours for a model of other sizes, before a model is built."""
    path = find(name)
    _head(path)
    if changed := differences((header := _read_header(path)).get("config"), to_tree(config) if header else None):
        raise WeightsError(
            f"{path.name} does not fit this run: {'; '.join(changed)}; leave out model.preset and the sizes of model "
            "and data, which follow from the weights (clips are packed for them with stella pack … model.weights="
            f"{name}), make a larger model of them (model.grow=true), or choose others"
        )


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            head = stream.read(9)
    except OSError as error:
        names = ", ".join(shipped())
        raise WeightsError(
            f"{path} cannot be read ({error.strerror}); check the path, or take weights that ship: {names}"
        ) from None
    if not head:
        raise WeightsError(f"{path} is empty; copy or download it again")
    return head


def _open(path: Path) -> WeightFile:
    head = _head(path)
    # safetensors: eight bytes of length, which may look like a pickle's first, then JSON.
    pickled = head[8:] != b"{" and head.startswith((b"PK\3\4", b"\x80"))
    state, metadata = (read_torch(path), {}) if pickled else read_safetensors(path)
    if header := _header(path, metadata):
        if "crc32" in header and header["crc32"] != _crc32(header, state):
            raise WeightsError(f"{path} is damaged: it fails its checksum; copy or export it again")
        return WeightFile(path, OURS, state, header)
    state = {re.sub(r"^((module|_orig_mod)\.)+", "", name): value for name, value in state.items()}
    for format_, (mark, _) in FORMATS.items():
        if any(name.startswith(mark) for name in state):
            return WeightFile(path, format_, state, {})
    raise WeightsError(
        f"{path} is none of the known formats ({', '.join([OURS, *FORMATS])}): it holds {some_of(list(state), 6)}; "
        "bring one of these, or its state_dict under these names"
    )


def _header(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """The header of our own files, checked; empty for others."""
    if OURS not in metadata:
        return {}
    try:
        header: dict[str, Any] = json.loads(metadata[OURS])
        build(CAVConfig, header["config"])
        if "inputs" in header:
            build(Inputs, header["inputs"])
    except (ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        raise WeightsError(f"{path} has a damaged header ({error}); copy or export it again") from error
    return header


def _read_header(path: Path) -> dict[str, Any]:
    """As `_header`, without reading the tensors."""
    return _header(path, read_metadata(path)) if _head(path)[8:] == b"{" else {}


def _inputs(header: Mapping[str, Any]) -> Inputs | None:
    return build(Inputs, header["inputs"]) if "inputs" in header else None


def _check_header(file: WeightFile, config: CAVConfig) -> None:
    """Refuse a header whose sizes are not those of the file's tensors, before memory of these sizes is taken."""
    if config.depth + config.dec_depth > len(file.state):
        raise WeightsError(
            f"{file.path} has {len(file.state)} tensors and its header says depth={config.depth} and "
            f"dec_depth={config.dec_depth}; copy or export it again"
        )
    try:
        with torch.device("meta"):
            model = CAV(config)
    except RuntimeError as error:
        raise WeightsError(f"{file.path} has a header of absurd sizes ({error}); copy or export it again") from error
    _check(file, "its own header", under("backbone.", file.state), model)
    heads, beta = file.header.get("avm_heads"), file.header.get("avm_beta", 0.4)
    whole = heads is None or (type(heads) is int and heads > 0 and config.dim % heads == 0)
    if not whole or not isinstance(beta, int | float):
        raise WeightsError(
            f"{file.path} has a damaged header (avm_heads={heads!r}, avm_beta={beta!r}); export it again"
        )


# ---- fitting


def _fill(file: WeightFile, model: CAV, avm: AVM | None) -> list[str]:
    _same_config(file, model, avm)
    try:
        if file.format == OURS:
            found = Converted(under("backbone.", file.state), under("avm.", file.state))
        else:
            found = FORMATS[file.format][1](file.state, model.config)
    except (RuntimeError, ValueError, IndexError) as error:  # a name or a shape no such file has
        raise WeightsError(
            f"{file.path} is not a {file.format} file as it should be ({error}); export it again"
        ) from error
    theirs = file.format != OURS
    notes = [*([f"{file.path.name} is {file.format}"] if theirs else []), *found.notes]
    _check(file, "the backbone", found.backbone, model, found.initial)
    if avm is not None and found.avm:
        _check(file, "the matching module", found.avm, avm)
        avm.load_state_dict(found.avm)
    elif avm is not None:
        notes.append("it has no matching module: ours keeps its initial values")
    elif found.avm and theirs:  # of our own files a method takes what it needs
        notes.append("its matching module is not used")
    model.load_state_dict(found.backbone, strict=False)
    return notes


def _same_config(file: WeightFile, model: CAV, avm: AVM | None) -> None:
    """Shapes do not show heads or eps: our own files say them."""
    if not file.header:
        return
    changed = differences(file.header["config"], to_tree(model.config))
    if avm is not None and file.header.get("avm_heads") not in (None, avm.heads):
        changed += differences(file.header["avm_heads"], avm.heads, "avm_heads")
    if changed:
        raise WeightsError(
            f"{file.path} holds another model: {'; '.join(changed)}; build the model from the file's config"
        )


def _check(file: WeightFile, what: str, state: State, module: nn.Module, initial: tuple[str, ...] = ()) -> None:
    expected = module.state_dict()
    wrong = {
        "missing": [n for n in expected if n not in state and not (initial and n.startswith(initial))],
        "left over": [n for n in state if n not in expected],
        "of another shape": [
            f"{n} (file {list(t.shape)}, model {list(expected[n].shape)})"
            for n, t in state.items()
            if n in expected and t.shape != expected[n].shape
        ],
        "not of floating-point type": [f"{n} ({t.dtype})" for n, t in state.items() if not t.is_floating_point()],
        "not finite in float32": [
            n for n, t in state.items() if t.is_floating_point() and not t.float().isfinite().all()
        ],
    }
    if any(wrong.values()):
        found = "; ".join(f"{kind}: {some_of(list(names), 6)}" for kind, names in wrong.items() if names)
        raise WeightsError(
            f"{file.path} ({file.format}) does not fit {what}: {found}; choose the file or the sizes that match"
        )


def _sizes(state: State) -> dict[str, int]:
    shapes = {name.removeprefix("backbone.transformer."): t.shape for name, t in state.items()}
    stacks = {
        "encoder_blocks": "blocks_a",
        "fusion_blocks": "blocks_u",
        "blocks": "blocks",
        "dec_depth": "decoder_blocks",
    }
    rows = {"dim": "norm.weight", "dec_dim": "decoder_norm.weight"}
    tables = {"positions_a": "pos_embed_a", "positions_v": "pos_embed_v", "positions": "pos_embed"}
    sizes = {key: count_blocks(stack, shapes) for key, stack in stacks.items()}
    sizes |= {key: shapes[name][0] for key, name in rows.items() if name in shapes}
    sizes |= {key: shapes[name][1] for key, name in tables.items() if name in shapes}
    return {key: size for key, size in sizes.items() if size}
