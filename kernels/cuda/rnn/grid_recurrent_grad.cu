// The gradient of a recurrent network, all steps in one launch: see rnn/grid.cuh. The cotangents of the sums of a step times
// weight_hh are those of the hidden states before. SPLITS blocks divide K of a tile of this product: each adds the partial sums
// of its own columns, and computes the formulas for these hidden units.
//
// Without WEIGHT_GRAD the hidden states before each step are outputs, and so are the totals over the steps that the gradients of
// the biases add. With WEIGHT_GRAD rnn/grid_weight_grad.cu computes both gradients from scratch (WeightGradInputs).
//
// Macros besides those of rnn/grid.cuh: ALL (there are cotangents of all hidden states).
#include "rnn/grid.cuh"

constexpr int TILES = HIDDEN / TILE_N, PARTS = TILES * SPLITS;
constexpr int OWN = SUMS / SPLITS; // accumulators of a thread that its block adds up: two rows of eight units
typedef Layout<TILES, SUMS_OF_STEP> Packed;
static_assert(HIDDEN % TILE_N == 0 && HIDDEN % TILE_K == 0 && OWN == 16, "whole tiles, and a chunk of each row in a thread");

// Adds over the eight lanes with the same threadIdx.x % 4, which have rows of the same units. Each gets the sum of element
// lane / 4.
__device__ __forceinline__ float sum_over_rows(float (&x)[CHUNK_ELEMENTS]) {
    #pragma unroll
    for (int count = CHUNK_ELEMENTS / 2; count > 0; count /= 2) {
        const bool second = threadIdx.x / 4 & count;
        #pragma unroll
        for (int j = 0; j < count; j++) {
            const float other = shuffle_xor(second ? x[j] : x[j + count], 4 * count);
            x[j] = (second ? x[j + count] : x[j]) + other;
        }
    }
    return x[0];
}

