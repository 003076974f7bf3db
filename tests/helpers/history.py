"""Learners with a history that was never trained."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stella.learn.home import Home, Settings


def record(number: int) -> dict[str, Any]:
    """As earlier versions wrote it and left it: with the levels of all rounds."""
    level = {"before": 50.123456789, "after": 51.123456789, "clips": 3, "level": 60.123456789, "best": 61.123456789}
    figures = {"clips": 54, "before": 50.0, "after": 49.0, "error": 1.0}
    return {
        "round": number,
        "began": "2026-08-01T00:00:00+00:00",
        "ended": "2026-08-01T00:09:00+00:00",
        "epochs": 1,
        "clips": 475,
        "learnt": 470,
        "set_aside": 25,
        "sources": {"/in": 475},
        "skipped": {},
        "gallery": 80,
        "old": figures,
        "new": figures,
        "F": 2.0,
        "gap": 0.5,
        "matching": 59.4,
        "rounds": {str(each): level for each in range(1, number + 1)},
        "memory": {"rounds": [1] * number, "sources": {"/in": number}, "distinct": number},
        "worst": [{"clip": f"{number:024x}", "id": "/in/film.mp4", "round": 1, "before": 1.5, "after": 7.5}],
        "guard": None,
        "kept_apart": False,
        "seconds": {"all": 12.0},
    }


def write(home: Home, told: dict[str, Any]) -> None:
    folder = home.round(told["round"])
    folder.root.mkdir(parents=True)
    folder.record.write_text(json.dumps(told, indent=2))


def made(root: Path, records: Sequence[dict[str, Any]]) -> Home:
    """A learner after these rounds, the last of them in use."""
    home = Home(root)
    for told in records:
        write(home, told)
    home.file.write_text(json.dumps({"version": 1, "settings": asdict(Settings())}))
    home.link(records[-1]["round"])
    return home
