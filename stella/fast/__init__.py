"""Everything that makes a step quick, applied from outside. The code it applies to knows nothing of it.

`parts` lists what is compiled or replaced, `activations` says what compiled parts keep for the backward pass, `graphs`
records whole steps as CUDA graphs, `kernels` has the Triton kernels, `allocator` keeps freed memory on a CPU.
"""
