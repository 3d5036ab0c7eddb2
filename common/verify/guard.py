"""Memory in which a kernel's mistakes at the edges of tensors can be seen.

`placed` copies an input to where NaN lies around it and between its rows: what is loaded there spoils the result.
Inside `watched`, every tensor of numbers that PyTorch allocates starts as NaN and lies between guards: an element that
no program stores stays NaN, and a store outside the result changes a guard. This holds for the backward pass too, if it
runs inside.
"""

import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from unittest import mock

import torch

ALLOCATORS = ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty"))
GUARD = 2**16  # elements on each side: a tile of the largest head_dim, and batch and head exchanged
UNTOUCHED = 0x44  # what a guard holds, as an integer
# What a result holds before it is stored, by bytes of an element: a NaN that arithmetic does not make.
UNWRITTEN = {1: -1, 2: 0x7FD5, 4: 0x7FD57FD5, 8: 0x7FD57FD57FD57FD5}
MOST_GAPS = 16  # a tensor whose memory is so many times its elements is not copied
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Result:
    """A tensor that was allocated inside `watched`, and the memory around it."""

    tensor: torch.Tensor
    memory: torch.Tensor  # as integers

    @property
    def stored_outside(self) -> bool:
        edges = torch.cat([self.memory[:GUARD], self.memory[-GUARD:]])
        return bool((edges != UNTOUCHED).any())

    def holds(self, t) -> bool:
        """Whether t is a tensor in this memory."""
        is_tensor = isinstance(t, torch.Tensor) and t.layout == torch.strided
        return is_tensor and self.memory.untyped_storage().data_ptr() == t.untyped_storage().data_ptr()

    def where_outside(self) -> str:
        """How many elements before its begin and behind its end were stored to."""
        before, behind = (int((edge != UNTOUCHED).sum()) for edge in (self.memory[:GUARD], self.memory[-GUARD:]))
        return " and ".join(f"{n} {where}" for n, where in ((before, "before it"), (behind, "behind it")) if n)


@dataclass(frozen=True)
class Placed:
    """What a function may be given for an input. memory: all that the tensor lies in, values: its own elements, as
    they were, both as integers.
    """

    tensor: torch.Tensor
    memory: torch.Tensor
    before: torch.Tensor  # a copy of the memory
    values: torch.Tensor  # and of the tensor

    @property
    def written(self) -> bool:
        return not torch.equal(self.memory, self.before)

    @property
    def written_inside(self) -> bool:
        """Whether an element of the tensor was written, and not only what lies beside it."""
        return not torch.equal(bits(self.tensor), self.values)


def placed(t: torch.Tensor, fill: float = math.nan) -> Placed:
    """A copy of t with its strides, its alignment to 16 bytes, and `fill` around it and between its rows.

    Where gaps make up almost all of its memory, t itself.
    """
    if t.is_neg():  # a view that negates what lies in memory
        copy = placed(torch._neg_view(t), fill)
        return replace(copy, tensor=torch._neg_view(copy.tensor), values=bits(t).clone())
    span = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
    if span > MOST_GAPS * t.numel() + GUARD:
        return Placed(t, bits(t), bits(t).clone(), bits(t).clone())
    offset = GUARD + t.data_ptr() % 16 // t.itemsize
    numbers = torch.full((offset + span + GUARD,), fill, dtype=t.dtype, device=t.device)
    copy = numbers.as_strided(t.shape, t.stride(), offset)
    own = [slice(1) if stride == 0 else slice(None) for stride in t.stride()]  # expanded axes share their memory
    copy[tuple(own)].copy_(t[tuple(own)])
    memory = bits(numbers)
    return Placed(copy, memory, memory.clone(), bits(copy).clone())


def never_stored(t: torch.Tensor) -> torch.Tensor:
    """True for each element of a result (or of a copy in its dtype) that no program has stored."""
    return bits(t) == UNWRITTEN[t.itemsize]


def bits(t: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor of numbers as integers."""
    return t.detach().resolve_neg().view(BITS[t.itemsize])


class Listening:
    """Attributes that are replaced while anybody listens, in any thread. Everybody's list gets all that is said.

    patches: a function that returns the unittest.mock patches to hold, made for the first who listens.
    """

    def __init__(self, patches: Callable[[], Iterable]):
        self.patches, self.lists, self.held, self.lock = patches, [], contextlib.ExitStack(), threading.Lock()

    def say(self, what) -> None:
        for heard in list(self.lists):
            heard.append(what)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[list]:
        heard = []
        with self.lock:
            if not self.lists:
                for patch in self.patches():
                    self.held.enter_context(patch)
            self.lists.append(heard)
        try:
            yield heard
        finally:
            with self.lock:
                self.lists = [others for others in self.lists if others is not heard]
                if not self.lists:
                    self.held.close()


def _allocators():
    return [mock.patch.object(owner, name, _between_guards(getattr(owner, name))) for owner, name in ALLOCATORS]


def _between_guards(allocate):
    is_new_empty = allocate is torch.Tensor.new_empty

    def allocated(*args, **kwargs):
        wanted = allocate(*args, **kwargs)
        # Triton's interpreter makes empty tensors by new_empty, and sets them to other memory.
        if (wanted.numel() == 0 and is_new_empty) or not wanted.is_floating_point() or wanted.is_meta:
            return wanted
        elements = wanted.untyped_storage().nbytes() // wanted.itemsize
        memory = torch.full((elements + 2 * GUARD,), UNTOUCHED, dtype=BITS[wanted.itemsize], device=wanted.device)
        memory[GUARD : GUARD + elements] = UNWRITTEN[wanted.itemsize]
        tensor = memory.view(wanted.dtype).as_strided(wanted.shape, wanted.stride(), GUARD)
        watched.say(Result(tensor, memory))
        return tensor

    return allocated


# `with watched() as results` guards what is allocated inside, by any thread: the list of results, in their order.
watched = Listening(_allocators)
