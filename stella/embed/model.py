"""A model to use: unit vectors of videos and sounds, with the seconds that they stand for.

`embed_video` and `embed_audio` take one thing or a list of things: paths of files, or arrays in memory with their rate,
as `(frames, fps)` and `(waveform, rate)`. One thing gives one result, a list gives a list. Whatever is wrong with a
file is a `ClipError`.

On a CPU every window goes through the model alone, so that its vector is the same bit for bit whatever stands beside
it; batches of one are as fast there. On a GPU windows go in batches, and vectors agree to about 1e-6.
"""

import hashlib
import json
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from stella.config import to_tree
from stella.embed.localise import Maps, localise
from stella.embed.progress import Shown
from stella.embed.save import export_onnx, hub_class, save
from stella.errors import BeyondEndError, ClipError, StellaError
from stella.evaluate.retrieval import unit_a, unit_v
from stella.media.arrays import frame_windows, sound_windows
from stella.media.decode import decode_shown, decode_track, read_duration
from stella.media.inputs import Inputs
from stella.media.windows import KINDS, Window, windows
from stella.model.avm import AVM
from stella.model.cav import CAV, CAVConfig

Thing = Path | str | tuple[Any, float]  # a file, or frames with their rate, or a waveform with its rate
VERSION = 1  # of how vectors are made; another one makes other fingerprints


