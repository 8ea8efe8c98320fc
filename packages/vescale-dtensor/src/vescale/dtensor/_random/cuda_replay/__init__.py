"""Random operators on CUDA shards: what one device draws, without drawing the full tensor.

The stock kernels run as they are, from generator offsets that make a window of the global draw a draw of its own
(``windows``); the map of random words behind that is in ``geometry``. Work is proportional to the elements of a row
shard, scratch is bounded, and the generator ends where it ends on one device.

=====================  ====================================================================================
fills                  ``uniform_ normal_ bernoulli_(float) exponential_ geometric_ log_normal_ cauchy_
                       random_`` of any dense tensor, also of more than 2^31 elements: replayed in windows
``native_dropout``     replayed in windows
``bernoulli(p)``       computed word by word, from 2^24 elements on
=====================  ====================================================================================

Each entry point returns whether it did the work. Otherwise the generator is as before, and the caller draws the full
tensor and keeps its shard, which is right everywhere: for small tensors (no larger than one launch), for
dropout of more than 2^31 - 1 elements, during the capture of a CUDA graph (where a generator's offset can be neither
read nor set), for complex and fake tensors, and where the device does not draw as assumed.

Assumptions about the device and the torch release, and the run-time check of each:

* the map of words, the number of threads (also where a device is shared), values per block: a test draw of each
  operator and dtype against the native one (``selftest``), and the generator's move after each launch;
* the widest vectorized read of ``native_dropout``, 4 or 8 elements of 16 bits: found by a test draw;
* the halves that a fill of more than 2^31 - 1 bytes is split into: a test draw of 2 GiB before the first such fill of
  an operator and dtype (where memory does not suffice, the full tensor is drawn). They are those of a dense tensor;
* the alignment of the input of ``native_dropout``: on one device it starts at an address divisible by 16, as the result
  of every operator does. One device reads an unaligned view into a storage in narrower vectors. This assumption has no
  check, because a shard has no access to the storage of the global tensor.
"""

from .entries import replay_bernoulli, replay_fill, replay_native_dropout

__all__ = ["replay_bernoulli", "replay_fill", "replay_native_dropout"]
