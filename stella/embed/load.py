"""From a name to a model: `stella.load("base-small")`."""

from collections.abc import Iterable
from pathlib import Path

import torch

from stella.data.config import is_embedded
from stella.data.scenes.export import is_scene
from stella.embed.model import Model
from stella.errors import StellaError
from stella.model import weights
from stella.runs.plan import FEW_STEPS


def resolve(what: Path | str) -> Path:
    """The weight file of a shipped name, a weight file, a finished run, or a folder that `Model.save` wrote."""
    return weights.find(what)


def load(what: Path | str, device: str | torch.device | None = None) -> Model:
    """A model to use. `device` is cpu, cuda or cuda:N; none: a GPU if there is one."""
    if not isinstance(what, str | Path):
        raise StellaError(
            f"load takes a shipped name ({', '.join(weights.shipped())}) or the path of a finished run, a learner, "
            f"a saved folder or a weight file; {what!r} is neither"
        )
    place, path = device_for(device), resolve(what)
    about = weights.describe(path)
    if about.format == "mae":
        raise StellaError(f"{path} is an image model that knows no sound; pre-train from it with model.weights={path}")
    loaded = weights.load(path)
    notes = loaded.notes
    if loaded.inputs is None:
        notes = [*notes, "it does not say how its inputs are made: they are derived from its sizes"]
    name = str(what) if path.parent == weights.SHIPPED else path.parent.name if path.name == weights.FILE else path.stem
    inputs = loaded.inputs or weights.inputs_for(loaded.model.config)
    return Model(loaded.model, loaded.avm, inputs, place, name, loaded.extra, notes, str(what))


def caveat(name: str, clips: Iterable[Path | str]) -> str:
    """A sentence if the model `name` knows rendered scenes alone and one of the clips is no scene; else nothing."""
    if not _knows_scenes_alone(name) or all(map(is_scene, clips)):
        return ""
    return (
        f"{name} knows rendered scenes, not the world, so its answers about these clips mean little; "
        "let it learn from your videos"
    )


def _knows_scenes_alone(name: str) -> bool:
    """Whether it is a shipped model, one that was grown from it, or a run on scenes; also in the hands of a learner, or
    trained on other clips, as long as that was few steps."""
    if not name or name in weights.shipped():
        return bool(name)
    try:
        extra = weights.read_extra(name)
    except StellaError:  # an index is left whose model is gone
        return False
    config = extra.get("config", {})
    if extra.get("steps", FEW_STEPS) < FEW_STEPS and config.get("model", {}).get("weights") in weights.shipped():
        return True  # what it has met since taught it next to nothing
    source = config.get("data", {}).get("source", "")
    return "made" in extra or ("round" not in extra and bool(source) and is_embedded(source))


def device_for(device: str | torch.device | None) -> torch.device:
    if device in (None, "auto"):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise StellaError(f"device={device!s} is not here; leave it out, or set cpu") from error
    return place
