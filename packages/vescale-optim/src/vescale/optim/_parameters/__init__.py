"""Parameters that are sharded or being gathered, and the guards against reading them."""
