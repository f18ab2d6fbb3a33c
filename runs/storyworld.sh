#!/usr/bin/env bash
# The storyworld table of docs/results.md: every arm at full size on one GPU, MDLM and RMDM with two seeds.
#
#   runs/storyworld.sh [OUT]         # OUT: runs/storyworld; a stage that is done already is skipped
#
# RMDM names the command (default: rmdm). DATA, FLOW and ARM add flags to all stages, to stage I and to stage II, for
# example ARM='--train.steps 200' to try it out. STEPS and N are the table's step counts and stories a cell.
set -euo pipefail
OUT=${1:-runs/storyworld}
RMDM=${RMDM:-rmdm}
STEPS=${STEPS:-1,2,4,8,16,64}
N=${N:-2000}
mkdir -p "$OUT"

# once NAME COMMAND...: run it unless it has ended well before; its output goes to OUT/NAME.log.
once() {
    local name=$1
    shift
    [ -e "$OUT/$name.ok" ] && return
    echo "$(date -u +%T) $name"
    local began=$SECONDS
    "$@" >"$OUT/$name.log" 2>&1 || { tail -5 "$OUT/$name.log"; echo "$name failed; see $OUT/$name.log"; exit 1; }
    echo "$((SECONDS - began)) s" >"$OUT/$name.ok"
}

# arm NAME PRESET FLAGS...: train it, then write its stories: by the model's own law, and surest first at temperature 0.7.
arm() {
    local name=$1 preset=$2
    shift 2
    once "train-$name" $RMDM train "$preset" --out "$OUT/$name" ${DATA:-} ${ARM:-} "$@"
    local exact=ancestral best=balanced ceiling=
    [ "$preset" = storyworld-sedd ] && exact=analytic best=analytic
    case $preset in storyworld | storyworld-paper) ceiling=--ceiling ;; esac
    once "best-$name" $RMDM eval stories "$OUT/$name" --steps "$STEPS" --n "$N" --sampler $best --temperature 0.7 $ceiling
    once "exact-$name" $RMDM eval stories "$OUT/$name" --steps "$STEPS" --n "$N" --sampler $exact --temperature 1 \
        $(has_null "$preset" && echo --guidance 1) $ceiling
}

# Guidance can be turned off only where there is some.
has_null() { [ "$1" = storyworld ]; }

once prepare $RMDM prepare storyworld ${DATA:-}
once encode $RMDM encode storyworld ${DATA:-}
once stage-one $RMDM align storyworld --out "$OUT/stage-one" --latent.draw prior ${DATA:-} ${FLOW:-}
for seed in 0 1; do
    arm "mdlm-$seed" storyworld-mdlm --seed $seed
    arm "flow-$seed" storyworld --seed $seed --latent.flow "$OUT/stage-one"
done
arm prior-0 storyworld --latent.draw prior --latent.flow "$OUT/stage-one"
arm indep-0 storyworld-indep
arm sedd-0 storyworld-sedd
once encode-paper $RMDM encode storyworld-paper ${DATA:-}
once stage-one-paper $RMDM align storyworld-paper --out "$OUT/stage-one-paper" ${DATA:-} ${FLOW:-}
arm paper-0 storyworld-paper --latent.flow "$OUT/stage-one-paper"
for log in "$OUT"/best-*.log "$OUT"/exact-*.log; do
    echo "== $(basename "$log" .log)"
    cat "$log"
done >"$OUT/table.txt"
tail -n +1 "$OUT"/train-*.ok "$OUT"/stage-one*.ok >"$OUT/seconds.txt"
echo "tables: $OUT/table.txt   seconds of each stage: $OUT/seconds.txt"
