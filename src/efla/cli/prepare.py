"""``efla prepare``: tokenise text once, for training."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import tyro


def prepare(
    sources: Annotated[tuple[str, ...], tyro.conf.Positional],
    output: Path,
    tokenizer: str = "bytes",
    column: str = "text",
    validation_share: float = 0.005,
    shard_tokens: int = 1 << 26,
    max_tokens: int = 0,
    workers: int | None = None,
) -> int:
    """Tokenise text into packed, memory-mapped shards with checksums; then: efla train --data OUTPUT.

    The same command again continues where it stopped, and leaves a finished folder alone. The tokens do not depend on the
    number of workers.

    Args:
        sources: Files and folders of text (.txt, .jsonl, .parquet, .tar; .gz, .xz, .zst, .bz2), or hf:owner/name[:config][@split]
            for a data set of the Hugging Face hub, which is streamed.
        output: New folder for the shards.
        tokenizer: bytes; mistral (the paper's); or a folder, tokenizer.json or hub name that transformers loads.
        column: Key of JSON lines, or column of a table, that holds the text.
        validation_share: Share of the documents kept for validation (of the tokens at the end, if there are few).
        shard_tokens: Tokens of a shard; a kill loses at most the shards being written.
        max_tokens: Stop after so many training tokens (0: read everything).
        workers: Processes that tokenise; default one per core, and none beside this one for bytes.
    """
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from efla.data.prepare import PrepareConfig
    from efla.data.prepare import prepare as run

    config = PrepareConfig(
        sources=sources,
        tokenizer=tokenizer,
        column=column,
        validation_share=validation_share,
        shard_tokens=shard_tokens,
        max_tokens=max_tokens,
    )
    if workers is None:
        workers = 1 if tokenizer == "bytes" else os.cpu_count() or 1
    start = time.perf_counter()
    shown = TextColumn(
        "{task.fields[documents]:,} documents, {task.fields[tokens]:,} tokens, {task.fields[speed]:.1f} MB/s"
    )
    with Progress(SpinnerColumn(), shown, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("", documents=0, tokens=0, speed=0.0)

        def watch(*, documents: int, tokens: int, text_bytes: int) -> None:
            speed = text_bytes / 1e6 / (time.perf_counter() - start)
            progress.update(task, documents=documents, tokens=tokens, speed=speed)

        index = run(config, output, workers=workers, watch=watch)
    for part, shards in (("training", index.train), ("validation", index.validation)):
        tokens, documents = sum(s.tokens for s in shards), sum(s.documents for s in shards)
        print(f"{part:<10}  {tokens:,} tokens, {documents:,} documents, {len(shards)} shards")
    if index.tail:
        print(f"            of which the last {index.tail:,} tokens are kept for validation")
    if index.dropped:
        print(f"            {index.dropped:,} NUL characters were left out: byte 0 marks documents")
    print(f"vocabulary  {index.vocab_size:,} ({index.tokenizer}); then: efla train --data {output}")
    return 0
