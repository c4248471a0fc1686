"""Will this work here, and if not, what is to be done? ``diagnose`` answers and never prints.

``facts`` gathers what can be known without importing anything heavy; ``environment``,
``plugins``, ``model`` and ``fit`` hold the checks; ``table`` puts them in order together with
those of the backends; ``runner`` runs them; ``report`` is what comes out.
"""

from oot_quant.doctor.report import Report, Result, Verdict
from oot_quant.doctor.runner import diagnose

__all__ = ["Report", "Result", "Verdict", "diagnose"]
