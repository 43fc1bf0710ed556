"""The two forms of a rule between keys."""

from __future__ import annotations

from nemo_rl_dsv4.errors import UserError


def require(condition: bool, message: str) -> None:
    """Raises UserError with `message` unless `condition` holds."""
    if not condition:
        raise UserError(message)


def require_divides(divisor: int, divisor_name: str, number: int, number_name: str, fix: str) -> None:
    """Raises UserError unless `divisor` divides `number`; the names and the fix make the message."""
    require(
        number % divisor == 0,
        f"{number_name} is {number}, which {divisor_name} = {divisor} does not divide; {fix}",
    )
