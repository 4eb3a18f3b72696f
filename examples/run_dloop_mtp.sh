#!/usr/bin/env bash
# Loop-aware training of an MTP head:  DATA=<jsonl> bash examples/run_dloop_mtp.sh qwen3.5|gemma4
# CKPT: a head to start from; the target's built-in one, or the released assistant, without it. The published page gives the lengths and one epoch:
# rate, warm-up, clipping and length are those of EAGLE-3's own training.
SIZES='qwen3.5|gemma4'
. "$(dirname "$0")/host.sh"
TARGET=Qwen/Qwen3.5-9B
NAME=qwen3.5-9b
HEAD=mtp
LENGTHS=3,6,9
if [ "$SIZE" = gemma4 ]; then
    TARGET=google/gemma-4-12B-it
    NAME=gemma-4-12b
    HEAD=google/gemma-4-12B-it-assistant
    LENGTHS=6,12,18
fi
START=--ckpt-dir
OPTIMISER=(--learning-rate 1e-4 --warmup-ratio 0.015 --max-grad-norm 0.5 --seed 42)
TEMPLATE=model
train_host mtp train_eagle3.py "$HEAD" 4096 --mtp "$SIZE" --ttt-length-dist "$LENGTHS"
