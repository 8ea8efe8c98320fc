"""A plan as data: placements checked, names resolved, parameters distributed."""
