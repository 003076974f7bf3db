"""Videos that shards or packed clips beside or above them were made of, which are not to be learnt a second time.

Clips name the video they were cut out of by its path below the folder that it was prepared from. That folder is not
known: most often it is the one of the shards itself, or one below or above it.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set

from stella.errors import number_of


def cut_up(videos: Iterable[str], folders: Mapping[str, Set[str]]) -> dict[str, set[str]]:
    """By folder, those of `videos` beside or below it that its clips were made of. All are paths; `folders` gives the
    recordings of the clips in each.

    A recording is the video at its path below the folder. If there is none, it is the one whose path ends with it; of
    several none is left out, since most of them are others.
    """
    below: dict[str, list[str]] = defaultdict(list)
    for video in videos:
        for folder in _parents(video):
            if folder in folders:
                below[folder].append(video)
    found = {folder: _cut(folder, listed, folders[folder]) for folder, listed in below.items()}
    return {folder: cut for folder, cut in found.items() if cut}


def left_out(folder: str, videos: Set[str]) -> str:
    """What is said of them."""
    return (
        f"left out of {folder}: {number_of(len(videos), 'video')}, such as {min(videos)}, of whose names clips in that "
        "folder were made; if they are other videos, move them out of it"
    )


def _cut(folder: str, videos: list[str], recordings: Set[str]) -> set[str]:
    here = {video for video in videos if video[len(folder) + 1 :] in recordings}
    other = recordings - {video[len(folder) + 1 :] for video in here}
    elsewhere: dict[str, list[str]] = {recording: [] for recording in other}
    for video in videos:
        for end in ends(video):
            if end in elsewhere:
                elsewhere[end].append(video)
    return here | {found[0] for found in elsewhere.values() if len(found) == 1}


def _parents(path: str) -> Iterator[str]:
    """/a/b/c → /a/b, /a."""
    while path := path.rpartition("/")[0]:
        yield path


def ends(path: str) -> Iterator[str]:
    """/a/b/c → a/b/c, b/c, c."""
    while path := path.partition("/")[2]:
        yield path
