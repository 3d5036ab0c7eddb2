"""Runs an answer on rings of 2 to 5 ranks: gradients, how often each rank sends, and what it computes meanwhile."""

from common.learn.check.require import reject
from phase5_tuning.checks.bring_home import check_result, made, watched
from phase5_tuning.checks.pass_keys import played


def check(answer):
    for ranks in (2, 3, 4, 5):
        what, inputs = f"{ranks} ranks", [made(rank, ranks) for rank in range(ranks)]
        got, ring = played(what, watched(answer, inputs), inputs, "(dq, dkv)")
        for rank in ring:
            _check_keys(what, rank, sum(kv.shape[1] for _, kv, *_ in inputs))
        for rank, (dq, dkv) in zip(ring, got, strict=True):
            check_result(f"{what}: rank {rank.number}", rank.number, inputs, dq, dkv, own_in_halves=True)
        for rank in ring:
            _check_transfers(what, rank)
    return "2 to 5 ranks: right, and each rank computes during every transfer"


def _check_keys(what, rank, keys):
    if sum(rank.computed) > keys:
        reject(
            f"{what}: rank {rank.number} computes gradients of {sum(rank.computed)} keys, where all ranks have "
            f"{keys}: each key once"
        )


def _check_transfers(what, rank):
    enough = 2 * (rank.ranks - 1)
    if len(rank.sends) > enough:
        reject(
            f"{what}: each rank sends {len(rank.sends)} times, where {enough} are enough: its own terms of dK and dV "
            "need not travel"
        )
    for kind, ends in (("send", rank.sends), ("receive", rank.receives)):
        for number, end in enumerate(ends, 1):
            if not any(keys for keys in end.meanwhile):
                reject(
                    f"{what}: rank {rank.number} computes nothing while {kind} {number} of {len(ends)} is under way. "
                    "Which products need neither what comes nor what has been sent?"
                )
