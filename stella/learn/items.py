"""What arrives: the clips in folders of videos, of shards and of packed arrays, and in tar archives of videos.

An item says where a clip lies and what it holds, so that each is learnt once. A video is known by its content: one that
was renamed, copied or touched is not new, and another video under a known path is. A clip in shards or packed arrays is
known by its folder and id, and in other folders by its id and a checksum.
"""

import errno
import hashlib
import os
import stat
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from stella.clip import MIDDLE, Clip, Source, Windowed, location_of, same_stamp
from stella.data.archives.members import Place, is_tar, list_videos, readable
from stella.data.archives.tar import ARCHIVE
from stella.data.folder import VIDEO_SUFFIXES, find_videos, walk
from stella.data.packed import Packed
from stella.data.shards import Shards
from stella.data.views import View, view
from stella.errors import ClipError, StellaError
from stella.learn.cut import cut_up, left_out
from stella.learn.disks import refuse_gone
from stella.media.decode import Plan, decode
from stella.media.inputs import Inputs

NOT_THERE = "not there any more"
LOST = ("missing file", "broken link", "no permission", NOT_THERE)  # reasons that say nothing about a clip's content
PASSING = ("time limit", "unreadable file")  # reasons that may not: a disk hung, the limit was too low
TRIES = 3  # rounds with such a reason, after which it is the clip's
SAMPLE = 1 << 16  # bytes at both ends of a file that tell it from others of its length

Signature = tuple[int, ...]  # changes while a file is being written
Found = tuple["Item", Signature]


@dataclass(frozen=True)
class Item:
    root: str  # the folder or archive that was given
    path: str  # below it: of the video (in an archive, ARCHIVE.tar/NAME), or of the folder of shards or packed clips
    clip: str  # its id in that folder; empty for a video
    recording: str  # a video's path; if another video had that path before, with its stamp
    stamp: str  # of its content
    device: int = 0  # of the root, which tells a folder that was emptied from one that is not mounted; 0: unknown

    @property
    def place(self) -> str:
        """The path of the video, or of the folder of shards or packed clips."""
        return f"{self.root}/{self.path}" if self.path else self.root

    @property
    def id(self) -> str:
        name = self.path if self.clip else self.recording
        return "/".join(part for part in (self.root, name) if part) + (f"#{self.clip}" if self.clip else "")

    @property
    def content(self) -> str:
        """By which it is known wherever it lies; empty: it is known in its folder alone."""
        checksum = self.stamp.partition(", checksum ")[2]
        return (f"{self.clip} {checksum}" if checksum else "") if self.clip else self.stamp


@dataclass
class Seen:
    """Which items are known. One that could not be used is known until its content changes."""

    ids: set[str] = field(default_factory=set)  # with real paths of folders of clips
    contents: set[str] = field(default_factory=set)
    bad: dict[str, str] = field(default_factory=dict)  # stamps of clips that could not be used, by id
    tries: Counter[str] = field(default_factory=Counter)  # rounds that failed for a passing reason, by content or id
    _real: dict[tuple[str, str], str] = field(default_factory=dict)  # paths of folders of clips

    def add_round(self, items: Sequence[Item], skipped: Mapping[Item, str]) -> None:
        """Add the clips of a round; those that it could not use are given with the reason. One that was moved or
        deleted before it was read, or may be read another time, is not seen: wherever it turns up, it is new."""
        passing = {item: item.content or self.id_of(item) for item in items if skipped.get(item) in PASSING}
        self.tries.update(passing.values())
        again = {item for item, name in passing.items() if self.tries[name] < TRIES}
        known = [item for item in items if item not in again and skipped.get(item) not in LOST]
        self.add(known, [item for item in known if item in skipped])

    def add(self, items: Iterable[Item], bad: Iterable[Item] = ()) -> None:
        wrong = {self.id_of(item): item.stamp for item in bad}
        for item in items:
            id = self.id_of(item)
            if id not in wrong:
                self.ids.add(id)
            if item.content and not (item.clip and id in wrong):  # a damaged shard may be whole elsewhere
                self.contents.add(item.content)
        self.bad |= wrong

    def id_of(self, item: Item) -> str:
        """An item's id; that of a clip in a folder is the same however the folder's path is spelt."""
        if not item.clip:
            return item.id
        place = item.root, item.path
        if place not in self._real:
            self._real[place] = str(Path(*place).resolve())
        return f"{self._real[place]}#{item.clip}"

    def named(self, item: Item) -> Item:
        """A new item with an id of its own: another video may have had its path."""
        if item.clip or item.id not in self.ids:
            return item
        return replace(item, recording=f"{item.recording}, {item.stamp}")

    def __contains__(self, item: Item) -> bool:
        id = self.id_of(item)
        if item.content in self.contents or (item.clip and id in self.ids):
            return True
        return id in self.bad and same_stamp(self.bad[id], item.stamp)


