"""CUDA kernels of the sparse tier.

Each is `name.cu`, its wrapper `name.py`, and `name_reference.py`: the semantics, in torch on CPU.
"""
