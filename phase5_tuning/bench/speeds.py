"""The README's picture and table of speeds: `python -m phase5_tuning.bench.speeds` draws one and prints the other."""

import hashlib

from common.arguments import arguments
from common.measure import records
from common.phases import ROOT
from phase5_tuning.hopper import sketches

PATH = ROOT / "phase5_tuning" / "speeds.png"
SEQ = 16384
RECORDS = "h200", "h200_hopper_forward", "h200_hopper_backward"
PROVIDERS = {
    "sdpa-flash": "FlashAttention-2 (SDPA)",
    "flex": "FlexAttention",
    "sdpa-cudnn": "cuDNN (SDPA)",
    "flash-attn-4": "FlashAttention-4",
    "flash-attn-4-det": "FlashAttention-4, fixed order",
    "hopper": "this course",
}


def rates() -> dict[tuple[str, int, bool, int, str], float]:
    """TFLOP/s in fp16 by (provider, head_dim, is_causal, seq, mode); of several records, the last one's."""
    found = {}
    for row in (row for name in RECORDS for row in records.load("phase5_tuning", name)["rows"]):
        # FlashAttention-4's forward pass is the same with and without a fixed order.
        twice = (row["provider"], row["mode"]) == ("flash-attn-4-det", "fwd")
        if row["dtype"] == "fp16" and "tflops" in row and not twice:
            key = row["provider"], row["head_dim"], row["is_causal"], row["seq"], row["mode"]
            found[key] = row["tflops"]
    return found


def table() -> str:
    """TFLOP/s at SEQ tokens in Markdown: a line for each case and pass, a column for each provider."""
    found = rates()
    lines = ["| | " + " | ".join(PROVIDERS.values()) + " |", "|---" * (len(PROVIDERS) + 1) + "|"]
    for mode, name in (("fwd", "forward"), ("bwd", "backward")):
        for d, is_causal in sketches.CASES:
            cells = [found.get((p, d, is_causal, SEQ, mode)) for p in PROVIDERS]
            of = f"{name}, head_dim {d}, {'causal' if is_causal else 'full'}"
            cells = [f"{rate:.0f}" if rate else "" for rate in cells]
            lines.append(f"| {of} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def fingerprint() -> str:
    """A hash of what the picture shows; it is stored in the picture."""
    return hashlib.sha256(table().encode()).hexdigest()[:16]


if __name__ == "__main__":
    arguments()
    figure = sketches.bars(rates(), PROVIDERS, SEQ)
    figure.savefig(PATH, dpi=110, metadata=dict(records=fingerprint()))
    print(table())
