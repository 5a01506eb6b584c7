// Direct convolution for few channels, which memory traffic bounds: no panels in shared memory; sums in registers.
//
// Compiled in: CONV_GROUPS, kernel KH x KW, stride SH x SW, padding PH x PW (may be negative), dilation DH x DW, shapes
// of images and outputs, and FILTERS, whose sums a thread has.
#pragma once
#ifndef FILTERS
#define CONV_GROUPS 1
#define KH 3
#define KW 3
#define SH 1
#define SW 1
#define PH 1
#define PW 1
#define DH 1
#define DW 1
#define IN_CHANNELS 1
#define IN_ROWS 8
#define IN_COLUMNS 8
#define OUT_CHANNELS 8
#define OUT_ROWS 8
#define OUT_COLUMNS 8
#define FILTERS 8
#define WIDE_C 1
#define FLIPPED 0
#define BIAS 1
#endif
#include "common/epilogue.cuh"
#include "common/rounding.cuh"

constexpr int TAPS = KH * KW, AREA = OUT_ROWS * OUT_COLUMNS, IN_AREA = IN_ROWS * IN_COLUMNS;
constexpr int GROUP_CHANNELS = IN_CHANNELS / CONV_GROUPS, GROUP_FILTERS = OUT_CHANNELS / CONV_GROUPS;
constexpr int FILTER_BLOCKS = (GROUP_FILTERS + FILTERS - 1) / FILTERS; // threads that divide a group's filters

// Whether windows reach into the padding.
constexpr bool PADDED_Y = PH > 0 || (OUT_ROWS - 1) * SH - PH + (KH - 1) * DH >= IN_ROWS;
constexpr bool PADDED_X = PW > 0 || (OUT_COLUMNS - 1) * SW - PW + (KW - 1) * DW >= IN_COLUMNS;
constexpr int SPAN = (WIDE_C - 1) * SW + (KW - 1) * DW + 1; // columns of the windows of WIDE_C neighbouring outputs

// The corner of an output's window.
struct Corner {
    int y, x;
    __device__ __forceinline__ explicit Corner(int place)
        : y(place / OUT_COLUMNS * SH - PH), x(place % OUT_COLUMNS * SW - PW) {}
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
