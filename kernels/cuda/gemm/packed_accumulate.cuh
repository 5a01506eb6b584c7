// The sums of a tile of scaled numbers, in halves or in pieces, and which of them are left to gemm/fp32_fallback.cu, which
// computes them in plain float32, where that may be more exact.
//
// The largest products, of the first numbers of both, are summed by the matrix units over 64 k and from there on by
// float32 additions, as the matrix units cut bits off where they add; all others have sums of their own.
//
// Left are elements that are not finite; of pieces, those of lines that are `late`; and of halves
// - those in which may show what small elements have lost (Line::floor);
// - those of tiles that few products make, of sparse lines or with huge elements (Line::share): then a chain has little
//   to round;
// - those whose running sum has stayed small over the first WATCHED slabs (Line::level): where neighbours cancel, a chain of
//   multiply-adds has next to nothing to round, while here the last bits of the operands are missing.
#pragma once
#include "gemm/packed_pipeline.cuh"

// Two float16 numbers each; low x high counts 2^-11.
struct Halves {
    static constexpr int COUNT = 2, STAGES = TILE_STAGES, BESIDE = 2;
    static constexpr Kind FORMAT = HALVES;
    static constexpr float UNIT_BESIDE = LOW;
    __device__ static constexpr Pair beside(int i) { return i == 0 ? Pair{0, 1} : Pair{1, 0}; }
};

// Three bfloat16 numbers each.
struct Pieces {
    static constexpr int COUNT = PIECE_COUNT, STAGES = TILE_STAGES * 2 / 3, BESIDE = ::BESIDE;
    static constexpr Kind FORMAT = BFLOAT16;
    static constexpr float UNIT_BESIDE = 1;
    __device__ static constexpr Pair beside(int i) { return ::beside(i); }
};

// small: a bit for each sum of halves that has stayed below its row's level while it was watched.
template <class Form> struct Sums {
    static constexpr bool WATCHES = Form::FORMAT == HALVES;
    float main[SUMS], beside[SUMS];
    uint32_t small[SUMS / 32];

    __device__ __forceinline__ void multiply(Stages &stages, Round<Form::STAGES> &turn, const char *shared, int depth,
        const float (&level)[2]) {
        float high[SUMS];
        #pragma unroll
        for (int i = 0; i < SUMS; i++) main[i] = 0;
        #pragma unroll
        for (uint32_t &word : small) word = WATCHES ? ~0u : 0;
        int last = 0;
        for (int i = 0; i < depth; i++) {
            stages.full[turn.stage].wait(turn.parity);
            const Stage<Form::COUNT> stage(shared, turn.stage);
            Started::begin();
            #pragma unroll
            for (int k = 0; k < 4; k++)
                start<Form::FORMAT>(high, stage.a() + k * NEXT_K, stage.b() + k * NEXT_K, k > 0);
            Started::end();
            Started::finished<1>();
            if (i > 0) stages.release(last);
            #pragma unroll
            for (int k = 0; k < 4; k++) {
                #pragma unroll
                for (int p = 0; p < Form::BESIDE; p++) {
                    const Pair pair = Form::beside(p);
                    start<Form::FORMAT>(
                        beside, stage.a(pair.a) + k * NEXT_K, stage.b(pair.b) + k * NEXT_K, i + k + p > 0);
                }
            }
            Started::end();
            Started::finished<1>();
            arrived(high);
            #pragma unroll
            for (int j = 0; j < SUMS; j++) main[j] += high[j];
            if (WATCHES && i < WATCHED && __any_sync(~0u, bits() != 0)) { // of usual sums none is left after a dozen slabs
                #pragma unroll
                for (int j = 0; j < SUMS; j++) {
                    if (fabsf(main[j]) >= level[j / 2 % 2]) small[j / 32] &= ~(1u << j % 32);
                }
            }
            last = turn.stage;
            turn.next();
        }
        Started::finished<0>();
        arrived(beside);
        stages.release(last);
    }

    // Scales the sums back. A bit for each that is left.
    __device__ __forceinline__ uint64_t finish(const Place &place, const Line (&rows)[2], const Line *columns) {
        auto &again = small;
        const bool many = rows[0].share * columns[0].share >= 1;
        #pragma unroll
        for (int i = 0; i < SUMS; i++) {
            const Line &row = rows[i / 2 % 2], &column = columns[sum_column(i)];
            const uint32_t bit = 1u << i % 32;
            const float sum = main[i] + beside[i] * Form::UNIT_BESIDE;
            main[i] = sum * row.down * column.down;
            bool exact = fabsf(main[i]) < INFINITY;
            if (WATCHES) {
                if ((sum == 0) | row.seldom | column.seldom) again[i / 32] &= ~bit;
                exact &= many && fabsf(sum) >= row.floor + column.floor;
            } else {
                exact &= !(row.late | column.late);
            }
            if (!exact) again[i / 32] |= bit;
        }
        if (bits()) { // seldom; beyond the ends of the matrix, too, there may be some
            #pragma unroll
            for (int i = 0; i < SUMS; i++)
                if (!place.inside(i)) again[i / 32] &= ~(1u << i % 32);
        }
        return bits();
    }

  private:
    __device__ __forceinline__ uint64_t bits() const {
        return SUMS > 32 ? (uint64_t)small[SUMS / 32 - 1] << 32 | small[0] : small[0];
    }
};