@dataclass
class Scanner:
    """Lists what folders hold. What is known of unchanged files is kept, so that they are read once."""

    inputs: Inputs
    stamps: dict[str, tuple[Signature, str]] = field(default_factory=dict)  # of videos, by path
    fresh: bool = False  # whether `stamps` has changed; whoever keeps them sets it back
    problems: list[str] = field(default_factory=list)  # of the last scan: what could not be listed
    _inside: dict[Path, tuple[Signature, list[Item]]] = field(default_factory=dict)

    def scan(self, root: str, seen: Seen) -> list[Found]:
        """All new items of a folder or archive in order, with signatures that change while they are being written."""
        root = str(Path(root).resolve())  # now: a link may name another folder tomorrow
        try:
            device = Path(root).stat().st_dev
            found = self._archive(root, Path(root)) if Path(root).is_file() else self._folders(root, seen)
        except OSError as error:  # a mount may die at any moment
            self._cannot(error)
            return []
        order = sorted(found, key=lambda each: each[0].path)  # stable: clips of one folder keep its order
        new = [(item, signature) for item, signature in order if item not in seen]
        return [(replace(seen.named(item), device=device), signature) for item, signature in self._uncut(new, found)]

    def _folders(self, root: str, seen: Seen) -> list[Found]:
        found: list[Found] = []
        for folder, subfolders, names in walk(Path(root), self._cannot):
            subfolders[:] = sorted(name for name in subfolders if not name.endswith(".tmp"))
            inner = "" if folder == Path(root) else folder.relative_to(root).as_posix()
            if "clips.json" in names or any(map(_is_shard, names)):
                inside = self._inside_of(root, folder, inner, seen)
                found += inside
                if not inside:  # until it can be read it is not known which videos it was made of
                    subfolders.clear()
                    continue
            for name in sorted(names):
                if Path(name).suffix.lower() in VIDEO_SUFFIXES:
                    found += self._video(root, folder / name)
                elif ARCHIVE.fullmatch(name) and not _is_shard(name):
                    found += self._archive(root, folder / name)
        return found

    def _uncut(self, new: list[Found], found: list[Found]) -> list[Found]:
        """New items without the videos that clips beside or above them were made of."""
        folders: dict[str, set[str]] = {}
        for item, _ in found:
            if item.clip:
                folders.setdefault(item.place, set()).add(item.recording)
        places = {item.place for item, _ in new if not item.clip}
        cut = cut_up((item.place for item, _ in found if not item.clip), folders) if folders else {}
        self.problems += [left_out(folder, videos & places) for folder, videos in cut.items() if videos & places]
        videos = set().union(*cut.values())
        return [(item, signature) for item, signature in new if item.clip or item.place not in videos]

    def _video(self, root: str, path: Path) -> list[Found]:
        try:
            signature = _signature(path)
            if not os.access(path, os.R_OK):  # it may have been read before
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return [(self._item(root, path, signature, path), signature)]
        except OSError as error:
            self._cannot(error)
            return []

    def _archive(self, root: str, path: Path) -> list[Found]:
        if not is_tar(path.name):
            self.problems.append(_compressed(path))
            return []
        try:
            signature, listing = _signature(path), list_videos(path)
            if not listing.whole:
                self.problems.append(f"{path} is damaged or not whole yet; videos found in it: {len(listing.videos):,}")
            videos = listing.videos.items()
            return [(self._item(root, path / name, signature, path, place), signature) for name, place in videos]
        except OSError as error:
            self._cannot(error)
            return []

    def _item(self, root: str, path: Path, signature: Signature, file: Path, place: Place | None = None) -> Item:
        """The video that lies in this file, which is read if it has changed."""
        key, name = str(path), path.relative_to(root).as_posix()
        if self.stamps.get(key, ((), ""))[0] != signature:
            self.stamps[key] = signature, content(file, place)
            self.fresh = True
        return Item(root, name, "", name, self.stamps[key][1])

    def _inside_of(self, root: str, folder: Path, inner: str, seen: Seen) -> list[Found]:
        try:
            signature = _signature_of_clips(folder)
            if self._inside.get(folder, ((-1,), []))[0] != signature:  # a signature is () if all files are gone
                source = _container(folder, self.inputs)
                origins = [(source.origin(i), source.stamp(i)) for i in range(len(source))]
                items = [Item(root, inner, origin.id, origin.recording, stamp) for origin, stamp in origins]
                if isinstance(source, Shards):
                    new = [seen.id_of(item) not in seen.ids for item in items]
                    items = [_with_checksum(item, source, i) if new[i] else item for i, item in enumerate(items)]
                self._inside[folder] = (signature, items)
        except (StellaError, OSError) as error:
            self.problems.append(str(error))
            return []
        return [(item, ()) for item in self._inside[folder][1]]  # written whole: there is nothing to wait for

    def _cannot(self, error: OSError) -> None:
        remedies = {errno.EACCES: "correct its permissions", errno.EINVAL: "move it away"}
        remedy = remedies.get(error.errno or 0, "check the disk or mount")
        self.problems.append(f"{error.filename} cannot be read ({error.strerror}); {remedy}")


