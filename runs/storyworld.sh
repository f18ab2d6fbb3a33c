#!/usr/bin/env bash
# The storyworld table of docs/results.md: every arm at full size on one GPU, MDLM and RMDM with two seeds.
#
#   runs/storyworld.sh [OUT]         # OUT: runs/storyworld; a stage that is done already is skipped
#
# Models are trained one after another; stories are embedded, written and checked beside that, since the host has time.
#
# RMDM names the command (default: rmdm). DATA, FLOW and ARM add flags to all stages, to stage I and to stage II, for
# example ARM='--train.steps 200' to try it out. STEPS and N are the table's step counts and stories a cell, TEMPERATURE
# that of its rows that write the surest words first.
set -euo pipefail
OUT=${1:-runs/storyworld}
STEPS=${STEPS:-1,2,4,8,16,64}
N=${N:-2000} # as many as are held out
TEMPERATURE=${TEMPERATURE:-0.3}
. "$(dirname "$0")/stages.sh"

# arm NAME PRESET FLAGS...: train it, then, in the background, write its stories: surest words first, and by its own law.
arm() {
    local name=$1 preset=$2
    shift 2
    once "train-$name" $RMDM train "$preset" --out "$OUT/$name" ${DATA:-} ${ARM:-} "$@"
    stories "$name" "$preset" &
}

stories() {
    local name=$1 preset=$2 exact=ancestral best=balanced ceiling= guidance=
    case $preset in storyworld | storyworld-paper) ceiling=--ceiling ;; esac
    [ "$preset" = storyworld-sedd ] && exact=analytic best=analytic
    [ "$preset" = storyworld ] && guidance="--guidance 1" # it can be turned off only where there is some
    once "best-$name" $RMDM eval stories "$OUT/$name" --steps "$STEPS" --n "$N" --sampler $best \
        --temperature "$TEMPERATURE" $ceiling
    once "exact-$name" $RMDM eval stories "$OUT/$name" --steps "$STEPS" --n "$N" --sampler $exact \
        --temperature 1 $guidance $ceiling
}

embed() {
    once encode $RMDM encode storyworld ${DATA:-}
    once encode-paper $RMDM encode storyworld-paper ${DATA:-}
}

once prepare $RMDM prepare storyworld ${DATA:-}
embed &
arm mdlm-0 storyworld-mdlm --seed 0
await encode
once stage-one $RMDM align storyworld --out "$OUT/stage-one" --latent.draw prior ${DATA:-} ${FLOW:-}
for seed in 0 1; do
    arm "flow-$seed" storyworld --seed $seed --latent.flow "$OUT/stage-one"
done
arm mdlm-1 storyworld-mdlm --seed 1
arm prior-0 storyworld --latent.draw prior --latent.flow "$OUT/stage-one"
await encode-paper
once stage-one-paper $RMDM align storyworld-paper --out "$OUT/stage-one-paper" ${DATA:-} ${FLOW:-}
arm paper-0 storyworld-paper --latent.flow "$OUT/stage-one-paper"
arm sedd-0 storyworld-sedd
arm indep-0 storyworld-indep
finish
for log in "$OUT"/best-*.log "$OUT"/exact-*.log; do
    echo "== $(basename "$log" .log)"
    cat "$log"
done >"$OUT/table.txt"
tail -n +1 "$OUT"/train-*.ok "$OUT"/stage-one*.ok >"$OUT/seconds.txt"
echo "tables: $OUT/table.txt   seconds of each stage: $OUT/seconds.txt"
