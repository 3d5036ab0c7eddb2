"""The choice of tiles: by a table where it was measured, by a trial elsewhere, none too large."""

import functools
import itertools
import subprocess
import sys
from unittest import mock

from common import make_qkv, runtime, verify_results
from common.measure.offline import record_launches
from common.measure.timing import Timing
from common.phases import ROOT
from phase5_tuning.attention import flash_attention
from phase5_tuning.launch import configs
from phase5_tuning.launch import plans as launch
from phase5_tuning.launch.plans import Launch
from phase5_tuning.passes.backward import attention_backward
from phase5_tuning.passes.forward import attention_forward

import pytest
import torch
from helpers import interpreted_only
from triton.runtime.errors import OutOfResources, PTXASError
from tuned_passes import KERNELS, MASKS, leaves, tuned

NO_ROOM = OutOfResources(600, 512, "tensor memory")
BUG = PTXASError("a bug of the assembler")


def too_large(*_):
    raise OutOfResources(200_000, 100_000, "shared memory")


def never(config):
    pytest.fail("launched")


def choose(launch, tiles=100, kernel="dkdv", is_causal=False, **other):
    case = dict(head_dim=64, dtype=torch.float16, tma=True) | other
    return configs.choose(kernel, *case.values(), is_causal, tiles, launch)


def candidates(kernel="dkdv"):
    return configs.candidates(kernel, 64, torch.float16, True)


# --- the table ---------------------------------------------------------------------------------


def test_the_table_has_a_row_for_every_kernel_width_and_way_to_fetch():
    assert set(configs.TABLE) == set(itertools.product(KERNELS, (64, 128, 256), (True, False)))


def test_tiles_for_few_programs_come_with_limits():
    for choice in (*configs.TABLE.values(), *configs.TABLE_FP32.values()):
        assert (choice.few is not None) == (choice.few_full > 0) == (choice.few_causal > 0)


def test_both_backward_kernels_have_the_plain_tiles_of_a_backward_pass():
    forward, dkdv, dq = (configs.plain(kernel, 256, torch.float32) for kernel in ("forward", "dkdv", "dq"))
    assert dq == dkdv != forward
    assert dq.BLOCK_M < forward.BLOCK_M


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_last_candidate_is_the_plain_one(kernel):
    case = (16, 64, 100, 256), runtime.DTYPES, (True, False)
    for head_dim, dtype, tma in itertools.product(*case):
        tiles = configs.candidates(kernel, head_dim, dtype, tma)
        assert tiles[-1] == configs.plain(kernel, head_dim, dtype)
        assert len(tiles) == len(set(tiles)) <= 4