KERNEL __launch_bounds__(THREADS, 1) grid_recurrent_grad(
    const T *ct_h, const T *weight, IF(LSTM, const T *ct_c,) const T *h0, IF(LSTM, const T *c0,) const T *y,
    IF(LSTM, const T *c,) IF(GATED, const T *saved,) IF(ALL, const T *ct_y,) T *dx, IF(GRU, T *ds,)
#if !WEIGHT_GRAD
    T *before, T *dx_total,
#endif
#if !WEIGHT_GRAD && GRU
    T *ds_total,
#endif
    T *dh, IF(LSTM, T *dc,) int64_t rows, int64_t length, int64_t reverse, char *scratch) {
    wait_for_inputs();
    const Packed layout(rows, scratch);
    const Stages stages;
    stages.pipeline().start(1, CONSUMER_WARPS);
    const int part = blockIdx.x % PARTS;
    int tile = part / SPLITS, split = part % SPLITS;
    const int first_k = Packed::K_TILES * split / SPLITS, k_tiles = Packed::K_TILES * (split + 1) / SPLITS - first_k;
    PipelineState<STAGES> state;
#if LSTM
    const T *const states = c, *const first_states = c0;
#else
    const T *const states = y, *const first_states = h0;
#endif
    if (threadIdx.x < WARPGROUP) {
        warpgroup_reg_dealloc<24>();
        if (threadIdx.x > 0) return;
        for (int group = blockIdx.x / PARTS; group < layout.groups; group += gridDim.x / PARTS)
            for (int done = 0; done < length; done++)
                produce(
                    stages, state, k_tiles, [&](int i) { return layout.exchanged(group, done % 2, first_k + i); },
                    [&](int i) { return layout.weight(tile, first_k + i); },
                    [&](int i) { layout.wait_for_exchanged(group, first_k + i, done + 1); });
        return;
    }
    warpgroup_reg_alloc<240>();
    load_column_scales(stages, layout.inverse_scales(tile));
    const int thread = threadIdx.x - WARPGROUP;
    for (int group = blockIdx.x / PARTS; group < layout.groups; group += gridDim.x / PARTS) {
        int row = thread / WARPGROUP * 64 + accumulator_row(0);
        int first_unit = part * (TILE_N / SPLITS) + threadIdx.x % 4 * VECTOR;
        const auto row_at = [&](int half) { return (int64_t)(group * TILE_ROWS + row + 8 * half); };
        const auto exists = [&](int half) { return row_at(half) < rows; };
        // The index of step k of a row among all rows and steps.
        const auto at = [&](int half, int k) { return row_at(half) * length + (reverse ? (int)length - 1 - k : k); };
        const auto unit_of = [&](int vector) { return first_unit + 16 * vector; }; // the first of four units
        // Four neighbouring numbers of a row, 0 where the row does not exist.
        const auto four = [&](const T *from, int half) {
            return exists(half) ? load<T, VECTOR>(from) : Vector<T, VECTOR>{};
        };
        // Those of an array of states before step k, of which `first` has the ones before the first step.
        const auto before_step = [&](const T *all, const T *first, int k, int half, int unit) {
            return four((k ? all + at(half, k - 1) * HIDDEN : first + row_at(half) * HIDDEN) + unit, half);
        };
        // What step k reads, of one of this thread's rows.
        const auto read = [&](int k, int half, Given (&given)[CHUNK_ELEMENTS]) {
            const int64_t step = at(half, k);
            #pragma unroll
            for (int j = 0; j < CHUNK_ELEMENTS; j += VECTOR) {
                const int unit = unit_of(j / VECTOR);
                Vector<T, VECTOR> ct = {}, kept[4] = {}, last = {};
                IF(ALL, ct = four(ct_y + step * HIDDEN + unit, half);)
#if GATED
                #pragma unroll
                for (int g = 0; g < 4; g++) kept[g] = four(saved + step * (4 * HIDDEN) + g * HIDDEN + unit, half);
                last = before_step(states, first_states, k, half, unit);
#endif
                const Vector<T, VECTOR> state = four(states + step * HIDDEN + unit, half);
                #pragma unroll
                for (int e = 0; e < VECTOR; e++)
                    given[j + e] = {ct.lane[e], {kept[0].lane[e], kept[1].lane[e], kept[2].lane[e], kept[3].lane[e]},
                        state.lane[e], last.lane[e], last.lane[e]};
            }
        };
#if WEIGHT_GRAD
        // Packs what grid_weight_grad reads of step k.
        const auto pack_weight_grad = [&](int k, const StepGrad (&made)[2][CHUNK_ELEMENTS]) {
            const WeightGradInputs inputs = layout.weight_grad(length);
            float states[2][CHUNK_ELEMENTS], of_sums = 0, of_states = 0; // of_...: the largest magnitudes
            #pragma unroll
            for (int i = 0; i < 2 * CHUNK_ELEMENTS; i += VECTOR) {
                const Vector<T, VECTOR> v = before_step(y, h0, k, i / CHUNK_ELEMENTS, unit_of(i % CHUNK_ELEMENTS / VECTOR));
                #pragma unroll
                for (int e = 0; e < VECTOR; e++) states[i / CHUNK_ELEMENTS][i % CHUNK_ELEMENTS + e] = v.lane[e];
            }
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                of_states = largest_of(states[half], of_states);
                #pragma unroll
                for (const StepGrad &one : made[half])
                    #pragma unroll
                    for (float x : one.by_sum) of_sums = Max::of(of_sums, fabsf(x));
            }
            const Vector<float, 2> largest = largest_of_warpgroup(stages, of_sums, of_states);
            const Scale scale(largest.lane[0]), scale_of_states(largest.lane[1]);
            const auto put = [&](int half, int chunk, const float (&x)[CHUNK_ELEMENTS], const Scale &scale) {
                chunk += threadIdx.x % 4;
                char *const packed = inputs.tile(group * length + k, chunk / CHUNKS);
                store_chunk(packed, TERM_A, row + 8 * half, chunk % CHUNKS, x, scale.factor);
                if (thread % WARPGROUP == 0 && half == 0)
                    inputs.inverse_scales(group * length + k, thread / WARPGROUP)[chunk / 4] = scale.inverse;
            };
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                put(half, WeightGradInputs::FIRST_STATE + part * 4, states[half], scale_of_states);
                #pragma unroll
                for (int g = 0; g < GATES; g++) {
                    float x[CHUNK_ELEMENTS];
                    #pragma unroll
                    for (int j = 0; j < CHUNK_ELEMENTS; j++) x[j] = made[half][j].by_sum[g];
                    put(half, (part * GATES + g) * 4, x, scale);
                }
            }
        };
