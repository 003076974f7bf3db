"""Methods in the terminal: all of them in a table, or one in detail."""

import inspect
import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

import torch
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from stella.columns import ID, Column, bytes_per_clip
from stella.methods import Method
from stella.model.cav import CAV, PRESETS, CAVConfig, preset
from stella.selection import visible

CLIPS = 2000  # the paper's memory on Continual-VS


def methods_table(methods: Mapping[str, type[Method]]) -> Table:
    """What each method does, what its steps cost, and what it stores for a clip at the paper's sizes."""
    table = plain_table("Methods")
    table.add_column("method", no_wrap=True)
    table.add_column("what it does, and the cost of a step beside Finetune's", ratio=1)
    table.add_column("memory at the paper's size", max_width=26)
    for name, method in methods.items():
        about = Text.assemble(
            method.summary, "\n", (f"costs: {method.cost}\n", "cyan"), (_brief(method.citation), "dim")
        )
        table.add_row(Text.assemble((name, "bold"), "\n", (method.title, "dim")), about, _stored(_columns(method)))
        table.add_section()
    table.caption = "`stella methods NAME` shows a method's hyper-parameters and full citation."
    return table


def models_table() -> Table:
    """The presets of the backbone: sizes, and what a step of Finetune computes and keeps."""
    table = plain_table("Models, model.preset=NAME")
    table.add_column("model", style="bold")
    table.add_column("width")
    table.add_column("blocks: encoders + fusion, decoder")
    for heading in ("parameters", "GFLOP a clip", "to train"):
        table.add_column(heading, justify="right")
    for name, c in PRESETS.items():
        with torch.device("meta"):
            parameters = sum(p.numel() for p in CAV(c).parameters())
        blocks = f"2 × {c.fusion_from} + {c.depth - c.fusion_from}, {c.dec_depth}"
        state = f"{16 * parameters / 2**30:.2f} GiB"
        table.add_row(name, str(c.dim), blocks, f"{parameters / 1e6:,.1f} M", f"{step_flop(c) / 1e9:,.1f}", state)
    table.caption = (
        "FLOPs of a step of Finetune. To train: weights, gradients and Adam in float32, without\n"
        "activations; processes divide it with train.shard=true."
    )
    return table


def step_flop(c: CAVConfig, mask_ratio: float = 0.8) -> float:
    """FLOPs of a step of Finetune for one clip: matrix products and attention, forward and backward."""
    patch, all_a, all_v = c.patch_size**2, c.patches_a, c.patches_v
    a, v = visible(all_a, mask_ratio), visible(all_v, mask_ratio)

    def block(dim: int, *lengths: int) -> float:
        """Products have two of their size in the backward pass; attention's scores are computed again there."""
        return sum(3 * 24 * n * dim**2 + 3.5 * 4 * n**2 * dim for n in lengths)

    embed = 2 * 2 * (a * patch + v * 3 * patch) * c.dim  # pixels need no gradient
    middle = 3 * 2 * (a + v) * c.dim * c.dec_dim
    predict = 3 * 2 * ((all_a - a) * patch + (all_v - v) * 3 * patch) * c.dec_dim
    encode = c.fusion_from * block(c.dim, a, v) + (c.depth - c.fusion_from) * block(c.dim, a + v, a, v)
    return embed + encode + middle + c.dec_depth * block(c.dec_dim, all_a, all_v) + predict


def method_page(method: type[Method]) -> Group:
    """One method in detail: hyper-parameters, columns of its memory, cost, publication."""
    about = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    about.add_row(Text(method.title, "bold"), method.summary)
    about.add_row("from", method.citation)
    about.add_row("costs", method.cost)
    return Group(about, "", _hyper_parameters(method.Config), _memory(_columns(method)))


def hyper_parameters(config: type[Any]) -> list[tuple[str, Any, str, str]]:
    """Name, default, type and trailing comment of each field of a configuration."""
    sources = [inspect.getsource(base) for base in reversed(config.__mro__) if is_dataclass(base)]
    comments = dict(re.findall(r"^    (\w+): [^#\n]*# (.+)$", "\n".join(sources), re.M))
    return [(f.name, _default(f), inspect.formatannotation(f.type), comments.get(f.name, "")) for f in fields(config)]


def _default(field: Field[Any]) -> Any:
    if field.default is not MISSING:
        return field.default
    return "required" if field.default_factory is MISSING else field.default_factory()


def format_bytes(n: int) -> str:
    """Bytes with three digits and a decimal unit: `864 kB`."""
    units = {"GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1}
    return next(f"{n / size:.3g} {unit}" for unit, size in units.items() if n >= size)


def _columns(method: type[Method]) -> dict[str, Column] | None:
    return method.columns(preset("base"), method.Config())


def _brief(citation: str) -> str:
    """Authors, venue and year of "Authors et al., Title, Venue Year"; other citations unchanged."""
    return re.sub(r"^([\w ]+ et al\.), .+, ([^,]+)$", r"\1, \2", citation)


def _stored(columns: Mapping[str, Column] | None) -> Text:
    if columns is None:
        return Text("none", "dim")
    each = bytes_per_clip(columns)
    sizes = f"{format_bytes(each)} a clip\n{format_bytes(CLIPS * each)} for {CLIPS:,}\n"
    names = dict.fromkeys(re.sub("_[av]$", "", name) for name in columns)  # one name for both modalities
    return Text.assemble(sizes, (", ".join(names), "dim"))


def _hyper_parameters(config: type[Any]) -> Table | Text:
    if not (found := hyper_parameters(config)):
        return Text("No hyper-parameters of its own.\n")
    table = plain_table("Hyper-parameters, set as args.NAME=VALUE")
    for heading in ("name", "default", "type", "meaning"):
        table.add_column(heading)
    for name, default, kind, comment in found:
        table.add_row(name, _as_given(default), Text(_kind(kind), "dim"), Text(comment))
    return table


def _as_given(value: Any) -> str:
    """A value as the command line takes it."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _kind(annotation: str) -> str:
    """A type in words: `time, frequency or free` of `Literal['time', 'frequency', 'free']`, `float or none`."""
    names = re.sub(r"Literal\[(.*)\]", lambda m: m[1].replace("'", ""), annotation)
    return re.sub(r", (\S+)$", r" or \1", names.replace(" | None", ", none"))


def _memory(columns: Mapping[str, Column] | None) -> Table | Text:
    if columns is None:
        return Text("No memory.")
    each = bytes_per_clip(columns)
    table = plain_table("Memory at the paper's sizes")
    for heading in ("column", "type", "shape"):
        table.add_column(heading)
    table.add_column("bytes", justify="right")
    for name, column in (ID | dict(columns)).items():
        kind, shape = str(column.dtype).removeprefix("torch."), " × ".join(map(str, column.shape))
        table.add_row(name, kind, shape or "one number", f"{column.bytes:,}")
    table.add_section()
    table.add_row("a clip", "", "", f"{each:,}", style="bold")
    table.add_row(f"{CLIPS:,} clips", "", "", format_bytes(CLIPS * each), style="bold")
    return table


def plain_table(title: str) -> Table:
    left: dict[str, Any] = {"title_justify": "left", "caption_justify": "left", "title_style": "bold"}
    return Table(box=box.SIMPLE_HEAD, title=title, **left)
