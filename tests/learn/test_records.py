"""The history of a learner stays small and quick to read, however many rounds it has."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.history import made, record, write
from helpers.learning import copy, packed, quiet, state
from helpers.small import same

from stella.learn import home as home_module
from stella.learn import records
from stella.learn.home import Home, Settings
from stella.learn.loop import learn, rollback
from stella.learn.page import render
from stella.learn.records import own_part
from stella.serve.answers import HttpError
from stella.serve.learner import Attached
from stella.serve.served import Served

ROUNDS = 300


@pytest.fixture
def many(tmp_path: Path) -> Home:
    """A learner of an earlier version, after some hundred rounds."""
    home = made(tmp_path / "home", [record(number) for number in range(1, ROUNDS + 1)])
    for number in range(1, ROUNDS + 1):
        home.round(number).before.touch()
    return home


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often the record of each round was read."""
    counts: Counter[int] = Counter()
    plain = records.read_json

    def read(path: Path, *more: Any) -> Any:
        if path.name == "round.json":
            counts[int(path.parent.name)] += 1
        return plain(path, *more)

    for module in (records, home_module):
        monkeypatch.setattr(module, "read_json", read)
    return counts


def size(home: Home) -> int:
    return sum(path.stat().st_size for path in home.root.glob("rounds/*/*"))


def test_records_of_rounds_that_one_cannot_go_back_to_keep_their_own_part(many: Home) -> None:
    before, history = size(many), many.history()
    many.use(ROUNDS)
    assert size(many) < 2_000 * ROUNDS + 150_000 < before / 5 and not list(many.root.rglob("before.pt"))
    whole = [len(many.round(number).ended["rounds"]) for number in range(1, ROUNDS + 1)]  # type: ignore[index]
    assert whole == [1] * (ROUNDS - 3) + [ROUNDS - 2, ROUNDS - 1, ROUNDS]
    assert many.history() == history == [*(own_part(record(n)) for n in range(1, ROUNDS)), record(ROUNDS)]
    assert list(history[6]["rounds"]) == ["7"] and history[6]["memory"] == {"sources": {"/in": 7}, "distinct": 7}
    written = many.round(1).record.stat().st_mtime_ns
    many.use(ROUNDS)
    assert many.round(1).record.stat().st_mtime_ns == written


def test_a_record_is_read_once_and_again_after_a_rollback(many: Home, reads: Counter[int]) -> None:
    render(many)
    many.history()
    assert reads == Counter(range(1, ROUNDS)) + Counter({ROUNDS: 2})  # the last as a whole
    for number in (ROUNDS, ROUNDS - 1):
        many.round(number).root.rename(many.root / str(number))
    write(many, record(ROUNDS - 1))
    changed = record(ROUNDS - 1) | {"learnt": 1}
    many.round(ROUNDS - 1).record.write_text(json.dumps(changed))
    write(many, record(ROUNDS))
    assert many.history() == [*(own_part(record(n)) for n in range(1, ROUNDS - 1)), own_part(changed), record(ROUNDS)]
    assert reads[ROUNDS - 1] == 2 and reads[1] == 1
    many.link(ROUNDS - 2)
    assert many.history()[-1] == record(ROUNDS - 2)


def test_a_page_that_is_served_reads_new_records_alone_and_a_picture_one(many: Home, reads: Counter[int]) -> None:
    learner = Attached(str(many.root))
    tree = learner.tree()
    assert (tree["round"], tree["clips"], len(tree["memory"]["rounds"])) == (ROUNDS, 470 * ROUNDS, ROUNDS)
    write(many, record(ROUNDS + 1))
    many.link(ROUNDS + 1)
    reads.clear()
    assert learner.tree()["clips"] == 470 * (ROUNDS + 1)
    assert set(reads) == {ROUNDS, ROUNDS + 1}
    reads.clear()
    with pytest.raises(HttpError, match="no such clip"):
        learner.picture(learner.tree()["forgetting"][0]["key"])
    assert reads == Counter({ROUNDS + 1: 2})  # one for the name


def test_the_learner_behind_an_index_is_kept_between_requests(many: Home) -> None:
    served = object.__new__(Served)
    served.versions, served._learner = SimpleNamespace(home=lambda: str(many.root)), None  # type: ignore[assignment]
    assert served.learner() is served.learner()


def test_a_learner_goes_on_and_back_with_short_records(three: Path, tmp_path: Path) -> None:
    """Levels of all rounds go on from the last record, also after a rollback."""
    home, more = copy(three, tmp_path / "home"), packed(tmp_path / "more", (8, 9), first=3)
    learn(home, more[:1], None, Settings(share=0.2, keep=2), console=quiet())
    fourth = Home(home).history()[-1]
    done = learn(home, more, console=quiet())
    whole, last = state(home), Home(home).history()[-1]
    assert done.rounds == [own_part(last)] and {"2", "3"} <= last["rounds"].keys() >= fourth["rounds"].keys()
    assert Home(home).round(4).ended == fourth and Home(home).round(3).ended == own_part(Home(three).history()[-1])
    rollback(home, 4, quiet())
    learn(home, more, console=quiet())
    assert same(state(home), whole) and not list(home.glob("rounds/*/before.pt"))
