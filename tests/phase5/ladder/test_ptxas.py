"""A mistake of the assembler: ptxas 12.8, which Triton 3.6 and 3.7 carry, loses an address.

The machine code of the forward kernels at BLOCK_D = 32, with K transposed in memory and rows of V that are not
aligned to 16 bytes, computes the descriptors of V's tile from a uniform register that nothing has written. Rows of V
from the 17th on come from anywhere: o is wrong, or the GPU reports an illegal address.
"""

import itertools
import re

from common.measure import offline
from phase5_tuning.ladder.forward import _attn_fwd_heavy_first_kernel
from phase5_tuning.launch import configs
from phase5_tuning.passes.forward import attention_forward

import pytest
import torch
from helpers import interpreted_only

INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s*(.*?)\s*;")


def never_written(sass: str) -> list[str]:
    """The instructions that read a uniform register before any instruction above has written it."""
    written, found = set(), []
    for name, text in INSTRUCTION.findall(sass):
        operands = [operand.strip() for operand in text.split(",")]
        numbers = [[int(n) for n in re.findall(r"\bUR(\d+)", operand)] for operand in operands]
        uniform = name.startswith(("U", "R2UR", "S2UR", "VOTEU", "REDUX"))
        at = next((i for i, o in enumerate(operands) if uniform and re.fullmatch(r"UR\d+", o)), None)
        pairs = ".64" in name
        for i, operand in enumerate(operands):
            # Of a product's two descriptors only the second is asked about: the first may be registers.
            first = [n + 2 for n in numbers[i]] if "gdesc" in operand else numbers[i]
            last = i == len(operands) - 1 > 2
            wide = "desc" in operand or ("[" not in operand and (pairs or ("WIDE" in name and last)))
            read = {n + k for n in first for k in range(1 + wide)} if i != at else set()
            if read - written:
                found.append(f"{name} {text}")
        if at is not None:
            written |= {numbers[at][0] + k for k in range(1 + (pairs or "WIDE" in name))}
    return found


def test_a_register_that_is_read_before_it_is_written_is_found():
    def sass(*lines):
        return "\n".join(f"        /*{16 * i:04x}*/   {line} ;   /* 0x0 */" for i, line in enumerate(lines))

    assert not never_written(sass("ULDC.64 UR4, c[0x0][0x208]", "UIADD3 UR6, UP0, UR4, 0x40, URZ", "UMOV UR7, UR5"))
    add = "UIADD3 UR22, UP0, UR22, 0x40, URZ"
    assert never_written(sass(add)) == [add]
    load = "LDG.E.U16 R8, desc[UR20][R20.64]"
    assert never_written(sass("UMOV UR20, 0x1", f"@P6 {load}")) == [load]
    product = "HGMMA.64x32x16.F32 R88, R24, gdesc[UR20].tnspB, R88"
    assert never_written(sass("ULDC.64 UR20, c[0x0][0x208]", product)) == [product]


def tensor(memory, heads, head_dim, seq=100):
    """(1, heads, seq, head_dim) fp16 whose rows are aligned to 16 bytes, or contiguous only, or not even that."""
    if memory == "transposed":
        return torch.empty(1, heads, head_dim, seq, dtype=torch.float16).mT
    columns = head_dim + (-head_dim % 16 if memory == "aligned" else head_dim % 16 == 0)
    return torch.empty(1, heads, seq, columns, dtype=torch.float16)[..., :head_dim]


MEMORY = "aligned", "contiguous", "transposed"


@interpreted_only
@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [8, 16, 20, 24, 32, 40, 80, 200])
def test_no_forward_kernel_reads_a_register_that_nothing_wrote(head_dim):
    dtype, recorded = torch.float16, []
    known = configs.row("forward", head_dim, dtype, False)
    tiles = {known.full, known.causal, known.few} if known else {configs.plain("forward", head_dim, dtype)}
    for config, *memory in itertools.product(tiles - {None}, MEMORY, MEMORY):
        q, k, v = (tensor(*look, head_dim) for look in (("contiguous", 3), (memory[0], 1), (memory[1], 1)))
        options = dict(enable_gqa=True, kernel=_attn_fwd_heavy_first_kernel, config=config)
        recorded += offline.record_launches(lambda: attention_forward(q, k, v, True, **options))  # noqa: B023
    made = offline.compile_launches(recorded, ["sm_90"], sass=True)
    assert len(made) == 9 * len(tiles - {None})
    for c in made:
        assert c.error is None, c
        assert "HGMMA" in c.sass
        assert not never_written(c.sass)
