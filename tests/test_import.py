"""What ``import efla`` costs, seen from a fresh process."""

from __future__ import annotations

import subprocess
import sys

OPTIONAL = ("transformers", "matplotlib", "mlxtend", "jinja2", "datasets", "lm_eval", "triton", "fla", "tyro", "rich")


def test_import_brings_in_no_optional_package_nor_transformers():
    code = f"import sys, efla; print([name for name in {OPTIONAL!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_public_names_of_the_design_are_there():
    import efla

    for name in ("linear_attention", "scan", "rules", "backends", "ops"):
        assert hasattr(efla, name)
    assert efla.backends()["reference"] is None
    assert efla.backends()["chunked"] is None
