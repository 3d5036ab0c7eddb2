"""Runs an answer on causal rings of 1 to 5 ranks: results, work of each step, and what travels meanwhile."""

from common.learn.check.require import reject, require
from phase5_tuning.checks.pass_keys import check_sends, played, require_meanwhile

import torch

ROWS = 3  # of a chunk


def check(answer):
    for ranks in (2, 1, 3, 4, 5):
        q, kv = _whole(ranks)
        rows = [_rows(rank, ranks) for rank in range(ranks)]
        inputs = [(q[of], kv[:, of]) for of in rows]
        got, ring = played(f"{ranks} ranks", lambda rank, of: answer.forward(rank, *of), inputs, "(o, lse)")
        for rank, (o, lse) in zip(ring, got, strict=True):
            _check_result(ranks, rank.number, rows, q, kv, o, lse)
        for rank in ring:
            _check_work(rank)
            require_meanwhile(ranks, rank, "attend", "the keys")
            check_sends(rank)
    return "1 to 5 ranks: right, every step has the same work, keys travel while ranks attend"


def _whole(ranks):
    generator = torch.Generator().manual_seed(ranks)
    q, k, v = torch.randn(3, 2 * ranks * ROWS, 4, generator=generator)
    return q, torch.stack((k, v))


def _rows(rank, ranks):
    chunks = torch.arange(2 * ranks * ROWS).split(ROWS)
    return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]))


def _check_work(rank):
    pairs = [queries * keys for queries, keys in rank.attended]
    expected = [4 * ROWS**2] + [2 * ROWS**2] * (rank.ranks - 1)
    if sum(pairs) > sum(expected):
        said = ", ".join(f"{queries} x {keys}" for queries, keys in rank.attended)
        reject(
            f"{rank.ranks} ranks: rank {rank.number} attends with {said} rows (queries x keys), where "
            f"{sum(expected)} pairs are enough: are there chunks among them that see nothing?"
        )


def _attended(q, kv, times):
    """(o, lse) where query i sees key j times[i, j] times."""
    s = q @ kv[0].T / q.shape[1] ** 0.5 + times.float().log()
    lse = torch.logsumexp(s, 1)
    shift = lse.masked_fill(lse.isinf(), 0.0)
    return torch.exp(s - shift[:, None]) @ kv[1], lse


def _check_result(ranks, number, rows, q, kv, o, lse):
    what, mine = f"{ranks} ranks: rank {number}", rows[number]
    keys = torch.arange(len(q))
    truth = (mine[:, None] >= keys).int()
    right = _attended(q[mine], kv, truth)

    every, early, late = slice(None), slice(0, ROWS), slice(ROWS, None)
    cut = len(mine) // ranks

    def seen(
        source_of=lambda step: (number - step) % ranks,
        before=(every, early),
        after=(late, every),
        own_mask=True,
        masked=False,
        moves=True,
        merged=True,
    ):
        """How often each query sees each key if the keys of a step are taken for those of `source_of(step)`.

        before, after: (queries, keys) that meet, of a rank before and of a rank after. masked: other ranks' keys are
        masked too. moves: the keys move on. merged: a part is merged into the result, and does not replace it.
        """
        times = torch.zeros(len(mine), len(q), dtype=torch.int)
        for step in range(ranks):
            here, believed = (number - step * moves) % ranks, source_of(step)
            block = torch.zeros(len(mine), len(mine), dtype=torch.int)
            queries, far = before if believed < number else after
            if believed == number:
                queries = far = every
            part = block[queries, far]
            part += 1
            if own_mask if believed == number else masked:
                part.copy_(part.tril())
            if not merged:
                times[queries] = 0
            times[:, rows[here]] += block
        return times

    own = torch.zeros(len(mine), len(q), dtype=torch.int)
    own[:, mine] = torch.ones(len(mine), len(mine), dtype=torch.int).tril()
    counts = {
        "these are its own keys alone: what else do its queries see, and does the merge change o and lse "
        "themselves?": own,
        "there is no mask": torch.ones(len(mine), len(q), dtype=torch.int),
        "all keys of other ranks are seen": own | ~torch.isin(keys, mine)[None, :],
        "the keys of a step are those of rank (number - step) % ranks: they have come from the rank before": seen(
            lambda step: (number + step) % ranks
        ),
        "the keys of a rank after are taken for those of a rank before: is number - step taken % ranks, and are the "
        "two cases the right way round?": seen(lambda step: number - step),
        "the two cases are exchanged: a rank before has smaller numbers, source < number": seen(
            lambda step: 2 * number - (number - step) % ranks
        ),
        "its own keys need the mask": seen(own_mask=False),
        "only its own keys need a mask; here those of other ranks have one too": seen(masked=True),
        "of a rank before, the late keys are seen here: are they before these queries?": seen(before=(every, late)),
        "the early keys of a rank before are before all queries; here only the late queries see them": seen(
            before=(late, early)
        ),
        "the early queries see the keys of a rank after here: are these before them?": seen(after=(early, every)),
        "both chunks of a rank after are before the late queries; here these see the early one alone": seen(
            after=(late, early)
        ),
        "both chunks of a rank after are before the late queries; here these see the late one alone": seen(
            after=(late, late)
        ),
        "a chunk has half of the rank's rows, on any number of ranks": seen(
            before=(every, slice(0, cut)), after=(slice(cut, None), every)
        ),
        "its own keys are attended to in every step: kv must become what came": seen(moves=False),
        "a part replaces the result so far: merge it": seen(merged=False),
    }
    wrong = {s: _attended(q[mine], kv, n) for s, n in counts.items() if not torch.equal(n, truth)}
    for i, name, got in ((1, "lse", lse), (0, "o", o)):
        mistakes = {sentence: of[i] for sentence, of in wrong.items()}
        require(f"{what}: {name}", got, right[i], mistakes=mistakes, rtol=1e-4, atol=1e-4)
