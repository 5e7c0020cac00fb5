"""Makes transformers' Auto classes know ``model_type="efla"`` without importing transformers before it is wanted.

:func:`install` registers at once with the parts of transformers that are loaded, and otherwise when they are. Whatever
could not be registered then is when the first EflaConfig is made: no Auto class looks for a model before that.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_CONFIGS = "transformers.models.auto.configuration_auto"
_MODELS = "transformers.models.auto.modeling_auto"


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


_PENDING: dict[str, Callable[[], None]] = {_CONFIGS: _register_config, _MODELS: _register_models}
# Where the classes are, and the last of each module: while it is missing, the module is still being imported.
_OURS = {
    _CONFIGS: ("efla.models.configuration_efla", "EflaConfig"),
    _MODELS: ("efla.models.modeling_efla", "EflaForSequenceClassification"),
}


def install() -> None:
    """Register now where transformers is loaded, on its loading where it is not. Safe to call more than once."""
    for name in list(_PENDING):
        if name in sys.modules and not getattr(sys.modules[name].__spec__, "_initializing", False):
            _run(name)
    if _PENDING and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _run(name: str) -> None:
    module, last_class = _OURS[name]
    if name not in _PENDING or (module in sys.modules and not hasattr(sys.modules[module], last_class)):
        return  # done, or our own module is what loads transformers: it calls install() when it is ready
    if name == _MODELS and any(_is_half_imported(other) for other in list(sys.modules) if other != name):
        return  # transformers loads its Auto classes in the middle of something else; the first EflaConfig comes back
    register = _PENDING.pop(name)
    try:
        register()
    except Exception as error:  # a foreign transformers must not become unimportable because of us
        warnings.warn(
            f"efla could not register its models with transformers ({error}); "
            "use efla.EflaForCausalLM instead of AutoModelForCausalLM",
            RuntimeWarning,
            stacklevel=2,
        )


def _is_half_imported(name: str) -> bool:
    if not name.startswith("transformers."):
        return False
    return bool(getattr(getattr(sys.modules[name], "__spec__", None), "_initializing", False))


class _Finder(MetaPathFinder):
    """Finds the two modules of transformers as everyone else would, and has us told when one has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _PENDING:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, fullname)
                return spec
        return None


class _Loader(Loader):
    """The module's own loader, and after it our registration."""

    def __init__(self, loader: Loader, name: str) -> None:
        self._loader = loader
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader  # from here on the module is as if we had not been there
        module.__loader__ = self._loader
        _run(self._name)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)  # is_package, get_source and the like


def lazy_attribute(name: str) -> object:
    """The model class of that name, for ``efla.__getattr__``."""
    module = "efla.models.configuration_efla" if name == "EflaConfig" else "efla.models.modeling_efla"
    return getattr(importlib.import_module(module), name)
