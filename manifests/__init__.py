"""Identity, digests, manifests and their verification; nothing here needs torch."""
