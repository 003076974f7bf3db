"""Configuration: frozen dataclasses beside their owner, TOML files, `key.sub=value` on the command line.

`resolve(Config, "scenes.toml", ["train.lr=1e-4"])` reads the file, applies the overrides and builds the dataclass. An
unknown key fails with the nearest name, a wrong type with the key's path.

A dataclass may name keys of which one is set, `either = ("clips", "bytes")`: a layer (defaults, file, command line)
that sets one of them clears the others of the layers below.

A union of dataclasses is a choice: their first field, which all share, is a tag, and its value in the table picks one
of them. `data.source=folder` builds the dataclass whose `source` is "folder"; without a tag the first is built.
"""

import contextlib
import dataclasses
import datetime
import difflib
import sys
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from stella.errors import ConfigError

T = TypeVar("T")


class UnknownKeyError(ConfigError):
    def __init__(self, path: str, key: str, names: Sequence[str]) -> None:
        known = f"known: {', '.join(names)}" if names else "there are none here"
        super().__init__(f"unknown key {path}{key}{nearest(key, names, path)} ({known})")
        self.path, self.key = path, key


def resolve(cls: type[T], file: Path | str | None = None, overrides: Sequence[str] = ()) -> T:
    """Build `cls` from its defaults, then a TOML file, then `key.sub=value` overrides."""
    return build(cls, layered(cls, read_toml(Path(file)) if file else {}, overrides))


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); check the path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML ({error}); correct that line") from error


def build(cls: type[T], tree: Mapping[str, Any], path: str = "") -> T:
    """A dataclass from a tree of plain values, checked key by key."""
    hints, names, absent = typing.get_type_hints(cls), _names(cls), dataclasses.MISSING
    try:
        for key in tree:
            if key not in names:
                raise UnknownKeyError(path, key, names)
        values = {key: convert(value, hints[key], f"{path}{key}") for key, value in tree.items()}
    except UnknownKeyError as error:
        if path or not (elsewhere := _paths(cls, error.key)):
            raise
        found = " or ".join(elsewhere)
        raise ConfigError(f"unknown key {error.path}{error.key}: did you mean {found}?") from error
    values |= _cleared(cls, values)
    fields = [f for f in dataclasses.fields(cast(Any, cls)) if f.init and f.name not in values]
    if missing := [f"{path}{f.name}" for f in fields if f.default is absent and f.default_factory is absent]:
        raise ConfigError(f"{path.rstrip('.') or 'this table'} is incomplete: add {', '.join(missing)}")
    return cls(**values)


def _names(cls: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(cls) if f.init]


def nearest(name: str, names: Iterable[str], path: str = "") -> str:
    """A question that names the one which was meant, if one of them is near."""
    near = difflib.get_close_matches(name, list(names), n=1)
    return f": did you mean {path}{near[0]}?" if near else ""


def _paths(cls: Any, key: str, path: str = "") -> list[str]:
    """Where a configuration has a key of this name."""
    hints, found = typing.get_type_hints(cls), [path + key] if key in _names(cls) else []
    for name in _names(cls):
        for kind in (hints[name], *typing.get_args(hints[name])):
            if dataclasses.is_dataclass(kind):
                found += _paths(kind, key, f"{path}{name}.")
    return list(dict.fromkeys(found))


def to_tree(config: Any) -> Any:
    """The inverse of `build`: plain values, ready for TOML or JSON."""
    if dataclasses.is_dataclass(config):
        return {f.name: to_tree(getattr(config, f.name)) for f in dataclasses.fields(config) if f.init}
    if isinstance(config, tuple | list):
        return [to_tree(item) for item in config]
    return str(config) if isinstance(config, Path) else config


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """A phrase for each key in which two trees differ, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = list(old) + [k for k in new if k not in old]
        return [d for k in keys for d in differences(old.get(k), new.get(k), f"{path}.{k}" if path else k)]
    return [] if old == new else [f"{path} was {spelt(old)} and is now {spelt(new)}"]


def spelt(value: Any) -> str:
    """A value as it is written in a configuration: none, true, 'text'."""
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)


def check_values(config: Any, path: str, **rules: tuple[bool, str]) -> None:
    """Refuse the first key whose value breaks its rule, such as `lr=(0 < self.lr, "be above 0")`.

    It is told by its whole name: `path` is that of the configuration's table, with its dot.
    """
    for name, (kept, rule) in rules.items():
        if not kept:
            raise ConfigError(f"{path}{name}={spelt(getattr(config, name))} must {rule}")


def merged(tree: Any, over: Any) -> Any:
    """A tree updated by another, key by key."""
    if isinstance(tree, dict) and isinstance(over, dict):
        return tree | {key: merged(tree.get(key), value) for key, value in over.items()}
    return over


def layered(cls: Any, *layers: Mapping[str, Any] | Sequence[str]) -> dict[str, Any]:
    """The tree of a `cls` from layers, trees or lists of `key.sub=value`, each over those before it.

    A layer that sets one of the keys of an `either` clears the others below it; one that picks another dataclass of a
    union drops the keys below that this one does not have.
    """
    tree: dict[str, Any] = {}
    for layer in layers:
        tree = _laid([cls], tree, layer if isinstance(layer, Mapping) else overridden({}, layer))
    return tree


def _laid(kinds: Sequence[Any], below: Any, over: Any) -> Any:
    """A value over another. Tables of one of these dataclasses, or of none, are laid key by key."""
    if not isinstance(over, Mapping):
        return over
    below = below if isinstance(below, Mapping) else {}
    if not kinds:
        return merged(below, over)
    kind = kinds[0]
    if len(kinds) > 1:
        tag, by_tag = _tags(kinds)
        was = below.get(tag, next(iter(by_tag)))
        kind = by_tag.get(str(over.get(tag, was)), kind)
        if over.get(tag, was) != was:
            below = {key: value for key, value in below.items() if key in _names(kind)}
    hints = typing.get_type_hints(kind)
    laid = {key: _laid(_tables(hints.get(key)), below.get(key), value) for key, value in over.items()}
    return {**below, **_cleared(kind, over), **laid}


def _cleared(cls: Any, table: Mapping[str, Any]) -> dict[str, None]:
    """The keys that may not be set beside those of this table, and are not in it."""
    either = getattr(cls, "either", ())
    is_set = any(table.get(key) not in (None, "none") for key in either)
    return {key: None for key in either if is_set and key not in table}


def _tables(hint: Any) -> list[Any]:
    """The dataclasses of a type."""
    return [kind for kind in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(kind)]


def _tags(kinds: Sequence[Any]) -> tuple[str, dict[str, Any]]:
    """The tag of a choice of dataclasses, and each by its value; the first is the default."""
    return dataclasses.fields(kinds[0])[0].name, {str(dataclasses.fields(kind)[0].default): kind for kind in kinds}


def overridden(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The same tree, in which these `key.sub=value` are set."""
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise ConfigError(f"{override!r} is not of the form key.sub=value, such as train.lr=1e-4")
        table, (*parents, leaf) = tree, key.split(".")
        for parent in parents:
            table = table.setdefault(parent, {})
            if not isinstance(table, dict):
                raise ConfigError(f"{key}: {parent} is a value, not a table; it has no sub-keys")
        table[leaf] = _value(text)
    return tree


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except ValueError:  # anything else is a string, so quotes may be left out
        return text


