"""A GGUF file as a Hugging Face folder: dequantised once to float32, cached by the digest of the file.

transformers' own loader does the reading. Four of its results are corrected from the file's metadata,
because they would otherwise be silently wrong (compared on transformers 5.24):

* it knows only some of the pre-tokenisers that `tokenizer.ggml.pre` names and falls back to GPT-2's for all
  others, which joins digits that SmolLM2, StarCoder and Command-R split one by one (with SmolLM2's merges
  this changes the ids of digits beyond ASCII, such as `²` and `½`: 18 of 106 Wikipedia articles);
* float32 metadata is widened digit by digit, so an epsilon of 1e-5 arrives as 9.999999747378752e-06;
* the tokenizer gets no maximum length;
* a byte-level vocabulary without `<|endoftext|>` (Llama 3) gets it added, under an id the model lacks.

What it would drop without a word is refused here: rope scaling, and tensors that the model class has no
place for.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mla_convert.errors import InputRefused
from mla_convert.manifests.digest import sha256_file

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

PROVENANCE_FILE = "gguf_provenance.json"
_MAGIC = b"GGUF"
_ANOTHER_FILE = "Give a complete GGUF file of a llama-like decoder, or the original Hugging Face folder."
# Names of `tokenizer.ggml.pre` by the splitting that llama.cpp gives them. The others are either known to
# transformers or refused.
_PLAIN_GPT2_SPLIT = frozenset({"exaone4", "gpt-2", "granite-docling", "jais", "mpt", "olmo", "trillion"})
_SINGLE_DIGIT_SPLIT = frozenset({"codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder"})


@dataclass(frozen=True)
class GGUFProvenance:
    """Where a materialised folder comes from.

    Attributes:
        file_name: Name of the GGUF file, without its folder.
        sha256: Hexadecimal digest of the GGUF file.
        bytes: Size of the GGUF file.
        architecture: Its `general.architecture`.
        file_type: Its quantisation by llama.cpp's name, such as `MOSTLY_Q4_1`; None where it does not say.
        tensor_types: Number of tensors by storage type.
        transformers_version: The version that read it.
    """

    file_name: str
    sha256: str
    bytes: int
    architecture: str
    file_type: str | None
    tensor_types: dict[str, int]
    transformers_version: str


@dataclass(frozen=True)
class _Header:
    """What the checks and corrections need to know of a GGUF file."""

    path: Path
    architecture: str
    file_type: str | None
    tensor_types: dict[str, int]
    elements: int
    vocabulary: int
    byte_level: bool
    pre_tokenizer: str | None


def materialise_gguf(path: Path, cache_root: Path) -> Path:
    """Write a GGUF file as a Hugging Face folder in float32, or return the folder written before.

    The folder holds `config.json`, safetensors, the tokenizer's files and `gguf_provenance.json`. It appears
    under its name only when it is whole; two runs at once both work and one result is kept. Dequantising
    brings back the numbers that the file stands for, not those of the checkpoint it was quantised from.

    Args:
        path: The GGUF file.
        cache_root: Folder below which `gguf/<sha256 of the file>/` is kept.

    Returns:
        The folder.

    Raises:
        InputRefused: Not a GGUF file, cut short, of an architecture that transformers cannot load, or with
            contents (rope scaling, a tokenizer, tensors) that its loader would get wrong.
    """
    _check_magic(path)
    digest = sha256_file(path)
    target = cache_root / "gguf" / digest
    if (target / PROVENANCE_FILE).is_file():
        return target
    header = _read_header(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{digest[:16]}-") as scratch:
        # Alone in its folder: transformers would prefer a tokenizer.json or config.json found beside it.
        alone = Path(scratch) / "source" / path.name
        alone.parent.mkdir()
        alone.symlink_to(path.absolute())
        staged = Path(scratch) / "model"
        _write_model(alone, header, staged)
        _write_provenance(header, digest, staged)
        try:
            os.replace(staged, target)
        except OSError:
            # A run beside this one was faster; its result has the same content.
            if not (target / PROVENANCE_FILE).is_file():
                raise
    return target


def read_provenance(folder: Path) -> GGUFProvenance | None:
    """The provenance of a folder that `materialise_gguf` wrote; None for any other folder."""
    file = folder / PROVENANCE_FILE
    return GGUFProvenance(**json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None


def _check_magic(path: Path) -> None:
    if not path.is_file():
        raise InputRefused("no such file", expected="a GGUF file", where=str(path), remedy=_ANOTHER_FILE)
    with path.open("rb") as stream:
        start = stream.read(len(_MAGIC))
    if start != _MAGIC:
        raise InputRefused(
            "not a GGUF file",
            expected=f"the first bytes {_MAGIC!r}",
            found=repr(start),
            where=str(path),
            remedy=_ANOTHER_FILE,
        )


def _read_header(path: Path) -> _Header:
    """Read the metadata and the tensor table, and refuse what the loader would get wrong."""
    from gguf import GGUFReader, LlamaFileType

    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, KeyError) as error:
        # The reader has no check of its own: on a short file its views of the bytes do not add up.
        raise InputRefused(
            "the GGUF file is cut short or damaged",
            expected="all tensors that its header lists",
            found=f"{path.stat().st_size} bytes ({error})",
            where=str(path),
            remedy="Download it again and compare its digest.",
        ) from error
    architecture = str(_field(reader, "general.architecture"))
    _refuse_rope_scaling(reader, architecture, path)
    types: dict[str, int] = {}
    for tensor in reader.tensors:
        types[tensor.tensor_type.name] = types.get(tensor.tensor_type.name, 0) + 1
    file_type = _field(reader, "general.file_type")
    return _Header(
        path=path,
        architecture=architecture,
        file_type=None if file_type is None else LlamaFileType(file_type).name,
        tensor_types=dict(sorted(types.items())),
        elements=sum(int(tensor.n_elements) for tensor in reader.tensors),
        vocabulary=len(_field(reader, "tokenizer.ggml.tokens") or ()),
        byte_level=_field(reader, "tokenizer.ggml.model") == "gpt2",
        pre_tokenizer=_field(reader, "tokenizer.ggml.pre"),
    )


def _field(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _refuse_rope_scaling(reader: GGUFReader, architecture: str, path: Path) -> None:
    """The loader reads neither form in which a GGUF states rope scaling: metadata, or a table of factors."""
    stated = _field(reader, f"{architecture}.rope.scaling.type")
    tables = [tensor.name for tensor in reader.tensors if tensor.name.startswith("rope_f")]
    if stated not in (None, "none") or tables:
        raise InputRefused(
            "transformers' GGUF loader drops this file's rope scaling",
            expected="a model with unscaled rotary frequencies",
            found=f"rope scaling {stated!r}" if stated not in (None, "none") else f"the tensor {tables[0]}",
            where=str(path),
            remedy="Convert from the original Hugging Face folder instead.",
        )


def _write_model(alone: Path, header: _Header, folder: Path) -> None:
    """Load through transformers, correct, and save as safetensors with the tokenizer."""
    tokenizer = _within_vocabulary(_load_tokenizer(alone, header), header)
    _correct_splitting(tokenizer, header)
    model = _load_model(alone, header)
    _correct_config(model.config)
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _load_model(alone: Path, header: _Header) -> PreTrainedModel:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    # Says to unpack the weights, which else stay in blocks where a kernel is installed, and by that makes the
    # model a plain one that may be saved.
    unpack = GgufConfig(dequantize=True)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            alone.parent,
            gguf_file=alone.name,
            dtype=torch.float32,
            quantization_config=unpack,
            output_loading_info=True,
        )
    except (ValueError, NotImplementedError) as error:
        raise InputRefused(
            f"transformers cannot load a GGUF file of the architecture {header.architecture!r}",
            expected="an architecture that its GGUF loader supports as a causal language model",
            found=str(error).split("\n", 1)[0],
            where=str(header.path),
            remedy=_ANOTHER_FILE,
        ) from error
    model: PreTrainedModel = loaded[0]
    missing = sorted(loaded[1]["missing_keys"])
    numbers = sum(parameter.numel() for parameter in model.parameters())
    if missing or numbers != header.elements:
        raise InputRefused(
            f"the file's tensors and those of {type(model).__name__} do not correspond",
            expected=f"{header.elements} numbers, as the file holds",
            found=f"{numbers} numbers in the model, {len(missing)} tensors not filled {missing[:3]}",
            where=str(header.path),
            remedy="Convert from the original Hugging Face folder instead.",
        )
    return model


def _correct_config(config: PretrainedConfig) -> None:
    """Undo the widening of float32 metadata: the shortest decimal that is the same float32."""
    for name in ("rms_norm_eps", "layer_norm_eps"):
        value = getattr(config, name, None)
        if isinstance(value, float):
            setattr(config, name, _shortest_float32(value))
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and isinstance(rope.get("rope_theta"), float):
        config.rope_parameters = {**rope, "rope_theta": _shortest_float32(rope["rope_theta"])}


def _shortest_float32(value: float) -> float:
    import numpy as np

    return float(str(np.float32(value)))


def _load_tokenizer(alone: Path, header: _Header) -> PreTrainedTokenizerFast:
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(alone.parent, gguf_file=alone.name)
    except (ValueError, KeyError) as error:
        raise InputRefused(
            "transformers cannot build a tokenizer from this GGUF file",
            expected="a supported architecture, and a vocabulary with merges or scores",
            found=f"architecture {header.architecture!r}: {error}",
            where=str(header.path),
            remedy=_ANOTHER_FILE,
        ) from error
    return cast("PreTrainedTokenizerFast", tokenizer)


def _within_vocabulary(tokenizer: PreTrainedTokenizerFast, header: _Header) -> PreTrainedTokenizerFast:
    """The tokenizer without the tokens that the loader's own class added behind the file's."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    if len(tokenizer) <= header.vocabulary:
        return tokenizer
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < header.vocabulary]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        chat_template=tokenizer.chat_template,
        **tokenizer.special_tokens_map,
    )


