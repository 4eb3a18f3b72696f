#!/usr/bin/env bash
# Loop-aware training of EAGLE-3:  CKPT=<checkpoint> DATA=<jsonl> bash examples/run_dloop_eagle3.sh 4B|8B
# The published page gives the lengths and one epoch: rate, warm-up, clipping and length are those of EAGLE-3's own training.
. "$(dirname "$0")/host.sh"
if [ -z "${CKPT:-}" ]; then
    echo "CKPT is not set; give the EAGLE-3 checkpoint to start from, a folder or naver-ai/EAGLE3-Qwen3-$SIZE" >&2
    exit 2
fi
START=--ckpt-dir
OPTIMISER=(--learning-rate 1e-4 --warmup-ratio 0.015 --max-grad-norm 0.5 --seed 42)
train_host eagle3 train_eagle3.py "$CKPT" 4096 --ttt-length-dist 7,14,21