def convert(value: Any, hint: Any, path: str) -> Any:
    """A plain value as the type hint `hint` wants it."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, args, path)
    if origin is typing.Literal:
        if value in args:
            return value
        choices = args[0] if len(args) == 1 else f"one of {', '.join(map(str, args))}"
        raise ConfigError(f"{path} must be {choices}, not {spelt(value)}")
    if origin is tuple and isinstance(value, str):  # on a command line: task1,task2
        value = [_value(each.strip()) for each in value.split(",")]
    if origin is tuple and isinstance(value, list | tuple):
        kinds = [args[0]] * len(value) if len(args) == 2 and args[1] is Ellipsis else list(args)
        if len(kinds) != len(value):
            raise ConfigError(f"{path} must have {len(kinds)} entries, not {len(value)}")
        return tuple(convert(v, kind, f"{path}[{i}]") for i, (v, kind) in enumerate(zip(value, kinds, strict=True)))
    if dataclasses.is_dataclass(hint):
        return _convert_table(value, [hint], path)
    if hint is dict or origin is dict:
        if isinstance(value, Mapping):
            return dict(value)
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not abs(value) <= sys.float_info.max:  # also what is not a number
            raise ConfigError(f"{path} must be a finite number, not {_short(value)}")
        return float(value)
    elif hint is int and isinstance(value, int) and abs(value) >= 2**63:
        raise ConfigError(f"{path} must be an integer of at most 63 bits, not {_short(value)}")
    elif hint is str and isinstance(value, int | datetime.date) and not isinstance(value, bool):
        return str(value)  # data.path=2024 is a folder
    elif hint is Path and isinstance(value, str | Path):
        return Path(value)
    elif isinstance(hint, type) and isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise ConfigError(f"{path} must be {_describe(hint)}, not {_short(value)}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _convert_union(value: Any, args: tuple[Any, ...], path: str) -> Any:
    if types.NoneType in args and value in (None, "none"):  # TOML has no null
        return None
    kinds = [a for a in args if a is not types.NoneType]
    if len(kinds) > 1 and all(map(dataclasses.is_dataclass, kinds)):
        return _convert_table(value, kinds, path)
    if len(kinds) == 1:
        return convert(value, kinds[0], path)
    for kind in kinds:
        with contextlib.suppress(ConfigError):
            return convert(value, kind, path)
    raise ConfigError(f"{path} must be {' or '.join(_describe(k) for k in kinds)}, not {_short(value)}")


def _convert_table(tree: Any, kinds: Sequence[Any], path: str) -> Any:
    """A dataclass built from the tree. If there are several kinds, the tree's tag names one."""
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{path} must be a table, not {tree!r}; set its keys as {path}.key=value")
    if len(kinds) == 1:
        return build(kinds[0], tree, f"{path}.")
    tag, by_tag = _tags(kinds)
    chosen = tree.get(tag, next(iter(by_tag)))
    if chosen not in list(by_tag):
        near = nearest(str(chosen), list(by_tag))
        raise ConfigError(f"unknown {path}.{tag}={chosen!r}{near} (known: {', '.join(by_tag)})")
    for key in tree:
        owners = [name for name, kind in by_tag.items() if key in _names(kind)]
        if owners and chosen not in owners:
            raise ConfigError(
                f"{path}.{key} is not a key of {path}.{tag}={chosen}; leave it out, "
                f"or set {path}.{tag} to {' or '.join(owners)}"
            )
    return build(by_tag[chosen], tree, f"{path}.")


def _describe(hint: Any) -> str:
    names = {int: "an integer", float: "a number", str: "a string", bool: "true or false", Path: "a path"}
    kind = typing.get_origin(hint) or hint
    return names.get(hint) or {tuple: "a list such as a,b", dict: "a table"}.get(kind, "another kind of value")
