"""Batches of streams, compared."""

import json
from typing import Any

import torch

from stella.clip import Batch
from stella.data.stream import Stream, StreamConfig


def same(ours: Any, theirs: Any, sound: float = 0.0) -> bool:
    """Whether two sequences of batches are equal, their sound up to an error."""
    ours, theirs = list(ours), list(theirs)
    return len(ours) == len(theirs) and all(
        a.video.dtype == b.video.dtype
        and torch.equal(a.video, b.video)
        and torch.equal(a.ids, b.ids)
        and torch.allclose(a.audio, b.audio, rtol=0, atol=sound)
        for a, b in zip(ours, theirs, strict=True)
    )


def ids(batches: list[Batch]) -> list[list[int]]:
    return [batch.ids.tolist() for batch in batches]


def check_it_resumes_at_every_batch(tasks: Any, config: StreamConfig) -> list[Batch]:
    """Continue from the state after each batch; returns all batches."""
    stream = Stream(tasks, config)
    states, batches = [stream.state_dict()], []
    for batch in stream:
        batches.append(batch)
        states.append(json.loads(json.dumps(stream.state_dict())))
    for done, state in enumerate(states):
        again = Stream(tasks, config)
        again.load_state_dict(state)
        assert again.position.batches == done
        assert same(again, batches[done:]), done
        assert again.state_dict() == states[-1]
    return batches
