"""The forward of a module on one rank's part of the global batch."""