def _signature_of_clips(folder: Path) -> Signature:
    """Of all that shards or packed clips may consist of: another one if a file of them is changed or lost."""
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() not in VIDEO_SUFFIXES and file.is_file())
    return tuple(number for file in files for number in _signature(file))


def opened(items: Sequence[Item], inputs: Inputs) -> View:
    """The clips of these items, in this order. Those of a folder that cannot be opened raise `ClipError`."""
    wanted: dict[tuple[str, str | None], dict[str, str]] = {}  # the clips of each folder, with their stamps
    for item in items:
        wanted.setdefault(_folder(item), {})[item.clip or item.path] = item.stamp
    devices = {item.root: item.device for item in items}
    found = {key: _open(*key, devices[key[0]], clips, inputs) for key, clips in wanted.items()}
    number = {key: i for i, key in enumerate(found)}
    clips = [(number[_folder(item)], found[_folder(item)][1].get(item.clip or item.path, -1)) for item in items]
    return view([source for source, _ in found.values()], clips)


class Present:
    """A source below a folder. While the folder is gone its clips are not bad: reading them raises `GoneError`."""

    def __init__(self, source: Source, root: str, device: int) -> None:
        self.source, self.root, self.device = source, root, device

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Clip:
        return self.clip(index)

    def clip(self, index: int, window: float = MIDDLE) -> Clip:
        try:
            if index < 0:
                raise ClipError(self.root, NOT_THERE, "restore it, or leave it")
            return self.source.clip(index, window) if isinstance(self.source, Windowed) else self.source[index]
        except (ClipError, OSError):
            refuse_gone(self.root, self.device)
            raise

    def location(self, index: int) -> str:
        return location_of(self.source, index) if index >= 0 else self.root


class Videos:
    """These files, one clip each. One that is not as it was found is not there any more: it is new as it is now."""

    def __init__(self, root: str, files: Mapping[str, str], plan: Plan) -> None:
        self.root, self.files, self.stamps, self.plan = Path(root), list(files), list(files.values()), plan

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Clip:
        return self.clip(index)

    def clip(self, index: int, window: float = MIDDLE) -> Clip:
        with readable(self.root / self.files[index]) as path:
            with suppress(OSError):  # `decode` says why
                if content(path) != self.stamps[index]:
                    raise ClipError(self.location(index), NOT_THERE, "it has changed: it is learnt as it is now")
            return replace(decode(path, self.plan, window=window), id=self.files[index])

    def location(self, index: int) -> str:
        return str(self.root / self.files[index])


