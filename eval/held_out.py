"""Held-out text for conversions yet to be made: checked before the work, run on the files when they are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mla_convert.convert.calibration_text import read_corpus
from mla_convert.convert.chat_text import ChatTemplate
from mla_convert.convert.checkpoint import SourceCheckpoint
from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.plan import SELF_TEXT
from mla_convert.convert.planning import split_weight
from mla_convert.convert.tokenizer import load_tokenizer
from mla_convert.eval import defaults
from mla_convert.eval.evaluate import EvalOptions, Prepared, evaluate_target, prepare
from mla_convert.eval.text import refuse_overlap, shared_documents
from mla_convert.manifests.quality import MeasuredRecord


@dataclass(frozen=True)
class HeldOut:
    """A source and a text, ready; called with a converted folder it measures that."""

    prepared: Prepared

    @classmethod
    def of(cls, source: SourceCheckpoint, texts: Sequence[str], options: ConvertOptions, tokens: int) -> HeldOut:
        """Read the text and cut it into windows.

        Args:
            source: The opened source.
            texts: Held-out text.
            options: Of the conversion: its calibration text must be other text.
            tokens: Most tokens to run.

        Raises:
            UsageFault: If there are fewer tokens than a window has.
            InputRefused: For text that cannot be used or that calibration is given as well.
        """
        length = min(defaults.SEQ_LEN, int(source.config.max_position_embeddings), tokens)
        wanted = EvalOptions(max_tokens=tokens, seq_len=length, seed=options.seed, text_field=options.text_field)
        prepared = prepare(source, texts, wanted)
        chat = ChatTemplate(load_tokenizer(source.location.folder))
        names = [split_weight(text)[0] for text in options.calibration]
        calibration = [read_corpus(name, options.text_field, chat) for name in names if name != SELF_TEXT]
        # Names alone say little here: `train/data.jsonl` and `test/data.jsonl` number their lines alike.
        seen = {document.sha256 for corpus in calibration for document in corpus.documents}
        refuse_overlap(shared_documents(frozenset(), seen, prepared.corpora), allowed=False, remedy="Use other text.")
        return cls(prepared)

    def __call__(self, folder: Path) -> MeasuredRecord:
        """Evaluate a converted folder, for its manifest."""
        return evaluate_target(self.prepared, folder).record()
