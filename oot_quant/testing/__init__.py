"""What a backend's author needs to test it: the contract, real layers, tiny checkpoints.

``contract`` is the suite that every backend must pass, ``layers`` builds vLLM's layers
without an engine, ``checkpoints`` writes models of a few hundred kilobytes. Needs pytest,
hypothesis, torch and vLLM; nothing else in the package imports it.
"""

import pytest

# So that a failing assertion in the suite shows its values, as in a test file.
pytest.register_assert_rewrite(
    *(f"{__name__}.{part}" for part in ("contract_identity", "contract_linear", "contract_storage"))
)
