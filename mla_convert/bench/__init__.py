"""Measurements on a real model, each a subcommand of `mla-convert bench`, and the demo."""