#endif
        // Item i of a thread is unit i % 8 of row i / 8.
        float h[OWN]; // cotangents of the hidden states
        #pragma unroll
        for (int i = 0; i < OWN; i += VECTOR) {
            const int64_t from = row_at(i / 8) * HIDDEN + unit_of(i % 8 / VECTOR);
            const Vector<T, VECTOR> v = four(ct_h + from, i / 8);
            #pragma unroll
            for (int e = 0; e < VECTOR; e++) h[i + e] = v.lane[e];
            IF(LSTM, stages.kept(i / VECTOR) = four(ct_c + from, i / 8);)
        }
        Given given[CHUNK_ELEMENTS];
        read(length - 1, 0, given);
        IF(WEIGHT_GRAD, float bias_sums[GATES + GRU] = {};)
        for (int done = 0; done < length; done++) {
            const int k = opaque(length) - 1 - done;
            StepGrad made[2][CHUNK_ELEMENTS];
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                Given next[CHUNK_ELEMENTS];
                if (half == 0) read(k, 1, next);
                float largest = 0;
                #pragma unroll
                for (int j = 0; j < CHUNK_ELEMENTS; j++) {
                    const Given &of = given[j];
                    const T ct = ALL ? h[half * 8 + j] + of.ct : h[half * 8 + j];
                    T &kept = stages.kept(half * 2 + j / 4).lane[j % 4];
                    StepGrad &now = made[half][j] = step_grad_of(of, ct, LSTM ? kept : (T)0);
                    if (LSTM || GRU) kept = LSTM ? now.cell : now.h;
                    #pragma unroll
                    for (int g = 0; g < GATES; g++) largest = Max::of(largest, fabsf(now.by_sum[g]));
                }
                const Scale scale(over_lanes<Max, 4>(largest));
                #pragma unroll
                for (int g = 0; g < GATES; g++) {
                    float x[CHUNK_ELEMENTS];
                    #pragma unroll
                    for (int j = 0; j < CHUNK_ELEMENTS; j++) x[j] = made[half][j].by_sum[g];
                    const int chunk = (part * GATES + g) * 4 + threadIdx.x % 4;
                    store_exchanged(layout.exchanged(group, done % 2, chunk / CHUNKS), row + 8 * half, chunk % CHUNKS, x,
                        scale.factor, scale.inverse);
                }
                #pragma unroll
                for (int j = 0; j < CHUNK_ELEMENTS && half == 0; j++) given[j] = next[j];
            }
            publish(layout.exchanges(group, part));
            // The outputs are stored when other blocks no longer wait for this one. Stores would delay the reads behind them.
            read(max(k - 1, 0), 0, given);
            #pragma unroll
            for (int half = 0; half < 2; half++)
                #pragma unroll
                for (int j = 0; j < CHUNK_ELEMENTS && exists(half); j += VECTOR) {
                    const int unit = unit_of(j / VECTOR);
                    const int64_t step = at(half, k);
#if !WEIGHT_GRAD
                    store<T, VECTOR>(before, step * HIDDEN + unit, before_step(y, h0, k, half, unit));
#endif
                    const auto put = [&](T *all, int g, const Vector<T, VECTOR> &x) {
                        store<T, VECTOR>(all, step * SUMS_OF_STEP + g * HIDDEN + unit, x);
                    };
                    const auto add = [&](T *total, int g, const Vector<T, VECTOR> &x) { // over the steps
                        T *const to = total + row_at(half) * SUMS_OF_STEP + g * HIDDEN + unit;
                        if (done)
                            add_in_memory(to, x);
                        else
                            store<T, VECTOR>(to, 0, x);
                    };
                    const StepGrad *const of = made[half] + j;
                    #pragma unroll
                    for (int g = 0; g < GATES; g++) {
                        const Vector<T, VECTOR> by_sum = {of[0].by_sum[g], of[1].by_sum[g], of[2].by_sum[g], of[3].by_sum[g]};
                        Vector<T, VECTOR> by_x = by_sum;
#if GRU
                        if (g == 2) by_x = {of[0].by_candidate, of[1].by_candidate, of[2].by_candidate, of[3].by_candidate};
                        put(ds, g, by_sum);
#endif
                        put(dx, g, by_x);
#if !WEIGHT_GRAD
                        add(dx_total, g, by_x);
                        IF(GRU, add(ds_total, g, by_sum);)
#endif
                    }
                }
