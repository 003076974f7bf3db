"""MSR-VTT: videos of 20 categories with captions; here for retrieval of their sound."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from stella.data.archives.base import (
    ArchiveConfig,
    Item,
    Videos,
    find_some,
    first_existing,
    read_list,
    read_tree,
    told_missing,
)
from stella.errors import StellaError


@dataclass(frozen=True)
class MSRVTTConfig(ArchiveConfig):
    """`videos/all/videoN.mp4` (anywhere below `path`, or in a tar), and the lists of a split, or the annotations.

    Videos that are not there are left out and counted, those without a sound skipped. A tenth of the training list
    chooses the best model.
    """

    source: Literal["msrvtt"] = "msrvtt"  # a public data set
    serves: ClassVar[tuple[str, ...]] = ("retrieval", "matching")

    split: Literal["miech", "jsfusion"] = "miech"  # which lists

    def part(self, name: str) -> Videos:
        names = self._names("test" if name == "test" else "train")
        found = find_some(self.root, names)
        if name != "test":
            names = [each for n, each in enumerate(names) if (n % 10 == 9) == (name == "validation")]
        return Videos([Item(each, found[each]) for each in names if each in found], self.plan)

    def remarks(self) -> list[str]:
        return told_missing(self.root, [*self._names("train"), *self._names("test")])

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
