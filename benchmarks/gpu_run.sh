#!/usr/bin/env bash
# Everything there is to find out on a machine with a GPU, in one command and under eight minutes, without internet:
#
#     bash benchmarks/gpu_run.sh OUT          conformance, graphs and streams, tuning, benchmarks; results into a new OUT
#     bash benchmarks/gpu_run.sh --dry OUT    the same code on the CPU in Triton's interpreter, tiny sizes: no measurement
#
# PYTHON: the interpreter with PyTorch and Triton (default: .venv/bin/python where it exists, else python3).
# BUDGET: seconds for everything (default 470). docs/gpu.md says what is in OUT.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-}
if [ -z "$python" ]; then
  python=python3
  if [ -x "$root/.venv/bin/python" ]; then python=$root/.venv/bin/python; fi
fi
exec env PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" \
  "$python" -m benchmarks.gpu_run --budget "${BUDGET:-470}" "$@"
