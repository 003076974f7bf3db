"""MSR-VTT: videos of 20 categories with captions; here for retrieval of their sound."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from stella.clip import Source
from stella.data.archives.base import ArchiveConfig, Item, Videos, find_named, first_existing, read_list, read_tree
from stella.data.views import part
from stella.errors import StellaError, number_of


@dataclass(frozen=True)
class MSRVTTConfig(ArchiveConfig):
    """`videos/all/videoN.mp4` (anywhere below `path`, or in a tar), and the lists of a split, or the annotations.

    Videos without a sound are skipped and counted. A tenth of the training list chooses the best model.
    """

    source: Literal["msrvtt"] = "msrvtt"  # a public data set
    serves: ClassVar[tuple[str, ...]] = ("retrieval", "matching")

    split: Literal["miech", "jsfusion"] = "miech"  # which lists

    def part(self, name: str) -> Source:
        if name == "test":
            return self._videos("test")
        train = self._videos("train")
        held = [index for index in range(len(train)) if (index % 10 == 9) == (name == "validation")]
        return part(train, held)

    def _videos(self, which: str) -> Videos:
        found = find_named(self.root)
        names = self._names(which)
        if not any(name in found for name in names):
            raise StellaError(
                f"none of {number_of(len(names), 'video')} of the {which} list is below {self.root}; check data.path"
            )
        missing = self.root / "videos" / "all"
        items = [Item(name, found.get(name, missing / f"{name}.mp4")) for name in names]  # a missing one is skipped
        return Videos(items, self.plan)

    def _names(self, which: str) -> list[str]:
        folders = ("", "structured-symlinks/", "high-quality/structured-symlinks/")
        lists = [f"{folder}{which}_list_{self.split}.txt" for folder in folders]
        existing = [self.root / name for name in lists if (self.root / name).exists()]
        if existing:
            return [Path(line).stem for line in read_list(existing[0])]
        file = first_existing(self.root, *lists, "annotation/MSR_VTT.json", "videodatainfo.json")
        tree = read_tree(file)
        if "videos" not in tree:
            raise StellaError(f"{file} names no splits; copy {lists[0]} into {self.root}")
        wanted = {"train": ("train", "validate"), "test": ("test",)}[which]
        return [str(video["video_id"]) for video in tree["videos"] if video.get("split") in wanted]
