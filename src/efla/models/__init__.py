"""Models that transformers loads as its own: ``EflaConfig``, ``EflaModel``, ``EflaForCausalLM`` and a classifier.

``import efla`` imports neither torch nor transformers. :func:`register_when_loaded` registers torch operators and teaches
transformers' Auto classes ``model_type="efla"`` at once where these packages are loaded, and otherwise as soon as they are.
Models that cannot be registered then are registered with the first EflaConfig: no Auto class looks for a model before that.
"""

import copy
import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["EflaConfig", "EflaForCausalLM", "EflaForSequenceClassification", "EflaModel", "export_onnx"]

_TORCH = "torch"
_CONFIGS = "transformers.models.auto.configuration_auto"
_MODELS = "transformers.models.auto.modeling_auto"


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = {"EflaConfig": "configuration_efla", "export_onnx": "onnx_export"}.get(name, "modeling_efla")
    return getattr(importlib.import_module(f"efla.models.{module}"), name)


def _register_operators() -> None:
    importlib.import_module("efla.scans.operators")


def _register_config() -> None:
    from transformers.models.auto.configuration_auto import AutoConfig

    from efla.models.configuration_efla import EflaConfig

    AutoConfig.register("efla", EflaConfig, exist_ok=True)


def _register_models() -> None:
    from transformers.models.auto import modeling_auto as auto

    from efla.models import modeling_efla as ours
    from efla.models.configuration_efla import EflaConfig

    auto.AutoModel.register(EflaConfig, ours.EflaModel, exist_ok=True)
    auto.AutoModelForCausalLM.register(EflaConfig, ours.EflaForCausalLM, exist_ok=True)
    auto.AutoModelForSequenceClassification.register(EflaConfig, ours.EflaForSequenceClassification, exist_ok=True)


_PENDING: dict[str, Callable[[], None]] = {
    _TORCH: _register_operators,
    _CONFIGS: _register_config,
    _MODELS: _register_models,
}
# Our modules and the last class of each: while it is missing, the module is still being imported.
_OURS = {
    _CONFIGS: ("efla.models.configuration_efla", "EflaConfig"),
    _MODELS: ("efla.models.modeling_efla", "EflaForSequenceClassification"),
}


def register_when_loaded() -> None:
    """Register now with torch and transformers if they are loaded, otherwise when they are. Safe to call repeatedly."""
    for name in list(_PENDING):
        if name in sys.modules and not _is_half_imported(name):
            _run(name)
    if _PENDING and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _run(name: str) -> None:
    module, last_class = _OURS.get(name, ("", ""))
    if name not in _PENDING or (module in sys.modules and not hasattr(sys.modules[module], last_class)):
        return  # done, or our own module is loading transformers and registers when it is ready
    if name == _MODELS and _any_half_imported("transformers.", name):
        return  # the first EflaConfig registers
    if name == _TORCH and _any_half_imported("efla.", ""):
        return  # one of our modules is loading torch; the scans register with their own import
    register = _PENDING.pop(name)
    try:
        register()
    except Exception as error:  # transformers must stay importable
        warnings.warn(
            f"efla could not register with {name} ({error}); "
            "use efla.EflaForCausalLM instead of transformers' Auto classes",
            RuntimeWarning,
            stacklevel=2,
        )


def _is_half_imported(name: str) -> bool:
    return bool(getattr(getattr(sys.modules[name], "__spec__", None), "_initializing", False))


def _any_half_imported(prefix: str, but: str) -> bool:
    return any(name.startswith(prefix) and name != but and _is_half_imported(name) for name in list(sys.modules))


class _Finder(MetaPathFinder):
    """Finds the pending modules as the other finders do; the registration follows the module's own code."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _PENDING:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            loader = spec.loader = copy.copy(spec.loader)  # one in an archive loads other modules too
            execute = loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                del loader.exec_module  # leaves the module as without us
                execute(module)
                _run(fullname)

            loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
