"""Random operators on shards, stream "torch": how the global draw is walked, and one rule for each family of operators.

=============  =========================================================================================
``_spans``     pure planning: which flat ranges of the global draw are needed, and where they go
``_draw``      one in-place operator over the global tensor, the own elements kept
``_fills``     in-place fills, and every operator that is a fill of a new tensor or of ``out``
``_elements``  one input element per random element: dropout, ``bernoulli(p)``, ``normal(mean, std)``
``_rows``      one draw per row: ``multinomial``
``_gathered``  operators whose random numbers depend on values: ``poisson``, ``rrelu`` …
=============  =========================================================================================
"""
