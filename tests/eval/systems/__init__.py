"""Cache, speed and memory beside the source."""
