"""A learner whose state made the index: where it stands, its history, and the clips it is forgetting.

Folders and files are named as they are called, without where they lie.
"""

from pathlib import Path
from typing import Any

from stella.errors import StellaError, number_of, plain
from stella.files import in_use
from stella.serve.answers import HttpError

SHOWN = 200  # newest rounds


class Attached:
    """The learner behind a model's name, if it is one. Its folder is only read, and may change at any time: what is
    kept of it is the records of earlier rounds, which are many."""

    def __init__(self, root: str) -> None:
        from stella.learn.home import Home  # all of training: only where there is a learner

        self.root = Path(root)
        self.home = Home(root)

    def tree(self) -> dict[str, Any]:
        """What the page shows. Figures are in percent and points."""
        try:
            return self._tree()
        except (OSError, StellaError) as error:  # a round is being thrown away, or the disk is gone
            raise HttpError(503, "the learner cannot be read just now; try again", retry=5) from error

    def _tree(self) -> dict[str, Any]:
        from stella.learn.measure import caveats
        from stella.learn.records import learnt

        history, following = self.home.history(), self.home.next
        last = history[-1] if history else None
        memory = last["memory"] if last else None
        return {
            "name": plain(self.root.resolve().name),
            "round": self.home.current,
            "clips": sum(map(learnt, history)),
            "set_aside": sum(record["set_aside"] for record in history),
            "doing": self._doing(following),
            "caveats": caveats(last) if last else [],
            "history": [_row(record) | {"clips": learnt(record)} for record in history[-SHOWN:]],
            "memory": memory
            and {
                "rounds": memory["rounds"],
                "distinct": memory.get("distinct"),  # earlier versions did not count them
                "sources": [[plain(Path(name).name), count] for name, count in memory["sources"].items()],
            },
            "forgetting": [
                {"key": w["clip"], "name": plain(Path(w["id"]).name), **{k: w[k] for k in ("round", "before", "after")}}
                for w in (last["worst"] if last else [])
            ],
        }

    def _doing(self, following: Any) -> str:
        from stella.learn.measure import judged

        if apart := following.kept_apart:
            return f"round {following.number} is kept apart for what it forgets, {judged(apart)}; someone must decide"
        running = in_use(self.home.root / "lock")
        if following.plan.exists():
            doing = f"round {following.number} is in progress, with {number_of(following.read_plan().clips, 'clip')}"
            return doing if running else f"{doing}, and was interrupted: the same command goes on"
        return "waiting for new clips" if running else "no learner is running"

    def picture(self, key: str) -> bytes:
        """A JPEG: the first stored frame of a clip that it is forgetting."""
        from stella.data.shards import DamagedSampleError, read_head

        try:
            last = self.home.round(self.home.current).ended
            if last is None or key not in {each["clip"] for each in last["worst"]}:
                raise FileNotFoundError
            with (self.home.held / f"{key}.tar").open("rb") as file:
                return read_head(file, 0).read(file, 0)
        except (OSError, StellaError, DamagedSampleError) as error:
            raise HttpError(404, "there is no such clip any more") from error


def _row(record: dict[str, Any]) -> dict[str, Any]:
    from stella.learn.measure import chance_of

    both = {
        name: record[name] and [record[name][key] for key in ("before", "after", "clips")] for name in ("old", "new")
    }
    figures = {key: record[key] for key in ("round", "ended", "gallery", "F", "gap", "matching")}
    pairs = record.get("pairs", 0)  # earlier versions did not count them
    return figures | both | {"chance": chance_of(record), "pairs": pairs}
