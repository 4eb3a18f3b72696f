#!/usr/bin/env bash
# Loop-aware training of an MTP head:  DATA=<jsonl> bash examples/run_dloop_mtp.sh qwen3.5
# CKPT: a head to start from; the target's built-in one without it. The published page gives the lengths and one epoch:
# rate, warm-up, clipping and length are those of EAGLE-3's own training.
SIZES='qwen3.5'
. "$(dirname "$0")/host.sh"
TARGET=Qwen/Qwen3.5-9B
NAME=qwen3.5-9b
START=--ckpt-dir
OPTIMISER=(--learning-rate 1e-4 --warmup-ratio 0.015 --max-grad-norm 0.5 --seed 42)
TEMPLATE=model
train_host mtp train_eagle3.py mtp 4096 --mtp qwen3.5 --ttt-length-dist 3,6,9
