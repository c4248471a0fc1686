"""What the kernels and the engine cost, beside what a user could take instead."""