def _correct_splitting(tokenizer: PreTrainedTokenizerFast, header: _Header) -> None:
    """Split text before the merges as the file says.

    transformers leaves a bare `ByteLevel`, GPT-2's splitting, where it does not know the name.
    """
    from tokenizers import pre_tokenizers

    backend = tokenizer.backend_tokenizer
    unknown = header.byte_level and isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel)
    if not unknown or header.pre_tokenizer in _PLAIN_GPT2_SPLIT:
        return
    if header.pre_tokenizer not in _SINGLE_DIGIT_SPLIT:
        known = ", ".join(sorted(_PLAIN_GPT2_SPLIT | _SINGLE_DIGIT_SPLIT))
        raise InputRefused(
            "the pre-tokeniser of this GGUF file is not known, and a wrong one gives wrong ids silently",
            expected=f"one that transformers knows, or one of {known}",
            found=f"tokenizer.ggml.pre {header.pre_tokenizer!r}",
            where=str(header.path),
            remedy="Convert from the original Hugging Face folder instead.",
        )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def _write_provenance(header: _Header, digest: str, folder: Path) -> None:
    from transformers import __version__

    provenance = GGUFProvenance(
        file_name=header.path.name,
        sha256=digest,
        bytes=header.path.stat().st_size,
        architecture=header.architecture,
        file_type=header.file_type,
        tensor_types=header.tensor_types,
        transformers_version=__version__,
    )
    text = json.dumps(asdict(provenance), indent=1, sort_keys=True) + "\n"
    (folder / PROVENANCE_FILE).write_text(text, encoding="utf-8")
