"""What the boundaries of a parallelized module move, and how long it takes."""
