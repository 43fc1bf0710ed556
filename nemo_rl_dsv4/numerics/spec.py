"""What one site rounds to: format, blocks and scale rule."""

import math
from dataclasses import dataclass

from nemo_rl_dsv4.numerics.formats import NumericsError, format_of


@dataclass(frozen=True)
class QuantSpec:
    """How one site is rounded.

    fmt: "e4m3fn" | "e4m3fnuz" | "e2m1".
    block: (rows, cols) over the last two dims; (1, g) makes groups of g along the last dim.
    scale: "ue8m0" (smallest power of two >= amax/max) | "float32" (amax/max).
    amax_floor: clamps amax from below as kernels do; 0.0 means none, and an all-zero block gets scale 1.
    keep_last: trailing channels left as they are.
    scale_rounding, for UE8M0: "bits" is exact; "log2f" is exp2(ceil(log2f(amax/max))) with a correctly rounded float32
    log2, one octave lower for quotients a few ulp above a power of two.
    fnuz_max: the max of e4m3fnuz, 240 (torch, DeepEP) or 224 (vLLM, SGLang).
    """

    fmt: str = "e4m3fn"
    block: tuple[int, int] = (128, 128)
    scale: str = "ue8m0"
    amax_floor: float = 0.0
    keep_last: int = 0
    scale_rounding: str = "bits"
    fnuz_max: float = 240.0

    def __post_init__(self) -> None:
        format_of(self.fmt)
        object.__setattr__(self, "block", tuple(self.block))
        for field, valid in (
            ("scale", ("ue8m0", "float32")),
            ("scale_rounding", ("bits", "log2f")),
            ("fnuz_max", (224.0, 240.0)),
        ):
            if getattr(self, field) not in valid:
                raise NumericsError(
                    f"QuantSpec.{field} is {getattr(self, field)!r}; valid: {', '.join(map(str, valid))}"
                )
        if len(self.block) != 2 or not all(isinstance(b, int) and b > 0 for b in self.block):
            raise NumericsError(f"QuantSpec.block is {self.block!r}; wanted two positive integers (rows, cols)")
        if self.fmt == "e2m1" and self.block[1] % 2:
            raise NumericsError(f"QuantSpec.block is {self.block!r}; e2m1 packs two a byte and wanted even columns")
        if not 0.0 <= self.amax_floor < math.inf:
            raise NumericsError(f"QuantSpec.amax_floor is {self.amax_floor!r}; wanted a finite number >= 0")
        if self.keep_last < 0:
            raise NumericsError(f"QuantSpec.keep_last is {self.keep_last!r}; wanted a number of channels >= 0")

    @property
    def max_value(self) -> float:
        """Largest code value the scale aims at: 448, 240 or 224, 6."""
        return self.fnuz_max if self.fmt == "e4m3fnuz" else format_of(self.fmt).max_value
