"""Update rules by name. ``efla.rules.get("efla").coefficients(beta, lam)`` gives a step's three scalars."""

from efla.errors import unknown_name
from efla.rules.additive import Linear, StateSpaceDual
from efla.rules.base import FlowRates, StepCoefficients, UpdateRule
from efla.rules.delta import Delta, GatedDelta
from efla.rules.exact_flow import ExactFlow, GatedExactFlow, GatedExactFlowLog
from efla.rules.runge_kutta import CrankNicolson, ImplicitEuler, Midpoint, RungeKutta4

__all__ = ["FlowRates", "StepCoefficients", "UpdateRule", "builtin_name", "get", "names", "register"]

_RULES: dict[str, UpdateRule] = {}


def register(rule: UpdateRule) -> UpdateRule:
    """Register a rule, so that ``rule="its-name"`` finds it everywhere."""
    known = _RULES.get(rule.name)
    if known is not None and _origin(known) != _origin(rule):
        raise ValueError(f"a rule named {rule.name!r} is registered already ({known!r}); choose another name")
    _RULES[rule.name] = rule
    return rule


def _origin(rule: UpdateRule) -> tuple[str, str]:
    """Where a rule's class is defined. Running a notebook cell again defines it again in the same place."""
    return type(rule).__module__, type(rule).__qualname__


def get(rule: str | UpdateRule) -> UpdateRule:
    """The rule of that name. Rule objects are returned unchanged, so that unregistered rules can be used too."""
    if isinstance(rule, UpdateRule):
        return rule
    try:
        return _RULES[rule]
    except (KeyError, TypeError):
        raise unknown_name("rule", rule, _RULES) from None


def builtin_name(rule: UpdateRule) -> str | None:
    """The name of a rule of this package; ``None`` for a rule of the user's own."""
    return rule.name if type(rule) in _BUILTIN else None


def names() -> list[str]:
    """Names of all rules, in the order of their registration."""
    return list(_RULES)


for _rule in (
    Linear(),
    StateSpaceDual(),
    Delta(),
    Midpoint(),
    RungeKutta4(),
    ImplicitEuler(),
    CrankNicolson(),
    ExactFlow(),
    GatedDelta(),
    GatedExactFlow(),
    GatedExactFlowLog(),
):
    register(_rule)
_BUILTIN = frozenset(map(type, _RULES.values()))
