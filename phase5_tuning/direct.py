"""A shorter way to launch what Triton has compiled: the one file that relies on private parts of Triton.

`compiled[grid](...)` describes every launch to profilers and calls their hooks, whether anybody listens or not. That
takes a third of a launch. Where nobody listens, and the parts that are named here exist, they are passed over.
"""

from collections.abc import Callable

from triton import knobs
from triton.runtime import driver


def runner(compiled, grid: tuple[int, int, int]) -> Callable:
    """A function of a kernel's arguments, positional and complete, that launches it on the current stream.

    compiled: as `kernel.warmup` returns it, on the GPU that is current now.
    """
    public = compiled[grid]  # loads the kernel
    try:
        run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
        entered, left = knobs.runtime.launch_enter_hook.calls, knobs.runtime.launch_exit_hook.calls
        stream_of, device = driver.active.get_current_stream, driver.active.get_current_device()
    except AttributeError:  # another release of Triton
        return public

    def launch(*arguments):
        if entered or left:
            public(*arguments)
        else:
            run(*grid, stream_of(device), function, metadata, None, None, None, *arguments)

    return launch
