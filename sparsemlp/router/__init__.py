"""Which way a call on a CPU takes: `backend="auto"` asks a model of this machine; `sparsemlp tune` measures it.

`set_router` switches it, `explain` says what it would choose and why. Nothing here changes results beyond rounding.
"""

from __future__ import annotations

from sparsemlp.router.decide import set_router
from sparsemlp.router.explain import Explanation, explain, explain_calls

__all__ = ["Explanation", "explain", "explain_calls", "set_router"]
