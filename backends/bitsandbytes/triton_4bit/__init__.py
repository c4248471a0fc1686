"""4-bit products in Triton, for Hopper: ``units`` the weight's order, ``gemm`` the product.

``ptx`` and ``decode`` are what every kernel of this format is made of. Importing the folder, or
``units``, imports no Triton. Nothing here knows bitsandbytes, layers or vLLM.
"""
