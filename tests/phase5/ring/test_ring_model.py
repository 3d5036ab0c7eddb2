"""The ring of threads: what arrives, and the deadlocks and races that it names."""

import threading

from common import make_qkv, verify_results
from common.verify.reference import naive_attention, naive_attention_backward
from phase5_tuning.bench.ring import sent_bytes
from phase5_tuning.ring.attention import merge_
from phase5_tuning.ring.model import BETWEEN, HOST, WAYS, Deadlock, Given, Race, efficiency, run, times_computed

import pytest
import torch

RINGS = pytest.mark.parametrize("ranks", [1, 2, 3, 7])


def numbers(ranks):
    return [torch.tensor(float(rank)) for rank in range(ranks)]


def pass_on(rank, x):
    sending, coming = rank.send(x), rank.receive()
    sending.wait()
    return coming.wait()


@RINGS
def test_a_message_goes_to_the_next_rank(ranks):
    assert [int(x) for x in run(pass_on, numbers(ranks))] == [(r - 1) % ranks for r in range(ranks)]


@RINGS
def test_messages_arrive_in_the_order_in_which_they_were_sent(ranks):
    def two(rank, x):
        transfers = rank.receive(), rank.receive(), rank.send(x), rank.send(x + 10)
        second, first, *_ = (transfer.wait() for transfer in transfers[1::-1] + transfers[2:])
        return first, second

    assert run(two, numbers(ranks))[0] == (ranks - 1, ranks + 9)


@RINGS
def test_who_sends_first_waits_for_ever(ranks):
    def send_first(rank, x):
        rank.send(x).wait()
        return rank.receive().wait()

    every = "; ".join(f"rank {rank} waits for its send 1" for rank in range(ranks))
    with pytest.raises(Deadlock, match=f"^{every}$"):
        run(send_first, numbers(ranks))


def test_a_rank_that_takes_no_part_leaves_its_neighbors_waiting():
    with pytest.raises(Deadlock, match=r"^rank 0 waits for its send 1; rank 2 waits for its receive 1$"):
        run(lambda rank, x: x if rank.number == 1 else pass_on(rank, x), numbers(3))


def test_who_waits_for_a_rank_that_has_ended_is_told():
    """Rank 1 ends when rank 0 waits already: nobody else is left to see that this is for ever."""

    def one_message_too_few(rank, x):
        if rank.number == 1:
            rank.send(x)
        rank.receive().wait()  # of rank 1: given when rank 0 begins to wait anew
        if rank.number == 0:
            rank.send(x)
            rank.receive().wait()

    said = []

    def tried():
        try:
            run(one_message_too_few, numbers(2))
        except Deadlock as error:
            said.append(str(error))

    thread = threading.Thread(target=tried, daemon=True)
    thread.start()
    thread.join(20)
    assert said == ["rank 0 waits for its receive 2"]


def test_an_error_of_a_rank_comes_before_the_deadlock_that_follows():
    def fails(rank, x):
        if rank.number == 1:
            raise ValueError("it failed")
        return pass_on(rank, x)

    with pytest.raises(ValueError, match="it failed"):
        run(fails, numbers(3))


@RINGS
def test_a_tensor_must_not_change_while_it_is_sent(ranks):
    def too_early(rank, x):
        sending, coming = rank.send(x), rank.receive()
        x += coming.wait()
        sending.wait()

    def in_time(rank, x):
        total = pass_on(rank, x)
        x += total
        return x

    with pytest.raises(Race, match="changed the tensor of its send 1 before it had waited"):
        run(too_early, numbers(ranks))
    assert run(in_time, numbers(ranks))[0] == (ranks - 1) % ranks


def test_ranks_compute_what_one_alone_computes():
    q, k, v, do = torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(0)).double()
    ranks = []

    def both(rank, _):
        halves = [rank.attend(q, torch.stack((k[rows], v[rows]))) for rows in (slice(4), slice(4, 6))]
        merge_(*halves[0], *halves[1])
        return *halves[0], *rank.gradients(q, torch.stack((k, v)), *halves[0], do)

    o, lse, dq, dkv = run(both, [None], ranks)[0]
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    s = q @ k.T / 3**0.5
    torch.testing.assert_close((o, lse), (torch.softmax(s, 1) @ v, torch.logsumexp(s, 1)))
    grads = torch.autograd.grad(torch.softmax(s, 1) @ v, (q, k, v), do)
    torch.testing.assert_close((dq, *dkv), grads)
    assert ranks[0].log == [("computed", "attend")] * 2 + [("computed", "gradients")]


