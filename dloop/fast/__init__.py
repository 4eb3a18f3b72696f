"""The fast path: static memory, fused weights, flat rows of many sequences, CUDA graphs; and the same code on a CPU.

It stands behind the same protocols as the Hugging Face adapter, its slow twin.
"""
