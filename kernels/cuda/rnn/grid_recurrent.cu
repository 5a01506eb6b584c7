// A recurrent network, all steps in one launch: see rnn/grid.cuh. A block computes TILE_N / GATES hidden units of a group's
// rows. A thread's accumulators hold all gates of its rows and units.
#include "rnn/grid.cuh"

constexpr int UNITS = TILE_N / GATES, PARTS = HIDDEN / UNITS;
typedef Layout<PARTS, HIDDEN> Packed;
static_assert(UNITS % 32 == 0 && HIDDEN % UNITS == 0 && HIDDEN % TILE_K == 0, "whole tiles");

KERNEL __launch_bounds__(THREADS, 1) grid_recurrent(
    const T *x, const T *weight, const T *bias,
#if GRU
    const T *bias_x,
#endif
    const T *h0,
#if LSTM
    const T *c0,
#endif
    T *y, T *h_last,
#if LSTM
    T *c_last, T *c,
#endif
#if GATED
    T *saved,
#endif
    int64_t rows, int64_t length, int64_t reverse, char *scratch
) {
    wait_for_inputs();
    const Packed layout(rows, scratch);
    const Stages stages;
    init_pipeline(stages);
    const int part = blockIdx.x % PARTS;
    PipelineState<STAGES> state;
    if (threadIdx.x < WARPGROUP) {
        warpgroup_reg_dealloc<40>();
        if (threadIdx.x > 0) return;
        for (int group = blockIdx.x / PARTS; group < layout.groups; group += gridDim.x / PARTS)
            for (int k = 0; k < length; k++)
                produce(
                    stages, state, Packed::K_TILES, [&](int i) { return layout.exchanged(group, k % 2, i); },
                    [&](int i) { return layout.weight(part, i); },
                    [&] {
                        wait_for_count(layout.counters(group), k * PARTS);
                        fence_proxy_async_global();
                    });
        return;
    }
    warpgroup_reg_alloc<232>();
    load_column_scales(stages, layout.inverse_scales(part));
    for (int group = blockIdx.x / PARTS; group < layout.groups; group += gridDim.x / PARTS) {
        const int steps = length;
        int row = (threadIdx.x / WARPGROUP - 1) * 64 + accumulator_row(0), first_unit = part * UNITS + accumulator_column(0);
        const auto row_at = [&](int half) { return (int64_t)(group * TILE_ROWS + row + 8 * half); };
        const auto exists = [&](int half) { return row_at(half) < rows; };
        // The index of step k of a row among all rows and steps.
        const auto at = [&](int half, int k) { return row_at(half) * length + (reverse ? (int)length - 1 - k : k); };
        const auto unit_of = [&](int sub) { return first_unit + 8 * sub; }; // and the next one
        // The inverse scales of the columns of accumulators i and i + 1.
        const auto column_scales = [&](int i) { return load<float, 2>(stages.column_scales() + accumulator_column(i)); };
#if LSTM
        #pragma unroll
        for (int i = 0; i < 16; i += 2) {
            const int64_t from = row_at(i / 8) * HIDDEN + unit_of(i % 8 / 2);
            const Vector<T, 2> v = exists(i / 8) ? load<T, 2>(c0 + from) : Vector<T, 2>{};
            stages.kept(i / 4).lane[i % 4] = v.lane[0], stages.kept(i / 4).lane[i % 4 + 1] = v.lane[1];
        }
#endif
        for (int k = 0; k < steps; k++) {
            // The sums start from input products and biases, a GRU's candidate from bias_hh alone, times the columns' scales.
            float sums[SUMS];
            #pragma unroll
            for (int sub = 0; sub < UNITS / 8; sub++)
                #pragma unroll
                for (int g = 0; g < GATES; g++) {
                    Vector<T, 2> b = load<T, 2>(bias + g * HIDDEN + unit_of(sub));
#if GRU
                    const Vector<T, 2> bx = load<T, 2>(bias_x + g * HIDDEN + unit_of(sub));
                    if (g < 2) b.lane[0] += bx.lane[0], b.lane[1] += bx.lane[1];
#endif
                    const int first = (sub * GATES + g) * 4;
                    const Vector<float, 2> inverse = column_scales(first);
                    #pragma unroll
                    for (int half = 0; half < 2; half++) {
                        Vector<T, 2> in = {};
                        if (exists(half) && !(GRU && g == 2))
                            in = load<T, 2>(x + at(half, k) * SUMS_OF_STEP + g * HIDDEN + unit_of(sub));
                        #pragma unroll
                        for (int e = 0; e < 2; e++)
                            sums[first + 2 * half + e] = (in.lane[e] + b.lane[e]) * inverse_power_of_two(inverse.lane[e]);
                    }
                }
            multiply(stages, state, Packed::K_TILES, sums);
            row = opaque(row), first_unit = opaque(first_unit);
            #pragma unroll
            for (int i = 0; i < SUMS; i += 4) {
                const Vector<float, 2> inverse = column_scales(i);
                #pragma unroll
                for (int e = 0; e < 4; e++) sums[i + e] *= inverse.lane[e % 2];
            }
            Step made[UNITS / 16][CHUNK_ELEMENTS];
            #pragma unroll
            for (int i = 0; i < UNITS / 16; i++) { // of each row, a chunk of what the blocks exchange
                const int half = i % 2;
                float h[CHUNK_ELEMENTS] = {};
                #pragma unroll
                for (int j = 0; j < CHUNK_ELEMENTS && exists(half); j += 2) {
                    const int sub = i / 2 * 4 + j / 2, unit = unit_of(sub);
                    const int64_t step = at(half, k);
#if GRU
                    Vector<T, 2> candidate = load<T, 2>(x + step * SUMS_OF_STEP + 2 * HIDDEN + unit);
                    const Vector<T, 2> bx = load<T, 2>(bias_x + 2 * HIDDEN + unit);
                    candidate.lane[0] += bx.lane[0], candidate.lane[1] += bx.lane[1];
                    const Vector<T, 2> before =
                        load<T, 2>((k ? y + at(half, k - 1) * HIDDEN : h0 + row_at(half) * HIDDEN) + unit);
#endif
                    #pragma unroll
                    for (int e = 0; e < 2; e++) {
                        T in[GATES] = {}, s[GATES];
                        #pragma unroll
                        for (int g = 0; g < GATES; g++) s[g] = sums[(sub * GATES + g) * 4 + 2 * half + e];
#if LSTM
                        T &cell = stages.kept(half * 2 + j / 4).lane[j % 4 + e];
                        made[i][j + e] = step_of(in, s, 0, cell);
                        cell = made[i][j + e].cell;
#elif GRU
                        in[2] = candidate.lane[e];
                        made[i][j + e] = step_of(in, s, before.lane[e], 0);
#else
                        made[i][j + e] = step_of(in, s, 0, 0);
#endif
                        h[j + e] = made[i][j + e].h;
                    }
                }
                const int chunk = (part * UNITS + i / 2 * 32) / CHUNK_ELEMENTS + accumulator_column(0) / 2;
                store_exchanged(layout.exchanged(group, (k + 1) % 2, chunk / CHUNKS), row + 8 * half, chunk % CHUNKS, h,
                    Scale(over_lanes<Max, 4>(largest_of(h))));
            }
            publish(layout.counters(group));
            // The outputs are stored when other blocks no longer wait for this one.
            #pragma unroll
            for (int i = 0; i < UNITS / 16; i++)
                #pragma unroll
                for (int j = 0; j < CHUNK_ELEMENTS && exists(i % 2); j += 2) {
                    const int half = i % 2, unit = unit_of(i / 2 * 4 + j / 2);
                    const int64_t step = at(half, k), last = row_at(half) * HIDDEN + unit;
                    const Step &first = made[i][j], &second = made[i][j + 1];
                    const auto put = [&](T *to, T x, T next) { store<T, 2>(to, 0, {x, next}); };
#if LSTM
                    put(c + step * HIDDEN + unit, first.cell, second.cell);
                    if (k == steps - 1) put(c_last + last, first.cell, second.cell);
#endif
#if GATED
                    #pragma unroll
                    for (int g = 0; g < 4; g++)
                        put(saved + step * (4 * HIDDEN) + g * HIDDEN + unit, first.kept[g], second.kept[g]);
#endif
                    put(y + step * HIDDEN + unit, first.h, second.h);
                    if (k == steps - 1) put(h_last + last, first.h, second.h);
                }
        }
    }
}
