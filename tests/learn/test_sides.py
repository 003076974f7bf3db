"""A recording stays on its side, in whatever form it comes again."""

import pytest
from helpers.media_files import write_video

from stella.data import workers as pool
from stella.data.pack import pack
from stella.data.prepare import prepare
from stella.data.shards import Shards
from stella.learn.held import is_held
from stella.learn.home import Plan
from stella.learn.items import Item, Scanner, Seen
from stella.learn.sides import set_aside
from stella.media.inputs import Inputs

SHARE = 0.5
INPUTS = Inputs(0.5, 16, 18, 2, None, 48)


def film(items: list[Item]) -> set[str]:
    return {item.recording.rpartition("/")[2] for item in items}


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Item]]:
    """The same recordings as videos, as pieces in shards of their folder, as packed clips, and in their sub-folder."""
    root = tmp_path_factory.mktemp("forms")
    for number in range(9):
        write_video(root / "v" / "a" / "b" / f"{number}.mp4", 1.0, seed=number)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "START_METHOD", "fork")
        for name, videos in (("s", root / "v" / "a" / "b"), ("deep", root / "v")):
            prepare(videos, root / name, seconds=0.5, size=18, fps=4, split=True, workers=1, progress=False)
    pack(Shards(root / "s", 2, None), root / "p", pixels=16, spec_frames=48, workers=0, progress=False, inputs=INPUTS)
    found = {name: Scanner(INPUTS).scan(str(root / name), Seen()) for name in ("v", "v/a", "s", "deep", "p")}
    return {name: [item for item, _ in each] for name, each in found.items()}


@pytest.mark.parametrize("first", ["v", "v/a", "s", "deep", "p"])
def test_what_is_set_aside_is_never_trained_on(first: str, forms: dict[str, list[Item]]) -> None:
    """Nor the other way round: in the same round or in a later one."""
    held = set_aside(forms[first], [], SHARE)
    train = [item for item in forms[first] if item not in held]
    assert film(held) and film(train) and not film(held) & film(train)
    plan = Plan(1, "", len(train), train, held)
    for name, items in forms.items():
        if {first, name} <= {"v", "v/a"}:
            continue  # known by their content
        assert len(film(items)) == 9
        later, at_once = set_aside(items, [plan], SHARE), set_aside([*forms[first], *items], [], SHARE)
        assert film(later) == film(at_once) == film(held), name
        assert {is_held(item, SHARE) for item in items} == {False, True}


def test_other_recordings_are_decided_by_themselves() -> None:
    """Of another folder, and of a name with the same end."""
    one = Item("/v", "a/film.mp4", "", "a/film.mp4", "one")
    others = [
        Item("/s", "", "x", "b/film.mp4", ""),
        Item("/s", "", "y", "a/my film.mp4", ""),
        Item("/v", "b/film.mp4", "", "b/film.mp4", "two"),
        Item("/w", "a/film.mp4", "", "a/film.mp4", "three"),
    ]
    assert {is_held(item, SHARE) for item in others} == {False, True}
    for plan in (Plan(1, "", 0, [], [one]), Plan(1, "", 1, [one], [])):
        assert set_aside(others, [plan], SHARE) == [item for item in others if is_held(item, SHARE)]


@pytest.mark.parametrize("beside", [[], [Item("/s", "", "x", "another.mp4", "")]])
def test_a_path_keeps_its_side(beside: list[Item]) -> None:
    """A file that was taken while its writer paused, and then grew, is not set aside after a part was trained on."""
    names = [f"{number}.mp4" for number in range(20)]
    first = [Item("/v", name, "", name, f"{name}, a part") for name in names]
    again = [Item("/v", name, "", f"{name}, {name}, whole", f"{name}, whole") for name in names]
    assert {is_held(item, SHARE) for item in again} == {False, True}
    for side in (slice(7), slice(7, None)):
        train = [item for item in first if item not in first[side]]
        plan = Plan(1, "", len(train), train, first[side])
        assert set_aside([*beside, *again], [plan], SHARE)[-len(first[side]) :] == again[side]
        assert len(set_aside(again, [plan], SHARE)) == len(first[side])
