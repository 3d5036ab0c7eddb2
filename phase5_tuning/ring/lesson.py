"""Apparatus of the chapter on context parallelism: what its cells call beside their subject."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence

from common import make_qkv, verify_results
from common.measure import records
from common.phases import ROOT
from common.speak.text import decode, encode
from common.speak.trained import load
from phase5_tuning.given import merge_
from phase5_tuning.passes.backward import attention_backward
from phase5_tuning.passes.forward import attention_forward
from phase5_tuning.ring import figures, model
from phase5_tuning.ring.ranks import joined, meeting, shard_of

import torch

WAYS = dict(ring="ring", gather="all-gather", ulysses="Ulysses", torch="PyTorch's")
LENGTHS = 16384, 65536, 131072  # tokens
SPLITS = {
    "zigzag": (shard_of, joined),
    "contiguous": (lambda x, rank, ranks: x.chunk(ranks, dim=-2)[rank], lambda shards: torch.cat(shards, dim=-2)),
}  # how a tensor is cut and joined


def verdict(q, k, v, results: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> str:
    """What the harness says of the (o, lse) of all ranks, cut in order."""
    o, lse = (torch.cat(parts, dim=2) for parts in zip(*results, strict=True))
    return verify_results(lambda *_, **__: (o, lse), q, k, v, compare_sdpa=False).verdict


def error_of_parts(merge: Callable, parts: int, mean: float = 0.0) -> float:
    """The rms error of o in bf16, by that of o, if the keys are attended to in so many parts, which `merge` merges.

    mean: of the values, whose standard deviation is 1.
    """
    q, k, v = make_qkv(1, 1, 64, 64, seq_k=1024, dtype=torch.bfloat16)
    v = v + mean
    exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    (o, lse), *others = (attention_forward(q, *kv) for kv in zip(k.chunk(parts, 2), v.chunk(parts, 2), strict=True))
    o = o.float()
    for part in others:
        merge(o, lse, *part)
    return ((o.bfloat16() - exact).square().mean() / exact.square().mean()).sqrt().item()


def outcome(program: Callable, ranks: int = 4) -> tuple[str, str]:
    """("right", "deadlock" or "race", a line with what the ranks return or say), where each sends its number on."""
    try:
        came = model.run(program, [torch.tensor(rank) for rank in range(ranks)])
    except (model.Deadlock, model.Race) as error:
        word = type(error).__name__.lower()
        return word, f"{program.__name__}: {word}: " + str(error).replace("; ", ",\n    ")
    return "right", f"{program.__name__}: the ranks return {[int(x) for x in came]}"


def gradients(q, k, v, do, results, ranks: int, o_of_one: bool = False, lse_of_one: bool = False):
    """The harness's report on gradients that `ranks` ranks add up, one shard of keys at a time.

    results: the merged (o, lse) of each rank. o_of_one, lse_of_one: give the backward pass those of one shard instead.
    """
    shards = [[x.contiguous() for x in t.chunk(ranks, dim=2)] for t in (q, k, v, do)]
    sums = [[torch.zeros_like(x) for x in of] for of in shards[:3]]
    for rank, (near, (o, lse), do_here) in enumerate(zip(shards[0], results, shards[3], strict=True)):
        for source, far in enumerate(zip(shards[1], shards[2], strict=True)):
            part = attention_forward(near, *far)
            saved = part[0] if o_of_one else o, part[1] if lse_of_one else lse
            terms = attention_backward(near, *far, *saved, do_here)
            for total, term in zip((sums[0][rank], sums[1][source], sums[2][source]), terms, strict=True):
                total += term
    whole = torch.cat([o for o, _ in results], dim=2), *(torch.cat(of, dim=2) for of in sums)
    attention = lambda q, k, v, **_: model.Given.apply(q, k, v, *whole)  # noqa: E731 - verify_results calls it
    return verify_results(attention, q, k, v, do=do, compare_sdpa=False)


def over_ranks(forward: Callable, split: str, ranks: int = 4) -> Callable:
    """attention(q, k, v, is_causal) in which forward(rank, q, kv) attends on each rank of a ring, head by head.

    split: of SPLITS. Rows are added at the end until 2 * ranks chunks are of equal length; no query before sees them.
    """
    cut, join = SPLITS[split]

    def attention(q, k, v, is_causal):
        seq, more = q.shape[2], -q.shape[2] % (2 * ranks)
        q, k, v = (torch.nn.functional.pad(t, (0, 0, 0, more)).flatten(0, 1).cpu() for t in (q, k, v))
        heads = []
        for of_head in zip(q, torch.stack((k, v), dim=1), strict=True):
            inputs = [[cut(t, rank, ranks) for t in of_head] for rank in range(ranks)]
            got = model.run(lambda rank, shards: forward(rank, *shards), inputs)
            heads.append(join([o for o, _ in got]))
        return torch.stack(heads)[None, :, :seq]

    return attention


def ring_that_believes(believed: Callable[[int, int], int]) -> Callable:
    """forward(rank, q, kv) of a causal ring, for `over_ranks`.

    believed(rank, step): whose keys a rank believes to hold.
    """

    def forward(rank, q, kv):
        o, lse, chunk = torch.zeros_like(q), torch.full(q.shape[:1], -torch.inf), len(q) // 2
        for step in range(rank.ranks):
            if step > 0:
                sending, coming = rank.send(kv), rank.receive()
                sending.wait()
                kv = coming.wait()
            rows, columns, masked = meeting(rank.number, believed(rank.number, step), chunk, chunk, True)
            merge_(o[rows], lse[rows], *rank.attend(q[rows], kv[:, columns], masked))
        return o, lse

    return forward


@torch.no_grad()
def written(attention: Callable, prompt: str) -> str:
    """The prompt with the small model's continuation; each character is written after all text before is read again."""
    gpt = load(attention).cpu()
    tokens = encode(prompt)[None]
    while tokens.shape[1] < gpt.context:
        best = gpt(tokens)[:, -1:].argmax(dim=-1)
        if best.item() == 0:  # the line's end
            break
        tokens = torch.cat((tokens, best), dim=1)
    return decode(tokens[0])


