#!/usr/bin/env bash
# Loop-aware training of Domino:  DATA=<jsonl> bash examples/run_dloop_domino.sh 4B|8B
# The published page gives DSpark's command alone: anchors, gamma and length are those of Domino's own training.
. "$(dirname "$0")/host.sh"
train_host domino train_domino.py "Huang2020/Qwen3-$SIZE-Domino-b16" 3072 \
    --num-anchors 256 --loss-decay-gamma 7.0 \
    --dloop-max-stage 3 --dloop-loss-weight 0.25
