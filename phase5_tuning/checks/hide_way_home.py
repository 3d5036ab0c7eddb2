"""Runs an answer on rings of 2 to 5 ranks: gradients, how often each rank sends, and what it computes meanwhile."""

from common.learn.check.require import reject
from phase5_tuning.checks.bring_home import check_result, made, watched
from phase5_tuning.checks.pass_keys import played


def check(answer):
    for ranks in (2, 3, 4, 5):
        inputs = made(ranks)
        played_by = played(watched(answer, inputs), inputs, "(dq, dkv)")
        keys = sum(kv.shape[1] for _, kv, *_ in inputs)
        for rank, _ in played_by:
            if sum(rank.computed) > keys:
                computed = f"rank {rank.number} computes gradients of {sum(rank.computed)} keys"
                reject(f"{ranks} ranks: {computed}, where all ranks have {keys}: each key once")
        for rank, got in played_by:
            check_result(rank, inputs, *got, own_in_halves=True)
        for rank, _ in played_by:
            _check_transfers(rank)
    return "2 to 5 ranks: right, and each rank computes during every transfer"


def _check_transfers(rank):
    what, enough = f"{rank.ranks} ranks", 2 * (rank.ranks - 1)
    if len(rank.sends) > enough:
        reject(
            f"{what}: each rank sends {len(rank.sends)} times, where {enough} are enough: its own terms of dK and dV "
            "need not travel"
        )
    for kind, ends in (("send", rank.sends), ("receive", rank.receives)):
        for number, end in enumerate(ends, 1):
            if not any(end.meanwhile):
                reject(
                    f"{what}: rank {rank.number} computes nothing while {kind} {number} of {len(ends)} is under way. "
                    "Which products need neither what comes nor what has been sent?"
                )