def ran(module: str, ranks: int) -> str:
    """What a module prints as so many processes on this machine, or how they failed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", module]
    env = os.environ | dict(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", TRITON_INTERPRET="1")
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else "the processes ended with an error:\n" + done.stderr[-2000:]


def measured(name: str = "h100_context_2") -> tuple[dict, dict]:
    """(a record, its rows by number of tokens and provider)."""
    record = records.load("phase5_tuning", name)
    return record, {(row["seq"], row["provider"]): row for row in record["rows"]}


def measured_lines(name: str) -> list[str]:
    """The lines of a table of times and efficiencies."""
    _, of = measured(name)
    lines = ["milliseconds (efficiency)", " tokens  one GPU" + "".join(f"{name:>15}" for name in WAYS.values())]
    for seq in LENGTHS:
        rows = [of[seq, way] for way in WAYS]
        fields = "".join(f"{row['ms']:8.2f} ({row['efficiency']:.2f})" for row in rows)
        lines.append(f"{seq:>7}  {rows[0]['one_gpu_ms']:7.2f}{fields}")
    return lines


def parts(seq: int) -> dict[str, float]:
    """What the ring's time of a forward and a backward pass is made of, and its whole, in ms.

    Copies, merge and additions of rank 1 read and write 19 times the bytes of its Q in the forward pass and 34 times in
    the backward pass, by a count in the module's code.
    """
    record, of = measured()
    ring, kernels = of[seq, "ring"], of[seq, "attention"]["ms"]
    copied = (19 + 34) * seq // 2 * 16 * 128 * 2
    half, copies = ring["one_gpu_ms"] / 2, copied / record["ceilings"]["copy_bytes_per_s"] * 1e3
    return {
        "half of T1": half,
        "kernels on shards, beyond half of T1": kernels - half,
        "copies, merges, additions (computed)": copies,
        "the rest": ring["ms"] - kernels - copies,
        "T2 of the ring": ring["ms"],
    }


def parts_lines(seq: int) -> list[str]:
    """The lines of a table of `parts`."""
    return [f"milliseconds at {seq:,} tokens", *(f"{what:<40}{ms:5.1f}" for what, ms in parts(seq).items())]


def compared() -> dict[int, list[tuple[float, float]]]:
    """(predicted, measured) efficiency of the ring and of Ulysses, by the rows of a rank of two."""
    _, of = measured()
    ways = "ring", "ulysses"
    return {
        seq // 2: [(model.efficiency(way, 2, seq, *rates(seq)), of[seq, way]["efficiency"]) for way in ways]
        for seq in LENGTHS
    }


def fewest_rows() -> int:
    """From how many rows of a rank on the record bears the model out: both ways are predicted to 0.1."""
    off = [rows for rows, pairs in compared().items() if any(abs(p - m) > 0.1 for p, m in pairs)]
    return min(rows for rows in compared() if rows > max(off, default=0))


def compared_lines() -> list[str]:
    """The lines of a table of predicted and measured efficiencies, and `fewest_rows`."""
    lines = ["rows of a rank   ring: predicted, measured   Ulysses: predicted, measured"]
    for rows, pairs in compared().items():
        lines.append(f"{rows:>14}" + "".join(f"{predicted:18.2f} {found:10.2f}" for predicted, found in pairs))
    fewest = fewest_rows()
    worst = max(abs(p - m) for rows, pairs in compared().items() if rows >= fewest for p, m in pairs)
    return [*lines, f"on these two GPUs, from {fewest:,} rows on, the model is off by at most {worst:.2f}"]


def rates(seq: int) -> tuple[float, float]:
    """(operations a second of one GPU, bytes a second between two) of the record at this number of tokens."""
    _, of = measured()
    operations, bytes_sent = 7 * seq**2 * 16 * 128, 4 * seq // 2 * 16 * 128
    return operations / of[seq, "ring"]["one_gpu_ms"] * 1e3, bytes_sent / of[seq, "link"]["ms"] * 1e3


def show_predicted(rate: float, within: float) -> None:
    """The picture of `model.efficiency` from 2 to 1,024 GPUs and 64k to 16M tokens."""
    gpus, tokens = [2**i for i in range(1, 11)], [2**i for i in range(16, 25, 2)]
    fewest = fewest_rows()
    by = (
        f"Predicted, not measured: {rate / 1e12:.0f}e12 operations a second; hosts of {model.HOST} GPUs, "
        f"{within / 1e9:.0f} GB/s within a host, {model.BETWEEN / 1e9:.0f} GB/s between hosts; causal, 16 heads of 128 "
        f"columns. Hatched: fewer than {fewest:,} rows of a GPU: may be too high."
    )
    of = {
        name: [[model.efficiency(way, w, n, rate, within) for w in gpus] for n in tokens]
        for way, name in dict(ring="ring", ulysses="Ulysses", both="both").items()
    }
    figures.predicted(of, gpus, tokens, by, fewest)
