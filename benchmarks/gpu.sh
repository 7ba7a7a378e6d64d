#!/usr/bin/env bash
# Everything that needs a GPU, straight from a checkout, in two halves of under nine minutes each:
#   benchmarks/gpu.sh kernels      checks, measurements, tuning, GPU tests, memory checker -> OUT/kernels
#   benchmarks/gpu.sh models       training steps and micro cases beside torch.amp -> OUT/models
#   benchmarks/gpu.sh              both
#   benchmarks/gpu.sh --dry-run    rehearses on the CPU, the kernels in Triton's interpreter (also: kernels --dry-run)
# OUT is a folder (default out/gpu), PYTHON an interpreter (default python3). Needs torch 2.11 or newer and triton 3.6
# or newer; uses pytest, matplotlib and compute-sanitizer if there. A stage that fails or hangs costs only itself,
# results are on disk as they come, at most eight files a half, and the table is printed last.
set -u
cd "$(dirname "$0")/.." || exit 1
HALVES=() DRY=()
for word in "$@"; do
    case $word in
        kernels | models) HALVES+=("$word") ;;
        --dry-run) DRY=(--dry-run) ;;
        *) echo "unknown argument '$word'; expected kernels, models or --dry-run" >&2; exit 2 ;;
    esac
done
[ ${#HALVES[@]} -gt 0 ] || HALVES=(kernels models)
ROOT=${OUT:-out/gpu}
PYTHON=${PYTHON:-python3}
export PYTHONPATH=".:kernels${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
if [ ${#DRY[@]} -gt 0 ]; then export TRITON_INTERPRET=1; else unset TRITON_INTERPRET; fi

begin() { # half: an empty folder in OUT, a log, and a deadline for the stages; what comes after them takes seconds
    OUT=$ROOT/$1 LOG=$ROOT/$1/log.txt DEADLINE=$((SECONDS + 515))
    mkdir -p "$OUT"
    rm -f "$OUT"/{checks,small-checks,environment}.json "$OUT"/{rows,tuning,results}.jsonl "$OUT"/report.md "$OUT"/*.png
    echo "==== $1" | tee "$LOG"
}

stage() { # name, most seconds, command...: its exit code goes to CODE, its output to the log
    local name=$1 limit=$2 start=$SECONDS left=$((DEADLINE - SECONDS)) before
    shift 2
    if [ "$left" -lt 15 ]; then
        CODE=0
        echo "$name: no time left" | tee -a "$LOG"
        return
    fi
    echo "== $name" | tee -a "$LOG"
    before=$(wc -c < "$LOG")
    # Interrupted, not terminated: Python then says where it was, and pytest what had failed.
    timeout -s INT -k 10 "$((limit < left ? limit : left))" "$@" >> "$LOG" 2>&1
    CODE=$?
    if [ "$CODE" -ne 0 ]; then tail -c "+$((before + 1))" "$LOG" | tail -n 12; fi
    echo "$name: exit $CODE, $((SECONDS - start)) s" | tee -a "$LOG"
}

persistent() { # as stage, and again in a fresh process for what is left where the device failed (3) or the process died
    local tries=5
    stage "$@"
    while [ $((tries -= 1)) -gt 0 ] && { [ "$CODE" -eq 3 ] || [ "$CODE" -ge 124 ]; }; do stage "$@" --resume; done
}

have() { "$PYTHON" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)"; }

gpu_tests() { # name, most seconds, what to run... : nothing is installed, so plugins that pyproject.toml configures may
    # be missing, hence no addopts and no word about unknown options
    if have pytest && have hypothesis; then
        stage "$1" "$2" "$PYTHON" -m pytest -m gpu -q -p no:cacheprovider -o addopts= \
            -W ignore::pytest.PytestConfigWarning --continue-on-collection-errors "${@:3}"
    else
        echo "$1: pytest or hypothesis is not installed" | tee -a "$LOG"
    fi
}

kernels() {
    stage doctor 60 "$PYTHON" -m ampkit doctor
    persistent checks 130 "$PYTHON" -m benchmarks.gpu checks --out "$OUT" ${DRY[@]+"${DRY[@]}"}
    persistent measure 130 "$PYTHON" -m benchmarks.gpu measure --out "$OUT" --seconds 110 ${DRY[@]+"${DRY[@]}"}
    stage tune 50 "$PYTHON" -m benchmarks.gpu tune --out "$OUT" --seconds 35 ${DRY[@]+"${DRY[@]}"}
    if [ ${#DRY[@]} -eq 0 ]; then
        # This room's GPU tests are the checks above; those that compile models belong to the other half.
        local files
        mapfile -t files < <(
            grep -rl 'mark\.gpu' tests --include='test_*.py' | grep -v -e kernels/test_gpu.py -e test_benchmarks.py
        )
        gpu_tests pytest 90 "${files[@]}"
        if command -v compute-sanitizer > /dev/null; then
            # Without the caching allocator every tensor is an allocation, and what lies beyond it is out of bounds.
            PYTORCH_NO_CUDA_MEMORY_CACHING=1 stage sanitizer 80 compute-sanitizer --tool memcheck --error-exitcode 9 \
                --print-limit 20 "$PYTHON" -m benchmarks.gpu small-checks --out "$OUT"
        else
            echo "sanitizer: compute-sanitizer is not on the PATH" | tee -a "$LOG"
        fi
    fi
    "$PYTHON" -m benchmarks.gpu report --out "$OUT" 2>&1 | tee -a "$LOG"
}

models() {
    local device=(--device cuda --minutes 6.4) cases=()
    if [ ${#DRY[@]} -gt 0 ]; then
        device=(--device cpu --minutes 1 --effort 0.02) cases=('training/LSTM, bf16' 'scaler/clip, 50*' 'regions/*')
    fi
    stage benchmarks 430 "$PYTHON" -m benchmarks --large-first --gate none --out "$OUT" "${device[@]}" \
        ${cases[@]+"${cases[@]}"}
    if [ ${#DRY[@]} -eq 0 ]; then gpu_tests pytest 85 tests/test_benchmarks.py; fi
    if [ -s "$OUT/results.jsonl" ]; then
        [ -s "$OUT/report.md" ] || "$PYTHON" -m benchmarks.report "$OUT/results.jsonl" >> "$LOG" 2>&1
        sed -n '/^## Aims/,/^!\[/p; /^## Not measured/,$p; /^## Training/,/^## /p' "$OUT/report.md"
    fi
}

for half in "${HALVES[@]}"; do
    begin "$half"
    "$half"
done
