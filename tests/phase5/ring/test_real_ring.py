"""What exercise 5.27's check sees of a rank, in one process: no transfer leaves it."""

from types import SimpleNamespace
from unittest import mock

from common.learn.check.require import Rejected
from common.phases import ROOT
from phase5_tuning.checks import real_ring
from phase5_tuning.checks.real_ring import Rank, Transfer

import pytest
import torch


@pytest.fixture
def rank():
    """Rank 0 of three, with 4 numbers each of q, k and v. This file is the answer, whose lines are named."""
    rank = Rank(__file__, 0)
    rank.begin(list(torch.arange(36.0).reshape(3, 3, 4)))
    return rank


def send(rank, tensor):
    return Transfer(rank, "send", tensor, 1, 0, mock.Mock())


def receive(rank, tensor):
    return Transfer(rank, "receive", tensor, 2, 0, mock.Mock())


def attend(rank):
    with mock.patch.object(real_ring, "_ATTEND"):
        rank.attend(*rank.everybody[0])


@pytest.mark.parametrize("started", [[send], [receive], []], ids=["sends", "receives", "does neither"])
def test_a_rank_that_computes_while_keys_stand_still_is_rejected(rank, started):
    transfers = [start(rank, torch.zeros(8)) for start in started]
    attend(rank)
    for transfer in transfers:
        transfer.wait()
    with pytest.raises(Rejected, match=r"line \d+: rank 0 computes while keys or values stand still"):
        rank.check_end()


def test_a_rank_that_computes_while_keys_travel_is_right(rank):
    for _ in range(2):
        transfers = send(rank, torch.zeros(8)), receive(rank, torch.zeros(8))
        attend(rank)
        for transfer in transfers:
            transfer.wait()
    attend(rank)  # all keys have come
    rank.check_end()


def test_two_receives_into_one_tensor_are_rejected(rank):
    buffer = torch.zeros(8)
    first = receive(rank, buffer)
    with pytest.raises(Rejected, match="into a tensor into which its receive 1 comes: wait first"):
        receive(rank, buffer[4:])
    first.wait()


def test_a_tensor_that_changes_while_it_is_sent_is_rejected(rank):
    sent = torch.zeros(8)
    sending = send(rank, sent)
    sent[3] = 1
    with pytest.raises(Rejected, match="changed the tensor of its send 1"):
        sending.wait()


def test_what_is_received_is_there_after_the_wait_and_not_before(rank):
    buffer = torch.zeros(8)
    coming = receive(rank, buffer)
    assert buffer.isnan().all()
    coming.copy.fill_(7)  # it has come
    assert buffer.isnan().all()
    coming.wait()
    assert (buffer == 7).all()


def test_what_nobody_needs_is_rejected_once_it_is_sent(rank):
    attend(rank)
    for _ in range(2):
        send(rank, torch.zeros(8)).wait()
    send(rank, torch.zeros(1)).wait()
    with pytest.raises(Rejected, match="sends 17 numbers, where 16 are enough"):
        rank.check_end()


def test_an_answer_that_computes_unseen_is_rejected(rank):
    with pytest.raises(Rejected, match="attention_forward was not called"):
        rank.check_end()


def test_an_answer_that_writes_into_its_inputs_is_rejected(rank):
    answer = SimpleNamespace(ring_attention=lambda q, k, v: (q.zero_(), q[..., 0]))
    with pytest.raises(Rejected, match="rank 0 has written into its inputs"):
        real_ring._play(answer, rank)


def test_a_rank_that_fails_is_named_and_not_those_that_wait_for_it(monkeypatch):
    waits = dict(kind="stuck", message="waits", advice="start both")
    ended = dict(kind="crashed", message="ended")
    fails = dict(kind="error", message="NameError")

    def message_of(*verdicts):
        monkeypatch.setattr(real_ring, "_verdict", lambda folder, rank, path: verdicts[rank])
        with pytest.raises(Rejected) as rejected, mock.patch.object(real_ring.subprocess, "run"):
            real_ring.check(SimpleNamespace(__file__="answer.py"))
        return str(rejected.value), rejected.value.kind

    assert message_of(waits, ended, fails) == ("NameError", "error")
    assert message_of(waits, waits, ended) == ("ended", "crashed")
    assert message_of(waits, waits, waits) == ("no rank goes on: waits; waits; waits. start both", "wrong")


def test_ranks_interpret_whatever_this_process_does_and_meet_on_this_machine(monkeypatch):
    for name in ("TRITON_INTERPRET", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "0")
    started = mock.patch.object(real_ring.subprocess, "run")
    with started as run, pytest.raises(Rejected, match="Python ended rank 0 in the middle of the check"):
        real_ring.check(SimpleNamespace(__file__=__file__))
    needed = dict(TRITON_INTERPRET="1", OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    assert run.call_args.kwargs["env"].items() >= needed.items()
    assert run.call_args.kwargs["cwd"] == ROOT