def fingerprint(config: CAVConfig, state: Mapping[str, Tensor], inputs: Inputs) -> str:
    """sha256 of a backbone, its sizes and its inputs; `state` is its state_dict."""
    about = {"version": VERSION, "config": to_tree(config), "inputs": to_tree(inputs)}
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, tensor in sorted(state.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Embeddings:
    """Unit vectors of consecutive windows of one file or array."""

    vectors: Tensor  # float32 [n, D] on the CPU, each of length 1
    start: Tensor  # float64 [n], seconds from the beginning
    end: Tensor  # float64 [n]

    def __len__(self) -> int:
        return len(self.vectors)

    def __repr__(self) -> str:
        seconds = f"{self.start.min():.1f} to {self.end.max():.1f} s" if len(self) else "nothing"
        return f"Embeddings({len(self)} × {self.vectors.shape[1]}, {seconds})"


class Model:
    """Made by `stella.load`."""

    def __init__(
        self,
        cav: CAV,
        avm: AVM | None,
        inputs: Inputs,
        device: torch.device | str = "cpu",
        name: str = "model",
        extra: Mapping[str, Any] | None = None,
        notes: Sequence[str] = (),
        given: str = "",
    ) -> None:
        """`given` is what `load` takes for this model again; none: its name."""
        c = cav.config
        sizes = (inputs.pixels, inputs.frames, inputs.spec_frames, inputs.mels)
        if sizes != (c.image_size, c.frames, c.spec_frames, c.mel_bins):
            raise StellaError(f"the inputs of {name} have other sizes than its model {sizes}; export the weights again")
        self.device, self.name, self.inputs = torch.device(device), name, inputs
        self.given = given or name
        self.cav = cav.eval().requires_grad_(False).to(self.device)
        self.avm = None if avm is None else avm.eval().requires_grad_(False).to(self.device)
        self.extra, self.notes = dict(extra or {}), list(notes)
        self._fingerprint = ""

    def __repr__(self) -> str:
        i = self.inputs
        return f"<stella.Model {self.name}: {self.dim} numbers for {i.duration:g} s of {i.pixels}×{i.pixels} pixels>"

    @property
    def dim(self) -> int:
        return self.cav.config.dim

    @property
    def fingerprint(self) -> str:
        """sha256 of the backbone, its sizes and its inputs: vectors of models with the same one can be compared.

        The matching module is left out, because no vector depends on it.
        """
        if not self._fingerprint:
            self._fingerprint = fingerprint(self.cav.config, self.cav.state_dict(), self.inputs)
        return self._fingerprint

    # ---- embeddings

    @overload
    def embed_video(
        self, what: Thing, *, overlap: float = 0.0, batch: int = 32, progress: bool = False
    ) -> Embeddings: ...

    @overload
    def embed_video(
        self, what: list[Any], *, overlap: float = 0.0, batch: int = 32, progress: bool = False
    ) -> list[Embeddings]: ...

    def embed_video(self, what: Any, *, overlap: float = 0.0, batch: int = 32, progress: bool = False) -> Any:
        """`Embeddings` of a video file or of `(frames, fps)`; a list of them for a list.

        Windows are as long as the model's clips. `overlap` is the share of a window that the next one repeats; the
        default embeds every second once. The last window ends with the video, and a video shorter than a window is
        padded as in training. `batch` windows go through a GPU at a time.
        """
        return self._embed("video", what, overlap, batch, progress)

    @overload
    def embed_audio(
        self, what: Thing, *, overlap: float = 0.0, batch: int = 32, progress: bool = False
    ) -> Embeddings: ...

    @overload
    def embed_audio(
        self, what: list[Any], *, overlap: float = 0.0, batch: int = 32, progress: bool = False
    ) -> list[Embeddings]: ...

    def embed_audio(self, what: Any, *, overlap: float = 0.0, batch: int = 32, progress: bool = False) -> Any:
        """`Embeddings` of a sound file, of a video file's sound or of `(waveform, rate)`, as `embed_video`."""
        return self._embed("audio", what, overlap, batch, progress)

    def embed_both(
        self, path: Path | str, *, overlap: float = 0.0, batch: int = 32, progress: bool = False
    ) -> tuple[Embeddings | None, Embeddings | None]:
        """The embeddings of a file's picture and of its sound, decoded once; None for a track that it does not have."""
        queue, parts = _Queue(self, batch), {kind: _Part() for kind in KINDS}
        with Shown([path], progress) as shown:
            for window in windows(path, self.inputs, overlap=overlap):
                shown.at(0, window.end)
                queue.add(parts[window.kind], window)
            queue.flush()
        if not any(part.rows for part in parts.values()):
            raise _nothing("video or sound", path)
        video, audio = (part.embeddings() if part.rows else None for part in parts.values())
        return video, audio

    def embed_moment(self, path: Path | str, moment: float, kind: str) -> Embeddings:
        """The one window around a second of a file's picture (kind video) or sound (audio); only that is decoded."""
        duration, length = self.inputs.duration, read_duration(path) or math.inf
        if moment > length:
            raise BeyondEndError(f"{path}@{moment:g} is beyond the end of the file, at {length:.2f} s")
        start = max(0.0, min(moment - duration / 2, length - duration))
        data = decode_track(path, self.inputs.plan(start), kind)
        queue, part = _Queue(self, 1), _Part()
        queue.add(part, Window(kind, start, min(start + duration, length), data))
        return part.embeddings()

    def _embed(self, kind: str, what: Any, overlap: float, batch: int, progress: bool) -> Any:
        items = _listed(what)
        queue, parts = _Queue(self, batch), [_Part() for _ in items]
        with Shown(items, progress) as shown:
            for number, item in enumerate(items):
                for window in self._windows(kind, item, overlap):
                    shown.at(number, window.end)
                    queue.add(parts[number], window)
            queue.flush()
        for part, item in zip(parts, items, strict=True):
            if not part.rows:
                raise _nothing(kind, item)
        found = [part.embeddings() for part in parts]
        return found if isinstance(what, list) else found[0]

    def _windows(self, kind: str, item: Thing, overlap: float) -> Iterator[Window]:
        if isinstance(item, str | Path):
            return windows(item, self.inputs, [kind], overlap=overlap)
        data, rate = _with_rate(kind, item)
        return (frame_windows if kind == "video" else sound_windows)(data, rate, self.inputs, overlap)

    def tensor(self, window: Window) -> Tensor:
        """What the model takes of a window: pixels uint8 [1, T, 3, H, W] or a spectrogram [1, time, mel]."""
        if window.kind == "video":
            return self.inputs.crop(window.data[None])
        return self.inputs.spectrogram(window.data[None], torch.tensor([len(window.data)]))

    # ---- heat maps

    def localise(self, path: Path | str, *, overlap: float = 0.0, progress: bool = False) -> Maps:
        """Where in each frame a video's sound comes from, and which of its seconds matter."""
        with Shown([path], progress) as shown:
            found = windows(path, self.inputs, overlap=overlap, aligned=True)
            return self.localise_windows(path, shown.watched(found))

    def localise_moment(self, path: Path | str, start: float) -> Maps:
        """The heat maps of the one window that begins at a second; only that is decoded."""
        clip, shown = decode_shown(path, self.inputs.plan(start))
        pictures = Window("video", start, shown.end, clip.video, shown.times)
        return self.localise_windows(path, [pictures, Window("audio", start, shown.end, clip.audio)])

    def localise_windows(self, path: Path | str, found: Iterable[Window]) -> Maps:
        """The heat maps of windows of picture and sound that begin at the same times."""
        if self.avm is None:
            raise StellaError(
                f"{self.given} has no matching module, from whose attention heat maps are read; train one on its "
                f"backbone: stella localise VIDEO --model {shlex.quote(self.given)} --train-on FOLDER, or use "
                "stella.embed.matching.train_matching"
            )
        return localise(self.cav, self.avm, self.inputs, Path(path), found)

    # ---- keeping and sharing

    def save(self, folder: Path | str) -> None:
        """Write `config.json`, `model.safetensors` and a model card, from which `stella.load(folder)` is this model."""
        save(self, Path(folder))

    def export_onnx(self, folder: Path | str) -> None:
        """Write both encoders as `video.onnx` and `audio.onnx`, with `config.json`; needs the extra `onnx`."""
        export_onnx(self, Path(folder))

    def push_to_hub(self, repo_id: str, **options: Any) -> Any:
        """Upload what `save` writes to the Hugging Face Hub; needs the extra `hub`."""
        return hub_class()(self).push_to_hub(repo_id, **options)

    @classmethod
    def from_pretrained(cls, name: Path | str, **options: Any) -> "Model":
        """The model of a folder, or of a repository of the Hugging Face Hub; needs the extra `hub`."""
        model: Model = hub_class().from_pretrained(str(name), **options).model
        return model


class _Part:
    """The vectors of one track so far."""

    def __init__(self) -> None:
        self.rows: list[tuple[Tensor, float, float]] = []

    def embeddings(self) -> Embeddings:
        vectors, start, end = zip(*self.rows, strict=True)
        seconds = (torch.tensor(times, dtype=torch.float64) for times in (start, end))
        return Embeddings(torch.stack(vectors), *seconds)


class _Queue:
    """Windows on their way through the model, `batch` at a time; on a CPU one at a time."""

    def __init__(self, model: Model, batch: int) -> None:
        if batch < 1:
            raise StellaError(f"batch={batch} must be at least 1")
        self.model, self.size = model, batch if model.device.type == "cuda" else 1
        self.waiting: dict[str, list[tuple[_Part, Window, Tensor]]] = {kind: [] for kind in KINDS}

    def add(self, part: _Part, window: Window) -> None:
        self.waiting[window.kind].append((part, window, self.model.tensor(window)))
        if len(self.waiting[window.kind]) == self.size:
            self.flush()

    @torch.inference_mode()
    def flush(self) -> None:
        for kind, rows in self.waiting.items():
            if rows:
                inputs = torch.cat([tensor for *_, tensor in rows]).to(self.model.device)
                vectors = (unit_v if kind == "video" else unit_a)(self.model.cav, inputs).cpu().clone()
                for (part, window, _), vector in zip(rows, vectors, strict=True):
                    part.rows.append((vector, window.start, window.end))
            rows.clear()


def _listed(what: Any) -> Sequence[Any]:
    return what if isinstance(what, list) else [what]


def _with_rate(kind: str, item: Any) -> tuple[Any, float]:
    """The array and its rate."""
    name, unit, example = ("frames", "fps", "25") if kind == "video" else ("waveform", "rate", "48000")
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], int | float):
        return item[0], float(item[1])
    raise StellaError(
        f"{type(item).__name__} is neither the path of a file nor a pair ({name}, {unit}); "
        f"give a path, or an array with its rate as ({name}, {example})"
    )


def _nothing(kind: str, item: Any) -> ClipError:
    return ClipError(
        item if isinstance(item, str | Path) else "the array", f"no {kind} in it", "it has nothing to embed"
    )
