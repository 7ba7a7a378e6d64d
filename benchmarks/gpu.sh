#!/usr/bin/env bash
# Everything that needs a GPU, straight from a checkout, in two halves of under nine minutes each:
#   benchmarks/gpu.sh kernels      checks, kernels and torch's, tuning, GPU tests, memory checker -> OUT/kernels
#   benchmarks/gpu.sh models       training steps and micro cases, with torch.amp -> OUT/models
#   benchmarks/gpu.sh              both
#   benchmarks/gpu.sh --dry-run    rehearses on the CPU, the kernels in Triton's interpreter (also: kernels --dry-run)
# OUT is a folder (default: out/gpu in the checkout), PYTHON an interpreter (default python3). Needs torch 2.11 or newer,
# triton 3.6 or newer, numpy, pytest and hypothesis; uses scikit-learn and compute-sanitizer if there. A stage that fails
# or hangs costs only itself, results are on disk as they come, at most eight files a half, and tables are printed last.
set -u
# Relative to where the caller is, not to the checkout. An interpreter's links stay: they are what makes an environment.
if [ -n "${OUT:-}" ]; then OUT=$(realpath -m -- "$OUT"); fi
case ${PYTHON:=python3} in /*) ;; */*) PYTHON=$PWD/$PYTHON ;; esac
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
ROOT=${OUT:-$PWD/out/gpu}
export PYTHONPATH=".:kernels${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
if [ ${#DRY[@]} -gt 0 ]; then export TRITON_INTERPRET=1; else unset TRITON_INTERPRET; fi

begin() { # half: an empty folder in OUT, a log, and a deadline for the stages; what comes after them takes seconds
    OUT=$ROOT/$1 LOG=$ROOT/$1/log.txt DEADLINE=$((SECONDS + 515))
    mkdir -p "$OUT"
    rm -f "$OUT"/running.json "$OUT"/results.jsonl "$OUT"/report.md
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

persistent() { # as stage, and again in a fresh process for what is left where the device failed (3) or the process
    # died, all within the one limit
    local name=$1 end=$((SECONDS + $2)) tries=5
    stage "$@"
    shift 2
    while [ $((tries -= 1)) -gt 0 ] && { [ "$CODE" -eq 3 ] || [ "$CODE" -ge 124 ]; }; do
        [ $((end - SECONDS)) -ge 15 ] || return
        stage "$name" $((end - SECONDS)) "$@" --resume
    done
}

# Nothing is installed, so plugins that pyproject.toml configures may be missing: no addopts, no word about unknown options.
TESTS=(-m pytest -q -p no:cacheprovider -o addopts= -W ignore::pytest.PytestConfigWarning --continue-on-collection-errors)
CHECKS=tests/kernels/test_operations.py

sanitizer() { # the path of compute-sanitizer, which the CUDA toolkit installs without putting it on the PATH
    local toolkit
    command -v compute-sanitizer && return
    for toolkit in "${CUDA_HOME:-}" "${CUDA_PATH:-}" /usr/local/cuda /usr/local/cuda-*; do
        if [ -x "$toolkit/bin/compute-sanitizer" ]; then echo "$toolkit/bin/compute-sanitizer" && return; fi
    done
    return 1
}

measured() { # pattern of titles: those sections of the report, which is written if the run that should have died
    [ -s "$OUT/results.jsonl" ] || return 0
    [ -s "$OUT/report.md" ] || "$PYTHON" -m benchmarks.report "$OUT/results.jsonl" >> "$LOG" 2>&1
    awk -v titles="^## ($1)" '/^## / { show = $0 ~ titles } show' "$OUT/report.md"
}

kernels() { # the limits add up to what the half has
    local patterns=('kernels/*' 'float8/*' 'tuning/*') device=(--device cuda --minutes 2.2) chosen=(-m gpu) checker
    if [ ${#DRY[@]} -gt 0 ]; then
        device=(--device cpu --minutes 2 --effort 0.02) patterns=('kernels/*20 tiny*' 'tuning/norm') chosen=(-k interpreted)
    fi
    stage doctor 60 "$PYTHON" -m ampkit doctor
    stage checks 110 "$PYTHON" "${TESTS[@]}" "${chosen[@]}" "$CHECKS"
    persistent benchmarks 180 "$PYTHON" -m benchmarks "${patterns[@]}" --no-gate --out "$OUT" "${device[@]}"
    if [ ${#DRY[@]} -eq 0 ]; then
        # The GPU tests besides the checks above. Those of tests/benchmarks compile models: the other half runs them.
        local files
        mapfile -t files < <(
            grep -rl 'mark\.gpu' tests --include='test_*.py' | grep -v -e "$CHECKS" -e tests/benchmarks/
        )
        stage tests 85 "$PYTHON" "${TESTS[@]}" -m gpu "${files[@]}"
        if checker=$(sanitizer); then
            # Without the caching allocator every tensor is an allocation, and what lies beyond it is out of bounds.
            PYTORCH_NO_CUDA_MEMORY_CACHING=1 stage sanitizer 80 "$checker" --tool memcheck --error-exitcode 9 \
                --print-limit 20 "$PYTHON" "${TESTS[@]}" -k 'on_the_gpu and (address or float64 or ulp)' "$CHECKS"
        else
            echo "sanitizer: no compute-sanitizer on the PATH or in a CUDA toolkit" | tee -a "$LOG"
        fi
    fi
    measured 'Aims|Kernels|FP8|Launch|GB|Not measured'
}

models() {
    local device=(--device cuda --minutes 6.2) cases=()
    if [ ${#DRY[@]} -gt 0 ]; then
        device=(--device cpu --minutes 1 --effort 0.02) cases=('small/transformer*' 'scaler/clip, 50*' 'regions/*')
    fi
    persistent benchmarks 425 "$PYTHON" -m benchmarks --large-first --no-gate --out "$OUT" "${device[@]}" \
        ${cases[@]+"${cases[@]}"}
    if [ ${#DRY[@]} -eq 0 ]; then stage tests 85 "$PYTHON" "${TESTS[@]}" -m gpu tests/benchmarks; fi
    measured 'Aims|Training|Steps|Not measured'
}

for half in "${HALVES[@]}"; do
    begin "$half"
    "$half"
done
