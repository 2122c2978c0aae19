"""That a match is a linear cross entropy: that its program streams over the vocabulary in one pass."""

from __future__ import annotations

import mcir
from aicf_jax.errors import Refusal
from aicf_jax.ops import _loss_programs
from aicf_jax.ops._loss_composition import places
from aicf_jax.ops._semantic import FusedOp


def prove(op: FusedOp) -> Refusal | None:
    def no(code: str, expected: str, found: str) -> Refusal:
        return Refusal("linear_cross_entropy", "legality", code, f"resembles it: {found}", expected, found, op.site)

    try:
        places(op)
        program = _loss_programs.forward(op).program
        _loss_programs.forward_saving(op)
    except mcir.MCIRError as error:
        code = getattr(error, "code", "derive")
        return no(code, getattr(error, "expected", "a program"), getattr(error, "found", str(error)))
    streams = [s for _, s in program.statements() if isinstance(s, mcir.Stream)]
    reductions = [s for _, s in program.statements() if isinstance(s, mcir.OnlineReduction)]
    if len(streams) != 1 or not any(r.corrected_by for r in reductions):
        return no("not_linear", "a loss that one pass over the vocabulary tells", f"{len(streams)} passes")
    return None
