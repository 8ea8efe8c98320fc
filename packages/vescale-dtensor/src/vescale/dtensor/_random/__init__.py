"""Random operators on sharded tensors: the two streams, and what each rank keeps of a global draw."""
