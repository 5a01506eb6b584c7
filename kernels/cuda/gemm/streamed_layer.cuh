// The first layer of a network whose inputs are bytes, with weights and optimizer state in device memory (Ampere and later). Each
// block has UNITS rows of the weight matrix. It reads and writes them once: it computes the gradient, updates the weights in
// registers, and multiplies the new weights by the next batch.
//
// Tiles of weights are those of gemm/weight_tile.cuh. gemm/byte_layer.cuh says which numbers of a batch a lane has.
#pragma once
#include "common/common.cuh"
#include "gemm/byte_layer.cuh"
#include "gemm/weight_tile.cuh"

extern __shared__ __align__(16) unsigned char shared_bytes[];

// A warp multiplies a chunk, loads the next one, and prefetches so many chunks after that to L2.
constexpr int PREFETCHED_CHUNKS = 1;

// Neighbouring groups of warps have neighbouring chunks of inputs, so that a block reads and writes many neighbouring inputs of a
// row at a time.
//
// If UPDATES, it computes the gradient for a batch and updates the weights. If MULTIPLIES, it multiplies the weights by a batch, the
// next one if both.
template <int INPUTS, int UNITS, int BATCH, int STATES, bool UPDATES, bool MULTIPLIES>
struct StreamedLayer : ByteLayer<INPUTS, UNITS, BATCH> {
    typedef ByteLayer<INPUTS, UNITS, BATCH> Base;
    typedef typename Base::Four Four;
    typedef typename Base::Outputs Outputs;
    using Base::CHUNKS, Base::COLUMNS, Base::K_STEPS, Base::TILES, Base::GROUPS, Base::FRAGMENTS;
    using Base::weight_sums, Base::rows, Base::scale, Base::shift, Base::tile, Base::group, Base::lane, Base::g, Base::c, Base::index;
    using Base::fragment;
    static constexpr int WARPS = THREADS / WARP, WARP_FRAGMENTS = (TILES * K_STEPS + WARPS - 1) / WARPS;
    static_assert(GROUPS <= CHUNKS, "a chunk for each group");

    // Bytes of shared memory. WORKSPACE: batches, which partial sums replace. A row of a batch begins 16 bytes after a multiple of
    // 128, so that lanes read without bank conflicts.
    static constexpr int PITCH = INPUTS + (16 - INPUTS % 128 + 128) % 128, BATCH_BYTES = BATCH * PITCH;
    static constexpr int PARTIAL_SUMS = GROUPS * UNITS * BATCH * 4;
    static constexpr int BATCHES = (UPDATES + MULTIPLIES) * BATCH_BYTES;
    static constexpr int WORKSPACE = BATCHES > PARTIAL_SUMS ? BATCHES : PARTIAL_SUMS;
    static constexpr int SHARED = WORKSPACE + FRAGMENTS + Base::SUMS + 2 * BATCH * 4;
    static constexpr int NEXT = UPDATES; // the batch that weights are multiplied by: 1 if the gradient is that of batch 0

    char *const batches; // this batch and the next one, or only one of them; afterwards partial sums of the outputs

    __device__ StreamedLayer(float scale, float shift)
        : Base((char *)shared_bytes + WORKSPACE, (float *)((char *)shared_bytes + WORKSPACE + FRAGMENTS), scale, shift),
          batches((char *)shared_bytes) {}

    // Sets where the examples of a batch begin in the table of `count` examples. which: the batch in shared memory, 0 or 1. batch: its
    // number among all batches, whose examples have these indices. A barrier of the block must follow.
    template <typename I> __device__ __forceinline__ void set_rows(
        int which, const I *indices, int64_t batch, int batches, int count, int *bad) const {
        const bool valid = batch >= 0 && batch < batches;
        if (!valid) *bad = 1;
        for (int row = threadIdx.x; row < BATCH; row += THREADS) {
            const int64_t example = valid ? (int64_t)indices[batch * BATCH + row] : 0;
            const bool inside = example >= 0 && example < count;
            if (!inside) *bad = 1;
            rows[which * BATCH + row] = inside ? (uint32_t)example * INPUTS : 0;
        }
    }
    // Starts to copy a batch to shared memory.
    __device__ __forceinline__ void copy_batch(int which, const uint8_t *table) const {
        for (int i = threadIdx.x; i < BATCH * CHUNKS; i += THREADS) {
            const int row = i / CHUNKS, chunk = i % CHUNKS;
            char *const to = batches + which * BATCH_BYTES + row * PITCH + chunk * CHUNK;
            cp_async<16>((uint8_t *)to, table + (rows[which * BATCH + row] + chunk * CHUNK), true);
        }
    }
    // This lane's bytes of a chunk: four neighbouring inputs of rows g, g + 8, ...
    __device__ __forceinline__ void read_bytes(uint32_t (&bytes)[COLUMNS], int which, int chunk) const {
        #pragma unroll
        for (int j = 0; j < COLUMNS; j++)
            bytes[j] = *(const uint32_t *)(batches + which * BATCH_BYTES + (8 * j + g) * PITCH + chunk * CHUNK + c * 4);
    }

