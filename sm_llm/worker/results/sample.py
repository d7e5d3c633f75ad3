"""Writes a little text with the trained model, sharded as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pathlib import Path

    from sm_llm.worker.runtime.collectives import ControlGroup
    from sm_llm.worker.strategies.base import Strategy

TEMPERATURE = 0.8
TOP_K = 50


@torch.no_grad()
def generate(
    strategy: Strategy,
    control: ControlGroup,
    tokenizer: Path,
    prompt: str,
    *,
    tokens: int,
    context_length: int,
    seed: int,
) -> str:
    """Continue ``prompt`` by at most ``tokens`` tokens, drawn from the 50 likeliest at temperature 0.8. A collective.

    Rank 0 draws (from a generator of its own, so training is not disturbed) and broadcasts. Without a cache:
    each token costs a forward pass, which needs no memory beyond training's. ``context_length`` tokens are seen.
    """
    from tokenizers import Tokenizer

    coder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    # An empty prompt needs a token to predict from.
    ids = list(coder.encode(prompt).ids) or [0]
    prompt_length = len(ids)
    generator = torch.Generator().manual_seed(seed)
    # Without dropout.
    strategy.train_mode(False)
    for _ in range(tokens):
        window = torch.tensor([ids[-context_length:]], device=strategy.device.torch_device)
        # All processes compute the logits together, so all need the token that was drawn.
        ids.append(control.broadcast(_draw(strategy.logits(window)[0, -1], generator)))
        if ids[-1] in _end_ids(coder):
            break
    strategy.train_mode(True)
    return harmless(coder.decode(ids[prompt_length:]))


def harmless(text: str) -> str:
    """``text`` without control characters, which a terminal would obey; an untrained model writes any byte."""
    return "".join(it if it.isprintable() or it in "\n\t" else "\N{REPLACEMENT CHARACTER}" for it in text)


def _draw(logits: torch.Tensor, generator: torch.Generator) -> int:
    # On the host, where the generator is.
    scores, tokens = logits.float().cpu().topk(min(TOP_K, logits.shape[-1]))
    chosen = torch.multinomial(torch.softmax(scores / TEMPERATURE, dim=-1), 1, generator=generator)
    return int(tokens[chosen].item())


def _end_ids(coder: Any) -> set[int]:
    """Ids of special tokens: where a text ends."""
    return {index for index, token in coder.get_added_tokens_decoder().items() if token.special}
