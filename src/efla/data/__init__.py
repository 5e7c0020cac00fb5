"""Text as tokens: corpora, readers, tokenizers, prepared shards, and which row of them is trained on at which step."""
