"""The stream "philox": each value is a function of (seed, number of the draw, global element index).

============== =========================================================================================
``cipher``     Philox4x32-10: blocks of four words from a key and a counter, and keys from keys
``elements``   one draw: the words of the elements that this rank holds, in bounded pieces
``values``     words to numbers: one small class per distribution
``fills``      rules for operators whose elements are independent of each other
``choices``    rules for ``randperm`` and ``multinomial``
``state``      seed and draw number, kept inside the state of torch's CPU generator
============== =========================================================================================
"""
