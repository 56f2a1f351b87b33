"""Defaults that the command line shows; nothing is imported here, so that its help stays quick."""

from __future__ import annotations

MAX_TOKENS = 16_384
SEQ_LEN = 512
NEW_TOKENS = 64
