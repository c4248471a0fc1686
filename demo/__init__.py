"""The demo: a small model served in 16 and 4 bits, side by side. Not part of the package."""
