// Direct convolution, for a small number of channels. It is bound by memory traffic, so it has no panels in shared memory;
// sums are in registers.
//
// Macros: CONV_GROUPS, kernel KH x KW, stride SH x SW, padding PH x PW (may be negative), dilation DH x DW, IN_* and OUT_*
// for the shapes of images and outputs. FILTERS: filters of a thread. WIDE_C: its neighbouring outputs. FLIPPED, BIAS.
#pragma once
#include "common/epilogue.cuh"
#include "common/rounding.cuh"

constexpr int TAPS = KH * KW, AREA = OUT_ROWS * OUT_COLUMNS, IN_AREA = IN_ROWS * IN_COLUMNS;
constexpr int GROUP_CHANNELS = IN_CHANNELS / CONV_GROUPS, GROUP_FILTERS = OUT_CHANNELS / CONV_GROUPS;
constexpr int FILTER_BLOCKS = (GROUP_FILTERS + FILTERS - 1) / FILTERS; // threads that share a group's filters

// Whether windows reach into the padding.
constexpr bool PADDED_Y = PH > 0 || (OUT_ROWS - 1) * SH - PH + (KH - 1) * DH >= IN_ROWS;
constexpr bool PADDED_X = PW > 0 || (OUT_COLUMNS - 1) * SW - PW + (KW - 1) * DW >= IN_COLUMNS;
constexpr int SPAN = (WIDE_C - 1) * SW + (KW - 1) * DW + 1; // columns of the windows of WIDE_C neighbouring outputs

// The corner of an output's window.
struct Corner {
    int y, x;
    __device__ __forceinline__ explicit Corner(int pixel)
        : y(pixel / OUT_COLUMNS * SH - PH), x(pixel % OUT_COLUMNS * SW - PW) {}
    __device__ __forceinline__ int at() const { return y * IN_COLUMNS + x; }

    // One row of the windows of WIDE_C neighbouring outputs, rounded (MANTISSA); 0 in the padding and where not `real`.
    __device__ __forceinline__ void row(int tap_y, const T *window, bool real, T (&values)[SPAN]) const {
        const bool inside = real && (!PADDED_Y || (unsigned)(y + tap_y * DH) < IN_ROWS);
        const T *from = window + tap_y * DH * IN_COLUMNS;
        #pragma unroll
        for (int i = 0; i < SPAN; i++)
            values[i] = inside && (!PADDED_X || (unsigned)(x + i) < IN_COLUMNS) ? rounded(from[i]) : (T)0;
    }
};
