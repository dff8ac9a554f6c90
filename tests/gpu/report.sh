#!/bin/sh
# Everything there is to know about a GPU, in one command: checks and measures, with results in files.
#
#   tests/gpu/report.sh OUT              OUT: a folder for the results
#
# No step stops the others: each has a log, and OUT/summary.txt says how it ended and how long it took. It needs Python
# with torch, triton and transformers; pytest and hypothesis for the tests. PYTHON names the interpreter. SHAPES says
# which models are measured, LIMIT_S how long one step may take, and DEVICE=cpu tries it all out without a GPU.
set -u
out=${1:?say where the results go: tests/gpu/report.sh OUT}
python=${PYTHON:-python3}
shapes=${SHAPES:-2b 8b qwen2.5-7b}
limit=${LIMIT_S:-540}
device=${DEVICE:-cuda}
small=
[ "$device" = cpu ] && small='--small --rounds 1' && export TRITON_INTERPRET=1
cd "$(dirname "$0")/../.." || exit 1
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 1
export HF_HUB_OFFLINE=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
: > "$out/summary.txt"
began=$(date +%s)

step() { # NAME COMMAND...
    name=$1
    shift
    start=$(date +%s)
    timeout "$limit" "$@" > "$out/$name.log" 2>&1
    code=$?
    case $code in
        0) ended=ok ;;
        124) ended="cut off after $limit s" ;;
        *) ended="ended with $code" ;;
    esac
    echo "$name: $ended, $(($(date +%s) - start)) s: $(tail -n 1 "$out/$name.log" | cut -c 1-160)" | tee -a "$out/summary.txt"
}

step environment "$python" -m tests.gpu.environment
step doctor "$python" -m vlmserve.cli doctor
if "$python" -c 'import pytest, hypothesis' 2> "$out/pytest.log"; then
    step tests env VLMSERVE_TEST_DEVICE="$device" "$python" -m pytest -m gpu tests/gpu --durations=20 -o addopts= -p no:cacheprovider --import-mode=importlib -q
    step kernel-tests "$python" -m pytest tests/vlmserve_common/kernels -k triton -o addopts= -p no:cacheprovider --import-mode=importlib -q
else
    echo "tests: not run: pytest or hypothesis is not installed ($(tail -n 1 "$out/pytest.log"))" | tee -a "$out/summary.txt"
fi
for shape in $shapes; do
    # shellcheck disable=SC2086
    step "bench-$shape" "$python" -m vlmserve.cli bench gpu --model-shape "$shape" --device "$device" $small --json "$out/bench-$shape.json"
done
step trace "$python" -m vlmserve.cli bench trace --device "$device" --output "$out/trace.json"
echo "$(($(date +%s) - began)) s in all" | tee -a "$out/summary.txt"
