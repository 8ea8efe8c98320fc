"""Random operators on shards and on parts of a batch, equal to one device.

=================== =====================================================================================
``rules``           the table of all random operators; start here
``global_position`` the boxes of the global tensor that a rank holds, batch windows included
``streams``         switching streams; dispatch modes for plain tensors
``state``           the generators of the process: the stream in force, seeds, saved states
``checkpointed``    `random.Streams`: these states as an object of a checkpoint
``batch``           `random.local_batch` and `random.micro_batches`
``pipeline``        what `vescale-pipe` asks for: parts of a batch, moves of the generators
``stock``           stream "torch": the values of the stock generator
``cuda_replay``     the same on CUDA, by replaying windows of the stock kernel
``philox``          stream "philox": counter-based values
=================== =====================================================================================
"""
