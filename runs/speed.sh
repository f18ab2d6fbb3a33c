#!/usr/bin/env bash
# The speed figures of docs/results.md and docs/performance.md, one command after another on an otherwise idle machine.
#
#   runs/speed.sh [OUT]         # OUT: runs/speed; what is done already is skipped
#
# OUT/NAME.log holds what each command printed, its JSON object last, and OUT/*.svg the pictures of growth. ONLY names the
# parts to do, the most telling first. TINY=1 takes a tiny model throughout, to see that all of it works; RUNS names
# trained models to time beside. RMDM names the command (default: rmdm), PYTHON an interpreter with this package.
set -euo pipefail
OUT=${1:-runs/speed}
ONLY=${ONLY:-train sample latency trained law rest growth}
PYTHON=${PYTHON:-python3}
HERE=$(cd "$(dirname "$0")/.." && pwd)
. "$(dirname "$0")/stages.sh"

parts train sample latency trained law rest growth

# size NAME: that size of rmdm bench, or the tiny one.
size() {
    [ -n "${TINY:-}" ] && echo tiny || echo "$1"
}

# steps COUNTS: as many steps, or what the tiny size has tokens for.
steps() {
    [ -n "${TINY:-}" ] && echo 4,16 || echo "$1"
}

# try NAME COMMAND...: as `once`, but one that fails costs no other.
try() {
    (once "$@") || true
}

# bench NAME KIND FLAGS...: one command of rmdm bench.
bench() {
    local name=$1
    shift
    try "$name" $RMDM bench "$@" --json
}

train() {
    bench train-owt train --size "$(size owt)" --process mdlm,rmdm
    bench train-owt-groups train --size "$(size owt)" --process mdlm,rmdm --arms ours --groups 16
    bench train-qwen train --size "$(size qwen)"
    bench train-lm1b train --size "$(size lm1b)" --process mdlm,rmdm
    bench train-wiki-small train --size "$(size wiki-small)" --process mdlm,rmdm
    bench train-profile train --size "$(size owt)" --process mdlm,rmdm --arms ours --profile "$OUT/train.txt"
    # Torch times the ordinary step where it cannot record one, unless it is told to fail.
    [ -n "${TINY:-}" ] || TORCHINDUCTOR_CUDAGRAPH_OR_ERROR=1 bench train-owt-graphs train --size owt --process mdlm,rmdm \
        --arms ours --graphs
}

sample() {
    bench sample-owt sample --size "$(size owt)" --batch 8 --steps "$(steps 1024)"
    bench sample-qwen sample --size "$(size qwen)" --batch 8 --steps "$(steps 1024)"
    bench sample-owt-64 sample --size "$(size owt)" --batch 64 --steps "$(steps 16,64)" --arms ours
    bench sample-owt-groups sample --size "$(size owt)" --batch 8 --steps "$(steps 1024)" --arms ours --groups 16
    bench sample-owt-64-groups sample --size "$(size owt)" --batch 64 --steps "$(steps 16,64)" --arms ours --groups 16
    bench sample-profile sample --size "$(size owt)" --batch 64 --steps "$(steps 16)" --arms ours --profile "$OUT/sample.txt"
}

latency() {
    bench latency sample --size "$(size wiki-small)" --batch 1 --steps "$(steps 16)" --arms ours --latency
    bench latency-shipped sample shipped --batch 1 --steps 16 --latency
    bench latency-guided sample shipped --guidance 1.25 --batch 1 --steps 16 --latency
}

trained() {
    local batch=64
    [ -z "${TINY:-}" ] || batch=2
    bench trained sample shipped ${RUNS:-} --batch "$batch" --steps "$(steps 128,64,32,16,8,4)"
    bench trained-guided sample shipped --guidance 1.25 --batch "$batch" --steps "$(steps 128,64,32,16,8,4)"
}

# Whether a text depends on what is written beside it.
law() {
    try same-text $PYTHON "$HERE/benchmarks/same_text.py" shipped --requests "$([ -n "${TINY:-}" ] && echo 8 || echo 512)" --steps 16 \
        --samplers spaced,ancestral
}

rest() {
    bench meanflow meanflow --size "$(size wiki-small)"
    bench encode-minilm encode --size "$(size minilm)"
    bench encode-mpnet encode --size "$(size mpnet)"
    bench data data --size "$([ -n "${TINY:-}" ] && echo tiny || echo stories)"
    try solvers $PYTHON "$HERE/benchmarks/solvers.py" shipped ${TINY:+--rows 4 --steps 8 --reference 32}
}

growth() {
    try growth $PYTHON "$HERE/benchmarks/growth.py" measure "$OUT/growth.json" ${TINY:+--small}
    try growth-plots $PYTHON "$HERE/benchmarks/growth.py" plot "$OUT/growth.json" "$OUT"
}

for part in $ONLY; do
    "$part"
done
for log in "$OUT"/*.log; do
    echo "== $(basename "$log" .log)"
    grep -v '^{' "$log" || true
done
finish
