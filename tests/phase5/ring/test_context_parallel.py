"""Context parallelism over gloo: 1 to 4 processes of this machine against one, kernels interpreted."""

import gc
import itertools
import weakref

from common import runtime, verify_results
from phase5_tuning.bench import ring as context_bench
from phase5_tuning.ring import attention as cp
from phase5_tuning.ring.ranks import chunk_lengths, chunks_of, joined, meeting, shard_of, side_group

import pytest
import sharded_runs
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st
from sharded_runs import CALLS, CASES, GATHERED, RING, ULYSSES

pytestmark = pytest.mark.skipif(runtime.DEVICE == "cuda", reason="gloo's tensors are a CPU's")


def started(target, ranks, folder):
    """A process for each rank; they begin with the modules imported."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["common", "sharded_runs", "sympy"])  # which PyTorch loads at a first gradient
    args = [(rank, ranks, str(folder)) for rank in range(ranks)]
    processes = [context.Process(target=target, args=of, daemon=True) for of in args]
    for process in processes:
        process.start()
    return processes


def ended(processes, guard=4 * sharded_runs.GUARD):
    """The exit codes; processes that outlive the guard are ended."""
    for process in processes:
        process.join(guard)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


@pytest.fixture(scope="module", params=[1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def runs(request, tmp_path_factory):
    """(ranks, what each of them got)."""
    folder = tmp_path_factory.mktemp("ranks")
    codes = ended(started(sharded_runs.run, request.param, folder))
    assert codes == [0] * request.param
    return request.param, [torch.load(folder / f"{rank}.pt") for rank in range(request.param)]


class Given(torch.autograd.Function):
    """An attention function that returns tensors computed elsewhere."""

    @staticmethod
    def forward(ctx, q, k, v, o, *grads):
        ctx.grads = grads
        return o.clone()

    @staticmethod
    def backward(ctx, do):
        return *ctx.grads, *(None,) * 4


@pytest.mark.parametrize(("way", "case"), CALLS)
def test_all_ranks_together_give_attention_and_its_gradients(runs, way, case):
    ranks, got = runs
    if (way, case) not in got[0]["whole"]:
        pytest.skip(f"{ranks} ranks cannot share these heads, or the case does not depend on their number")
    for rank in range(1, ranks):
        for a, b in zip(got[0]["whole"][way, case], got[rank]["whole"][way, case], strict=True):
            assert torch.equal(a, b)
    verify(case, got[0]["whole"][way, case])


def verify(case, results):
    """Hold o and the gradients of the whole sequence against the truth."""
    *qkv, do = sharded_runs.inputs(case)
    qkv = [t.to(do.dtype) for t in qkv]
    report = verify_results(
        lambda q, k, v, **_: Given.apply(q, k, v, *results), *qkv, do=do, compare_sdpa=False, **CASES[case][1]
    )
    report.check()


def test_a_subgroup_attends_without_the_others(tmp_path):
    """They are not in the call, and a side group must not wait for them."""
    codes = ended(started(sharded_runs.in_a_subgroup, 3, tmp_path), sharded_runs.GUARD / 2)
    assert codes == [0, 0, 0]
    for rank in (1, 2):
        for (_, case), results in torch.load(tmp_path / f"{rank}.pt").items():
            verify(case, results)


@pytest.fixture(scope="module")
def mesh_runs(tmp_path_factory):
    """What each of four ranks got, two hosts of two."""
    folder = tmp_path_factory.mktemp("mesh")
    assert ended(started(sharded_runs.on_a_mesh, 4, folder), sharded_runs.GUARD) == [0] * 4
    return [torch.load(folder / f"{rank}.pt") for rank in range(4)]


@pytest.mark.parametrize("case", sharded_runs.MESH_CASES)
def test_heads_within_hosts_and_a_ring_between_give_attention_and_its_gradients(mesh_runs, case):
    for of_rank in mesh_runs[1:]:
        assert all(map(torch.equal, mesh_runs[0]["whole"][case], of_rank["whole"][case]))
    verify(case, mesh_runs[0]["whole"][case])


def test_what_is_wrong_on_a_mesh_is_named_on_every_rank(mesh_runs):
    heard = [of_rank["errors"] for of_rank in mesh_runs]
    scale = "scale: the ranks disagree: rank 0: 0.25, rank 1: 2.0"
    mask = "is_causal: the ranks disagree: rank 0: False, rank 1: True"
    everywhere = {
        "no mesh": ("TypeError", "mesh: expected a DeviceMesh, got NoneType"),
        "one dimension": ("ValueError", "mesh: expected two dimensions (hosts, GPUs of a host), got 1"),
        "heads_q": ("ValueError", "heads_q: 3 heads cannot be shared by 2 ranks"),
        "heads_kv": ("ValueError", "heads_kv: 1 heads cannot be shared by 2 ranks"),
        "one host's mask": ("ValueError", mask),
        "afterwards": ("nothing", ""),
    }
    for name, said in everywhere.items():
        assert [of_rank[name] for of_rank in heard] == [said] * 4
    others, theirs = ("ValueError", f"host 1 raised ValueError: {scale}"), ("ValueError", scale)
    assert [of_rank["one rank's scale"] for of_rank in heard] == [others, others, theirs, theirs]


def test_gradients_are_summed_in_fp32_and_rounded_once(runs):
    ranks, got = runs
    terms = 1 + (ranks - 1) * torch.tensor(sharded_runs.SMALL)
    for of_rank in got:
        for way, gradients in of_rank["small terms"].items():
            for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
                assert (gradient == terms.half()).all(), (way, name)


def test_every_run_gives_the_same_bits(runs):
    for of_rank in runs[1]:
        assert of_rank["again"]
        assert all(all(same) for same in of_rank["again"].values())


def test_the_all_gather_computes_the_ring_s_bits(runs):
    whole = runs[1][0]["whole"]
    for case in (case for way, case in sharded_runs.calls(runs[0]) if way == GATHERED):
        o, dq, *_ = zip(whole[RING, case], whole[GATHERED, case], strict=True)
        assert torch.equal(*o), case
        assert torch.equal(*dq), case


def test_unshard_undoes_shard(runs):
    assert all(all(of_rank["round trip"]) for of_rank in runs[1])


DISAGREE = {"which gradients": "q, k and v require gradients: the ranks disagree"} | dict(
    head_dim="q's batch, heads and head_dim: the ranks disagree: rank 0: (1, 2, 16)",
    dtype="q.dtype: the ranks disagree: rank 0: torch.float32",
    is_causal="is_causal: the ranks disagree: rank 0: False",
    scale="scale: the ranks disagree: rank 0: 0.25",
    requires_grad="q, k and v require gradients: the ranks disagree: rank 0: (False, False, False)",
    function="function: the ranks disagree: rank 0: context_parallel_attention",
    rows="q: the ranks hold [",
)


def test_a_disagreement_is_raised_and_named_on_every_rank(runs):
    ranks, got = runs
    if ranks == 1:
        pytest.skip("nobody to disagree with")
    for name, message in DISAGREE.items():
        for of_rank in got:
            kind, text = of_rank["errors"][name]
            assert kind == "ValueError", (name, text)
            assert text.startswith(message), (name, text)
            assert f"rank {ranks - 1}: " in text or name == "rows"


def test_what_one_rank_raises_all_others_hear(runs):
    ranks, got = runs
    if ranks == 1:
        pytest.skip("nobody to hear")
    (*others, (kind, text)) = [of_rank["errors"]["invalid"] for of_rank in got]
    assert others == [("ValueError", f"rank {ranks - 1} raised {kind}: {text}")] * (ranks - 1)


def test_wrong_on_all_ranks(runs):
    ranks, got = runs
    for of_rank in got if ranks > 1 else []:
        kind, text = of_rank["errors"]["causal lengths"]
        assert kind == "ValueError"
        assert text.startswith("is_causal: seq_q and seq_k must be equal, got")
        kind, text = of_rank["errors"]["invalid on all"]
        assert (kind, "rank" in text) == ("ValueError", False)
        assert of_rank["errors"]["heads"] == ("ValueError", f"heads_q: 5 heads cannot be shared by {ranks} ranks")
        assert of_rank["errors"]["heads_kv"] == ("ValueError", f"heads_kv: 1 heads cannot be shared by {ranks} ranks")


def test_a_scale_of_0_is_one_scale_whatever_its_sign(runs):
    ranks, got = runs
    for of_rank in got if ranks > 1 else []:
        assert of_rank["errors"]["two zeros"] == ("nothing", "")


def test_a_gradient_of_a_gradient_is_refused(runs):
    ranks, got = runs
    for of_rank, way in itertools.product(got if ranks > 1 else [], (RING, ULYSSES)):
        kind, text = of_rank["errors"]["twice", way]
        assert kind == "RuntimeError"
        assert "once_differentiable" in text, text


@given(seq=st.integers(0, 70), ranks=st.integers(1, 9))
def test_shards_are_the_whole_cut_and_joined(seq, ranks):
    x = torch.arange(2 * seq * 3).view(2, seq, 3)
    shards = [shard_of(x, rank, ranks) for rank in range(ranks)]
    assert torch.equal(joined(shards), x)
    chunks = chunk_lengths(seq, ranks)
    assert [len(c) for c in torch.arange(seq).tensor_split(2 * ranks)] == chunks
    assert [s.shape[1] for s in shards] == [sum(chunks[i] for i in chunks_of(rank, ranks)) for rank in range(ranks)]


@given(ranks=st.integers(1, 6), chunk=st.integers(1, 5))
def test_meetings_cover_the_causal_triangle_once_and_evenly(ranks, chunk):
    seq = 2 * ranks * chunk
    positions = torch.arange(seq)[:, None]
    held = [shard_of(positions, rank, ranks)[:, 0] for rank in range(ranks)]
    seen, work = torch.zeros(seq, seq, dtype=torch.int), []
    for rank, source in itertools.product(range(ranks), repeat=2):
        rows, cols, masked = meeting(rank, source, chunk, chunk, True)
        queries, keys = held[rank][rows], held[source][cols]
        allowed = torch.ones(len(queries), len(keys), dtype=torch.int)
        seen[queries[:, None], keys] += allowed.tril() if masked else allowed
        if source != rank:
            work.append(len(queries) * len(keys))
    assert torch.equal(seen, torch.ones(seq, seq, dtype=torch.int).tril())
    assert len(set(work)) <= 1


def test_merging_what_saw_nothing_changes_nothing():
    o, lse = torch.randn(2, 3, 4), torch.randn(2, 3)
    empty = torch.zeros(2, 3, 4), torch.full((2, 3), float("-inf"))
    for mine, part in (((o, lse), empty), (empty, (o, lse)), (empty, empty)):
        merged = [t.clone() for t in mine]
        cp.merge_(*merged, *part)
        expected = empty if mine is empty is part else (o, lse)
        assert all(torch.equal(*t) for t in zip(merged, expected, strict=True))


def test_a_side_group_ends_with_the_group_it_belongs_to(tmp_path):
    """Else every new process group in a process would leave one with its threads and sockets."""
    ends = []
    for turn in range(2):
        store = f"file://{tmp_path}/store{turn}"
        dist.init_process_group("cpu:gloo,cuda:gloo", init_method=store, rank=0, world_size=1)
        try:
            beside = side_group(None)
            assert beside is side_group(dist.group.WORLD) is not dist.group.WORLD
            said = [None]
            dist.all_gather_object(said, turn, group=beside)
            assert said == [turn]
            ends.append(weakref.ref(beside))
            del beside
        finally:
            dist.destroy_process_group()
        gc.collect()
        assert [end() for end in ends] == [None] * len(ends)


def test_the_bench_reads_its_arguments(capsys):
    args = context_bench.arguments([])
    assert args.seq_len == [16384, 65536, 131072]
    assert (args.head_dim, args.heads, args.provider) == (128, 16, list(context_bench.PROVIDERS))
    for wrong in (["--seq-len", "0"], ["--provider", "nobody"], ["--heads-kv", "4"], ["--name", "a/b"]):
        with pytest.raises(SystemExit):
            context_bench.arguments(wrong)
    assert context_bench.main([]) == 1
    assert "nothing to measure" in capsys.readouterr().err


def test_the_bench_s_formula_is_the_number_of_bytes_sent(runs):
    ranks, got = runs
    if ranks == 1:
        assert context_bench.sent_bytes("ring", 1, 1, 1, 64, 16) == (0, 0)
        return
    # seq 24 can be cut into 2 W equal chunks for each W here; one head of 16, fp16; sums in fp32
    expected = sum(context_bench.sent_bytes("ring", ranks, 1, 1, 24, 16))
    assert [of_rank["sent"] for of_rank in got] == [expected] * ranks


def test_two_shards_and_two_sums_are_alive_at_most(runs):
    """Those that leave and those that come: what context_bench.ring_peak_bytes counts."""
    ranks, got = runs
    expected = {} if ranks == 1 else {torch.float16: 2, torch.float32: 2}
    assert [of_rank["alive"] for of_rank in got] == [expected] * ranks


def test_something_is_computed_during_each_transfer(runs):
    """Keys and values travel in both passes, sums in the second; none makes a last transfer round the whole ring."""
    ranks, got = runs
    assert [of_rank["idle"] for of_rank in got] == [(3 * (ranks - 1), 0)] * ranks
