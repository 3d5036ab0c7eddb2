"""The tensor memory accelerator's operations, by the names under which the kernels were measured.

Triton 3.8 gave the copies new names, and 3.9 has these only.
"""

from triton.experimental.gluon.language.nvidia.hopper import tma as _tma

tensor_descriptor, store_wait = _tma.tensor_descriptor, _tma.store_wait
if hasattr(_tma, "async_load"):
    async_copy_global_to_shared, async_copy_shared_to_global = _tma.async_load, _tma.async_store
else:
    async_copy_global_to_shared = _tma.async_copy_global_to_shared
    async_copy_shared_to_global = _tma.async_copy_shared_to_global
