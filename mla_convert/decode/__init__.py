"""Absorbed decoding from paged latent rows: the cache, the backends, and which of them ran."""
