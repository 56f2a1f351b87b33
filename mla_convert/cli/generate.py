"""`mla-convert generate`: a continuation by a converted folder, or by a source as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from mla_convert.cli.common import Backend, Debug, JsonFlag, Seed, run_command
from mla_convert.eval import defaults

if TYPE_CHECKING:
    from rich.console import Console

    from mla_convert.eval.generate import Generation

HELP = "Continue a prompt with a converted folder from its latent cache, or with a source by stock transformers."
EXAMPLES = """
mla-convert generate OUT --prompt "Water boils at"
mla-convert generate OUT --chat --prompt "Why is the sky blue?" --max-new-tokens 128
mla-convert generate OUT --prompt "Water boils at" --backend stock
mla-convert generate OUT --prompt "Once upon a time" --temperature 0.8 --seed 7 --json
"""


def command(
    out: Annotated[
        str, typer.Argument(metavar="OUT", help="Converted folder, or a source: folder, GGUF file or Hub id.")
    ],
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="Text to continue; with --chat, the user's message.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to add.")] = defaults.NEW_TOKENS,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 takes the likeliest token; above, tokens are drawn.")
    ] = 0.0,
    chat: Annotated[bool, typer.Option("--chat", help="Use the tokenizer's chat template.")] = False,
    backend: Backend = "auto",
    seed: Seed = 0,
    json_output: JsonFlag = False,
    debug: Debug = False,
) -> None:
    """Generate from `out`."""

    def body() -> GenerateResult:
        from mla_convert.eval.generate import GenerateOptions, generate

        return GenerateResult(generate(out, GenerateOptions(prompt, max_new_tokens, temperature, chat, seed, backend)))

    run_command(json_output, body, debug=debug)


@dataclass(frozen=True)
class GenerateResult:
    """A generation and how it is printed."""

    generation: Generation

    def to_json(self) -> Mapping[str, object]:
        """See `Generation.to_json`."""
        return self.generation.to_json()

    def render(self, console: Console) -> None:
        """The prompt and its continuation; with a chat template, the reply alone."""
        from rich.text import Text

        done, cache = self.generation, self.generation.cache
        shown = Text() if done.options.chat else Text(done.options.prompt, style="dim")
        console.print(shown + Text(done.text), soft_wrap=True)
        speed = f" ({len(done.new_ids) / done.seconds:.1f} per second)" if done.seconds > 0 else ""
        facts = (
            f"{len(done.new_ids)} tokens in {done.seconds:.2f} s{speed}, ended by {done.ending}; "
            f"cache {cache.bytes_per_token:,} bytes per token ({cache.dtype}); ran on {done.receipt['ran']}"
        )
        console.print(Text(facts, style="dim"), soft_wrap=True)
