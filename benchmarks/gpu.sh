#!/usr/bin/env bash
# Everything that needs a GPU, in one command from a checkout, within eight minutes: checks, measurements, tuning,
# memory checker, report. A stage that fails or hangs costs only itself. Prints the table last.
#   OUT=folder benchmarks/gpu.sh              results go to OUT (default out/gpu)
#   benchmarks/gpu.sh --dry-run               rehearses every stage on the CPU, in Triton's interpreter
# Needs python3 with torch 2.11 or newer and triton 3.6 or newer; uses pytest, matplotlib and compute-sanitizer if there.
set -u
cd "$(dirname "$0")/.." || exit 1
OUT=${OUT:-out/gpu}
PYTHON=${PYTHON:-python3}
export PYTHONPATH=".:kernels${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
DRY=()
if [ "${1:-}" = "--dry-run" ]; then
    DRY=(--dry-run)
    export TRITON_INTERPRET=1
else
    unset TRITON_INTERPRET
fi
mkdir -p "$OUT"
: > "$OUT/stages.txt"

stage() { # name, most seconds, command...
    local name=$1 limit=$2 start=$SECONDS code
    shift 2
    echo "== $name"
    timeout -k 5 "$limit" "$@" > "$OUT/$name.log" 2>&1
    code=$?
    echo "$name: exit $code, $((SECONDS - start)) s" | tee -a "$OUT/stages.txt"
    if [ "$code" -ne 0 ]; then tail -n 8 "$OUT/$name.log"; fi
}

stage doctor 40 "$PYTHON" -m ampkit doctor
stage checks 120 "$PYTHON" -m benchmarks.gpu checks --out "$OUT" ${DRY[@]+"${DRY[@]}"}
stage measure 150 "$PYTHON" -m benchmarks.gpu measure --out "$OUT" --seconds 130 ${DRY[@]+"${DRY[@]}"}
stage tune 50 "$PYTHON" -m benchmarks.gpu tune --out "$OUT" --seconds 40 ${DRY[@]+"${DRY[@]}"}
if [ ${#DRY[@]} -eq 0 ]; then
    # The other rooms' GPU tests; this room's ran above. Nothing is installed: without pytest this says so and goes on.
    # Plugins that pyproject.toml configures may be missing too, hence no addopts and no word about unknown options.
    stage pytest 60 "$PYTHON" -m pytest -m gpu -q -o addopts= -W ignore::pytest.PytestConfigWarning \
        --continue-on-collection-errors --deselect tests/kernels/test_gpu.py tests
    if command -v compute-sanitizer > /dev/null; then
        stage sanitizer 40 compute-sanitizer --tool memcheck --error-exitcode 9 \
            "$PYTHON" -m benchmarks.gpu small-checks --out "$OUT"
    else
        echo "sanitizer: compute-sanitizer is not on the PATH" | tee -a "$OUT/stages.txt"
    fi
fi
"$PYTHON" -m benchmarks.gpu report --out "$OUT" 2>&1 | tee "$OUT/table.txt"
