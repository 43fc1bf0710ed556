"""Do our classes still fit NeMo-RL's interfaces? Found out by comparing signatures with the tree that is present."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from inspect import Parameter, Signature
from typing import Any

from nemo_rl_dsv4.errors import UserError


def incompatibility(found: Signature, wanted: Signature) -> str | None:
    """Why a method with signature `found` cannot take every call that `wanted` allows; None if it can.

    Parameters are compared by name, order, kind and whether they may be left out; annotations are not. A signature of
    `*args, **kwargs` alone leaves the arguments to the class, and wants nothing.
    """
    if {p.kind for p in _without_self(wanted)} == {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}:
        return None
    ours = _without_self(found)
    takes_any_position = any(p.kind is Parameter.VAR_POSITIONAL for p in ours)
    takes_any_name = any(p.kind is Parameter.VAR_KEYWORD for p in ours)
    positional = [p for p in ours if p.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
    by_name = {p.name: p for p in ours if p.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)}
    asked = _without_self(wanted)
    place = 0
    for parameter in asked:
        if parameter.kind is Parameter.VAR_POSITIONAL:
            if not takes_any_position:
                return "takes no further positional arguments (*args)"
            continue
        if parameter.kind is Parameter.VAR_KEYWORD:
            if not takes_any_name:
                return "takes no further named arguments (**kwargs)"
            continue
        match = by_name.get(parameter.name)
        if match is None and not takes_any_name:
            return f"has no parameter {parameter.name!r}"
        if parameter.kind is not Parameter.KEYWORD_ONLY:
            if place < len(positional):
                if positional[place].name != parameter.name:
                    return f"has {positional[place].name!r} in the place of {parameter.name!r}"
            elif not takes_any_position:
                return f"takes {parameter.name!r} by name only"
            place += 1
        if match is not None and parameter.default is not Parameter.empty and match.default is Parameter.empty:
            return f"requires {parameter.name!r}, which callers may leave out"
    names = {p.name for p in asked}
    for parameter in ours:
        optional = parameter.default is not Parameter.empty or parameter.kind in (
            Parameter.VAR_POSITIONAL,
            Parameter.VAR_KEYWORD,
        )
        if parameter.name not in names and not optional:
            return f"requires {parameter.name!r}, which callers do not pass"
    return None


def moved_methods(ours: type, interface: type, *, beside: Iterable[str] = ()) -> list[str]:
    """One sentence for each method that no longer fits: name, signature found, signature wanted.

    Args:
        ours: our class.
        interface: NeMo-RL's class. Its abstract methods must be there; of the others, those that ours defines must fit.
        beside: methods that NeMo-RL's loop calls though the interface does not declare them.
    """
    problems = []
    abstract = getattr(interface, "__abstractmethods__", frozenset())
    for name in sorted({*abstract, *(n for n in dir(interface) if not n.startswith("_")), *beside}):
        wanted, found = getattr(interface, name, None), getattr(ours, name, None)
        if found is None:
            if name in abstract or (wanted is None and name in beside):
                text = f"{name}{inspect.signature(wanted)}" if callable(wanted) else name
                problems.append(f"{ours.__name__}.{name} is missing; {interface.__name__} wants {text}")
            continue
        if not callable(wanted) or not callable(found):
            continue
        reason = incompatibility(inspect.signature(found), inspect.signature(wanted))
        if reason is not None:
            problems.append(
                f"{ours.__name__}.{name} {reason}: found {_shown(name, found)}; "
                f"{interface.__name__} wants {_shown(name, wanted)}"
            )
    return problems


def adapted(ours: type, interface: type, *, beside: Iterable[str] = ()) -> Any:
    """A subclass of `ours` and of NeMo-RL's `interface`, whose defaults it inherits.

    Raises:
        UserError: a method moved; names it with the signature found and the one wanted.
    """
    problems = moved_methods(ours, interface, beside=beside)
    if problems:
        raise UserError("NeMo-RL's interface has moved: " + "; ".join(problems))
    return type(ours.__name__, (ours, interface), {"__module__": ours.__module__, "__doc__": ours.__doc__})


def require_parameters(function: Callable[..., Any], names: Iterable[str], where: str) -> None:
    """A function of NeMo-RL takes every argument that we pass, and asks for none that we do not.

    Raises:
        UserError: names the function, what it takes and what is passed.
    """
    passed = list(names)
    signature = inspect.signature(function)
    try:
        signature.bind(**dict.fromkeys(passed))
    except TypeError as error:
        raise UserError(
            f"NeMo-RL's {where} has moved ({error}): found {where}{signature}; this version passes {', '.join(passed)}"
        ) from error


def require_mentions(function: Callable[..., Any], names: Iterable[str], where: str) -> None:
    """The source of a function of NeMo-RL still uses the hooks that an adapter relies on.

    Raises:
        UserError: names the function and the hook that is gone.
    """
    text = inspect.getsource(function)
    for name in names:
        if name not in text:
            raise UserError(
                f"NeMo-RL's {where} no longer uses {name}, which this version relies on; check out the revision of "
                "docs/nemo_rl.md, or run with --trainer embedded"
            )


def _without_self(signature: Signature) -> list[Parameter]:
    parameters = list(signature.parameters.values())
    return parameters[1:] if parameters and parameters[0].name == "self" else parameters


def _shown(name: str, method: Callable[..., Any]) -> str:
    signature = inspect.signature(method)
    plain = [p.replace(annotation=Parameter.empty) for p in signature.parameters.values()]
    return f"{name}{signature.replace(parameters=plain, return_annotation=Signature.empty)}"
