"""The model that speaks: its weights, its cache, and what wrong attention makes it say."""

import hashlib
import json

from common import runtime
from common.measure import records
from common.speak import text, trained
from common.speak.gpt import complete
from common.verify.mistakes.table import MISTAKES
from phase2_tiling.tiling import attention as one_head
from phase4_backward import speak, train
from phase4_backward.backward import flash_attention

import pytest
import torch
import torch.nn.functional as F

HELD_OUT = [line.strip() for line in text.lines(held_out=True)]
LISTED = [*HELD_OUT[:40], *(line for line in HELD_OUT if line[2] == " "), "7 seven"]


@pytest.fixture(scope="module")
def model():
    return trained.load()


def prompts(written):
    return [line[: line.index(" ") + 1] for line in written]


def emulated(mistake):
    def attention(q, k, v, is_causal):
        return MISTAKES[mistake].attention(q, k, v, is_causal=is_causal)[0]

    return attention


def without_mask(q, k, v, is_causal):
    return F.scaled_dot_product_attention(q, k, v)


def without_cache(model, prompt):
    """The whole line is computed anew for each token."""
    tokens = text.encode(prompt)[None].to(runtime.DEVICE)
    while tokens.shape[1] < model.context and not (tokens == 0).any():
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(dim=-1)], dim=1)
    return text.decode(tokens[0]).split("\n")[0]


def test_the_model_writes_numbers_that_it_was_not_trained_on(model):
    assert complete(model, prompts(LISTED)) == LISTED


def test_it_writes_with_the_kernels_of_phase_4(model):
    written = ["12 twelve", "6 six"]
    assert complete(model, prompts(written), flash_attention) == written


def test_a_kernel_for_one_head_without_a_mask_speaks_token_by_token(model):
    attention = trained.head_by_head(one_head)
    assert complete(model, ["6 ", "2 "], attention, token_by_token=True) == ["6 six", "2 two"]
    with pytest.raises(ValueError, match=r"is_causal: expected False.*token_by_token=True"):
        complete(model, ["6 "], attention)


@pytest.mark.parametrize("token_by_token", [False, True])
def test_with_a_cache_the_model_says_what_it_says_without_one(model, token_by_token):
    asked = [*prompts(HELD_OUT[:8]), "99999 ", "four "]  # at the end it says nonsense, up to its context
    expected = [without_cache(model, prompt) for prompt in asked]
    assert complete(model, asked, token_by_token=token_by_token) == expected
    assert [complete(model, [prompt], token_by_token=token_by_token)[0] for prompt in asked] == expected


def test_attention_meets_the_prompt_at_once_and_then_one_query_over_a_strided_cache(model):
    seen = []

    def attention(q, k, v, is_causal):
        assert k.shape == v.shape
        seen.append((*q.shape, k.shape[2], k.stride(), v.stride(), is_causal))
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    complete(model, ["417 ", "9 "], attention)
    strides = (2 * 64 * 32, 64 * 32, 32, 1)
    first, *others = seen[:: len(model.blocks)]
    assert first == (2, 2, 2, 32, 2, strides, strides, True)
    assert others == [(2, 2, 1, 32, seq, strides, strides, False) for seq in range(3, 3 + len(others))]
    assert len(others) == len("417 four hundred and seventeen") - 2  # the last of them gives the line's end
    seen.clear()
    complete(model, ["417 "], attention, token_by_token=True)
    assert not any(is_causal for *_, is_causal in seen)


def test_after_a_completion_the_model_has_its_own_attention(model):
    def breaks(q, k, v, is_causal):
        raise RuntimeError("a kernel that does not run")

    own = [block.attention for block in model.blocks]
    with pytest.raises(RuntimeError, match="does not run"):
        complete(model, ["7 "], breaks)
    assert [block.attention for block in model.blocks] == own