def _folder(item: Item) -> tuple[str, str | None]:
    """The root of an item, and its folder of shards or packed clips if it is in one."""
    return item.root, item.path if item.clip else None


def _open(
    root: str, inner: str | None, device: int, wanted: Mapping[str, str], inputs: Inputs
) -> tuple[Source, dict[str, int]]:
    """A source that holds these clips, and where."""
    refuse_gone(root, device)
    if inner is None:
        return Present(Videos(root, wanted, inputs.plan()), root, device), {name: i for i, name in enumerate(wanted)}
    try:
        source = _container(Path(root) / inner, inputs)
    except (StellaError, OSError):
        refuse_gone(root, device)
        return Present(Videos(root, {}, Plan()), root, device), {}  # deleted, or damaged: its clips cannot be used
    positions = {source.origin(i).id: i for i in range(len(source))}
    whole = isinstance(source, Packed) and all(name in positions for name in wanted)
    return source if whole else Present(source, root, device), positions


def _with_checksum(item: Item, source: Shards, index: int) -> Item:
    """Read from the head of its sample."""
    try:
        checksum = zlib.crc32(repr(source.head(index).meta["crc32"]).encode())
        return replace(item, stamp=f"{item.stamp}, checksum {checksum:08x}")
    except ClipError:
        return replace(item, stamp=f"{item.stamp}, damaged")


def _container(folder: Path, inputs: Inputs) -> Packed | Shards:
    if not (folder / "clips.json").exists():
        return Shards(folder, inputs.frames, inputs.span, inputs.size, inputs.duration)
    source = Packed(folder)
    has = (source.header.pixels, source.header.spec_frames, source.header.frames[0])
    if has != (want := (inputs.pixels, inputs.spec_frames, inputs.frames)):
        names = ("pixels", "time steps", "frames")
        sizes = [", ".join(f"{n} {name}" for n, name in zip(each, names, strict=True)) for each in (has, want)]
        raise StellaError(f"{folder} was packed for {sizes[0]} and this model takes {sizes[1]}; pack it again")
    return source


def _signature(path: Path) -> Signature:
    """Of a regular file: a pipe would be waited for."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return status.st_size, status.st_mtime_ns


def content(path: Path, place: Place | None = None) -> str:
    """The length of a file, or of one that lies in it, and a hash of both its ends."""
    place = place or Place(0, _signature(path)[0])
    with path.open("rb") as file:
        rest = max(0, place.size - SAMPLE)
        file.seek(place.start)
        ends = file.read(min(SAMPLE, place.size))
        file.seek(place.start + max(SAMPLE, rest))
        ends += file.read(min(SAMPLE, rest))
    return f"{place.size} {hashlib.blake2b(ends, digest_size=16).hexdigest()}"


def refuse_empty(root: str) -> None:
    """Before a learner is made whose only folder holds nothing: most likely a wrong path."""
    names = (name for _, _, names in walk(Path(root), lambda error: None) for name in names)
    if kind_of(root)[0] == "folder" and Path(root).is_dir() and not any(map(is_tar, names)):
        find_videos(Path(root))


def check_source(root: str) -> None:
    path = Path(root)
    if path.is_dir() or (path.is_file() and is_tar(path.name)):
        return
    if path.is_file() and ARCHIVE.fullmatch(path.name):
        raise StellaError(_compressed(path))
    raise StellaError(f"{root} is not a folder; give one of videos, shards or packed clips, or a tar archive of videos")


def _is_shard(name: str) -> bool:
    return name.startswith("shard-") and name.endswith(".tar")


def _compressed(path: Path) -> str:
    remedy = f"make shards of it (stella prepare {path} SHARDS), or decompress it"
    return f"{path} is compressed, so that its videos cannot be read one by one; {remedy}"


def kind_of(root: str) -> tuple[str, str]:
    """What a folder holds, as `data.source` names it, and the folder of packed clips or shards, which may be below."""
    check_source(root)
    for folder, _, names in walk(Path(root), lambda error: None):
        if "clips.json" in names:
            return "packed", str(folder)
        if any(map(_is_shard, names)):
            return "shards", str(folder)
    return "folder", root
