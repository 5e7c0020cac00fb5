"""Checkpoints of flash-linear-attention: the same logits here, the same tensors back, and what has no counterpart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from efla.models import EflaConfig, EflaForCausalLM
from efla.models import convert as fla
from efla.models.convert import convert_folder
from tests.models.tiny import logits_of

REFERENCE = Path(__file__).with_name("fla_reference.py")
TOKENS = torch.randint(0, 101, (2, 29), generator=torch.Generator().manual_seed(0))
KINDS = [
    "delta_net",
    "delta_net_gated",
    "delta_net_hybrid",
    "gated_deltanet",
    "gated_deltanet_grouped",
    "mamba2",
    "transformer",
]


@cache
def fla_python() -> str | None:
    """An interpreter with flash-linear-attention 0.6: this one, or ``EFLA_FLA_PYTHON``."""
    for python in (sys.executable, os.environ.get("EFLA_FLA_PYTHON")):
        if python and Path(python).exists():
            check = "import importlib.util as u, sys; sys.exit(not (u.find_spec('fla') and u.find_spec('triton')))"
            if subprocess.run([python, "-c", check], check=False).returncode == 0:
                return python
    return None


def run_reference(action: str, folder: Path) -> None:
    python = fla_python()
    if python is None:
        pytest.skip(
            "needs flash-linear-attention 0.6.0 and triton 3.7.1: install them beside torch 2.13.0 and name that "
            "interpreter in EFLA_FLA_PYTHON"
        )
    save_file({"tokens": TOKENS}, folder / "tokens.safetensors")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [python, REFERENCE, action, folder], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.fixture(scope="module")
def fla_models(tmp_path_factory) -> Path:
    """A folder with a random model of each kind and its logits, made by fla itself."""
    folder = tmp_path_factory.mktemp("fla")
    run_reference("build", folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_converted_fla_checkpoint_gives_fla_s_logits_and_converts_back_bit_for_bit(kind, fla_models, tmp_path):
    convert_folder(fla_models / kind, tmp_path / "ours")
    model = EflaForCausalLM.from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        logits = model(TOKENS).logits
    reference = load_file(fla_models / f"{kind}.logits.safetensors")["logits"]
    torch.testing.assert_close(logits, reference, atol=2e-5, rtol=1e-5)

    convert_folder(tmp_path / "ours", tmp_path / "back")
    before, after = (load_file(folder / "model.safetensors") for folder in (fla_models / kind, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (fla_models / kind, tmp_path / "back"))
    # Written out where fla leaves a default to be worked out, or says how to run and not what to run.
    ignored = {
        "fuse_norm",
        "fuse_swiglu",
        "fuse_cross_entropy",
        "attn",
        "num_kv_heads",
        "num_v_heads",
        "intermediate_size",
    }
    differing = {key: (old[key], new[key]) for key in new.keys() & old.keys() - ignored if new[key] != old[key]}
    assert not differing


@pytest.mark.slow
def test_fla_loads_what_we_convert_to_it(tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 101, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 2, "intermediate_size": 96}
    model = EflaForCausalLM(EflaConfig(rule="gated_delta", head_dim=16, **sizes)).eval()
    model.save_pretrained(tmp_path / "ours")
    (tmp_path / "theirs").mkdir()
    convert_folder(tmp_path / "ours", tmp_path / "theirs" / "model")
    run_reference("load", tmp_path / "theirs")
    with torch.no_grad():
        logits = model(TOKENS).logits
    reference = load_file(tmp_path / "theirs" / "model.logits.safetensors")["logits"]
    torch.testing.assert_close(reference, logits, atol=2e-5, rtol=1e-5)


SMALL = {"vocab_size": 31, "hidden_size": 32, "num_hidden_layers": 4, "num_heads": 2, "num_attention_heads": 2}


@pytest.mark.parametrize(
    "fields",
    [
        {"rule": "delta"},
        {"rule": "delta", "output_gate": True, "conv_size": 0, "tie_word_embeddings": True},
        {"rule": "gated_delta", "num_key_heads": 1, "value_head_dim": 32},
        {"rule": "delta", "mixers": ["linear", "softmax"]},
        {"mixers": ["mamba2"], "intermediate_size": 0, "mamba_head_dim": 16},
        {"mixers": ["softmax"]},
    ],
    ids=["delta", "delta-gate-tied", "gated-grouped", "hybrid", "mamba2", "softmax"],
)
def test_to_fla_and_back_gives_the_same_model(fields, tmp_path):
    torch.manual_seed(0)
    model = EflaForCausalLM(EflaConfig(**{**SMALL, **fields})).eval()
    model.save_pretrained(tmp_path / "ours", max_shard_size="30KB")
    convert_folder(tmp_path / "ours", tmp_path / "fla")
    convert_folder(tmp_path / "fla", tmp_path / "back")
    back = EflaForCausalLM.from_pretrained(tmp_path / "back").eval()
    tokens = torch.randint(0, 31, (2, 9))
    assert torch.equal(logits_of(back, tokens), logits_of(model, tokens))


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"rule": "efla"}, "efla layers"),
        ({"rule": "delta", "key_norm": False}, "without L2 norm"),
        ({"rule": "delta", "num_key_heads": 1}, "fewer key than value heads"),
        ({"rule": "delta", "intermediate_size": 0}, "without MLPs"),
        ({"mixers": ["mamba2"], "mamba_head_dim": 16}, "mamba2 with MLPs"),
    ],
)
def test_what_fla_has_no_model_for_is_named(fields, names):
    with pytest.raises(ValueError, match=names):
        fla.config_to_fla(EflaConfig(**{**SMALL, **fields}))


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"model_type": "gla"}, "unknown flash-linear-attention model type 'gla'"),
        ({"model_type": "delta_net", "qk_norm": "sum"}, "qk_norm = 'sum'"),
        ({"model_type": "delta_net", "hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"model_type": "mamba2", "hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"model_type": "mamba2", "n_groups": 2, "hidden_size": 32, "num_hidden_layers": 1}, "n_groups"),
        ({"model_type": "mamba2", "dt_limit": [0, 1], "hidden_size": 32, "num_hidden_layers": 1}, "dt_limit"),
        (
            {"model_type": "mamba2", "hidden_size": 32, "num_hidden_layers": 1}
            | {"dt_limit": [0, "inf"], "time_step_limit": [0, 0.1]},
            "time_step_limit",
        ),
        ({"model_type": "transformer", "window_size": 64}, "window_size = 64"),
    ],
)
def test_what_has_no_counterpart_here_is_named(config, names):
    with pytest.raises(ValueError, match=names):
        fla.config_from_fla(config)


def test_a_checkpoint_whose_tensors_do_not_fit_its_config_is_not_converted(tmp_path):
    EflaForCausalLM(EflaConfig(**{**SMALL, "rule": "delta"})).save_pretrained(tmp_path / "ours")
    path = tmp_path / "ours" / "config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 5, "mixers": None, "layer_types": None})
    )
    with pytest.raises(ValueError, match=r"tensors missing: model\.layers\.4"):
        convert_folder(tmp_path / "ours", tmp_path / "fla")
    assert not (tmp_path / "fla").exists()


def test_conversion_never_overwrites(tmp_path):
    EflaForCausalLM(EflaConfig(**{**SMALL, "rule": "delta"})).save_pretrained(tmp_path / "ours")
    with pytest.raises(FileExistsError, match="not empty"):
        convert_folder(tmp_path / "ours", tmp_path / "ours")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        convert_folder(tmp_path, tmp_path / "new")
