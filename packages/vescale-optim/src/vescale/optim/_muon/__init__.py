"""Muon: which rank orthogonalizes which matrix, and the iteration."""
