// The gradient of a recurrent network, all steps in one launch: see rnn/grid.cuh. The cotangents of the sums of a step times
// weight_hh are those of the hidden states before. SPLITS blocks divide K of a tile of this product: each adds the partial sums of
// its own columns, and computes the formulas for these hidden units.
#include "rnn/grid.cuh"

constexpr int TILES = HIDDEN / TILE_N, PARTS = TILES * SPLITS;
constexpr int OWN = SUMS / SPLITS; // accumulators of a thread that its block adds up: two rows of eight units
typedef Layout<TILES, SUMS_OF_STEP> Packed;
static_assert(HIDDEN % TILE_N == 0 && HIDDEN % TILE_K == 0 && OWN == 16, "whole tiles, and a chunk of each row in a thread");

KERNEL __launch_bounds__(THREADS, 1) grid_recurrent_grad(
    const T *ct_h, const T *weight,
#if LSTM
    const T *ct_c,
#endif
    const T *h0,
#if LSTM
    const T *c0,
#endif
    const T *y,
#if LSTM
    const T *c,
#endif
#if GATED
    const T *saved,
#endif
#if ALL
    const T *ct_y, // of all hidden states
#endif
    T *dx,
#if GRU
    T *ds,
#endif
    T *before, T *dx_total,
#if GRU
    T *ds_total,
#endif
    T *dh,
#if LSTM
    T *dc,
#endif
    int64_t rows, int64_t length, int64_t reverse, char *scratch
) {
    wait_for_inputs();
    const Packed layout(rows, scratch);
    const Stages stages;
    init_pipeline(stages);
    const int part = blockIdx.x % PARTS;
    int tile = part / SPLITS, split = part % SPLITS;
    const int first_k = Packed::K_TILES * split / SPLITS, k_tiles = Packed::K_TILES * (split + 1) / SPLITS - first_k;
    PipelineState<STAGES> state;
    if (threadIdx.x < WARPGROUP) {
        warpgroup_reg_dealloc<24>();
        if (threadIdx.x > 0) return;
        for (int group = blockIdx.x / PARTS; group < layout.groups; group += gridDim.x / PARTS)
            for (int done = 0; done < length; done++)
                produce(
                    stages, state, k_tiles, [&](int i) { return layout.exchanged(group, done % 2, first_k + i); },
                    [&](int i) { return layout.weight(tile, first_k + i); },
                    [&] {
                        wait_for_count(layout.counters(group), (done + 1) * PARTS);
                        fence_proxy_async_global();
                    });
        return;
    }
    warpgroup_reg_alloc<240>();
    const int thread = threadIdx.x - WARPGROUP;
#if LSTM
    const T *const states = c;
#else
    const T *const states = y;
#endif
    for (int group = blockIdx.x / PARTS; group < layout.groups; group += gridDim.x / PARTS) {
        int *const counters = layout.counters(group);
        int row = thread / WARPGROUP * 64 + accumulator_row(0);
        int first_unit = tile * TILE_N + split * (TILE_N / SPLITS) + accumulator_column(0);
        const auto row_at = [&](int half) { return (int64_t)(group * TILE_ROWS + row + 8 * half); };
        const auto exists = [&](int half) { return row_at(half) < rows; };
        // The index of step k of a row among all rows and steps.
        const auto at = [&](int half, int k) { return row_at(half) * length + (reverse ? (int)length - 1 - k : k); };
        const auto unit_of = [&](int sub) { return first_unit + 8 * sub; }; // and the next one
        // What step k reads, of one of this thread's rows.
        const auto read = [&](int k, int half, Given (&given)[CHUNK_ELEMENTS]) {
            const int64_t step = at(half, k), last = k ? at(half, k - 1) : row_at(half);
            const auto pair = [&](const T *from) { return exists(half) ? load<T, 2>(from) : Vector<T, 2>{}; };
            #pragma unroll
            for (int j = 0; j < CHUNK_ELEMENTS; j += 2) {
                const int unit = unit_of(j / 2);
                Vector<T, 2> ct = {}, kept[4] = {}, cell = {};
#if ALL
                ct = pair(ct_y + step * HIDDEN + unit);
#endif
#if GATED
                #pragma unroll
                for (int g = 0; g < 4; g++) kept[g] = pair(saved + step * (4 * HIDDEN) + g * HIDDEN + unit);
#endif
#if LSTM
                cell = pair((k ? c : c0) + last * HIDDEN + unit);
#endif
                const Vector<T, 2> state = pair(states + step * HIDDEN + unit), h = pair((k ? y : h0) + last * HIDDEN + unit);
                #pragma unroll
                for (int e = 0; e < 2; e++)
                    given[j + e] = {ct.lane[e], {kept[0].lane[e], kept[1].lane[e], kept[2].lane[e], kept[3].lane[e]},
                        state.lane[e], cell.lane[e], h.lane[e]};
            }
        };
        // Item i of a thread is unit i % 8 of row i / 8.
        float h[OWN]; // cotangents of the hidden states
        #pragma unroll
        for (int i = 0; i < OWN; i += 2) {
            const int64_t from = row_at(i / 8) * HIDDEN + unit_of(i % 8 / 2);
            const Vector<T, 2> v = exists(i / 8) ? load<T, 2>(ct_h + from) : Vector<T, 2>{};
            h[i] = v.lane[0], h[i + 1] = v.lane[1];
#if LSTM
            const Vector<T, 2> w = exists(i / 8) ? load<T, 2>(ct_c + from) : Vector<T, 2>{};
            stages.kept(i / 4).lane[i % 4] = w.lane[0], stages.kept(i / 4).lane[i % 4 + 1] = w.lane[1];
#endif
        }
        Given given[CHUNK_ELEMENTS];
        read(length - 1, 0, given);
        for (int done = 0; done < length; done++) {
            const int k = opaque(length) - 1 - done;
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                Given next[CHUNK_ELEMENTS];
                if (half == 0) read(k, 1, next);
                float by_sum[GATES][CHUNK_ELEMENTS];
                const int64_t step = at(half, k);
                #pragma unroll
                for (int j = 0; j < CHUNK_ELEMENTS; j += 2) {
                    const int unit = unit_of(j / 2);
                    StepGrad made[2];
                    #pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const Given &of = given[j + e];
                        const T ct = ALL ? h[half * 8 + j + e] + of.ct : h[half * 8 + j + e];
                        T &kept = stages.kept(half * 2 + j / 4).lane[j % 4 + e];
                        made[e] = step_grad_of(of, ct, LSTM ? kept : (T)0);
                        if (LSTM || GRU) kept = LSTM ? made[e].cell : made[e].h;
                        #pragma unroll
                        for (int g = 0; g < GATES; g++) by_sum[g][j + e] = made[e].by_sum[g];
                    }
                    if (!exists(half)) continue;
                    store<T, 2>(before, step * HIDDEN + unit, {given[j].hidden, given[j + 1].hidden});
                    // The cotangents of gate g of x or s, and their sums over the steps so far.
                    const auto put_gate = [&](T *all, T *total, int g, T first, T second) {
                        store<T, 2>(all, step * SUMS_OF_STEP + g * HIDDEN + unit, {first, second});
                        T *const to = total + row_at(half) * SUMS_OF_STEP + g * HIDDEN + unit;
                        if (done)
                            add_in_memory(to, first, second);
                        else
                            store<T, 2>(to, 0, {first, second});
                    };
                    #pragma unroll
                    for (int g = 0; g < GATES; g++) {
#if GRU
                        put_gate(ds, ds_total, g, made[0].by_sum[g], made[1].by_sum[g]);
                        if (g == 2) {
                            put_gate(dx, dx_total, g, made[0].by_candidate, made[1].by_candidate);
                            continue;
                        }
#endif
                        put_gate(dx, dx_total, g, made[0].by_sum[g], made[1].by_sum[g]);
                    }
                }
                #pragma unroll
                for (int g = 0; g < GATES; g++) {
                    const int chunk = (g * HIDDEN + first_unit) / CHUNK_ELEMENTS + accumulator_column(0) / 2;
                    store_chunk(layout.exchanged(group, done % 2, chunk / 8), TERM_A, row + 8 * half, chunk % 8, by_sum[g]);
                }
                #pragma unroll
                for (int j = 0; j < CHUNK_ELEMENTS && half == 0; j++) given[j] = next[j];
            }
            publish(counters);
            float sums[SUMS] = {};
            multiply(stages, state, k_tiles, sums);
            row = opaque(row), first_unit = opaque(first_unit), tile = opaque(tile), split = opaque(split);
            #pragma unroll
            for (int i = 0; i < SUMS; i += 4)
                layout.partial(group, tile, i / OWN, split)[i % OWN / 4 * CONSUMER_THREADS + thread] =
                    {sums[i], sums[i + 1], sums[i + 2], sums[i + 3]};
            publish(counters + 1 + tile);
            read(max(k - 1, 0), 0, given); // without a branch: the last numbers would stay in registers during the product
            if (threadIdx.x % WARP == 0) wait_for_count(counters + 1 + tile, (done + 1) * SPLITS);
            __syncwarp();
            float found[OWN] = {}; // in the order of accumulators
            #pragma unroll
            for (int i = 0; i < OWN; i += 4)
                #pragma unroll
                for (int from = 0; from < SPLITS; from++) { // in this order in each run
                    const float4 v =
                        load_shared_by_blocks(layout.partial(group, tile, split, from) + i / 4 * CONSUMER_THREADS + thread);
                    found[i] += v.x, found[i + 1] += v.y, found[i + 2] += v.z, found[i + 3] += v.w;
                }
            #pragma unroll
            for (int i = 0; i < OWN; i++) h[i] = found[i % 8 / 2 * 4 + i / 8 * 2 + i % 2] + (GRU ? stages.kept(i / 4).lane[i % 4] : (T)0);
        }
        #pragma unroll
        for (int i = 0; i < OWN; i += 2) {
            if (!exists(i / 8)) continue;
            const int64_t to = row_at(i / 8) * HIDDEN + unit_of(i % 8 / 2);
            store<T, 2>(dh, to, {h[i], h[i + 1]});
#if LSTM
            store<T, 2>(dc, to, {stages.kept(i / 4).lane[i % 4], stages.kept(i / 4).lane[i % 4 + 1]});
#endif
        }
    }
}
