"""Memory with guards, in which a kernel's mistakes at the edges of its results can be seen.

Inside `watched`, every tensor of numbers that PyTorch allocates starts as NaN and lies between guards: an element that
no program stores stays NaN, and a store outside the result changes a guard. This holds for the backward pass too, if it
runs inside.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import torch

ALLOCATORS = ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty"))
GUARD = 2**16  # elements on each side: a tile of the largest head_dim, and batch and head exchanged
UNTOUCHED = 0x44  # what a guard holds, as an integer
UNWRITTEN = -1  # all bits set: a NaN in every dtype, and one that arithmetic does not give
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Result:
    """A tensor that was allocated inside `watched`, and the memory around it."""

    tensor: torch.Tensor
    memory: torch.Tensor  # as integers

    @property
    def stored_outside(self) -> bool:
        edges = torch.cat([self.memory[:GUARD], self.memory[-GUARD:]])
        return bool((edges != UNTOUCHED).any())


def never_stored(t: torch.Tensor) -> torch.Tensor:
    """True for each element of a result (or of a copy in its dtype) that no program has stored."""
    return t.detach().view(_BITS[t.itemsize]) == UNWRITTEN


@contextlib.contextmanager
def watched() -> Iterator[list[Result]]:
    """Guard what is allocated inside. Yields the list of results, in the order of their allocation."""
    results, new_empty = [], torch.Tensor.new_empty

    def between_guards(allocate):
        def allocated(*args, **kwargs):
            wanted = allocate(*args, **kwargs)
            # Triton's interpreter makes empty tensors by new_empty, and sets them to other memory.
            empty = wanted.numel() == 0 and allocate is new_empty
            if empty or not wanted.is_floating_point():
                return wanted
            elements = wanted.untyped_storage().nbytes() // wanted.itemsize
            bits = dict(dtype=_BITS[wanted.itemsize], device=wanted.device)
            memory = torch.full((elements + 2 * GUARD,), UNTOUCHED, **bits)
            memory[GUARD : GUARD + elements] = UNWRITTEN
            tensor = memory.view(wanted.dtype).as_strided(wanted.shape, wanted.stride(), GUARD)
            results.append(Result(tensor, memory))
            return tensor

        return allocated

    with contextlib.ExitStack() as stack:
        for owner, name in ALLOCATORS:
            replaced = between_guards(getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, replaced))
        yield results
