"""Which elements each rank holds: boxes, shards and meshes as pure functions over integers."""
