#!/bin/sh
# Everything there is to know about a GPU, in one command: checks and measures, with results in files.
#
#   tests/gpu/report.sh OUT              OUT: a folder for the results
#
# No step stops the others: each has a log, and OUT/summary.txt says how it ended and how long it took. It needs Python
# with torch, triton and transformers; pytest and hypothesis for the tests. PYTHON names the interpreter. STEPS says
# what is done, SHAPES which models are measured, LIMIT_S how long one step may take, and DEVICE=cpu tries it all out
# without a GPU.
set -u
out=${1:?say where the results go: tests/gpu/report.sh OUT}
python=${PYTHON:-python3}
steps=${STEPS:-environment doctor tests bench trace kernel-tests}
shapes=${SHAPES:-2b 8b qwen2.5-7b 30b-a3b}
limit=${LIMIT_S:-540}
device=${DEVICE:-cuda}
small=
[ "$device" = cpu ] && small='--small --rounds 1' && export TRITON_INTERPRET=1
cd "$(dirname "$0")/../.." || exit 1
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 1
export HF_HUB_OFFLINE=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export VLMSERVE_TEST_DEVICE="$device"
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

tests() { # NAME WORDS...
    name=$1
    shift
    step "$name" "$python" -m pytest "$@" -o addopts= -p no:cacheprovider --import-mode=importlib -q
}

for step in $steps; do
    case $step in
        environment) step environment "$python" -m tests.gpu.environment ;;
        doctor) step doctor "$python" -m vlmserve.cli doctor ;;
        tests) tests tests tests/gpu -m gpu --durations=20 ;;
        bench)
            for shape in $shapes; do
                # shellcheck disable=SC2086
                step "bench-$shape" "$python" -m vlmserve.cli bench gpu --model-shape "$shape" --device "$device" $small --json "$out/bench-$shape.json"
            done
            ;;
        trace) step trace "$python" -m vlmserve.cli bench trace --device "$device" --output "$out/trace.json" ;;
        # the last: each shape that they try is compiled, which takes its time
        kernel-tests) tests kernel-tests tests/vlmserve_common/kernels -k triton -m 'not slow' ;;
        *) echo "$step: STEPS has no such step" | tee -a "$out/summary.txt" ;;
    esac
done
echo "$(($(date +%s) - began)) s in all" | tee -a "$out/summary.txt"
