"""Stages of the kernel: each version answers what it can, and each wrong form is wrong where it is said."""

from common import make_qkv, verify_results
from common.source import source
from common.verify import guard
from phase3_forward import forward
from phase3_forward.forward import attention_forward
from phase3_forward.stages import GROWTH, KERNEL, NAMES, stage, try_columns

import pytest

CALLS = {  # what a feature is for
    "heads": dict(qkv=make_qkv(2, 4, 20, 16, heads_kv=2, seq_k=70), enable_gqa=True),
    "head_dim": dict(qkv=make_qkv(1, 1, 20, 80)),
    "mask": dict(qkv=make_qkv(1, 1, 70, 16), is_causal=True),
    "lse": dict(qkv=make_qkv(1, 1, 20, 16), lse=True),
}
GROUPED = CALLS["heads"]
WRONG = {  # a call that the wrong form gets wrong: None where it does not
    "heads one after another": dict(qkv=make_qkv(2, 2, 20, 16, layout="bshd")),
    "offsets of 32 bits": None,  # at 2^31 elements; on these it is right
    "key heads by remainder": GROUPED,
    "scale of the tile": CALLS["head_dim"],
    "values past the end are infinite": GROUPED,
    "keys past the end are visible": GROUPED,
    "loop bound without a mask": CALLS["mask"],
    "diagonal hidden": CALLS["mask"],
    "mask the wrong way round": CALLS["mask"],
    "loop ends a tile early": CALLS["mask"],
    "K padded with NaN": CALLS["head_dim"],
    "bottom-right, no guard in the loop": dict(qkv=make_qkv(1, 1, 100, 16, seq_k=20), is_causal=True),
    "no rescale": GROUPED,
    "LSE without the maximum": CALLS["lse"],
    "batch of the keys forgotten": GROUPED,
    "V addressed with K's strides": dict(qkv=make_qkv(1, 2, 20, 16, seq_k=70, layout_v="expanded")),
    "suspect": GROUPED,
}


def passes(qkv, lse=False, **options):
    """True if attention_forward, as it is now, gets the call right; o alone, or lse as well."""

    def attention(*args, **kwargs):
        with guard.watched():
            results = attention_forward(*args, **kwargs)
        return results if lse else results[0]

    return verify_results(attention, *qkv, compare_sdpa=False, **options).passed


@pytest.mark.parametrize("name", GROWTH)
def test_a_version_answers_the_calls_of_its_features_and_of_no_other(name):
    has = GROWTH.index(name)
    with stage(name):
        for feature, call in CALLS.items():
            if feature == "head_dim" and GROWTH.index(feature) > has:
                with pytest.raises(Exception, match="power of 2"):  # no tile is 80 wide
                    passes(**call)
            else:
                assert passes(**call) == (GROWTH.index(feature) <= has), feature


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("name", "call"), WRONG.items(), ids=WRONG)
def test_a_wrong_form_is_wrong(name, call):
    with stage(name):
        assert passes(**(call or GROUPED) | dict(lse=True)) == (call is None)


def test_every_stage_is_tested_and_the_last_is_the_module():
    assert (*GROWTH, *WRONG) == NAMES
    assert source(stage("lse")[KERNEL]) == source(forward._attn_fwd_kernel)


@pytest.mark.parametrize(
    ("places", "says"),
    [
        (set(), "does not run"),
        ({1}, "does not run"),
        ({3}, "place 1 makes a tile of 80 columns"),
        ({1, 2, 3}, "non-finite"),
        ({1, 3, 4}, "place 4 must end at the true columns"),
        ({1, 3, 5}, "loads columns behind the matrix"),
        ({1, 3, 6}, "stored outside"),
    ],
    ids=str,
)
def test_where_columns_are_padded_in_wrong_places_it_is_said(places, says, capsys):
    try_columns(places)
    assert says in capsys.readouterr().out


def test_columns_that_are_padded_in_the_right_places_pass(capsys):
    try_columns({1, 3})
    said = capsys.readouterr().out
    assert said.startswith("o   PASS")
    assert said.count("\n") == 1
