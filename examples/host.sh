# What the examples share; sourced by them. Sets `size`, and defines `train_host`.
# CKPT: the drafter to start from. NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, NPROC_PER_NODE: as torchrun's.
# The paper runs 8 processes a node: NPROC_PER_NODE=8.
set -euo pipefail
ROOT=$(cd "$(dirname "$0")/.." && pwd)

SIZE=${1:-}
case "|${SIZES:=4B|8B}|" in
*"|$SIZE|"*) ;;
*)
    echo "usage: DATA=<jsonl> bash examples/$(basename "$0") $SIZES" >&2
    exit 2
    ;;
esac
if [ -z "${DATA:-}" ]; then
    echo "DATA is not set; give the regenerated conversations: DATA=<jsonl> bash $0 $SIZE" >&2
    exit 2
fi
size=$(echo "$SIZE" | tr B b)

TARGET=Qwen/Qwen3-$SIZE
NAME=qwen3-$size
TEMPLATE=qwen
START=--draft-init-path
OPTIMISER=(--learning-rate 6e-4 --warmup-ratio 0.04 --max-grad-norm 1.0 --seed 42)

# train_host HOST SCRIPT DRAFTER MAX_LENGTH FLAGS...
train_host() {
    exec torchrun --nnodes "${NNODES:-1}" --node_rank "${NODE_RANK:-0}" --master_addr "${MASTER_ADDR:-127.0.0.1}" \
        --master_port "${MASTER_PORT:-29500}" --nproc_per_node "${NPROC_PER_NODE:-1}" "$ROOT/scripts/$2" \
        --target-model-path "$TARGET" \
        --target-model-backend hf \
        "$START" "${CKPT:-$3}" \
        --train-data-path "$DATA" \
        --on-the-fly-loader \
        --chat-template $TEMPLATE \
        --max-length "$4" \
        --output-dir "./outputs/dloop-$1-$NAME" \
        --num-epochs 1 --batch-size 1 \
        "${OPTIMISER[@]}" \
        --attention-backend flex_attention \
        "${@:5}"
}
