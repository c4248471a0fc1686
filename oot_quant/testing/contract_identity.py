"""Part of the contract: who a backend is, and that saying so costs nothing."""

from __future__ import annotations

import os
import subprocess
import sys

from oot_quant import hookspecs
from oot_quant.manager import backends
from oot_quant.types import Check

DESCRIBE = """
import importlib, sys
backend = importlib.import_module(sys.argv[1])
backend.oot_quant_describe()
getattr(backend, "oot_quant_checks", list)()
heavy = [name for name in sys.argv[2:] if name in sys.modules]
sys.exit(f"imported {', '.join(heavy)}" if heavy else 0)
"""


class IdentityContract:
    """Tests of ``oot_quant_describe`` and ``oot_quant_checks``."""

    def test_backend_is_found_and_usable(self, method: str) -> None:
        """The method's backend is installed, loads, and implements the hooks it needs.

        Troubleshooting: run ``oot-quant list``; is the entry point in the group
        ``oot_quant.backends``, and was the distribution installed again since it was added?
        """
        record = backends().record_for(method)
        assert record.ok, record.error
        assert record.info is not None
        assert record.info.name == record.name, "the name is not that of the entry point"
        needed = hookspecs.required_hooks() | {"oot_quant_linear_method"}
        assert needed <= set(record.hooks)

    def test_describing_imports_nothing_heavy(self, method: str) -> None:
        """Import, describe and checks work without torch, vLLM and the backend's library.

        Troubleshooting: move imports of these into the functions that need them, also in
        the modules that ``__init__`` imports.
        """
        record = backends().record_for(method)
        assert record.info is not None
        library = record.info.library
        heavy = ["torch", "vllm"]
        heavy += [library.distribution.replace("-", "_")] if library else []
        done = subprocess.run(  # noqa: S603 - this Python, on a module under test
            [sys.executable, "-c", DESCRIBE, record.module, *heavy],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    def test_checks_have_ids_of_their_own(self, method: str) -> None:
        """Ids of checks begin with ``backend.<name>.`` and occur once.

        Troubleshooting: rename the check; ``backend.<name>`` is the entry point's name.
        """
        record = backends().record_for(method)
        hooks = {found.name: call for found, call in backends().broadcast("oot_quant_checks")}
        checks: list[Check] = list(hooks[record.name]()) if record.name in hooks else []
        ids = [check.id for check in checks]
        assert len(set(ids)) == len(ids)
        assert all(name.startswith(f"backend.{record.name}.") for name in ids), ids
        assert all(check.title for check in checks)