#if WEIGHT_GRAD
            #pragma unroll
            for (int g = 0; g < GATES + GRU; g++) {
                float x[CHUNK_ELEMENTS] = {};
                #pragma unroll
                for (int i = 0; i < 2 * CHUNK_ELEMENTS; i++) {
                    const StepGrad &one = made[i / CHUNK_ELEMENTS][i % CHUNK_ELEMENTS];
                    x[i % CHUNK_ELEMENTS] += g == GATES ? one.by_candidate : one.by_sum[g % GATES];
                }
                bias_sums[g] += sum_over_rows(x);
            }
            pack_weight_grad(k, made);
#endif
            float sums[SUMS] = {};
            multiply(stages, state, k_tiles, sums);
            row = opaque(row), first_unit = opaque(first_unit), tile = opaque(tile), split = opaque(split);
            #pragma unroll
            for (int i = 0; i < SUMS; i += 4) {
                const Vector<float, 2> by = load<float, 2>(stages.column_scales() + accumulator_column(i));
                float4 *const to = layout.partial(group, done % 2, tile, i / OWN, split);
                to[i % OWN / 4 * CONSUMER_THREADS + thread] = {
                    sums[i] * by.lane[0], sums[i + 1] * by.lane[1], sums[i + 2] * by.lane[0], sums[i + 3] * by.lane[1]};
            }
            publish(layout.partials(group, tile));
            if (threadIdx.x % WARP == 0) wait_for_count(layout.partials(group, tile), (done + 1) * SPLITS);
            __syncwarp();
            float found[OWN] = {}; // in the order of accumulators
            #pragma unroll
            for (int i = 0; i < OWN; i += 4)
                #pragma unroll
                for (int from = 0; from < SPLITS; from++) { // in this order in each run
                    const float4 *const sums_of = layout.partial(group, done % 2, tile, split, from);
                    const float4 v = load_shared_by_blocks(sums_of + i / 4 * CONSUMER_THREADS + thread);
                    found[i] += v.x, found[i + 1] += v.y, found[i + 2] += v.z, found[i + 3] += v.w;
                }
            #pragma unroll
            for (int i = 0; i < OWN; i++)
                h[i] = found[i % 8 / 2 * 4 + i / 8 * 2 + i % 2] + (GRU ? stages.kept(i / 4).lane[i % 4] : (T)0);
        }
#if WEIGHT_GRAD
        const int lane = threadIdx.x % WARP, unit = unit_of(lane / 16) + lane / 4 % VECTOR;
        #pragma unroll
        for (int g = 0; g < GATES + GRU; g++)
            layout.weight_grad(length).bias_sums(group, thread / WARP)[g * HIDDEN + unit] = bias_sums[g];
#endif
        #pragma unroll
        for (int i = 0; i < OWN; i += VECTOR) {
            if (!exists(i / 8)) continue;
            const int64_t to = row_at(i / 8) * HIDDEN + unit_of(i % 8 / VECTOR);
            store<T, VECTOR>(dh, to, {h[i], h[i + 1], h[i + 2], h[i + 3]});
            IF(LSTM, store<T, VECTOR>(dc, to, stages.kept(i / VECTOR));)
        }
    }
}
