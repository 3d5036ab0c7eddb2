"""Runs an answer on rings of 1 to 5 ranks: gradients, deadlocks, races, and what travels meanwhile."""

from common.learn.check.require import reject, require
from phase5_tuning.checks import pass_keys
from phase5_tuning.checks.pass_keys import played, require_meanwhile
from phase5_tuning.ring import model as ring_model

import torch


def check(answer):
    for ranks in (2, 1, 3, 4, 5):
        inputs = [made(rank, ranks) for rank in range(ranks)]
        got, ring = played(f"{ranks} ranks", watched(answer, inputs), inputs, "(dq, dkv)")
        for rank, (dq, dkv) in zip(ring, got, strict=True):
            check_result(f"{ranks} ranks: rank {rank.number}", rank.number, inputs, dq, dkv)
        for rank in ring:
            require_meanwhile(ranks, rank, "gradients", "the keys")
            require_meanwhile(ranks, rank, "gradients", "the sums", kinds=2, first=1)
            if len(rank.sends) > 2 * ranks - 1:
                reject(
                    f"{ranks} ranks: each rank sends {len(rank.sends)} times. {2 * ranks - 1} are enough: in the last "
                    "step nobody needs its keys any more"
                )
    return "1 to 5 ranks: right, nobody waits for ever, keys and sums travel while ranks compute"


def made(number, ranks):
    q, kv, do = pass_keys.made(number)
    everybody = torch.cat([pass_keys.made(other)[1] for other in range(ranks)], dim=1)
    return q, kv, *ring_model.Rank(None, 0, 1).attend(q, everybody), do


def watched(answer, inputs):
    """The answer as a program; rejects products with keys and values that are nobody's."""
    everybody = torch.cat([kv for _, kv, *_ in inputs], dim=1)

    def program(rank, of):
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


def check_result(what, number, inputs, dq, dkv, own_in_halves=False):
    """own_in_halves: the rank attends to its own keys in two parts, whose terms may be missing."""
    gradients = ring_model.Rank(None, 0, 1).gradients

    def terms(query, keys):
        q, _, o, lse, do = inputs[query]
        return gradients(q, inputs[keys][1], o, lse, do)

    ranks = range(len(inputs))
    of_queries = [terms(number, keys)[0] for keys in ranks]
    sums = [sum(terms(query, keys)[1] for query in ranks) for keys in ranks]
    dq_mistakes, mistakes = {}, {}
    if len(inputs) > 1:
        after = (number + 1) % len(inputs)
        q, _, o, _, do = inputs[number]
        alone = [(kv, *ring_model.Rank(None, 0, 1).attend(q, kv)) for _, kv, *_ in inputs]
        dq_mistakes["the weights must be those of the whole row: use the lse that was given"] = sum(
            gradients(q, kv, o, lse, do)[0] for kv, _, lse in alone
        )
        dq_mistakes["delta and the weights belong to the whole row: use the o and lse given"] = sum(
            gradients(q, kv, *part, do)[0] for kv, *part in alone
        )
        dq_mistakes["this is the term of its own keys alone"] = of_queries[number]
        dq_mistakes["these are its own keys in every step: kv must become what came"] = len(inputs) * of_queries[number]
        dq_mistakes["this is the term of the last step alone: add the terms up"] = of_queries[after]
        mistakes[f"these are the gradients of rank {after}'s keys: the sums need one move more than the keys"] = sums[
            after
        ]
        mistakes["a rank has added up its own terms, of all keys: the sum must go where its keys go"] = sum(
            terms((number - 1) % len(inputs), keys)[1] for keys in ranks
        )
        mistakes["these are the rank's own terms, of all keys: the sum must go where its keys go"] = sum(
            terms(number, keys)[1] for keys in ranks
        )
        if own_in_halves:
            half = inputs[number][1].shape[1] // 2
            own = terms(number, number)[1]
            first, second = own[:, :half], own[:, half:]
            mistakes["the terms of the two halves of its own keys are exchanged"] = (
                sums[number] - own + torch.cat((second, first), dim=1)
            )
            for which, part in dict(first=slice(0, half), second=slice(half, None)).items():
                missing = gradients(q, inputs[number][1][:, part], *inputs[number][2:])[0]
                dq_mistakes[f"the term of the {which} half of its own keys is missing"] = sum(of_queries) - missing
            mistakes["the terms of the rank's own queries are missing: add them to what comes home"] = (
                sums[number] - own
            )
            if len(inputs) > 2:
                mistakes["what comes home is one rank's term: each rank must add its term to the sum that comes"] = (
                    own + terms((number - 1) % len(inputs), number)[1]
                )
    require(f"{what}: dq", dq, sum(of_queries), mistakes=dq_mistakes, rtol=1e-4, atol=1e-4)
    single = [terms(query, number)[1] for query in ranks]
    alike = isinstance(dkv, torch.Tensor) and dkv.shape == sums[number].shape
    signs = {
        "this is one rank's term: add it to the sum that comes": alike
        and any(torch.allclose(dkv, term, rtol=1e-4, atol=1e-4) for term in single)
    }
    close = dict(rtol=1e-4, atol=1e-4)
    require(f"{what}: dkv", dkv, sums[number], mistakes=mistakes, signs=signs, **close)
