// A recurrent network, all steps in one launch: see rnn/grid.cuh. A block computes TILE_N / GATES hidden units of a group's
// rows. A thread's accumulators hold all gates of its rows and units.
#include "rnn/grid.cuh"

constexpr int UNITS = TILE_N / GATES, PARTS = HIDDEN / UNITS;
typedef Layout<PARTS, HIDDEN> Packed;
static_assert(UNITS % 32 == 0 && HIDDEN % UNITS == 0 && HIDDEN % TILE_K == 0, "whole tiles");

KERNEL __launch_bounds__(THREADS, 1) grid_recurrent(
    const T *x, const T *weight, const T *bias, IF(GRU, const T *bias_x,) const T *h0, IF(LSTM, const T *c0,) T *y, T *h_last,
    IF(LSTM, T *c_last, T *c,) IF(GATED, T *saved,) int64_t rows, int64_t length, int64_t reverse, char *scratch) {
    wait_for_inputs();
    const Packed layout(rows, scratch);
    const Stages stages;
    stages.pipeline().start(1, CONSUMER_WARPS);
    const int part = blockIdx.x % PARTS;
    PipelineState<STAGES> state;
    if (threadIdx.x < WARPGROUP) {
        warpgroup_reg_dealloc<24>();
        if (threadIdx.x > 0) return;
        // A block first multiplies its own tile.
        const auto tile_of = [&](int i) { return (part * Packed::PART_K / TILE_K + i) % Packed::K_TILES; };
        for (int group = blockIdx.x / PARTS; group < layout.groups; group += gridDim.x / PARTS)
            for (int k = 0; k < length; k++)
                produce(
                    stages, state, Packed::K_TILES, [&](int i) { return layout.exchanged(group, k % 2, tile_of(i)); },
                    [&](int i) { return layout.weight(part, tile_of(i)); },
                    [&](int i) { layout.wait_for_exchanged(group, tile_of(i), k); });
        return;
    }
    warpgroup_reg_alloc<240>();
    load_column_scales(stages, layout.inverse_scales(part));
    for (int group = blockIdx.x / PARTS; group < layout.groups; group += gridDim.x / PARTS) {
        const int steps = length;
        int row = (threadIdx.x / WARPGROUP - 1) * 64 + accumulator_row(0), first_unit = part * UNITS + threadIdx.x % 4 * VECTOR;
        const auto row_at = [&](int half) { return (int64_t)(group * TILE_ROWS + row + 8 * half); };
        const auto exists = [&](int half) { return row_at(half) < rows; };
        // The index of step k of a row among all rows and steps.
        const auto at = [&](int half, int k) { return row_at(half) * steps + (reverse ? steps - 1 - k : k); };
        const auto unit_of = [&](int vector) { return first_unit + 16 * vector; }; // the first of four units
        // The accumulator of element e of a vector, and the inverse scales of the columns of elements e and e + 1.
        const auto sum_of = [&](int vector, int gate, int half, int e) {
            return ((vector * 2 + e / 2) * GATES + gate) * 4 + half * 2 + e % 2;
        };
        const auto column_scales = [&](int vector, int gate, int e) {
            return load<float, 2>(stages.column_scales() + accumulator_column(sum_of(vector, gate, 0, e)));
        };
        float inverse_scales[2]; // of hidden states
        #pragma unroll
        for (int half = 0; half < 2; half++)
            inverse_scales[half] = exists(half) ? inverse_scale(layout.exchanged(group, 0, 0), 0, row + 8 * half) : 1;
#if LSTM
        #pragma unroll
        for (int i = 0; i < 4; i++)
            stages.kept(i) =
                exists(i / 2) ? load<T, VECTOR>(c0 + row_at(i / 2) * HIDDEN + unit_of(i % 2)) : Vector<T, VECTOR>{};
#endif
        // The input products of step k, but those of a GRU's candidate.
        const auto read = [&](int k, float (&sums)[SUMS]) {
            #pragma unroll
            for (int v = 0; v < UNITS / 16; v++)
                #pragma unroll
                for (int i = 0; i < 2 * GATES; i++) {
                    const int g = i / 2, half = i % 2;
                    Vector<T, VECTOR> in = {};
                    if (exists(half) && !(GRU && g == 2))
                        in = load<T, VECTOR>(x + at(half, k) * SUMS_OF_STEP + g * HIDDEN + unit_of(v));
                    #pragma unroll
                    for (int e = 0; e < VECTOR; e++) sums[sum_of(v, g, half, e)] = in.lane[e];
                }
        };
        float sums[SUMS]; // of the gates of a step
        read(0, sums);
        for (int k = 0; k < steps; k++) {
            // The sums start from the input products and biases, times the scales of the columns. Those of a GRU's candidate start
            // from the bias alone; its input product is added later.
            #pragma unroll
            for (int v = 0; v < UNITS / 16; v++)
                #pragma unroll
                for (int g = 0; g < GATES; g++) {
                    Vector<T, VECTOR> b = load<T, VECTOR>(bias + g * HIDDEN + unit_of(v));
#if GRU
                    const Vector<T, VECTOR> bx = load<T, VECTOR>(bias_x + g * HIDDEN + unit_of(v));
                    #pragma unroll
                    for (int e = 0; e < VECTOR && g < 2; e++) b.lane[e] += bx.lane[e];
#endif
                    #pragma unroll
                    for (int i = 0; i < 2 * VECTOR; i++) {
                        const int half = i / VECTOR, e = i % VECTOR;
                        float &sum = sums[sum_of(v, g, half, e)];
                        sum = (sum + b.lane[e]) * inverse_power_of_two(column_scales(v, g, e / 2 * 2).lane[e % 2]);
                    }
                }
            multiply(stages, state, Packed::K_TILES, sums);
            row = opaque(row), first_unit = opaque(first_unit);
            Step made[UNITS / 16][CHUNK_ELEMENTS];
            #pragma unroll
            for (int i = 0; i < UNITS / 16; i++) { // of each row, a chunk of what the blocks exchange
                const int half = i % 2;
                float h[CHUNK_ELEMENTS] = {};
                #pragma unroll
                for (int j = 0; j < CHUNK_ELEMENTS && exists(half); j += VECTOR) {
                    const int v = i / 2 * 2 + j / VECTOR;
#if GRU
                    Vector<T, VECTOR> candidate = load<T, VECTOR>(x + at(half, k) * SUMS_OF_STEP + 2 * HIDDEN + unit_of(v));
                    const Vector<T, VECTOR> bx = load<T, VECTOR>(bias_x + 2 * HIDDEN + unit_of(v));
                    const Vector<T, VECTOR> before =
                        load<T, VECTOR>((k ? y + at(half, k - 1) * HIDDEN : h0 + row_at(half) * HIDDEN) + unit_of(v));
#endif
                    #pragma unroll
                    for (int e = 0; e < VECTOR; e++) {
                        T in[GATES] = {}, s[GATES];
                        #pragma unroll
                        for (int g = 0; g < GATES; g++)
                            s[g] = sums[sum_of(v, g, half, e)] * column_scales(v, g, e / 2 * 2).lane[e % 2];
                        Step &now = made[i][j + e];
#if LSTM
                        T &cell = stages.kept(half * 2 + j / VECTOR).lane[e];
                        now = step_of(in, s, 0, cell);
                        cell = now.cell;
#elif GRU
                        in[2] = candidate.lane[e] + bx.lane[e];
                        now = step_of(in, s, before.lane[e], 0);
#else
                        now = step_of(in, s, 0, 0);
#endif
                        h[j + e] = now.h;
                    }
                }
                const int chunk = (part * UNITS + i / 2 * 32) / CHUNK_ELEMENTS + threadIdx.x % 4;
                store_exchanged(layout.exchanged(group, (k + 1) % 2, chunk / CHUNKS), row + 8 * half, chunk % CHUNKS, h,
                    inverse_power_of_two(inverse_scales[half]), inverse_scales[half]);
            }
            publish(layout.exchanges(group, part));
            // The outputs are stored when other blocks no longer wait for this one. Stores would delay the reads behind them.
            read(min(k + 1, steps - 1), sums);
            #pragma unroll
            for (int i = 0; i < UNITS / 16; i++)
                #pragma unroll
                for (int j = 0; j < CHUNK_ELEMENTS && exists(i % 2); j += VECTOR) {
                    const int half = i % 2, unit = unit_of(i / 2 * 2 + j / VECTOR);
                    const int64_t step = at(half, k), last = row_at(half) * HIDDEN + unit;
                    Vector<T, VECTOR> h, cell, kept[4];
                    #pragma unroll
                    for (int e = 0; e < VECTOR; e++) {
                        const Step &one = made[i][j + e];
                        h.lane[e] = one.h, cell.lane[e] = one.cell;
                        #pragma unroll
                        for (int g = 0; g < 4; g++) kept[g].lane[e] = one.kept[g];
                    }
#if LSTM
                    store<T, VECTOR>(c, step * HIDDEN + unit, cell);
                    if (k == steps - 1) store<T, VECTOR>(c_last, last, cell);
#endif
#if GATED
                    #pragma unroll
                    for (int g = 0; g < 4; g++) store<T, VECTOR>(saved, step * (4 * HIDDEN) + g * HIDDEN + unit, kept[g]);
#endif
                    store<T, VECTOR>(y, step * HIDDEN + unit, h);
                    if (k == steps - 1) store<T, VECTOR>(h_last, last, h);
                }
        }
    }
}
