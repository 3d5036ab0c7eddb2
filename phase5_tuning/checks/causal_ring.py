"""Runs an answer on causal rings of 1 to 5 ranks: results, work of each step, and what travels meanwhile."""

from common.learn.check.require import reject
from phase1_softmax.checks import attention
from phase5_tuning.checks import require_o_lse
from phase5_tuning.checks.pass_keys import RINGS, check_moves_of_keys, played

import torch

ROWS = 3  # of a chunk


def check(answer):
    for ranks in RINGS:
        q, k, v = torch.randn(3, 2 * ranks * ROWS, 4, generator=torch.Generator().manual_seed(ranks))
        kv = torch.stack((k, v))
        rows = [_rows(rank, ranks) for rank in range(ranks)]
        played_by = played(answer.forward, [(q[of], kv[:, of]) for of in rows], "(o, lse)")
        for rank, got in played_by:
            _check_result(rank.number, rows, q, kv, got)
        for rank, _ in played_by:
            _check_work(rank)
            check_moves_of_keys([rank])
    return "1 to 5 ranks: right, every step has the same work, keys travel while ranks attend"


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
            f"{sum(expected)} pairs are enough: which of them see nothing, or are computed twice?"
        )


def _attended(q, kv, times):
    """(o, lse) where query i sees key j times[i, j] times."""
    return attention(q @ kv[0].T / q.shape[1] ** 0.5 + times.float().log(), kv[1])


def _check_result(number, rows, q, kv, got):
    ranks, mine = len(rows), rows[number]
    keys = torch.arange(len(q))
    truth = (mine[:, None] >= keys).int()
    every, early, late = slice(None), slice(0, ROWS), slice(ROWS, None)

    def holds(step):
        return (number - step) % ranks

    def seen(whose=holds, before=(every, early), after=(late, every), own=True, others=False, moves=True, merged=True):
        """How often each query sees each key if the keys of a step are taken for those of rank `whose(step)`.

        before, after: (queries, keys) that meet, of a rank before and of a rank after. own, others: these keys are
        masked. moves: the keys move on. merged: a part is merged into the result, and does not replace it.
        """
        times = torch.zeros(len(mine), len(q), dtype=torch.int)
        for step in range(ranks):
            block = torch.zeros(len(mine), len(mine), dtype=torch.int)
            is_own = whose(step) == number
            queries, far = (every, every) if is_own else before if whose(step) < number else after
            part = block[queries, far]
            part += 1
            if own if is_own else others:
                part.copy_(part.tril())
            if not merged:
                times[queries] = 0
            times[:, rows[holds(step * moves)]] += block
        return times

    alone = torch.zeros(len(mine), len(q), dtype=torch.int)
    alone[:, mine] = torch.ones(len(mine), len(mine), dtype=torch.int).tril()
    unseen = alone | ~torch.isin(keys, mine)[None, :]
    share = len(mine) // ranks
    shares = dict(before=(every, slice(0, share)), after=(slice(share, None), every))
    turned, exchanged = seen(lambda step: holds(-step)), seen(lambda step: 2 * number - holds(step))
    by_early = seen(before=(early, early))
    by_late, early_alone, late_alone = seen(before=(late, early)), seen(after=(late, early)), seen(after=(late, late))
    counts = {
        "these are its own keys alone: what else do its queries see, and does the merge change o and lse "
        "themselves?": alone,
        "there is no mask": torch.ones_like(alone),
        "all keys of other ranks are seen": unseen,
        "in step 1 these are taken for the keys of the rank after: what arrives comes from the rank before": turned,
        "the keys of a rank after are taken for those of a rank before: can the number of a rank be negative, and are "
        "the two cases the right way round?": seen(lambda step: number - step),
        "the two cases are exchanged: which rank has an early chunk that is before both of yours?": exchanged,
        "its own keys need the mask": seen(own=False),
        "only its own keys need a mask; here those of other ranks have one too": seen(others=True),
        "of a rank before, the late keys are seen here: are they before these queries?": seen(before=(every, late)),
        "of a rank before, here only the late queries see the early keys: are these after the early queries?": by_late,
        "of a rank before, here only the early queries see the early keys: are these after the late queries?": by_early,
        "the early queries see the keys of a rank after here: are these before them?": seen(after=(early, every)),
        "of a rank after, here the late queries see the early chunk alone: is the late one after them?": early_alone,
        "of a rank after, here the late queries see the late chunk alone: is the early one after them?": late_alone,
        "a chunk has half of the rank's rows, on any number of ranks": seen(**shares),
        "its own keys are attended to in every step: kv must become what came": seen(moves=False),
        "a part replaces the result so far: merge it": seen(merged=False),
    }
    mistakes = {s: _attended(q[mine], kv, n) for s, n in counts.items() if not torch.equal(n, truth)}
    require_o_lse(f"{ranks} ranks: rank {number}", got, _attended(q[mine], kv, truth), mistakes)
