"""The model card that goes with saved weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from efla.models.accounting import cache_bytes_per_token, state_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from efla.models.configuration_efla import EflaConfig

_CARD = """\
---
library_name: transformers
pipeline_tag: {task}
tags:
- efla
- linear-attention
{tags}
---

# {title}

A model of the Python library `efla` (Exact Flow Linear Attention), {parameters:,} parameters.

| | |
| --- | --- |
| mixers | {mixers} |
| hidden size, layers | {hidden}, {layers} |
| vocabulary | {vocabulary:,} |
| state per sequence | {state:,} bytes, whatever its length{growth} |

```python
import efla
from transformers import {auto}

model = {auto}.from_pretrained("path/or/name")
```

What it was trained on, how it was evaluated and what it should not be used for: to be filled in by whoever trained it.
"""


def model_card(model: PreTrainedModel) -> str:
    """README.md of a saved model: what Hugging Face's hub reads, sizes, and how to load it."""
    config = cast("EflaConfig", model.config)
    mixers = cast("list[str]", config.mixers)
    counts = {name: mixers.count(name) for name in dict.fromkeys(mixers)}
    growth = cache_bytes_per_token(config)
    is_classifier = hasattr(model, "score")
    return _CARD.format(
        task="text-classification" if is_classifier else "text-generation",
        tags="\n".join(f"- {name.replace('_', '-')}" for name in counts if name != "efla") or "- exact-flow",
        title=f"{type(model).__name__}: {' + '.join(counts)}",
        parameters=sum(p.numel() for p in model.parameters()),
        mixers=", ".join(f"{count} of {name}" for name, count in counts.items()),
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        vocabulary=config.vocab_size,
        state=state_bytes(config),
        growth=f", and {growth:,} bytes for each token" if growth else "",
        auto="AutoModelForSequenceClassification" if is_classifier else "AutoModelForCausalLM",
    )