    // Loads the gradient of the outputs and splits it into float16 terms, the operand of the gradient product. gradient: points to
    // this block's first unit; a row of the batch has `pitch` numbers. A barrier of the block must follow.
    __device__ __forceinline__ void load_gradient(const float *gradient, int pitch) const {
        float numbers[WARP_FRAGMENTS][4][2];
        #pragma unroll
        for (int i = 0; i < WARP_FRAGMENTS; i++) {
            const int own = threadIdx.x / WARP + i * WARPS, unit_tile = own % TILES, step = own / TILES;
            if (step >= K_STEPS) break;
            Base::load_gradient(gradient, pitch, unit_tile, step, numbers[i]);
        }
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < WARP_FRAGMENTS; i++) {
            const int own = threadIdx.x / WARP + i * WARPS, unit_tile = own % TILES, step = own / TILES;
            if (step >= K_STEPS) break;
            Base::split_gradient(unit_tile, step, numbers[i]);
        }
    }

    // Prefetches a chunk to L2: 64 bytes of each of 16 units.
    __device__ __forceinline__ void prefetch(const float *const (&from)[STATES], int chunk) const {
        if (chunk >= CHUNKS) return;
        #pragma unroll
        for (int s = 0; s < STATES; s++)
            prefetch_l2(from[s] + (tile * 16 + lane / 2) * INPUTS + chunk * CHUNK + lane % 2 * (CHUNK / 2), 1);
    }
    // Prefetches the first chunks of this warp.
    __device__ __forceinline__ void prefetch_first(const float *const (&from)[STATES]) const {
        #pragma unroll
        for (int i = 0; i <= PREFETCHED_CHUNKS; i++) prefetch(from, group + i * GROUPS);
    }

    // Goes over the weights once. from, to: this block's rows of weights and state, before and after.
    // update(gradient, numbers) changes a weight and its optimizer state.
    template <class Update> __device__ __forceinline__ void pass(
        Outputs &outputs, const float *const (&from)[STATES], float *const (&to)[STATES], const Update &update) const {
        float shifts[2], scales[2];
        if (UPDATES) this->find_scales(shifts, scales);
        WeightTile<STATES> next;
        next.load(from, [&](int half) { return index(group, half); });
        #pragma unroll 1
        for (int chunk = group; chunk < CHUNKS; chunk += GROUPS) {
            WeightTile<STATES> current = next;
            if (chunk + GROUPS < CHUNKS) next.load(from, [&](int half) { return index(chunk + GROUPS, half); });
            prefetch(from, chunk + (PREFETCHED_CHUNKS + 1) * GROUPS);
            if (UPDATES) {
                uint32_t bytes[COLUMNS];
                read_bytes(bytes, 0, chunk);
                float gradients[2][2][4] = {}; // [term][first or last two of four inputs]
                #pragma unroll
                for (int step = 0; step < K_STEPS; step++) {
                    uint32_t words[2][2]; // [first or last 8 rows][first or last two inputs]
                    #pragma unroll
                    for (int i = 0; i < 4; i++)
                        words[i / 2][i % 2] = transposed_matrix(bytes_as_pair(bytes[2 * step + i / 2], i % 2 * 2));
                    #pragma unroll
                    for (int term = 0; term < SPLIT_TERMS; term++) {
                        const Fragment a = *fragment(term, tile, step);
                        #pragma unroll
                        for (int pair = 0; pair < 2; pair++)
                            multiply_add<FLOAT16>(gradients[term][pair], a.lane, words[0][pair], words[1][pair]);
                    }
                }
                #pragma unroll
                for (int half = 0; half < 2; half++) {
                    current.update(half, [&](int i, float (&numbers)[STATES]) {
                        const int at = 2 * half + i % 2;
                        update(fmaf(gradients[0][i / 2][at] + gradients[1][i / 2][at], scales[half], shifts[half]), numbers);
                    });
                    current.store(half, to, index(chunk, half));
                }
            }
            if (MULTIPLIES) {
                uint32_t bytes[COLUMNS];
                read_bytes(bytes, NEXT, chunk);
                this->multiply(outputs, current.states[0], bytes);
            }
        }
    }

    // Adds the partial sums of all groups, in a fixed order. Calls epilogue(row of the batch, unit, outputs of four units from `unit`
    // on). weights: this block's rows.
    template <typename Epilogue> __device__ __forceinline__ void finish(
        const Outputs &outputs, const uint8_t *table, const float *weights, const Epilogue &epilogue) const {
        float *const sums = (float *)batches;
        this->store_weight_sums(outputs);
        __syncthreads(); // all warps have read the batches
        #pragma unroll
        for (int j = 0; j < COLUMNS; j++)
            #pragma unroll
            for (int i = 0; i < 4; i++)
                sums[(group * BATCH + 8 * j + 2 * c + i % 2) * UNITS + tile * 16 + i / 2 * 8 + g] = outputs.values[j][i];
        __syncthreads();
        for (int i = threadIdx.x; i < BATCH * UNITS / 4; i += THREADS) {
            const int row = i / (UNITS / 4), unit = i % (UNITS / 4) * 4;
            float output[4] = {}, weight_sum[4] = {};
            #pragma unroll
            for (int w = 0; w < GROUPS; w++) {
                const Four sum = *(const Four *)(sums + (w * BATCH + row) * UNITS + unit);
                const Four group_weights = *(const Four *)(weight_sums + w * UNITS + unit);
                #pragma unroll
                for (int k = 0; k < 4; k++) output[k] += sum.lane[k], weight_sum[k] += group_weights.lane[k];
            }
            #pragma unroll
            for (int k = 0; k < 4; k++) {
                const float sum = output[k] * (scale / (WEIGHT_SCALE * BYTE_SCALE));
                const uint8_t *const example = table + rows[NEXT * BATCH + row];
                output[k] = (finite(sum) ? sum : scale * float64_sum(weights + (unit + k) * INPUTS, example)) + shift * weight_sum[k];
            }
            epilogue(row, unit, output);
        }
    }
    // The sum of weight * byte over the inputs, in float64: for units with a weight that is too large for float16.
    static __device__ __noinline__ float float64_sum(const float *weights, const uint8_t *bytes) {
        double sum = 0;
        for (int i = 0; i < INPUTS; i++) sum += (double)weights[i] * bytes[i];
        return (float)sum;
    }
};
