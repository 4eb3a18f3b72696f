"""GPU kernels in Triton, each beside its plain PyTorch twin.

All obey one rule, on which bit-identical decoding rests: what a row's result is made of, and in which order, depends
on the shape of the weights and on the row's own positions, never on the other rows of the forward. So the tiles along
the summed dimension are fixed, and the rows are always the narrow operand of a matrix product (its columns).
"""
