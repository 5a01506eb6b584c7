// The accumulation of scaled operands in FP16X2 or BF16X3, and the choice of results for gemm/fp32_fallback.cu, which computes
// them by sequential FMA where that may be more exact.
//
// Tensor cores truncate when they add. So they sum the products of leading terms over 64 k only; float32 additions sum the
// results. All other products have low-order accumulators.
//
// The fallback computes results that are not finite; in BF16X3 the rows and columns marked `fallback`; and in FP16X2 results
// - in which the errors of small elements may be visible (RowStats::error_floor);
// - with too few effective products, because rows are sparse or have huge elements (RowStats::participation): sequential FMA has
//   almost no rounding error there;
// - whose running sum stays small over the first CHECKED_TILES packed tiles (RowStats::cancellation_level): where neighbours
//   cancel, sequential FMA has almost no rounding error, but FP16X2 has lost the operands' last bits.
#pragma once
#include "gemm/packed_pipeline.cuh"

// Two float16 terms; products with a low term have the unit LOW_SCALE.
struct Fp16x2Terms {
    static constexpr int COUNT = 2, STAGES = TILE_STAGES, LOW_ORDER = 2;
    static constexpr MmaKind FORMAT = FP16X2;
    static constexpr float LOW_ORDER_UNIT = LOW_SCALE;
    __device__ static constexpr TermPair pair(int i) { return i == 0 ? TermPair{0, 1} : TermPair{1, 0}; }
};

// Three bfloat16 terms.
struct Bf16x3Terms {
    static constexpr int COUNT = BF16X3_TERMS, STAGES = TILE_STAGES * 2 / 3, LOW_ORDER = LOW_ORDER_PAIRS;
    static constexpr MmaKind FORMAT = BFLOAT16;
    static constexpr float LOW_ORDER_UNIT = 1;
    __device__ static constexpr TermPair pair(int i) { return low_order_pair(i); }
};

// selected: a bit for each accumulator. FP16X2: while multiplying, it is set while the running sum stays below the level.
template <class Terms> struct Accumulators {
    static constexpr bool CHECKS_CANCELLATION = Terms::FORMAT == FP16X2;
    float main[SUMS], low_order[SUMS];
    uint32_t selected[SUMS / 32];

    // level: the cancellation levels of this thread's two rows.
    __device__ __forceinline__ void multiply(TilePipeline &pipeline, PipelineState<Terms::STAGES> &state,
        const char *shared, int k_tiles, const float (&level)[2]) {
        float leading[SUMS];
        #pragma unroll
        for (int i = 0; i < SUMS; i++) main[i] = 0;
        #pragma unroll
        for (uint32_t &word : selected) word = CHECKS_CANCELLATION ? ~0u : 0;
        int last = 0;
        for (int i = 0; i < k_tiles; i++) {
            pipeline.wait_full(state);
            const Stage<Terms::COUNT> stage(shared, state.stage);
            wgmma_fence();
            #pragma unroll
            for (int k = 0; k < 4; k++)
                wgmma<Terms::FORMAT>(
                    leading, stage.a() + k * DESCRIPTOR_K_STEP, stage.b() + k * DESCRIPTOR_K_STEP, k > 0);
            wgmma_commit_group();
            wgmma_wait_group<1>();
            if (i > 0) release(pipeline, last);
            #pragma unroll
            for (int k = 0; k < 4; k++) {
                #pragma unroll
                for (int p = 0; p < Terms::LOW_ORDER; p++) {
                    const TermPair pair = Terms::pair(p);
                    wgmma<Terms::FORMAT>(low_order, stage.a(pair.a) + k * DESCRIPTOR_K_STEP,
                        stage.b(pair.b) + k * DESCRIPTOR_K_STEP, i + k + p > 0);
                }
            }
            wgmma_commit_group();
            wgmma_wait_group<1>();
            wgmma_fence_operand(leading);
            #pragma unroll
            for (int j = 0; j < SUMS; j++) main[j] += leading[j];
            if (CHECKS_CANCELLATION && i < CHECKED_TILES && __any_sync(~0u, bits() != 0)) { // usually none after a dozen tiles
                #pragma unroll
                for (int j = 0; j < SUMS; j++) {
                    if (fabsf(main[j]) >= level[j / 2 % 2]) selected[j / 32] &= ~(1u << j % 32);
                }
            }
            last = state.stage;
            state.advance();
        }
        wgmma_wait_group<0>();
        wgmma_fence_operand(low_order);
        release(pipeline, last);
    }

    // Undoes the scaling. Returns a bit for each accumulator that the fallback computes.
    __device__ __forceinline__ uint64_t finish(
        const AccumulatorTile &tile, const RowStats (&rows)[2], const RowStats *columns) {
        const bool many_products = rows[0].participation * columns[0].participation >= 1;
        #pragma unroll
        for (int i = 0; i < SUMS; i++) {
            const RowStats &row = rows[i / 2 % 2], &column = columns[accumulator_column(i)];
            const uint32_t bit = 1u << i % 32;
            const float sum = main[i] + low_order[i] * Terms::LOW_ORDER_UNIT;
            main[i] = sum * row.inverse_scale * column.inverse_scale;
            bool exact = fabsf(main[i]) < INFINITY;
            if (CHECKS_CANCELLATION) {
                if ((sum == 0) | row.skip_cancellation | column.skip_cancellation) selected[i / 32] &= ~bit;
                exact &= many_products && fabsf(sum) >= row.error_floor + column.error_floor;
            } else {
                exact &= !(row.fallback | column.fallback);
            }
            if (!exact) selected[i / 32] |= bit;
        }
        if (bits()) { // rare; some may be outside the matrix
            #pragma unroll
            for (int i = 0; i < SUMS; i++)
                if (!tile.inside(i)) selected[i / 32] &= ~(1u << i % 32);
        }
        return bits();
    }

  private:
    __device__ __forceinline__ uint64_t bits() const {
        return SUMS > 32 ? (uint64_t)selected[SUMS / 32 - 1] << 32 | selected[0] : selected[0];
    }
};
