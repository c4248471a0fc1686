"""The backends that ship with oot-quant, one folder each; imported as ``oot_quant_backends``."""