@pytest.mark.parametrize("wrong", [None, "dq", "dk", "dv"])
def test_what_is_given_is_verified_as_it_is(wrong):
    q, k, v = make_qkv(1, 2, 8, 16)
    do = torch.randn_like(q)
    o, *_ = naive_attention(q, k, v)
    grads = dict(zip(("dq", "dk", "dv"), naive_attention_backward(q, k, v, do), strict=True))
    if wrong:
        grads[wrong] = grads[wrong] * 1.01

    def attention(q, k, v, **_):
        return Given.apply(q, k, v, o, *grads.values())

    report = verify_results(attention, q, k, v, do=do)
    assert [result.name for result in report.results if not result.passed] == ([wrong] if wrong else [])


@RINGS
def test_a_causal_ring_computes_each_pair_once_if_it_knows_whose_keys_it_holds(ranks):
    once, work = times_computed(ranks, 4, lambda rank, step: (rank - step) % ranks)
    assert once
    assert len(work) <= 1
    once, _ = times_computed(ranks, 4, lambda rank, step: (rank + step) % ranks)
    assert once == (ranks < 3)


def products(tokens, rate):
    """Seconds of one GPU: 7 N^2 H D operations, with 16 heads of 128."""
    return 7 * tokens**2 * 16 * 128 / rate


@pytest.mark.parametrize("gpus", [2, 8, 16, 64])
def test_gpus_that_compute_at_once_take_as_long_as_their_bytes(gpus):
    link = 1e11 if gpus <= HOST else BETWEEN
    sent = sum(sent_bytes("ring", gpus, 16, 16, 2**20, 128))
    assert products(2**20, 1e30) / (gpus * efficiency("ring", gpus, 2**20, 1e30, 1e11)) == pytest.approx(sent / link)


def test_an_exchange_of_heads_takes_as_long_as_its_bytes_on_the_slower_links():
    for gpus in (2, 8, 16):
        sent = sum(sent_bytes("ulysses", gpus, 16, 16, 2**20, 128))
        took = products(2**20, 1e30) / (gpus * efficiency("ulysses", gpus, 2**20, 1e30, 1e11))
        links = {2: sent / 1e11, 8: sent / 1e11, 16: sent * 8 / 15 / BETWEEN}
        assert took == pytest.approx(links[gpus])


def test_gpus_that_send_at_once_lose_nothing():
    for way, gpus in (("ring", 4), ("ulysses", 8), ("both", 8)):
        assert efficiency(way, gpus, 2**20, 1.0, 1e11) == pytest.approx(1.0)
    assert efficiency("both", 1024, 2**24, 5e14, 1e30) == pytest.approx(1.0)


@pytest.mark.parametrize(("heads_kv", "first"), [(1, 0), (2, 1 / 2), (3, 1 / 3)])
def test_the_heads_computed_beside_the_first_keys_hide_them_if_there_are_enough(heads_kv, first):
    """Two GPUs; a transfer of keys takes as long as a forward step's products: 2.5 of them are the backward's."""
    tokens, rate = 2**16, 5e14
    keys = first_product = 2 * (tokens / 2) ** 2 * 16 * 128 / rate
    link = 4 * tokens / 2 * heads_kv * 128 / keys
    took = products(tokens, rate) / (2 * efficiency("ring", 2, tokens, rate, link, heads_kv=heads_kv))
    first *= 2.5 * first_product
    rest = 2.5 * first_product - first
    assert took == pytest.approx(4.5 * first_product + max(first, keys) + max(rest, 2 * keys))


def test_both_ways_are_each_of_them_where_there_is_nothing_else():
    for gpus in (1, 2, 8):
        assert efficiency("both", gpus, 2**16, 5e14, 3e11) == efficiency("ulysses", gpus, 2**16, 5e14, 3e11)
    assert efficiency("both", 1024, 2**20, 5e14, 1e30) == pytest.approx(
        8 * efficiency("ring", 1024, 2**20, 5e14, 1), rel=0.01
    )


def test_heads_that_cannot_be_shared_out_have_no_prediction():
    assert efficiency("ulysses", 32, 2**20, 5e14, 3e11) is None
    assert efficiency("ulysses", 8, 2**20, 5e14, 3e11, heads_kv=4) is None
    assert efficiency("both", 16, 2**20, 5e14, 3e11, heads_kv=4) is None
    with pytest.raises(ValueError, match=f"way: expected one of {', '.join(WAYS)}, got 'gather'"):
        efficiency("gather", 8, 2**20, 5e14, 3e11)
    for gpus in (0, 12):
        with pytest.raises(ValueError, match=f"gpus: expected 1 to 8, or a multiple of 8, got {gpus}"):
            efficiency("ring", gpus, 2**20, 5e14, 3e11)
