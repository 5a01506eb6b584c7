// kernels/cuda/sm90/fp16x2.cuh on the CPU.
#pragma once
#include "common/common.cuh"

static uint32_t pack_half2(float low, float high) {
    const _Float16 both[2] = {(_Float16)low, (_Float16)high};
    uint32_t word;
    memcpy(&word, both, 4);
    return word;
}
static void unpack_half2(uint32_t word, float &low, float &high) {
    _Float16 both[2];
    memcpy(both, &word, 4);
    low = both[0], high = both[1];
}
