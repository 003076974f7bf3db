"""On which side a clip is: trained on, or set aside. A hash of its recording's name decides.

The same recording may come again under another name: `a/film.mp4` in a folder of videos is `film.mp4` in shards of
folder `a`. It stays on the side on which it came first. Two names are taken for one recording if one is the end of the
other. Videos are compared by content instead (`items.Seen`), and one that is new is another recording, unless its path
had a video before: that may have been a part of it, taken while it was being written.
"""

from collections.abc import Iterable, Sequence
from itertools import chain

from stella.learn.cut import ends
from stella.learn.held import is_held
from stella.learn.home import Plan
from stella.learn.items import Item


class _Recordings:
    """Names of recordings."""

    def __init__(self, items: Iterable[Item] = ()) -> None:
        self.videos, self.cut = _Paths(), _Paths()  # `cut`: of clips in shards and packed folders
        for item in items:
            self.add(item)

    def add(self, item: Item) -> None:
        (self.cut if item.clip else self.videos).add(_name(item))

    def __contains__(self, item: Item) -> bool:
        name = _name(item)
        return name in self.cut or (name in self.videos if item.clip else name in self.videos.whole)


class _Paths:
    """Paths, or what is known of them: one that is the end of another may be the same."""

    def __init__(self) -> None:
        self.whole: set[str] = set()
        self.ends: set[str] = set()

    def add(self, path: str) -> None:
        self.whole.add(path)
        self.ends.update(ends(path))

    def __contains__(self, path: str) -> bool:
        return path[1:] in self.ends or any(f"/{end}" in self.whole for end in ends(path))


def _name(item: Item) -> str:
    """The path of a video, or all that is known of it."""
    return f"/{item.recording}" if item.clip else f"{item.root}/{item.path}"


def set_aside(items: Sequence[Item], plans: Sequence[Plan], share: float) -> list[Item]:
    """Those of new items that are not trained on; `plans` are those of earlier rounds."""
    earlier = (item for plan in plans for item in (*plan.train, *plan.held))
    again = any(item.recording != item.path for item in items)
    if not again and not any(item.clip for item in chain(items, earlier)):
        return [item for item in items if is_held(item, share)]  # videos alone, all at paths of their own
    held = _Recordings(item for plan in plans for item in plan.held)
    trained = _Recordings(item for plan in plans for item in plan.train)
    aside = []
    for item in items:
        if item in held or (item not in trained and is_held(item, share)):
            aside.append(item)
            held.add(item)
        else:
            trained.add(item)
    return aside
