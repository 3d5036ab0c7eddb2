"""A shorter way to launch what Triton has compiled: the one file that relies on private parts of Triton.

`compiled[grid](...)` describes every launch to profilers and calls their hooks, whether anybody listens or not, and
encodes every descriptor anew. Both take longer than the launch itself. Here a launch goes straight to the compiled
kernel, and the descriptor of an address that was seen before is found again. Where somebody listens, on AMD, and with
another release of Triton than those that this was run with, Triton's own way is taken.
"""

import inspect
from collections.abc import Callable, Sequence

import triton
from triton import knobs
from triton.runtime import driver

RUN_WITH = "3.6.0"
LIMIT = 64  # addresses remembered for each descriptor of a launch


def runner(compiled, grid: tuple[int, int, int], described: Sequence, rest: Sequence) -> Callable:
    """A function of a kernel's tensors that launches it on the current stream.

    compiled: as `kernel.warmup` returns it, on the GPU that is current now. described: for each of the leading tensors
    that go as a descriptor, its `Described`. rest: the kernel's arguments after the tensors, complete.
    """
    public = compiled[grid]  # loads the kernel; raises where the GPU has no room for it

    def by_triton(*tensors):
        public(*(d.at(t) for d, t in zip(described, tensors, strict=False)), *tensors[len(described) :], *rest)

    if triton.__version__ != RUN_WITH or driver.active.get_current_target().backend != "cuda":
        return by_triton
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    if run.global_scratch_size or run.profile_scratch_size:
        return by_triton
    listening = knobs.runtime.launch_enter_hook.calls, knobs.runtime.launch_exit_hook.calls
    stream_of, device = driver.active.get_current_stream, driver.active.get_current_device()
    launcher = run.launch
    encode, kinds = None, ()
    if described:  # Triton wraps the launcher in a function that encodes descriptors
        from triton.backends.nvidia.driver import make_tensordesc_arg as encode

        inside = inspect.getclosurevars(launcher).nonlocals
        launcher, kinds = inside["launcher"], inside["tensordesc_meta"]
    fixed = run.launch_cooperative_grid, run.launch_pdl, None, None, metadata, None, None, None
    seen = [{} for _ in described]

    def launch(*tensors):
        if listening[0] or listening[1]:
            return by_triton(*tensors)
        arguments = []
        for of_address, d, kind, t in zip(seen, described, kinds, tensors, strict=False):
            address = t.data_ptr()
            encoded = of_address.get(address)
            if encoded is None:
                if len(of_address) >= LIMIT:
                    of_address.clear()
                encoded = of_address[address] = encode(d.at(t), kind)
            arguments += encoded
        launcher(*grid, stream_of(device), function, *fixed, *arguments, *tensors[len(described) :], *rest)

    return launch
