"""Triton kernels (installed as `sparsemlp.kernels`). Importing a module of this package needs Triton.

`<op>.py` holds an operator's kernels and its launcher, `forward` or `backward`, which the operator's backend names.
A launcher makes a list of launches (`_launch.Launch`) from tensors, real or meta, and runs it: what the tests compile
for GPUs that nobody has here is what would be launched on them.
"""
