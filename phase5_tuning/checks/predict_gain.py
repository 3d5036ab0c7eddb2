"""Checks the model's clocks on counted turns and on some drawn at random, and puts the gains beside the record."""

import functools
import itertools
import random

from common.measure import records
from phase5_tuning.checks import require_function

# The forward pass's turns, counted in what Triton 3.7.1 makes of each rung for sm_90, under the mask of the case:
# block_m, block_n, num_warps, then HGMMA, MUFU and all others. Which others go with a rung is the chapter's question.
TURNS = {
    (128, True): {
        "tiles": (64, 64, 4, (12, 34, 728)),
        "base 2": (64, 64, 4, (12, 34, 562)),
        "late sums": (64, 64, 4, (12, 34, 550)),
        "masks at edges": (64, 64, 4, (12, 34, 404)),
        "descriptors": (64, 128, 4, (16, 66, 408)),
    },
    (64, False): {
        "tiles": (128, 64, 4, (16, 68, 881)),
        "base 2": (128, 64, 4, (16, 68, 552)),
        "late sums": (128, 64, 4, (16, 68, 536)),
        "masks at edges": (128, 64, 4, (16, 68, 464)),
        "descriptors": (64, 128, 4, (12, 66, 353)),
    },
}
OPCODES = ("HGMMA", "MUFU", "FMUL", "FADD", "FFMA", "FMNMX", "FSEL", "FSETP", "ISETP", "IMAD")
NEAR = 0.05  # between the gain by the model and the recorded one


def check(answer):
    cases = _cases(answer.Turn)
    for name, right in (("serial_clocks", _serial), ("overlapped_clocks", _overlapped)):
        require_function(answer, name, cases, right, functools.partial(_mistakes, name), exact=False)
    pairs = [(before, after, d) for (before, d), (after, _) in itertools.pairwise(cases)]
    require_function(answer, "gain", pairs, _gain, _gain_mistakes, exact=False)
    return _beside_the_record(answer)


def _cases(make):
    """(turn, head_dim): the counted ones, others drawn at random."""
    drawn = random.Random()
    cases = [(_turn(make, *counted), d) for (d, _), rungs in TURNS.items() for counted in rungs.values()]
    for _ in range(6):
        counts = {op: drawn.randint(1, 90) for op in OPCODES}
        sizes = drawn.choice((64, 128)), drawn.choice((32, 64, 128)), drawn.choice((4, 8, 16))
        cases.append((make(*sizes, counts), drawn.choice((64, 128, 256))))
    cases.append((make(64, 64, 8, {"HGMMA": 16, "FFMA": 3000}), 64))  # no exponentials at all
    return cases


def _turn(make, *sizes_and_counts):
    *sizes, counts = sizes_and_counts
    return make(*sizes, dict(zip(("HGMMA", "MUFU", "others"), counts, strict=True)))


def _terms(turn, head_dim):
    """Clocks of the products, and a scheduler's numbers of exponentials and of other instructions."""
    share = turn.num_warps / 4
    mufu = turn.instructions.get("MUFU", 0)
    products = 4 * turn.block_m * turn.block_n * head_dim / 4096
    return products, mufu * share, (sum(turn.instructions.values()) - mufu) * share


def _serial(turn, head_dim):
    products, mufu, others = _terms(turn, head_dim)
    return products + 8 * mufu + others


def _overlapped(turn, head_dim):
    products, mufu, others = _terms(turn, head_dim)
    return max(products, 8 * mufu, mufu + others)


def _mistakes(name, turn, head_dim):
    """{sentence: a mistaken number} for one of the two."""
    products, mufu, others = _terms(turn, head_dim)
    hgmma, share = turn.instructions["HGMMA"] * turn.num_warps / 4, turn.num_warps / 4
    together = (lambda *x: sum(x)) if name == "serial_clocks" else max

    def of(products=products, mufu=8 * mufu, others=others, issued=mufu):
        if name == "serial_clocks":
            return products + mufu + others
        return max(products, mufu, others + issued)

    of_one_warp = of(mufu=8 * mufu / share, others=others / share, issued=mufu / share)
    of_all = of(mufu=32 * mufu, others=4 * others, issued=4 * mufu)
    wrong = {
        "the products are missing": of(products=0),
        "there are two products, of 2 * block_m * block_n * head_dim operations each": of(products / 2),
        "the exponentials are missing: a MUFU keeps its unit for 8 clocks": of(mufu=0),
        "a MUFU counts like any other instruction here, but 32 results at 4 a clock take 8 clocks": of(mufu=mufu),
        "the 16 results a clock are for four schedulers, and each has a quarter of them": of(mufu=2 * mufu),
        "each scheduler serves num_warps / 4 warps; yours serves one": of_one_warp,
        "the warps are spread over four schedulers; yours serves them all": of_all,
        "starting a product is an instruction that is issued, too": of(others=others - hgmma),
        "only products and exponentials count here: the other instructions are missing": together(products, 8 * mufu),
    }
    if name == "serial_clocks":
        wrong["the issue of a MUFU is among its 8 clocks"] = of(mufu=9 * mufu)
        wrong["nothing overlaps here: the sum, not the maximum"] = _overlapped(turn, head_dim)
    else:
        wrong["everything overlaps here: the maximum, not the sum"] = _serial(turn, head_dim)
        wrong["a MUFU is issued in one clock, like any other instruction"] = of(issued=8 * mufu)
        wrong["a MUFU is issued, too: it takes a clock of its scheduler"] = of(issued=0)
    return wrong


def _gain(before, after, head_dim, clocks=_serial):
    old, new = (clocks(t, head_dim) / (t.block_m * t.block_n) for t in (before, after))
    return old / new


def _gain_mistakes(before, after, head_dim):
    case, whole_turns = (before, after, head_dim), _serial(before, head_dim) / _serial(after, head_dim)
    return {
        "it is upside down: clocks before, divided by clocks after": 1 / _gain(*case),
        "the turns have different tiles: divide each by its logits, block_m * block_n": whole_turns,
        "this is the gain if everything overlaps": _gain(*case, _overlapped),
        "a gain of 12 percent is 1.12, not 0.12": _gain(*case) - 1,
    }


def _beside_the_record(answer):
    """How many of the learner's gains are near the record's. Which rung is missed is asked later in the chapter."""
    times = {
        (r["provider"], r["head_dim"], r["is_causal"]): r["ms"]
        for r in records.load("phase5_tuning", "h100_ladder")["rows"]
        if (r["mode"], r["seq"]) == ("fwd", 16384)
    }
    apart = []
    for (d, causal), rungs in TURNS.items():
        for old, new in itertools.pairwise(rungs):
            # "Heavy first", before the last one, changes no turn.
            names = ("rung: heavy first", "ours") if new == "descriptors" else (f"rung: {old}", f"rung: {new}")
            before, after = (times[name, d, causal] for name in names)
            gain = answer.gain(_turn(answer.Turn, *rungs[old]), _turn(answer.Turn, *rungs[new]), d)
            apart.append(abs(gain * after / before - 1))
    return (
        f"your model is within {NEAR:.0%} of {sum(x <= NEAR for x in apart)} of {len(apart)} recorded gains, in two of "
        "four cases forward. Section 3.8 counts all of them, and backward: there it misses more"
    )
