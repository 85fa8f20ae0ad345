#!/usr/bin/env bash
# Builds this checkout on a machine with a GPU, tests the ops there and measures them, in under 8
# minutes and without a network. Needs nvcc, and in PYTHON (python3): torch with CUDA, triton,
# pytest, numpy, cmake, ninja, pybind11, setuptools 77 or newer.
#
#   bench/device.sh [OUTPUT]        results into OUTPUT (bench/results/device)
#   bench/device.sh --dry-run       goes through it on a CPU, with the installed package
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}

if [ "${1:-}" = --dry-run ]; then
  output=$(mktemp -d)
  trap 'rm -rf "$output"' EXIT
  TRITON_INTERPRET=1 OMP_NUM_THREADS=1 "$PYTHON" -W ignore bench/device.py --dry-run \
    --output "$output" --seconds 240
  exit
fi

output=${1:-bench/results/device}
started=$SECONDS
PATH=$(dirname "$(command -v "$PYTHON")"):$PATH # its cmake and ninja
arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)
CMAKE_ARGS=${CMAKE_ARGS:--DMTP_CUDA=ON -DMTP_CUDA_ARCHS=$arch} PIP_BREAK_SYSTEM_PACKAGES=1 \
  "$PYTHON" -m pip install --quiet --no-index --no-build-isolation --no-deps -e .
"$PYTHON" -m mtp_kernels.cli doctor || true # says what is built in and what runs where
left=$((465 - (SECONDS - started)))
if [ "$left" -lt 60 ]; then
  echo "device.sh: building took $((SECONDS - started)) s, which leaves no time to measure" >&2
  exit 1
fi
rm -f "$output"/device.{json,md}
timeout --kill-after=5 "$left" \
  "$PYTHON" -W ignore bench/device.py --output "$output" --seconds $((left - 30)) || {
  code=$?
  cat "$output/device.md" || true # what was done until then
  exit $code
}
