"""Configuration: what fits is built, what does not is refused with the key's path and a remedy."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stella.config import build, differences, layered, read_toml, resolve, to_tree
from stella.errors import ConfigError


@dataclass(frozen=True)
class Inner:
    lr: float = 1e-4
    betas: tuple[float, float] = (0.95, 0.999)
    kind: Literal["adam", "sgd"] = "adam"


@dataclass(frozen=True)
class Outer:
    seed: int = 0
    name: str = "run"
    fast: bool = False
    limit: int | None = None
    path: Path | None = None
    tasks: tuple[str, ...] = ()
    train: Inner = field(default_factory=Inner)
    args: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Disc:
    shape: Literal["disc"] = "disc"
    name: str = ""
    radius: float = 1.0


@dataclass(frozen=True)
class Square:
    shape: Literal["square"] = "square"
    name: str = ""
    width: float = 1.0


@dataclass(frozen=True)
class Drawing:
    item: Disc | Square = field(default_factory=Disc)


@dataclass(frozen=True)
class Box:
    either: ClassVar[tuple[str, ...]] = ("clips", "bytes")

    clips: int | None = 7
    bytes: int | None = None
    name: str = ""


@dataclass(frozen=True)
class Shelf:
    box: Box = field(default_factory=Box)
    item: Disc | Square = field(default_factory=Disc)


@pytest.mark.parametrize(
    ("layers", "clips", "bytes"),
    [
        ([], 7, None),
        ([["box.bytes=5"]], None, 5),
        ([{"box": {"bytes": 5}}, ["box.clips=3"]], 3, None),
        ([{"box": {"clips": 3}}, {"box": {"bytes": 5}}, ["box.name=a"]], None, 5),
        ([{"box": {"clips": 3}}, ["box.bytes=5"], ["box.clips=4"]], 4, None),
        ([{"box": {"clips": "none", "bytes": 5}}, ["box.clips=3", "box.bytes=none"]], 3, None),
        ([{"box": {"clips": 3, "bytes": None}}, ["box.bytes=none"]], 3, None),
        ([["box.clips=3", "box.bytes=5"], ["box.name=a"]], 3, 5),  # for who takes one of them to refuse
        ([{"box": {"clips": 3, "bytes": 5}}, []], 3, 5),
    ],
)
def test_a_layer_that_sets_one_of_two_keys_clears_the_other(
    layers: list[dict[str, object] | list[str]], clips: int | None, bytes: int | None
) -> None:
    box = build(Shelf, layered(Shelf, *layers)).box
    assert (box.clips, box.bytes) == (clips, bytes)
    assert build(Shelf, to_tree(build(Shelf, layered(Shelf, *layers)))).box == box


def test_a_layer_with_another_tag_drops_the_keys_that_it_does_not_have() -> None:
    below = {"item": {"radius": 2, "name": "a"}}
    assert build(Shelf, layered(Shelf, below, ["item.shape=square"])).item == Square(name="a")
    assert build(Shelf, layered(Shelf, below, ["item.shape=disc"])).item == Disc(name="a", radius=2)
    for own in (["item.width=1"], ["item.shape=square", "item.radius=3"]):
        with pytest.raises(ConfigError, match=r"is not a key of item\.shape="):
            build(Shelf, layered(Shelf, below, own))
    for unknown in ("sqare", "[1]"):
        with pytest.raises(ConfigError, match=r"unknown item\.shape="):
            build(Shelf, layered(Shelf, below, [f"item.shape={unknown}"]))


def test_file_then_overrides(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text('seed = 3\ntasks = ["a", "b"]\n[train]\nlr = 1e-3\n')
    config = resolve(Outer, file, ["seed=4", "train.betas=[0.9, 1]", "limit=7", "path=x/y", "name=a b"])
    assert config == Outer(4, "a b", False, 7, Path("x/y"), ("a", "b"), Inner(1e-3, (0.9, 1.0)))
    assert resolve(Outer, overrides=["limit=5", "limit=none"]).limit is None


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("seed=1 seed.x=2", "is a value, not a table"),
        ("sed=1", "did you mean seed?"),
        ("train.lrr=1", "did you mean train.lr?"),
        ("seed=1.5", "seed must be an integer"),
        ("seed=true", "seed must be an integer"),
        ("fast=1", "fast must be true or false"),
        ("train.lr=high", "train.lr must be a number, not 'high'"),
        ("train.kind=rmsprop", "one of adam, sgd"),
        ("train.betas=[1]", "train.betas must have 2 entries, not 1"),
        ('train.betas=[1,"x"]', "train.betas[1] must be a number"),
        ("train=5", "train must be a table"),
        ("seed.deep=5", "seed must be an integer"),
        ("limit=x", "limit must be an integer"),
        ("seed", "key.sub=value"),
        ("=3", "key.sub=value"),
    ],
)
def test_what_does_not_fit_is_refused(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        resolve(Outer, overrides=override.split())
    assert said in str(refusal.value)


def test_unreadable_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_toml(tmp_path / "missing.toml")
    for content in (b"seed = = 3", b"\xff\xfe\x00"):
        (tmp_path / "broken.toml").write_bytes(content)
        with pytest.raises(ConfigError, match="not valid TOML"):
            read_toml(tmp_path / "broken.toml")


@settings(max_examples=40, deadline=None)
@given(
    st.builds(
        Outer,
        seed=st.integers(-(2**63) + 1, 2**63 - 1),
        name=st.text(),
        fast=st.booleans(),
        limit=st.none() | st.integers(-(2**63) + 1, 2**63 - 1),
        tasks=st.lists(st.text()).map(tuple),
        train=st.builds(
            Inner, lr=st.floats(allow_nan=False, allow_infinity=False), kind=st.sampled_from(["adam", "sgd"])
        ),
    )
)
def test_a_tree_builds_back_what_it_came_from(config: Outer) -> None:
    assert build(Outer, to_tree(config)) == config


def test_differences_name_the_keys() -> None:
    old, new = to_tree(Outer()), to_tree(Outer(seed=1, train=Inner(lr=1.0)))
    assert differences(old, new) == ["seed was 0 and is now 1", "train.lr was 0.0001 and is now 1.0"]
    assert differences(old, old) == []


def test_the_tag_of_a_table_picks_its_dataclass(tmp_path: Path) -> None:
    assert resolve(Drawing).item == Disc()
    assert resolve(Drawing, overrides=["item.radius=2", "item.name=a"]).item == Disc(name="a", radius=2.0)
    assert resolve(Drawing, overrides=["item.shape=square", "item.width=3"]).item == Square(width=3.0)
    file = tmp_path / "drawing.toml"
    file.write_text('[item]\nshape = "square"\nwidth = 2\n')
    drawing = resolve(Drawing, file, ["item.name=b"])
    assert drawing.item == Square(name="b", width=2.0)
    assert to_tree(drawing) == {"item": {"shape": "square", "name": "b", "width": 2.0}}
    assert build(Drawing, to_tree(drawing)) == drawing


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["item.shape=sqare"], "unknown item.shape='sqare': did you mean square? (known: disc, square)"),
        (["item.shape=[1]"], "unknown item.shape=[1]"),
        (["item.radus=1"], "unknown key item.radus: did you mean item.radius? (known: shape, name, rad"),
        (["item.shape=square", "item.widht=1"], "mean item.width? (known: shape, name, width)"),
        (["item.width=1"], "item.width is not a key of item.shape=disc; leave it out, or set item.shape to square"),
        (["item.radius=x"], "item.radius must be a number, not 'x'"),
        (["item=5"], "item must be a table, not 5; set its keys as item.key=value"),
    ],
)
def test_what_does_not_fit_the_chosen_dataclass_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        resolve(Drawing, overrides=overrides)
    assert said in str(refusal.value)


def test_a_key_of_another_table_is_named() -> None:
    from stella.runs.config import RunConfig

    for override, said in (
        ("lr=1", "train.lr?"),
        ("train.epochs=1", "stream.epochs?"),
        ("clips=1", "data.clips or memory"),
    ):
        with pytest.raises(ConfigError, match="did you mean") as error:
            resolve(RunConfig, None, [override])
        assert f"did you mean {said}" in str(error.value)
    with pytest.raises(ConfigError, match=r"unknown key foo \(known: seed, "):
        resolve(RunConfig, None, ["foo=1"])


def test_lists_need_no_brackets() -> None:
    from stella.runs.config import RunConfig

    for text in ("task2,task1", "task2, task1", '["task2", "task1"]'):
        assert resolve(RunConfig, None, [f"data.tasks={text}"]).data.tasks == ("task2", "task1")
    assert resolve(RunConfig, None, ["data.tasks=task3"]).data.tasks == ("task3",)
