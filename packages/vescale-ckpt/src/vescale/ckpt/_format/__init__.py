"""Files of a checkpoint: boxes, dtypes, manifest, data files and inspection."""
