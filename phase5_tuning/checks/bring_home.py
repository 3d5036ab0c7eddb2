"""Runs an answer on rings of 1 to 5 ranks: gradients, deadlocks, races, and what travels meanwhile."""

from common.learn.check.require import reject, require
from phase5_tuning.checks import pass_keys
from phase5_tuning.checks.pass_keys import ALONE, RINGS, played, require_meanwhile

import torch


def check(answer):
    for ranks in RINGS:
        inputs = made(ranks)
        played_by = played(watched(answer, inputs), inputs, "(dq, dkv)")
        for rank, got in played_by:
            check_result(rank, inputs, *got)
        for rank, _ in played_by:
            if ranks > 1 and len(rank.sends) < 2 * ranks - 1:  # one rank alone may keep its sum
                reject(
                    f"{ranks} ranks: each rank sends {len(rank.sends)} times. The gradients are right, and they "
                    "answer exercise 5.26. Here a rank's own terms of dK and dV travel with the others': it sends "
                    f"{2 * ranks - 1} times"
                )
            require_meanwhile(rank, "the keys")
            require_meanwhile(rank, "the sums", kinds=2, first=1)
            if len(rank.sends) > 2 * ranks - 1:
                reject(
                    f"{ranks} ranks: each rank sends {len(rank.sends)} times. {2 * ranks - 1} are enough: in the last "
                    "step nobody needs its keys any more"
                )
    return "1 to 5 ranks: right, nobody waits for ever, keys and sums travel while ranks compute"


def made(ranks):
    """q, kv, o, lse, do of each rank."""
    everybody = [pass_keys.made(rank) for rank in range(ranks)]
    whole = torch.cat([kv for _, kv, _ in everybody], dim=1)
    return [(q, kv, *ALONE.attend(q, whole), do) for q, kv, do in everybody]


def watched(answer, inputs):
    """The answer as a program; rejects products with keys and values that are nobody's."""
    everybody = torch.cat([kv for _, kv, *_ in inputs], dim=1)

    def program(rank, *of):
        gradients = rank.gradients

        def with_somebodys_keys(q, kv, *rest):
            if not (kv[:, :, None] == everybody[:, None]).all(-1).all(0).any(-1).all():
                reject(
                    f"{rank.ranks} ranks: rank {rank.number} computes with keys and values that no rank has. Its n-th "
                    "receive brings the n-th send of the rank before: are keys and sums received in the order in "
                    "which they are sent?"
                )
            return gradients(q, kv, *rest)

        rank.gradients = with_somebodys_keys
        return answer.backward(rank, *of)

    return program


def check_result(rank, inputs, dq, dkv, own_in_halves=False):
    """own_in_halves: the rank attends to its own keys in two parts, whose terms may be missing."""
    number, ranks = rank.number, len(inputs)
    what, before, after = f"{ranks} ranks: rank {number}", (number - 1) % ranks, (number + 1) % ranks
    # The terms of each rank's queries and each rank's keys.
    terms = [[ALONE.gradients(q, kv, *rest) for _, kv, *_ in inputs] for q, _, *rest in inputs]
    of_queries = [dq_term for dq_term, _ in terms[number]]
    of_keys = [sum(of[keys][1] for of in terms) for keys in range(ranks)]
    of_before, of_own = (sum(dkv_term for _, dkv_term in terms[queries]) for queries in (before, number))
    q, kv, o, lse, do = inputs[number]
    alone = [(each, *ALONE.attend(q, each)) for _, each, *_ in inputs]
    part_of_lse = sum(ALONE.gradients(q, each, o, part, do)[0] for each, _, part in alone)
    part_of_row = sum(ALONE.gradients(q, *part, do)[0] for part in alone)
    dq_mistakes = {
        "the weights must be those of the whole row: use the lse that was given": part_of_lse,
        "delta and the weights belong to the whole row: use the o and lse given": part_of_row,
        "this is the term of its own keys alone": of_queries[number],
        "these are its own keys in every step: kv must become what came": ranks * of_queries[number],
        "this is the term of the last step alone: add the terms up": of_queries[after],
    }
    short = f"these are the gradients of rank {after}'s keys: the sums need one transfer more than the keys"
    mistakes = {
        short: of_keys[after],
        "a rank has added up its own terms, of all keys: the sum must go where its keys go": of_before,
        "these are the rank's own terms, of all keys: the sum must go where its keys go": of_own,
    }
    if own_in_halves:
        half = kv.shape[1] // 2
        own, rest = terms[number][number][1], of_keys[number] - terms[number][number][1]
        for which, part in dict(first=slice(0, half), second=slice(half, None)).items():
            missing = ALONE.gradients(q, kv[:, part], o, lse, do)[0]
            dq_mistakes[f"the term of the {which} half of its own keys is missing"] = sum(of_queries) - missing
            again = ALONE.gradients(q, inputs[after][1][:, part], o, lse, do)[0]
            came_last = f"the {which} half of rank {after}'s keys, which came last, was taken in place of its own"
            dq_mistakes[came_last] = sum(of_queries) - missing + again
        one_term = own + terms[before][number][1]
        mistakes |= {
            "the terms of the two halves of its own keys are exchanged": rest + own.roll(-half, dims=1),
            "the terms of the rank's own queries are missing: add them to what comes home": rest,
            "what comes home is one rank's term: each rank must add its term to the sum that comes": one_term,
        }
    require(f"{what}: dq", dq, sum(of_queries), mistakes=dq_mistakes)
    alike = isinstance(dkv, torch.Tensor) and dkv.shape == of_keys[number].shape
    single = alike and any(torch.allclose(dkv, of[number][1], rtol=1e-4, atol=1e-4) for of in terms)
    signs = {"this is one rank's term: add it to the sum that comes": single}
    require(f"{what}: dkv", dkv, of_keys[number], mistakes=mistakes, signs=signs)
