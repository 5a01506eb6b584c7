// Shared by the kernels for channels-last (NHWC) convolutions, which are products (implicit GEMM). Read gemm/bfloat16_product.cuh
// first. y = x * w; x: N x H x W x C, y and its gradient g: N x OH x OW x O, w: O x KH x KW x C.
//
//   DIRECTION      rows of the result   columns    K                  operands
//   FORWARD        pixels of y          O          taps x C           x im2col; w
//   INPUT_GRAD     pixels of x          C          taps x O           g im2col; w, not K-major
//   WEIGHT_GRAD    O                    taps x C   pixels of g        g and x im2col, not K-major
//
// An input gradient of stride SH x SW is SH x SW convolutions, one for each phase: the pixels whose row and column have the same
// remainders by the stride. A phase is an item of the batch. It has some of the taps, its sub-filter, so that no zeros are
// multiplied.
//
// Macros (Bfloat16Conv in conv/bfloat16.py): DIRECTION; kernel KH x KW, stride SH x SW, padding PH x PW, dilation DH x DW;
// PHASES_H x PHASES_W: the stride, or the image where it is smaller; 1 x 1 if DIRECTION is not INPUT_GRAD.
#pragma once
#include "gemm/bfloat16_product.cuh"

enum { FORWARD, INPUT_GRAD, WEIGHT_GRAD };
constexpr int PHASES = PHASES_H * PHASES_W, TAPS = KH * KW;

// Along one axis, the `count` taps of a phase: first, first + STEP, ... The position of g for the i-th of them is that for the last
// one, plus (count - 1 - i) * SHIFT.
struct Taps {
    int first, count;
};
__device__ constexpr int gcd(int a, int b) { return b == 0 ? a : gcd(b, a % b); }
template <int K, int S, int P, int D> struct SubFilter {
    static constexpr int STEP = S / gcd(S, D), SHIFT = D * STEP / S;
    __device__ __forceinline__ static Taps of(int phase) {
        int first = 0;
        while (first < STEP && (phase + P - first * D) % S) first++;
        return {first, first < STEP && first < K ? (K - first + STEP - 1) / STEP : 0};
    }
    // The position of g for the last tap and the first pixel of the phase.
    __device__ __forceinline__ static int last(int phase, const Taps &taps) {
        return (phase + P - (taps.first + (taps.count - 1) * STEP) * D) / S;
    }
};
typedef SubFilter<KH, SH, PH, DH> Down;
typedef SubFilter<KW, SW, PW, DW> Right;

// The lengths of x and y.
struct Lengths {
    int n, h, w, c, oh, ow, o;

    // Rows of the result; for INPUT_GRAD they are the pixels of a phase.
    __device__ __forceinline__ int rows(int phase) const {
        if (DIRECTION == FORWARD) return n * oh * ow;
        return DIRECTION == INPUT_GRAD ? n * height(phase) * width(phase) : o;
    }
    // Rows and columns of x in a phase.
    __device__ __forceinline__ int height(int phase) const { return (h - phase / PHASES_W + SH - 1) / SH; }
    __device__ __forceinline__ int width(int phase) const { return (w - phase % PHASES_W + SW - 1) / SW; }
    // Where a row of the result is in memory. The pixels of a phase are not neighbours.
    __device__ __forceinline__ int memory_row(int row, int phase) const {
        if (DIRECTION != INPUT_GRAD || SH * SW == 1) return row;
        const int width = this->width(phase), area = height(phase) * width, pixel = row % area;
        const int y = pixel / width * SH + phase / PHASES_W, x = pixel % width * SW + phase % PHASES_W;
        return (row / area * h + y) * w + x;
    }
};
