from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mla_convert.assets.smollm2 import GGUF_SHA256
from mla_convert.convert.gguf_source import read_provenance

# Each agrees with a tokenizer built by hand from the file's vocabulary and merges, digits split one by one;
# `²` and `½` are digits too.
KNOWN_IDS = {
    "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
    "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
    "  multiple   spaces": [216, 2701, 256, 5600],
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "<|im_start|>user\nhi 42<|im_end|>": [1, 4093, 198, 6004, 216, 36, 34, 2],
    "x½ ²": [104, 16738, 216, 19133],
}


@pytest.mark.parametrize("text", KNOWN_IDS)
def test_tokenizer_gives_the_known_ids(smollm2: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)

    assert tokenizer.encode(text) == KNOWN_IDS[text]
    assert tokenizer.decode(KNOWN_IDS[text]) == text


def test_the_chat_template_came_along(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    messages = [{"role": "user", "content": "hi"}]

    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    assert isinstance(prompt, str)
    assert prompt.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_the_model_answers(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2).eval()
    prompt = tokenizer("The capital of France is", return_tensors="pt")

    with torch.no_grad():
        generated = model.generate(**prompt, max_new_tokens=1, do_sample=False)

    assert model.dtype == torch.float32
    assert model.config.rms_norm_eps == 1e-5
    assert tokenizer.decode(generated[0, -1:]) == " Paris"


def test_provenance_says_that_it_is_the_four_bit_checkpoint(smollm2: Path) -> None:
    provenance = read_provenance(smollm2)

    assert provenance is not None
    assert provenance.sha256 == GGUF_SHA256
    assert provenance.file_type == "MOSTLY_Q4_1"
    assert provenance.tensor_types == {"F32": 61, "Q4_1": 210, "Q8_0": 1}
