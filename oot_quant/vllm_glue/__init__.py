"""The only room that touches what vLLM does not document. Backends build on it.

``compat`` knows which versions work, ``config`` is the base of every backend's config,
``params`` turns shard rules into parameters, ``registration`` and ``stand_in`` serve start-up.
"""
