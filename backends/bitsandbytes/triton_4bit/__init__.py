"""4-bit products in Triton, for Hopper: ``units`` the weight's order, ``gemm`` the product.

``ptx`` and ``decode`` are what every kernel of this format is made of. Importing this folder
imports no Triton; only ``units`` can be imported without it.
"""
