#!/usr/bin/env bash
# Compares training steps and operations with other systems, and writes one JSON file for each comparison:
# benchmarks/peers.sh FOLDER [cpu|gpu] [PEER,...]
set -euo pipefail

folder=${1:?expected a folder for the JSON files} device=${2:-cpu} peers=${3:-torch,jax,numpy}
sgd='optimizer={sgd: {lr: 0.1, momentum: 0.9}}'
adam='optimizer={adam: {lr: 0.001}}'
hidden='{linear: 4096}, relu'
encoder='{transformer_encoder_layer: {nhead: 4, dim_feedforward: 512, dropout: 0.0, activation: gelu, norm_first: true}}'
wide_vit="patches: 7}, {linear: {out_features: 128, weight_init: xavier_uniform}}, positional_embedding"
wide_vit="[{$wide_vit, $encoder, $encoder, $encoder, $encoder, layer_norm, mean, {linear: 10}]"
wide=(mlp --set "model.layers=[$hidden, $hidden, $hidden, {linear: 10}]" --set data.batch_size=7500
    --set 'optimizer={sgd: {lr: 0.01, momentum: 0.9}}')
mkdir -p "$folder"

against() {
    printf '\n== %s: %s\n' "$1" "${*:2}"
    adtrain bench against "$peers" "${@:2}" --device "$device" --json-file "$folder/$1.json"
}

against mlp-128-sgd mlp --set "$sgd"
against mlp-128-adam mlp
against mlp-small-64-sgd mlp-small
against mlp-small-64-adam mlp-small --set "$adam"
against lenet5-128-adam lenet5 --set "$adam"
against cnn-128-adam cnn --set "$adam"
against resnet-128-adam resnet
against vit-128-adamw vit
against lstm-128-adam lstm
for layer in gru rnn; do against "$layer-128-adam" lstm --set "model.layers=[{$layer: 128}, {linear: 10}]"; done
if [ "$device" = gpu ]; then
    against mlp-1024-adam mlp --set data.batch_size=1024
    against cnn-1024-adam cnn --set "$adam" --set data.batch_size=1024
    against cnn-1024-adam-tf32 cnn --set "$adam" --set data.batch_size=1024 --set training.precision=tf32
    against cnn-1024-adam-bfloat16 cnn --set "$adam" --set data.batch_size=1024 --set training.precision=bfloat16
    against vit-wide-512-adamw vit --set "model.layers=$wide_vit" --set data.batch_size=512
    against lstm-256-64-adam lstm --set 'model.layers=[{lstm: 256}, {linear: 10}]' --set data.batch_size=64
    against lstm-512-1024-adam lstm --set 'model.layers=[{lstm: 512}, {linear: 10}]' --set data.batch_size=1024
    against wide-mlp-7500-sgd "${wide[@]}"
    against wide-mlp-7500-sgd-tf32 "${wide[@]}" --set training.precision=tf32
    against wide-mlp-7500-sgd-bfloat16 "${wide[@]}" --set training.precision=bfloat16
fi
against operations
