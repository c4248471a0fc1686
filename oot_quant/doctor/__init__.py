"""Will this work here, and if not, what is to be done?

``runner.diagnose`` answers and never prints. Importing this package alone imports none of it.

``facts`` gathers what can be known without importing anything heavy; ``environment``,
``plugins``, ``model``, ``stored`` and ``fit`` hold the checks; ``table`` puts them in order with
those of the backends; ``runner`` runs them; ``report`` is what comes out.
"""
