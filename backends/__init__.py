"""The backends that ship with oot-quant, one folder for each; imported as ``oot_quant_backends``."""
