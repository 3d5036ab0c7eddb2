"""What the compiler makes of every rung, for GPUs that are not here."""

import itertools
from collections import Counter
from unittest import mock

from common.measure import offline, sass
from phase5_tuning.bench import beside as hopper_beside
from phase5_tuning.bench import compile_all
from phase5_tuning.launch import configs
from phase5_tuning.passes.backward import attention_backward
from phase5_tuning.passes.forward import attention_forward
from phase5_tuning.passes.rungs import LADDER

import pytest
import torch
from helpers import for_target, interpreted_only

TILES = configs.Config(64, 64, 4, 2)


def launches(rung):
    """The kernels of a rung with tiles that every rung can have."""
    q, k = (torch.empty(1, heads, 512, 64, dtype=torch.float16) for heads in (4, 2))
    lse = torch.empty(1, 4, 512)
    forward = dict(enable_gqa=True, kernel=rung.forward, config=TILES)
    gradients = dict(dkdv_kernel=rung.dkdv, dkdv_config=TILES, dq_kernel=rung.dq)
    gradients |= dict(dq_config=TILES, is_causal=True)
    return [
        *offline.record_launches(lambda: attention_forward(q, k, k, True, **forward)),
        *offline.record_launches(lambda: attention_backward(q, k, k, q, lse, q, **gradients)),
    ]


def test_compile_all_names_a_gpu_it_does_not_know(capsys):
    with pytest.raises(SystemExit):
        compile_all.main(["sm_80", "sm_87"])
    assert "sm_87: expected some of sm_75, sm_80" in capsys.readouterr().err


@interpreted_only
@pytest.mark.parametrize(
    ("fault", "code"),
    [(dict(), 0), (dict(error="no"), 1), (dict(spills=4096), 1), (dict(serialized=True), 1), (dict(shared=2**20), 1)],
    ids=["good", "refused", "spills", "serialized", "too large"],
)
def test_compile_all_fails_if_a_kernel_has_no_good_tile(fault, code, capsys):
    def compiled(launches, targets):
        good = dict(kernel="kernel", target=targets[0])
        return [offline.Compiled(**good | fault) for _ in launches]

    with mock.patch.object(compile_all.offline, "compile_launches", compiled):
        assert compile_all.main(["sm_90"]) == code
    assert ("all good" if code == 0 else "problems") in capsys.readouterr().out


@interpreted_only
@pytest.mark.slow
def test_every_rung_compiles_for_hopper_without_spills():
    recorded = {rung.name: launches(rung) for rung in LADDER[1:]}
    compiled = iter(offline.compile_launches(itertools.chain(*recorded.values()), ["sm_90"]))  # in one child process
    made = {name: list(itertools.islice(compiled, len(of_rung))) for name, of_rung in recorded.items()}
    for name, kernels in made.items():
        assert len(kernels) == 4, name
        for c in kernels:
            assert c.error is None, c
            assert c.fits, c
            assert c.spills <= 64, (name, c)
            if c.kernel != "_attn_bwd_rows_kernel":
                assert c.instructions["wgmma"] > 0, c
    fetched = {name: sum(c.instructions["TMA"] for c in kernels) for name, kernels in made.items()}
    assert fetched.pop("descriptors") > 0
    assert not any(fetched.values())


@interpreted_only
@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
def test_hopper_runs_the_products_of_the_shipped_kernels_without_waiting_for_each(is_causal):
    def shipped(kernel, head_dim, dtype, tma, is_causal, tiles, launch):
        return configs.row(kernel, head_dim, dtype, tma).pick(is_causal, 1e6)

    recorded = []
    for head_dim in (64, 128, 256):
        q = torch.empty(1, 4, 512, head_dim, dtype=torch.float16)
        lse = torch.empty(1, 4, 512)
        given = q, q, q, q, lse, q, None, is_causal
        with mock.patch.object(configs, "choose", shipped):
            recorded += offline.record_launches(lambda q=q: attention_forward(q, q, q, is_causal))
            recorded += offline.record_launches(lambda given=given: attention_backward(*given))
    compiled = offline.compile_launches(recorded, ["sm_90"])
    made = [c for c in compiled if c.instructions["wgmma"]]
    assert len(made) == 9
    for c in made:
        assert not c.serialized, c
        assert c.spills <= 64, c
    assert made[0].registers <= 128  # head_dim 64: with one more, three programs fit, not four
    assert made[0].spills == 0


@pytest.mark.slow
@interpreted_only
def test_products_that_wait_for_each_other_are_recognized():
    q = torch.empty(1, 4, 512, 64, dtype=torch.float16)
    config = configs.Config(128, 128, 4, 2)  # serialized by Triton 3.6.0 and 3.7.1 alike
    recorded = offline.record_launches(lambda: attention_forward(q, q, q, True, config=config))
    (made,) = offline.compile_launches(recorded, ["sm_90"])
    assert made.serialized
    assert "serialized" in str(made)


@interpreted_only
@pytest.mark.parametrize("rung", LADDER[1:], ids=lambda rung: rung.name)
@pytest.mark.parametrize("target", [for_target("sm_80"), for_target("sm_100")])
def test_every_rung_compiles_elsewhere(target, rung):
    if target == "sm_80" and rung is LADDER[-1]:
        pytest.skip("sm_80 has no descriptors")
    for c in offline.compile_launches(launches(rung), [target]):
        assert c.error is None, c
        assert c.fits, c
        assert c.spills <= 256, c


@pytest.mark.slow
@interpreted_only
@pytest.mark.parametrize(
    ("kind", "opcodes"),
    [
        (hopper_beside.MULTIPLY, {"FMUL": 128}),
        (hopper_beside.MULTIPLY_ADD, {"FFMA": 128}),
        (hopper_beside.EXPONENTIAL, {"FFMA": 32, "MUFU": 32}),
    ],
    ids=lambda x: getattr(x, "value", None),
)
def test_what_is_measured_beside_a_product_stands_between_its_issue_and_the_wait(kind, opcodes):
    left, none = hopper_beside.SHARED.value, hopper_beside.NONE.value
    with (
        mock.patch.object(configs, "multiprocessors", return_value=132),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
        mock.patch.object(hopper_beside, "LAUNCHES", 1),
    ):
        recorded = offline.record_launches(lambda: hopper_beside.clocks(left, kind.value, none))
    (made,) = offline.compile_launches(recorded[:1], ["sm_90"], sass=True)
    assert not made.serialized
    listed = sass.instructions(made.sass)
    products = [i for i, x in enumerate(listed) if "HGMMA" in x.opcode]
    assert len(products) == 8  # 128 deep in steps of 16, and the loop is not unrolled
    wait = next(i for i, x in enumerate(listed) if i > products[-1] and "DEPBAR" in x.opcode and "gsb0" in x.text)
    under = listed[products[-1] + 1 : wait]
    clocks = [i for i, x in enumerate(under) if "SR_CLOCKLO" in x.text]
    assert len(clocks) == 2
    between = Counter(x.opcode.split(".")[0] for x in under[clocks[0] : clocks[1]])
    assert {name: between[name] for name in ("FMUL", "FFMA", "MUFU") if between[name]} == opcodes
