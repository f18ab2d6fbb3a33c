# Helpers of the scripts beside this file, which source it: stages that are skipped when done, logs, waiting for one another.
# OUT is the folder everything goes to; RMDM names the command.
RMDM=${RMDM:-rmdm}
mkdir -p "$OUT"
rm -f "$OUT/failed"

# parts NAME...: give up unless ONLY names nothing else.
parts() {
    local part
    for part in $ONLY; do
        case " $* " in
            *" $part "*) ;;
            *) echo "ONLY=$ONLY: $part is no part; use some of $*" >&2 && exit 2 ;;
        esac
    done
}

# once NAME COMMAND...: run it unless it has ended well before; its output goes to OUT/NAME.log.
once() {
    local name=$1
    shift
    [ -e "$OUT/$name.ok" ] && return
    echo "$(date -u +%T) $name"
    local began=$SECONDS
    "$@" >"$OUT/$name.log" 2>&1 || {
        tail -5 "$OUT/$name.log"
        echo "$name failed; see $OUT/$name.log" | tee -a "$OUT/failed"
        exit 1
    }
    echo "$((SECONDS - began)) s" >"$OUT/$name.ok"
}

# await NAME: until that stage has ended well; gives up when any has failed.
await() {
    until [ -e "$OUT/$1.ok" ]; do
        [ ! -e "$OUT/failed" ] || exit 1
        sleep 0.5
    done
}

# finish: wait for what runs in the background, and fail if anything has.
finish() {
    wait
    [ ! -e "$OUT/failed" ] || exit 1
}