@pytest.mark.parametrize("mistake", ["acc_not_rescaled", "sum_not_rescaled", "scale_missing", "tail_unmasked"])
def test_a_mistake_in_a_kernel_is_heard(model, mistake):
    assert complete(model, prompts(LISTED[:8]), emulated(mistake)) != LISTED[:8]


def test_a_forgotten_mask_is_heard_where_whole_prompts_are_read(model):
    written = [line for line in HELD_OUT if line[4] == " "][:250]
    said = complete(model, prompts(written), without_mask)
    wrong = sum(a != b for a, b in zip(said, written, strict=True))
    assert 0 < wrong < 10
    assert complete(model, prompts(written), without_mask, token_by_token=True) == written


def test_loading_draws_no_random_numbers_and_the_weights_are_those_of_16_bits(model):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    trained.load()
    assert torch.equal(torch.rand(3), expected)
    assert all(w.dtype == torch.float32 and torch.equal(w, w.half().float()) for w in model.parameters())


def test_record_and_weights_are_of_the_recipe_as_it_is():
    kernels = records.load("phase4_backward", "cpu/speak")["provenance"]["kernels"]
    assert kernels == {"phase4_backward.train.train": speak.recipe()}


def test_record_and_weights_belong_together():
    record = records.load("phase4_backward", "cpu/speak")
    assert record["provenance"]["weights"] == hashlib.sha256(trained.WEIGHTS.read_bytes()).hexdigest()
    assert len(record["provenance"]["commit"]) == 40
    (row,) = record["rows"]
    assert row["steps"] == speak.STEPS
    assert row["digits"] == [1, 2, 3, 4]
    assert row["right"][0] >= 9  # "zero" stands once in the text
    assert all(right >= 0.97 * of for right, of in zip(row["right"][1:], row["of"][1:], strict=True))


def test_the_model_is_trained_by_a_command(tmp_path, monkeypatch, model):
    monkeypatch.setattr(train, "ON_CPU", tmp_path)
    monkeypatch.setattr(trained, "examine", lambda made: {4: [made.context == 64, False]})
    monkeypatch.setattr("sys.argv", ["speak", "--train", "short", "--steps", "2"])
    assert speak.main() == 0
    record = json.loads((tmp_path / "short.json").read_text())
    assert record["provenance"]["command"] == "python -m phase4_backward.speak --train short"
    assert (record["rows"][0]["right"], record["rows"][0]["of"]) == ([1], [2])
    assert len(record["rows"][0]["losses"]) == 2
    made = trained.load(weights=tmp_path / "short.safetensors")
    assert made.token.weight.shape == model.token.weight.shape
    assert not torch.equal(made.token.weight, model.token.weight)


def test_each_number_is_examined_once(model):
    right = trained.examine(trained.load(lambda q, k, v, is_causal: torch.zeros_like(q)))
    assert {digits: len(of) for digits, of in right.items()} == {1: 10, 2: 7, 3: 84, 4: 909}
    assert not any(map(any, right.values()))


def test_windows_of_whole_lines_begin_where_lines_do(monkeypatch):
    seen = []

    class Seen(train.GPT):
        def forward(self, tokens):
            seen.extend(map(text.decode, tokens))
            return super().forward(tokens)

    monkeypatch.setattr(train, "GPT", Seen)
    train.train(train.sdpa(), 2, batch=50, whole_lines=True)
    lines = set(text.lines(held_out=False))
    assert all(f"{window.split(chr(10))[0]}\n" in lines for window in seen)


def test_numbers_are_written_from_the_command_line(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["speak", "13", "4170"])
    assert speak.main() == 0
    assert capsys.readouterr().out == "13 thirteen\n4170 four thousand one hundred and seventy\n"
    monkeypatch.setattr("sys.argv", ["speak", "10000"])
    with pytest.raises(SystemExit):
        speak.main()
    assert "numbers: expected numbers from 0 to 9999, got 10000" in capsys.readouterr().err
