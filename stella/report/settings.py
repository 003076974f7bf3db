"""`stella config`: every key of a run's configuration with its default and meaning, read from the dataclasses."""

import typing
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from stella.config import nearest
from stella.errors import StellaError
from stella.report.methods import hyper_parameters, plain_table
from stella.runs.config import RunConfig
from stella.transfer.config import TransferConfig

TRANSFER = "transfer"  # names what a downstream run has besides a run's sections


def sections(config: type[Any] = RunConfig) -> dict[str, list[type[Any]]]:
    """The tables of a configuration and their dataclasses; `data` has one for each source, "" holds the loose keys."""
    found: dict[str, list[type[Any]]] = {"": [config]}
    for name, hint in typing.get_type_hints(config).items():
        kinds = [kind for kind in (typing.get_args(hint) or (hint,)) if is_dataclass(kind)]
        if kinds:
            found[name] = typing.cast(list[type[Any]], kinds)
    return found


def config_tables(section: str | None, recipes: Sequence[str] = ()) -> list[Table]:
    """One table for each section, or for the one that is named; `data.folder` names one source's."""
    known, downstream = sections(), sections(TransferConfig)
    own = {name: kinds for name, kinds in downstream.items() if kinds != known.get(name)}
    name, _, source = (section or "").partition(".")
    chosen = known if section is None else own if name == TRANSFER else {name: known.get(name, [])}
    tables = []
    for title, kinds in chosen.items():
        for kind in kinds:
            tag = str(fields(kind)[0].default) if len(kinds) > 1 else ""
            if source in ("", tag):
                tables.append(_section(title, tag, kind, {*known, *downstream}))
    if not tables:
        names = [*filter(None, known), TRANSFER]
        meant = nearest(str(section), [*names, *recipes])
        choose = " Choose" if meant else "; choose"
        raise StellaError(f"unknown section {section!r}{meant}{choose} one of {', '.join(names)}, or give a recipe")
    return tables


def _section(title: str, tag: str, kind: type[Any], tables: set[str]) -> Table:
    table = plain_table(f"{title}, with {title}.source={tag}" if tag else title or "the run")
    for heading, ratio in (("key", None), ("default", None), ("meaning", 1)):
        table.add_column(heading, ratio=ratio, overflow="fold")
    for name, default, _, meaning in hyper_parameters(kind):
        if title or name not in tables:
            value = "none" if default is None else str(default).lower() if isinstance(default, bool) else str(default)
            table.add_row(Text(f"{title}.{name}" if title else name, "bold"), Text(value), Text(meaning))
    return table