@MASKS
@pytest.mark.usefixtures("known_gpu")
@pytest.mark.parametrize("tma", [True, False], ids=["descriptors", "pointers"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_the_gpu_of_the_table_takes_the_tiles_of_the_mask(dtype, tma, is_causal):
    table = configs.TABLE_FP32 if dtype == torch.float32 else configs.TABLE
    for (kernel, head_dim, fetched), choice in table.items():
        if fetched != tma:
            continue
        many = choice.causal if is_causal else choice.full
        limit = choice.few_causal if is_causal else choice.few_full
        expected = {1e6: many}  # by tiles of 64 rows for each multiprocessor
        if choice.few:
            expected |= {limit: choice.few, limit + 0.01: many, 0.01: choice.few}
        for each, config in expected.items():
            asked = dict(head_dim=head_dim, dtype=dtype, tma=tma, is_causal=is_causal)
            assert choose(never, round(100 * each), kernel, **asked) == config, (kernel, head_dim)


@pytest.mark.usefixtures("known_gpu")
def test_few_programs_get_other_tiles_than_many():
    for is_causal, limit in ((False, 3), (True, 8)):  # tiles for each of the 100 multiprocessors
        for tiles, stages in ((100 * limit, 3), (100 * limit + 1, 1)):
            assert choose(never, tiles, "forward", is_causal).num_stages == stages
    for tiles, block in ((50, 32), (51, 64)):
        asked = dict(head_dim=16, dtype=torch.float32, tma=False)
        assert choose(never, tiles, "forward", True, **asked) == configs.Config(block, block, 4, 1)


def test_a_known_gpu_measures_nothing(known_gpu):
    assert choose(never, tiles=10**6) == configs.TABLE["dkdv", 64, True].full
    assert not known_gpu


@pytest.mark.parametrize(
    ("capability", "multiprocessors", "hip", "known"),
    [
        ((9, 0), 132, None, True),
        ((9, 0), 114, None, False),  # an H100 PCIe
        ((9, 0), 78, None, False),  # an H20
        ((8, 6), 132, None, False),
        ((9, 0), 132, "6.4", False),  # an AMD GPU of the same number is not a Hopper
    ],
)
def test_the_table_is_for_one_chip(capability, multiprocessors, hip, known):
    with (
        mock.patch.object(configs, "capability", return_value=capability),
        mock.patch.object(configs, "multiprocessors", return_value=multiprocessors),
        mock.patch.object(torch.version, "hip", hip),
    ):
        assert configs.was_measured.__wrapped__(0) == known


def test_a_limit_of_registers_is_asked_for_where_there_is_one_and_on_nvidia():
    limited, free = configs.Config(64, 128, 4, 1, maxnreg=128), configs.Config(64, 128, 4, 1)
    assert limited.options == free.options | dict(maxnreg=128)
    with mock.patch.object(torch.version, "hip", "6.4"):  # which would raise: it has no such option
        assert limited.options == free.options


# --- the trial ---------------------------------------------------------------------------------


@interpreted_only
def test_trap41_nothing_is_measured_on_a_cpu():
    assert choose(never, 1, "forward", True) == configs.plain("forward", 64, torch.float16)


def test_nothing_is_measured_where_the_plain_tiles_are_the_best(unknown_gpu):
    asked = dict(dtype=torch.float32, tma=False)
    assert choose(never, **asked) == configs.plain("dkdv", 64, torch.float32)
    assert not unknown_gpu


def test_trap39_the_fastest_that_fits_is_chosen_once(unknown_gpu):
    forward = candidates("forward")
    times, launched = dict(zip(forward[1:], (2.0, 3.0), strict=True)), []

    def launch(config):
        launched.append(config)
        return times[config] if config in times else too_large()

    assert choose(launch, kernel="forward") == forward[1]
    assert set(launched) == set(forward)
    launched.clear()
    assert choose(launch, kernel="forward") == forward[1]
    assert not launched
    assert len(unknown_gpu) == 1


def test_the_median_decides_and_no_lucky_call():
    tried = candidates()[:2]
    times = Timing(2.0, 0.1, 3.0, host=0.0), Timing(1.0, 0.9, 9.0, host=0.0)
    with mock.patch.object(configs, "time_ms", side_effect=times):
        assert configs.fastest(never, tried) is tried[1]


@pytest.mark.usefixtures("unknown_gpu")
def test_trap39_a_gpu_too_small_for_all_says_so():
    with pytest.raises(RuntimeError, match=r"shared memory \(tried 128 x 64, .*smaller head_dim"):
        choose(too_large)


def test_a_tile_that_does_not_compile_is_passed_over(unknown_gpu):
    def launch(config):
        if config == candidates()[0]:
            raise BUG
        return 2.0

    assert choose(launch) in candidates()[1:]
    unknown_gpu.clear()
    with pytest.raises(PTXASError, match="a bug"):  # and not that the GPU is too small
        choose(mock.Mock(side_effect=BUG))


def test_without_memory_to_measure_in_the_plain_tile_is_taken_and_not_remembered(unknown_gpu):
    with mock.patch.object(configs, "time_ms", side_effect=torch.cuda.OutOfMemoryError):
        assert choose(lambda config: 1.0) == configs.plain("dkdv", 64, torch.float16)
    assert not unknown_gpu


def test_trap37_nothing_is_measured_while_a_graph_is_captured(unknown_gpu):
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
        assert choose(never) == configs.plain("dkdv", 64, torch.float16)
    assert not unknown_gpu


@pytest.mark.usefixtures("unknown_gpu")
@pytest.mark.parametrize(
    "other",
    [
        dict(kernel="dq"),
        dict(dtype=torch.bfloat16),
        dict(head_dim=128),
        dict(is_causal=True),
        dict(tma=False),
        dict(tiles=100_000),  # what is best for an idle GPU says nothing of a busy one
    ],
    ids=lambda other: next(iter(other)),
)
def test_what_is_measured_counts_for_the_like_only(other):
    asked = dict(head_dim=64, dtype=torch.float16, tma=True)
    asked |= dict(kernel="dkdv", tiles=100, is_causal=False)
    launch = mock.Mock(return_value=1.0)
    choose(launch, **asked)
    launch.reset_mock()
    choose(launch, **asked | dict(tiles=101, head_dim=63))
    assert not launch.called
    choose(launch, **asked | other)
    assert launch.called
    launch.reset_mock()
    with mock.patch.object(torch.cuda, "current_device", return_value=1):
        choose(launch, **asked)
    assert launch.called


@MASKS
def test_a_gpu_that_is_not_known_counts_as_busy_above_a_limit_of_the_mask(unknown_gpu, is_causal):
    limit = 100 * configs.FEW[is_causal]  # tiles, for its 100 multiprocessors
    for tiles, measured in ((1, 1), (limit, 1), (limit + 1, 2), (10 * limit, 2)):
        choose(lambda config: 1.0, tiles, is_causal=is_causal)
        assert len(unknown_gpu) == measured


@interpreted_only
@pytest.mark.usefixtures("fresh_plans")
def test_tiles_are_chosen_for_the_call_s_mask_and_counted_over_all_heads():
    q, k, v = leaves(2, 6, 40, 16, heads_kv=3, seq_k=70)
    asked, masks = {}, []

    def chosen(kernel, head_dim, dtype, tma, is_causal, tiles, launch):
        asked[kernel] = tiles
        masks.append(is_causal)
        assert (head_dim, dtype) == (16, torch.float16)
        return configs.plain(kernel, head_dim, dtype)

    with mock.patch.object(configs, "choose", chosen):
        flash_attention(q, k, v, enable_gqa=True).sum().backward()
        assert asked == dict(forward=2 * 6, dkdv=2 * 3 * 2, dq=2 * 6)
        flash_attention(q, k, v, is_causal=True, enable_gqa=True).sum().backward()
        assert asked["dkdv"] == 2 * 3  # the last keys are seen by nobody
    assert masks == [False] * 3 + [True] * 3


# --- what does not fit -------------------------------------------------------------------------


@pytest.mark.parametrize("error", [NO_ROOM, BUG], ids=["room", "assembler"])
def test_a_tile_that_cannot_be_launched_gives_way_to_the_first_that_can(error):
    def launch(config, good):
        if config != good:
            raise error

    tried = [configs.Config(64, 256, 4, 1), *candidates()]
    for n, good in enumerate(tried):
        launched = mock.Mock(side_effect=functools.partial(launch, good=good))
        assert configs.fitting(launched, tried) == good
        assert [call.args[0] for call in launched.call_args_list] == tried[: n + 1]
    says = r"no tile fits this GPU's tensor memory|a bug"
    with pytest.raises((RuntimeError, PTXASError), match=says):
        configs.fitting(mock.Mock(side_effect=error), tried)


def cramped(most, refused):
    """`Launch.compile` on a GPU that has no room for a tile of more than `most` keys."""

    def compile_(self, *tensors):
        given = dict(zip(reversed(self.kernel.arg_names), reversed(self.rest), strict=False))
        if given.get("BLOCK_N", 0) > most:
            refused.append(given["BLOCK_N"])
            too_large()

    return mock.patch.object(Launch, "compile", compile_)


@interpreted_only
@pytest.mark.usefixtures("known_gpu")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("most", "fits"), [(64, True), (16, False)])
def test_trap39_what_does_not_fit_in_a_later_call_gives_way_to_what_fits(kernel, most, fits):
    chosen = configs.Config(64, 256, 4, 1)  # fitted when it was measured, under another mask

    def choose(asked, head_dim, dtype, tma, is_causal, tiles, launch):
        return chosen if asked == kernel else configs.plain(asked, head_dim, dtype)

    with mock.patch.object(runtime, "DEVICE", "cpu"):
        q, k, v = leaves(1, 2, 70, 16, seq_k=100)
    refused = []
    with mock.patch.object(configs, "choose", choose), cramped(most, refused):
        if fits:
            options = dict(do=torch.randn_like(q), compare_sdpa=False)
            verify_results(tuned, q, k, v, **options).check()
            assert refused[0] == 256
            assert {256, 128} >= set(refused)
        else:
            says = r"no tile fits .*\(tried 64 x .*a smaller head_dim"
            with pytest.raises(RuntimeError, match=says):
                flash_attention(q, k, v).sum().backward()
            assert 64 in refused


def test_each_kernel_takes_the_tiles_that_are_asked_for_it():
    q, k, v = leaves(1, 1, 40, 16)
    lse = torch.zeros(1, 1, 40, device=q.device)
    dkdv, dq = (configs.Config(m, n, 4, 1) for m, n in ((16, 32), (64, 16)))
    call = functools.partial(attention_backward, q, k, v, q, lse, q, dkdv_config=dkdv, dq_config=dq)
    taken = {}
    for made in record_launches(call):
        named = {list(made.signature)[path[0]]: value for path, value in made.constexprs if len(path) == 1}
        taken[made.name.split("_")[3]] = named.get("BLOCK_M"), named.get("BLOCK_N")
    assert taken == dict(rows=(64, None), dkdv=(16, 32), dq=(64, 16))


@interpreted_only
@pytest.mark.usefixtures("known_gpu")
def test_tiles_that_are_asked_for_are_taken_or_refused():
    with mock.patch.object(runtime, "DEVICE", "cpu"):
        q, k, v = make_qkv(1, 1, 40, 16)
    refused = []
    with cramped(32, refused), pytest.raises(OutOfResources):
        attention_forward(q, k, v, config=configs.Config(32, 64, 4, 1))
    assert refused == [64]


# --- how tiles are multiplied ------------------------------------------------------------------


def test_amd_has_tf32_on_the_mi300_alone():
    allowed = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with mock.patch.object(torch.version, "hip", "6.4"):
            chips = ("gfx942:sramecc+", "tf32"), ("gfx950", "ieee"), ("gfx90a", "ieee")
            for arch, expected in chips:
                gpu = mock.Mock(gcnArchName=arch)
                with mock.patch.object(torch.cuda, "get_device_properties", return_value=gpu):
                    assert launch.precision(torch.float32) == expected
        assert launch.precision(torch.float32) == "tf32"
        assert launch.precision(torch.float16) == "ieee"
    finally:
        torch.set_float32_matmul_precision(allowed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "switch",
    [
        "torch.set_float32_matmul_precision('high')",
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    ],
)
def test_tf32_follows_pytorchs_switch(switch):
    code = (
        "import torch; from phase5_tuning.launch.plans import precision as p\n"
        f"print(p(torch.float32), end=' ')\n{switch}\nprint(p(torch.float32), p(torch.float16))"
    )
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == ["ieee", "tf32", "ieee"], done.stderr
