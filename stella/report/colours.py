"""Every method has a colour of its own, the same on every page and in every picture."""

from collections.abc import Sequence

from stella.report.svg import SERIES

LIGHT = (  # the series' colours in files; page.css has the same, and others for dark screens
    *("#0072b2", "#d55e00", "#00865f", "#a83e86", "#b07c00", "#3d9bd6", "#6b6b6b", "#7a4fbf"),
    *("#c2185b", "#4f7d00", "#a0522d", "#d83fd8", "#3f51b5", "#e0483e", "#5d7083", "#b5651d"),
)
OF_METHOD = {
    "finetune": 6,
    "er": 4,
    "mir": 10,
    "derpp": 1,
    "gmed": 9,
    "cls_er": 3,
    "lump": 11,
    "esmer": 5,
    "random": 14,
    "mats": 15,
    "stella": 0,
    "stella_plus": 2,
    "chorus": 7,
    "multitask": 12,
    "initial": 8,
    "matching": 13,
}


SPARE = (8, 12, 13, 15, 14)  # of what is seldom drawn beside others; the rest follow


def colours(methods: Sequence[str]) -> list[int]:
    """A number of a colour for each; the first of a method has its own, a second or unknown one takes a free one."""
    found: list[int] = []
    taken = {OF_METHOD.get(name) for name in methods}
    spare = [number for number in dict.fromkeys((*SPARE, *range(len(SERIES)))) if number not in taken]
    for place, name in enumerate(methods):
        own = OF_METHOD.get(name)
        if own is None or own in found:
            own = spare.pop(0) if spare else place % len(SERIES)
        found.append(own)
    return found
