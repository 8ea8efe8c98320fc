"""The counter-based random stream: every value is a function of (seed, number of the draw, global element index).

============== =======================================================================================
``_cipher``    Philox4x32-10: blocks of four words from a key and a counter, and keys from keys
``_elements``  which words belong to the elements of a box, in bounded pieces
``_values``    words to numbers: one small class per distribution
``_state``     seed and counters, kept inside the state of torch's CPU generator
``_place``     which boxes of the global tensor this rank holds
``_fills``     rules for operators whose elements are independent of each other
``_choices``   rules for ``randperm`` and ``multinomial``
``_rules``     the table of all rules
============== =======================================================================================
"""
