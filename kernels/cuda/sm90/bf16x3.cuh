// float32 as three bfloat16 numbers whose sum it is (Format<PIECES>), for Hopper's matrix units: words of eight
// neighbours, which of their products make up one of float32, and how stages in shared memory are gone round.
#pragma once
#include "common/rounding.cuh"
#include "sm90/wgmma.cuh"

constexpr int PIECE_COUNT = 3;
constexpr int GROUP_OF = 8, WORD = 16, UNIT_BYTES = 8 * WORD; // numbers of a word, its bytes, those of a unit's eight words

// A product of pieces of both operands. Six of them make up one of float32, but for what is below 2^-24 of it: the
// first of both, and these, the smallest first. Of rounded operands fewer pieces are USED, as the others are 0.
struct Pair { int a, b; };
constexpr int USED = MANTISSA > 15 ? 3 : MANTISSA > 7 ? 2 : 1, BESIDE = USED == 3 ? 5 : USED == 2 ? 3 : 0;
__device__ constexpr Pair beside(int i) {
    constexpr Pair pairs[] = {{0, 2}, {2, 0}, {1, 1}, {0, 1}, {1, 0}};
    return pairs[5 - BESIDE + i];
}

typedef Vector<uint32_t, 4> Word;

// Eight neighbours, rounded, in pieces.
__device__ __forceinline__ void cut(Word (&words)[PIECE_COUNT], const float (&x)[GROUP_OF]) {
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        const float four[4] = {rounded(x[4 * h]), rounded(x[4 * h + 1]), rounded(x[4 * h + 2]), rounded(x[4 * h + 3])};
        uint32_t found[PIECE_COUNT][2];
        Format<PIECES>::convert(four, found);
        #pragma unroll
        for (int p = 0; p < PIECE_COUNT; p++) {
            words[p].lane[2 * h] = found[p][0];
            words[p].lane[2 * h + 1] = found[p][1];
        }
    }
}

// Goes round `COUNT` stages.
template <int COUNT> struct Round {
    int stage = 0, parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == COUNT) stage = 0, parity ^= 1;
    }
};

// A warp has come so far.
__device__ __forceinline__ void say(Barrier &barrier) {
    __syncwarp();
    if (threadIdx.x % WARP == 0) barrier.arrive();
}
