"""oot-quant: quantization backends for vLLM, as plugins.

Importing this package imports neither torch nor vLLM. Start with ``hookspecs``.
"""

from oot_quant.hookspecs import hookimpl

__version__ = "0.1.0"
__all__ = ["__version__", "hookimpl"]
