"""Checks that chunks are shared out once, in order, and that the work is equal, for 1 to 9 ranks."""

from common.learn.check.require import reject


def check(answer):
    for ranks in range(1, 10):
        held = [_pair(answer, rank, ranks) for rank in range(ranks)]
        given = f"W = {ranks}: the ranks hold {held}"
        every = sorted(chunk for pair in held for chunk in pair)
        if every != list(range(2 * ranks)):
            reject(f"{given}: each of the chunks 0 to {2 * ranks - 1} must be there exactly once")
        for rank, (early, late) in enumerate(held):
            if early >= late:
                reject(f"{given}: rank {rank}: its first chunk must come before its second")
        work = [early + late + 1 for early, late in held]
        if len(set(work)) > 1:
            reject(f"{given}: their work is {work}, in units of a chunk by a chunk{_cause(held, ranks)}")
    return "1 to 9 ranks: every chunk once, all with the same work"


def _pair(answer, rank, ranks):
    got = answer.chunks_of(rank, ranks)
    if not (isinstance(got, tuple) and len(got) == 2 and all(type(i) is int for i in got)):
        reject(f"chunks_of({rank}, {ranks}): expected a pair of ints, got {got!r}")
    return got


def _cause(held, ranks):
    if held == [(2 * rank, 2 * rank + 1) for rank in range(ranks)]:
        return ". Neighbors go together here, so the last rank holds the two that see most"
    if held == [(rank, rank + ranks) for rank in range(ranks)]:
        return ". Both chunks of a rank get later with its number; one should get earlier"
    return ". A late chunk must go with an early one: which sum must each pair have?"
