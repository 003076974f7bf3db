"""On which side a clip is: trained on, or set aside. A hash of its recording's name decides.

The same recording may come again under another name: `a/film.mp4` in a folder of videos is `film.mp4` in shards of
folder `a`. It stays on the side on which it came first. Two names are taken for one recording if one is the end of the
other. Videos are compared by content instead (`items.Seen`), and one that is new is another recording, unless its path
had a video before: that may have been a part of it, taken while it was being written.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain

from stella.learn.held import is_held
from stella.learn.home import Plan
from stella.learn.items import Item


class _Recordings:
    """Names of recordings, by their last parts."""

    def __init__(self, items: Iterable[Item] = ()) -> None:
        self.videos: dict[str, set[str]] = defaultdict(set)
        self.cut: dict[str, set[str]] = defaultdict(set)  # of clips in shards and packed folders
        for item in items:
            self.add(item)

    def add(self, item: Item) -> None:
        name, last = _name(item)
        (self.cut if item.clip else self.videos)[last].add(name)

    def __contains__(self, item: Item) -> bool:
        name, last = _name(item)
        videos = self.videos.get(last, set())
        known = self.cut.get(last, set()) | (videos if item.clip else videos & {name})
        return any(one.endswith(name) or name.endswith(one) for one in known)


def _name(item: Item) -> tuple[str, str]:
    """The path of a video, or all that is known of it, and its last part."""
    name = f"/{item.recording}" if item.clip else f"{item.root}/{item.path}"
    return name, name.rpartition("/")[2]


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
