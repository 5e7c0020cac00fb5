"""A model with its tokenizer, and the log-likelihood of text after text as lm-evaluation-harness defines it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from efla.evaluation.likelihood import Request, Score, score


class Tokenizer(Protocol):
    """What is needed of a tokenizer; transformers' have it, and :class:`efla.evaluation.ByteTokenizer`."""

    bos_token_id: int | None
    eos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


@dataclass(frozen=True)
class Scorer:
    """What scores text: ``model`` maps token ids [B, T] to logits [B, T, V].

    max_length: tokens the model sees at once; longer contexts are cut on the left, longer texts into windows.
    share: score the choices of a question from one pass over their common beginning.
    batch_tokens: tokens in one forward pass.
    """

    model: Any
    tokenizer: Tokenizer
    max_length: int = 2048
    share: bool = True
    batch_tokens: int = 4096

    @property
    def prefix_token(self) -> int:
        """The token before a text without context: bos, else eos."""
        tokenizer = self.tokenizer
        found = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if found is None:
            raise ValueError("the tokenizer has neither bos nor eos; a text without context cannot be scored")
        return found


Pair = tuple[str, str]
"""A context and the continuation that is scored."""


def encode_pair(tokenizer: Tokenizer, prefix_token: int, context: str, continuation: str) -> tuple[list[int], int]:
    """Tokens of both, and how many of them are the continuation's.

    As the harness does it: spaces at the context's end go to the continuation, both are encoded together, and what comes
    after as many tokens as the context alone has is the continuation. An empty context is the prefix token.
    """
    if context == "":
        tokens = tokenizer.encode(continuation, add_special_tokens=False)
        if tokens and tokens[0] == prefix_token:
            return tokens, len(tokens) - 1
        return [prefix_token, *tokens], len(tokens)
    kept = context.rstrip()
    continuation = context[len(kept) :] + continuation
    whole = tokenizer.encode(kept + continuation)
    return whole, len(whole) - len(tokenizer.encode(kept))


def score_pairs(
    scorer: Scorer,
    pairs: Sequence[Pair],
    groups: Sequence[Hashable] | None = None,
    done: Callable[[list[tuple[int, Score]]], None] | None = None,
) -> list[Score]:
    """Log-likelihood of each continuation after its context, in nats, and whether greedy decoding would give it.

    groups: one value per pair; pairs with equal values (the choices of one question) share a prefill.
    """
    requests = []
    for index, (context, continuation) in enumerate(pairs):
        tokens, num_scored = encode_pair(scorer.tokenizer, scorer.prefix_token, context, continuation)
        if not 1 <= num_scored <= scorer.max_length:
            raise ValueError(
                f"a continuation must have 1 to {scorer.max_length} tokens, got {num_scored}: {continuation[:80]!r}"
            )
        group = None if groups is None else groups[index]
        requests.append(Request(tokens[-(scorer.max_length + 1) :], num_scored, group))
    return score(scorer.model, requests, share=scorer.share, batch_tokens=scorer.batch_tokens, done=done)
