"""Put a trained model into the page: ``python docs/explainer/write_model.py MODEL``.

The model of the page was trained by

    efla train --model efla-tiny --set num_heads=4 intermediate_size=256 tie_word_embeddings=true --data shakespeare \
        --length 256 --rows 16 --steps 2400

Format: the length of a JSON header (uint32), the header, padding to four bytes, then the arrays in the order in which the page's
LanguageModel reads them. Matrices are float32 scales, one for each row, followed by int8 weights.
"""

from __future__ import annotations

import base64
import json
import re
import sys
from pathlib import Path

import numpy as np

from efla.models import EflaForCausalLM

PAGE = Path(__file__).with_name("index.html")
BLOCK = re.compile(r'(<script id="model" type="text/plain">)([^<]*)(</script>)')


def quantise(matrix):
    """Scales [rows] and int8 weights [rows, columns] with matrix ~ scale * weight."""
    scales = (np.abs(matrix).max(1) / 127).astype(np.float32)
    return scales, np.rint(matrix / scales[:, None]).astype(np.int8)


def pack(model: EflaForCausalLM) -> bytes:
    """The model's configuration and weights as the page reads them."""
    config = model.config
    expected = {
        "rule": "efla", "mixers": ["efla"] * config.num_hidden_layers, "num_key_heads": config.num_heads,
        "value_head_dim": config.head_dim, "tie_word_embeddings": True, "query_norm": True, "allow_neg_eigval": False,
    }  # fmt: skip
    for name, value in expected.items():
        if getattr(config, name) != value:
            raise ValueError(f"the page's decoder expects {name} = {value!r}, got {getattr(config, name)!r}")
    header = {
        "vocabulary": config.vocab_size, "hidden": config.hidden_size, "layers": config.num_hidden_layers,
        "heads": config.num_heads, "width": config.head_dim, "conv": config.conv_size, "inner": config.intermediate_size,
        "eps": config.norm_eps, "parameters": sum(p.numel() for p in model.parameters()),
    }  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 4)
    out = [np.uint32(len(text)).tobytes(), text]
    weights = {name: value.detach().float().numpy() for name, value in model.state_dict().items()}

    def floats(*names):
        out.extend(weights[name].tobytes() for name in names)

    def matrix(*names):
        scales, integers = quantise(np.concatenate([weights[name] for name in names]))
        out.extend((scales.tobytes(), integers.tobytes()))

    matrix("model.embed_tokens.weight")
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}."
        mixer = f"{layer}mixer."
        floats(f"{layer}mixer_norm.weight")
        matrix(*(f"{mixer}{name}_proj.weight" for name in "qkv"))
        floats(*(f"{mixer}{name}_conv.weight" for name in "qkv"), f"{mixer}b_proj.weight", f"{mixer}o_norm.weight")
        matrix(f"{mixer}o_proj.weight")
        floats(f"{layer}mlp_norm.weight")
        for name in ("gate", "up", "down"):
            matrix(f"{layer}mlp.{name}_proj.weight")
    floats("model.norm.weight")
    return b"".join(out)


def main(folder: str) -> None:
    packed = base64.b64encode(pack(EflaForCausalLM.from_pretrained(folder))).decode()
    page = BLOCK.sub(lambda found: found[1] + packed + found[3], PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(page, encoding="utf-8")
    print(f"{PAGE}: {PAGE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1])
