"""A shorter way to launch what Triton has compiled: the one file that relies on private parts of Triton.

`compiled[grid](...)` describes every launch to profilers and calls their hooks, whether anybody listens or not. It asks
the driver about every address, and encodes every descriptor anew. All this takes longer than the launch itself. Here a
launch goes straight to the compiled kernel, addresses are numbers, and the descriptor of an address that was seen
before is found again. Where a profiler listens, on AMD, and with other releases of Triton than RUN_WITH, Triton's own
way is taken.
"""

import inspect
from collections.abc import Callable, Sequence

import triton
from triton import knobs
from triton.runtime import driver

RUN_WITH = ("3.6.0", "3.7.1")
LIMIT = 64  # addresses remembered for each descriptor of a launch


def runner(compiled, grid: tuple[int, int, int], described: Sequence, rest: Sequence) -> Callable:
    """A function of a kernel's tensors that launches it on the current stream.

    compiled: as `kernel.warmup` returns it, on the GPU that is current now. described: for each of the leading tensors
    that go as a descriptor, its `Described`. rest: the kernel's arguments after the tensors, complete.
    """
    public = compiled[grid]  # loads the kernel; raises where the GPU has no room for it

    def by_triton(*tensors):
        public(*(d.at(t) for d, t in zip(described, tensors, strict=False)), *tensors[len(described) :], *rest)

    run = compiled.run
    known = triton.__version__ in RUN_WITH and driver.active.get_current_target().backend == "cuda"
    if not known or run.global_scratch_size or run.profile_scratch_size:
        return by_triton
    launcher, encode, kinds = run.launch, None, ()
    if described:  # Triton wraps the launcher in a function that encodes descriptors
        from triton.backends.nvidia.driver import make_tensordesc_arg as encode

        inside = inspect.getclosurevars(launcher).nonlocals
        launcher, kinds = inside["launcher"], inside["tensordesc_meta"]
    stream_of, device = driver.active.get_current_stream, driver.active.get_current_device()
    metadata, flags = compiled.packed_metadata, (run.launch_cooperative_grid, run.launch_pdl)
    in_a_list = hasattr(run, "kernel_signature")  # from 3.7 on, behind what each of the arguments is
    if in_a_list:
        fixed = compiled.function, *flags, metadata, *[None] * 5, run.arg_annotations, run.kernel_signature
    else:
        fixed = compiled.function, *flags, None, None, metadata, None, None, None
    listening = knobs.runtime.launch_enter_hook.calls, knobs.runtime.launch_exit_hook.calls
    count = len(described)
    # Of each tensor that goes as a descriptor: its place, the descriptors that were made by address, how, and of what.
    encoded_at = [(i, {}, d, kind) for i, (d, kind) in enumerate(zip(described, kinds, strict=True))]

    def launch(*tensors):
        if listening[0] or listening[1]:
            return by_triton(*tensors)
        arguments = []
        for i, of_address, d, kind in encoded_at:
            address = tensors[i].data_ptr()
            encoded = of_address.get(address)
            if encoded is None:
                if len(of_address) >= LIMIT:
                    of_address.clear()
                encoded = of_address[address] = encode(d.at(tensors[i]), kind)
            arguments += encoded
        arguments += [None if t is None else t.data_ptr() for t in tensors[count:]]
        arguments += rest
        if in_a_list:
            launcher(*grid, stream_of(device), *fixed, arguments)
        else:
            launcher(*grid, stream_of(device), *fixed, *arguments)

    return launch
