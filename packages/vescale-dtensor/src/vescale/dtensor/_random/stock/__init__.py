"""Random operators in the stream "torch": walk the global draw of the stock generator and keep the local elements.

=============  ==========================================================================================
``draw``       run an in-place operator over the global tensor, keep this rank's part; every rule ends here
``spans``      planning: which flat ranges of the draw are skipped, drawn in place, drawn in scratch
``fills``      in-place fills, and every operator that is a fill of a new tensor or of ``out``
``elements``   one random number for each input element: dropout, ``bernoulli(p)``, ``normal(mean, std)``
``gathered``   random numbers that depend on values of other ranks: ``multinomial``, ``poisson``, ``rrelu``, …
=============  ==========================================================================================
"""
