"""``import efla`` is cheap and still teaches transformers' Auto classes, in whatever order the two are imported."""

from __future__ import annotations

import pytest

from tests.fresh import run_fresh

# efla/__init__.py calls it too; here it is called by name so that the test is about it.
INSTALL = "import efla, efla.models; efla.models.register_when_loaded()\n"
USE = """
config = AutoConfig.for_model("efla", hidden_size=16, num_hidden_layers=1, num_heads=2, vocab_size=7)
assert type(config).__name__ == "EflaConfig", type(config)
for auto, name in ((AutoModelForCausalLM, "EflaForCausalLM"), (AutoModel, "EflaModel"),
                   (AutoModelForSequenceClassification, "EflaForSequenceClassification")):
    assert type(auto.from_config(config)).__name__ == name, auto
"""
AUTO = "from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification\n"

FIRST = {
    "transformers first": AUTO + INSTALL + USE,
    "our model first": "from efla.models.modeling_efla import EflaForCausalLM\n" + AUTO + USE,
    "models before configs": INSTALL + "from transformers import AutoModelForCausalLM\n" + AUTO + USE,
}
MORE = {
    "lazy transformers first": "import transformers\n" + INSTALL + AUTO + USE,
    "our config first": "from efla.models import EflaConfig\n" + AUTO + USE,
    "installed twice": INSTALL + AUTO + INSTALL + USE,
}


def run(code: str) -> None:
    result = run_fresh("import warnings\nwarnings.simplefilter('error', RuntimeWarning)\n" + code)
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.parametrize("code", FIRST.values(), ids=FIRST)
def test_auto_classes_know_efla_in_any_order_of_imports(code):
    run(code)


@pytest.mark.slow
@pytest.mark.parametrize("code", MORE.values(), ids=MORE)
def test_auto_classes_know_efla_in_stranger_orders_of_imports(code):
    run(code)


def test_each_part_is_loaded_when_it_is_wanted_and_not_before():
    run(
        "import sys, inspect\n"
        + INSTALL
        + "assert not [m for m in sys.modules if m.split('.')[0] == 'transformers']\n"
        + "from transformers import AutoConfig\nassert AutoConfig.for_model('efla').rule == 'efla'\n"
        + "assert 'efla.models.modeling_efla' not in sys.modules\n"
        + AUTO
        + USE
        # and transformers' module is as it would be without us
        + "from transformers.models.auto import modeling_auto as m\n"
        + "assert type(m.__loader__).__name__ == type(m.__spec__.loader).__name__ == 'SourceFileLoader'\n"
        + "assert 'AutoModelForCausalLM' in inspect.getsource(m)"
    )


@pytest.mark.slow
def test_a_transformers_that_cannot_be_taught_still_imports():
    code = (
        "import warnings\nwarnings.simplefilter('always')\n"
        + INSTALL
        + "import efla.models as r\n"
        + "def fail(): raise TypeError('another signature')\n"
        + "r._PENDING[r._CONFIGS] = fail\n"
        + "with warnings.catch_warnings(record=True) as seen:\n    from transformers import AutoConfig\n"
        + "assert any('could not register' in str(w.message) for w in seen)\nassert AutoConfig.for_model('gpt2')"
    )
    run(code)
