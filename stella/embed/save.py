"""A model as a folder, in Hugging Face's convention, and its two encoders as ONNX."""

import logging
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stella.config import to_tree
from stella.errors import StellaError, require
from stella.evaluate.retrieval import unit_a, unit_v
from stella.files import whole, write_json, write_text
from stella.model import weights
from stella.model.cav import CAV

if TYPE_CHECKING:
    from stella.embed.model import Model

OPSET = 20
OTHERS = {  # a file of a folder that is something else
    "metrics.jsonl": "the folder of a run",
    "home.json": "the folder of a learner",
    "takeover.json": "the folder of a learner",  # that is being made
    "catalogue.sqlite": "an index",
}

CARD = """---
library_name: stella-av
pipeline_tag: feature-extraction
tags: [audio-visual, video, audio, retrieval, continual-learning]
---
# {name}

An audio-video model in the format of STELLA: {parameters:,} parameters, embeddings of {dim} numbers. One embedding
stands for {duration:g} seconds of sound, or of video ({frames} frames of {pixels}×{pixels} pixels). Sound and video of
one moment have similar embeddings: compare them by their inner product.
{localises}

```python
import stella

model = stella.load("PATH OF THIS FOLDER")
video = model.embed_video("dog.mp4")          # video.vectors [windows, {dim}], video.start, video.end
sounds = model.embed_audio(["bark.wav"])
```

How inputs are made is stored in `config.json` and in the header of `model.safetensors`; nothing has to be set.

| | |
|---|---|
| fingerprint | `{fingerprint}` |
| trained as | {trained} |
| scores | {scores} |
"""


def save(model: "Model", folder: Path) -> None:
    _prepare(folder)
    weights.save(folder / weights.FILE, model.cav, model.avm, model.extra, model.inputs)
    write_json(folder / "config.json", about(model))
    write_text(folder / "README.md", card(model))


def about(model: "Model") -> dict[str, Any]:
    """What `config.json` says."""
    return {
        "model_type": "stella",
        "architectures": ["CAV"],
        "fingerprint": model.fingerprint,
        "matching_module": model.avm is not None,
        "config": to_tree(model.cav.config),
        "inputs": to_tree(model.inputs),
    }


def card(model: "Model") -> str:
    """The text of README.md."""
    config, scores = model.extra.get("config") or {}, model.extra.get("scores") or {}
    known = {key: round(value, 1) for key, value in scores.items() if isinstance(value, int | float)}
    return CARD.format(
        name=model.name,
        parameters=sum(p.numel() for p in model.cav.parameters()),
        dim=model.dim,
        duration=model.inputs.duration,
        frames=model.inputs.frames,
        pixels=model.inputs.pixels,
        localises="Its matching module tells where in the picture a sound comes from." if model.avm else "",
        fingerprint=model.fingerprint,
        trained=f"method {config['method']} on {config['data']['source']}" if config else "not recorded",
        scores=", ".join(f"{key} {value}" for key, value in known.items()) or "not recorded",
    )


def _prepare(folder: Path) -> None:
    for file, what in OTHERS.items():
        if (folder / file).exists():
            raise StellaError(f"{folder} is {what}, whose files are its own; save to another folder")
    if folder.exists() and not folder.is_dir():
        raise StellaError(f"{folder} is a file; give the folder to save to")
    folder.mkdir(parents=True, exist_ok=True)


# ---- ONNX


class _Encoder(nn.Module):
    """One modality's path from the model's input to unit vectors."""

    def __init__(self, cav: CAV, kind: str) -> None:
        super().__init__()
        self.cav, self.unit = cav, unit_v if kind == "video" else unit_a

    def forward(self, x: Tensor) -> Tensor:
        return self.unit(self.cav, x)


def export_onnx(model: "Model", folder: Path) -> None:
    """`video.onnx`: uint8 [B, T, 3, H, W] → [B, D]; `audio.onnx`: normalised spectrograms [B, time, mel] → [B, D]."""
    for package in ("onnx", "onnxscript"):
        require(package, "onnx")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it names packages that are not needed
    _prepare(folder)
    i = model.inputs
    examples = {
        "video": torch.zeros(2, i.frames, 3, i.pixels, i.pixels, dtype=torch.uint8),
        "audio": torch.zeros(2, i.spec_frames, i.mels),
    }
    cav = CAV(model.cav.config).eval()
    cav.load_state_dict(model.cav.state_dict())
    for kind, example in examples.items():
        with whole(folder / f"{kind}.onnx") as fresh, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about torch's own code
            torch.onnx.export(
                _Encoder(cav, kind).eval(),
                (example,),
                fresh,
                input_names=[kind],
                output_names=["vectors"],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                opset_version=OPSET,
                external_data=False,
                dynamo=True,
                verbose=False,
            )
    write_json(folder / "config.json", about(model))


# ---- Hugging Face Hub


def hub_class() -> Any:
    """A class with the hub's methods around a `Model`."""
    hub = require("huggingface_hub", "hub")

    class HubModel(hub.ModelHubMixin, library_name="stella-av"):  # type: ignore[call-arg, misc, name-defined]
        def __init__(self, model: "Model") -> None:
            self.model = model

        def _save_pretrained(self, save_directory: Path) -> None:
            self.model.save(save_directory)

        @classmethod
        def _from_pretrained(cls, *, model_id: str, device: str | None = None, **options: Any) -> "HubModel":
            from stella.embed.load import load

            known = {
                k: options[k]
                for k in ("revision", "cache_dir", "force_download", "local_files_only", "token")
                if k in options
            }
            folder = model_id if Path(model_id).is_dir() else hub.snapshot_download(model_id, **known)
            return cls(load(folder, device))

    return HubModel
