// The first layer of a network whose inputs are bytes, with weights and optimizer state in device memory (Ampere and later). Each
// block has UNITS rows of the weight matrix. It reads and writes them once: it computes the gradient, updates the weights in
// registers, and multiplies the new weights by the next batch.
//
// Products are mma.sync in float16. A byte is exactly a subnormal float16. A scaled float32 is the sum of two float16 terms with an
// error of at most 2^-22 (fp16x2). So the product of both takes two mma. The input of the layer is scale * byte + shift.
//
// Tiles of weights are those of gemm/weight_tile.cuh. A chunk is 16 inputs. Lane (g, c) has inputs 4c ... 4c + 3 of rows g, g + 8,
// ... of a batch. So the result of the gradient product is an operand of the next product, and lanes exchange nothing (Dao,
// FlashAttention-2, 2023).
#pragma once
#include "common/cp_async.cuh"
#include "gemm/byte_batch.cuh"
#include "gemm/weight_tile.cuh"

extern __shared__ __align__(16) unsigned char shared_bytes[];

// The power of two by which weights are multiplied before they are split. Weights up to 511 fit in float16. The error is at most
// 2^-32, or 2^-22 of the weight.
constexpr float WEIGHT_SCALE = 128;

// A warp multiplies a chunk, loads the next one, and prefetches so many chunks after that to L2.
constexpr int PREFETCHED_CHUNKS = 1;

// A tile of units is 16 units. A group of warps has a warp for each tile. Neighbouring groups have neighbouring chunks of inputs, so
// that a block reads and writes long pieces of rows at a time.
//
// If UPDATES, it computes the gradient for a batch and updates the weights. If MULTIPLIES, it multiplies the weights by a batch, the
// next one if both.
template <int INPUTS, int UNITS, int BATCH, int STATES, bool UPDATES, bool MULTIPLIES> struct StreamedLayer {
    typedef Vector<float, 4> Four;
    static constexpr int CHUNKS = INPUTS / CHUNK, COLUMNS = BATCH / 8, K_STEPS = BATCH / 16, WARPS = THREADS / WARP;
    static constexpr int TILES = UNITS / 16, GROUPS = WARPS / TILES, WARP_FRAGMENTS = (TILES * K_STEPS + WARPS - 1) / WARPS;
    static_assert(INPUTS % CHUNK == 0 && UNITS % 16 == 0 && BATCH % 16 == 0 && GROUPS * TILES == WARPS, "whole tiles");
    static_assert(GROUPS <= CHUNKS, "a chunk for each group");

    // Bytes of shared memory. WORKSPACE: batches, which partial sums replace. A row of a batch begins 16 bytes after a multiple of
    // 128, so that lanes read without bank conflicts.
    static constexpr int PITCH = INPUTS + (16 - INPUTS % 128 + 128) % 128, BATCH_BYTES = BATCH * PITCH;
    static constexpr int PARTIAL_SUMS = GROUPS * UNITS * BATCH * 4, FRAGMENTS = SPLIT_TERMS * TILES * K_STEPS * WARP * 16;
    static constexpr int BATCHES = (UPDATES + MULTIPLIES) * BATCH_BYTES;
    static constexpr int WORKSPACE = BATCHES > PARTIAL_SUMS ? BATCHES : PARTIAL_SUMS;
    static constexpr int SUMS = (GROUPS + 2 * K_STEPS) * UNITS * 4, ROWS = 2 * BATCH * 4;
    static constexpr int SHARED = WORKSPACE + FRAGMENTS + SUMS + ROWS;
    static constexpr int NEXT = UPDATES; // the batch that weights are multiplied by: 1 if the gradient is that of batch 0

    char *const batches; // this batch and the next one, or only one of them; afterwards partial sums of the outputs
    char *const fragments; // the gradient of the outputs, as an operand
    float *const weight_sums, *const gradient_sums, *const gradient_maxima; // [group][unit]; [K step][unit]
    uint32_t *const rows; // where the examples of each batch begin in the table
    const float scale, shift;
    const int tile, group, lane, g, c; // tile: of units, of this warp

    __device__ StreamedLayer(float scale, float shift)
        : batches((char *)shared_bytes), fragments(batches + WORKSPACE), weight_sums((float *)(fragments + FRAGMENTS)),
          gradient_sums(weight_sums + GROUPS * UNITS), gradient_maxima(gradient_sums + K_STEPS * UNITS),
          rows((uint32_t *)(gradient_maxima + K_STEPS * UNITS)), scale(scale), shift(shift),
          tile(threadIdx.x / WARP % TILES), group(threadIdx.x / WARP / TILES), lane(threadIdx.x % WARP), g(lane / 4), c(lane % 4) {}

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

    // The index of the first of four neighbouring numbers of this lane, of unit g (half 0) or g + 8 (half 1) of the tile, in this
    // block's rows of the weight matrix.
    __device__ __forceinline__ int index(int chunk, int half) const {
        return (tile * 16 + half * 8 + g) * INPUTS + chunk * CHUNK + c * 4;
    }

    // Partial sums over the chunks of this warp: the outputs of the tile, and the weights of units g and g + 8.
    struct Outputs {
        float values[COLUMNS][4] = {}, weight_sums[2] = {};
    };

    // outputs += WEIGHT_SCALE * weights * BYTE_SCALE * bytes, for a chunk.
    __device__ __forceinline__ void multiply(Outputs &outputs, const Four (&weights)[2], const uint32_t (&bytes)[COLUMNS]) const {
        uint32_t terms[4][SPLIT_TERMS];
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            const Four &w = weights[half];
            outputs.weight_sums[half] += w.lane[0] + w.lane[1] + (w.lane[2] + w.lane[3]);
            split_terms<FLOAT16>(w.lane[0] * WEIGHT_SCALE, w.lane[1] * WEIGHT_SCALE, terms[half]);
            split_terms<FLOAT16>(w.lane[2] * WEIGHT_SCALE, w.lane[3] * WEIGHT_SCALE, terms[half + 2]);
        }
        constexpr int AT_ONCE = COLUMNS % 4 == 0 ? 4 : 2; // independent products, between two products that add to the same sum
        #pragma unroll
        for (int first = 0; first < COLUMNS; first += AT_ONCE)
            #pragma unroll
            for (int term = SPLIT_TERMS - 1; term >= 0; term--) {
                const uint32_t a[4] = {terms[0][term], terms[1][term], terms[2][term], terms[3][term]};
                #pragma unroll
                for (int j = first; j < first + AT_ONCE; j++)
                    multiply_add<FLOAT16>(outputs.values[j], a, bytes_as_pair(bytes[j], 0), bytes_as_pair(bytes[j], 2));
            }
    }

    // Loads the gradient of the outputs and splits it into float16 terms, the operand of the gradient product. gradient: points to
    // this block's first unit; a row of the batch has `pitch` numbers. A barrier of the block must follow.
    __device__ __forceinline__ void load_gradient(const float *gradient, int pitch) const {
        float numbers[WARP_FRAGMENTS][4][2];
        #pragma unroll
        for (int i = 0; i < WARP_FRAGMENTS; i++) {
            const int own = threadIdx.x / WARP + i * WARPS, unit_tile = own % TILES, step = own / TILES;
            if (step >= K_STEPS) break;
            float sum[2] = {}, largest[2] = {};
            #pragma unroll
            for (int k = 0; k < 4; k++) {
                const float *const from = gradient + (step * 16 + k / 2 * 8 + 2 * c) * pitch + unit_tile * 16 + k % 2 * 8 + g;
                const float low = numbers[i][k][0] = from[0], high = numbers[i][k][1] = from[pitch];
                sum[k % 2] += low + high;
                largest[k % 2] = fmaxf(largest[k % 2], fmaxf(fabsf(low), fabsf(high)));
            }
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                #pragma unroll
                for (int mask = 1; mask <= 2; mask *= 2) {
                    sum[half] += __shfl_xor_sync(FULL_MASK, sum[half], mask);
                    largest[half] = fmaxf(largest[half], __shfl_xor_sync(FULL_MASK, largest[half], mask));
                }
                const int place = step * UNITS + unit_tile * 16 + half * 8 + g;
                if (c == 0) gradient_sums[place] = sum[half], gradient_maxima[place] = largest[half];
            }
        }
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < WARP_FRAGMENTS; i++) {
            const int own = threadIdx.x / WARP + i * WARPS, unit_tile = own % TILES, step = own / TILES;
            if (step >= K_STEPS) break;
            const float factors[2] = {gradient_scale(unit_tile, 0).factor, gradient_scale(unit_tile, 1).factor};
            Fragment terms[SPLIT_TERMS];
            #pragma unroll
            for (int k = 0; k < 4; k++) {
                uint32_t pair_terms[SPLIT_TERMS];
                split_terms<FLOAT16>(numbers[i][k][0] * factors[k % 2], numbers[i][k][1] * factors[k % 2], pair_terms);
                #pragma unroll
                for (int term = 0; term < SPLIT_TERMS; term++) terms[term].lane[k] = pair_terms[term];
            }
            #pragma unroll
            for (int term = 0; term < SPLIT_TERMS; term++) *fragment(term, unit_tile, step) = terms[term];
        }
    }
    __device__ __forceinline__ Fragment *fragment(int term, int unit_tile, int step) const {
        return (Fragment *)fragments + ((term * TILES + unit_tile) * K_STEPS + step) * WARP + lane;
    }
    // The scale of the gradients of unit g or g + 8 of a tile.
    __device__ __forceinline__ Scale gradient_scale(int unit_tile, int half) const {
        float largest = 0;
        #pragma unroll
        for (int step = 0; step < K_STEPS; step++)
            largest = fmaxf(largest, gradient_maxima[step * UNITS + unit_tile * 16 + half * 8 + g]);
        return Scale(largest);
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
        if (UPDATES)
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                float sum = 0;
                #pragma unroll
                for (int step = 0; step < K_STEPS; step++) sum += gradient_sums[step * UNITS + tile * 16 + half * 8 + g];
                shifts[half] = shift * sum, scales[half] = scale / BYTE_SCALE * gradient_scale(tile, half).inverse;
            }
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
                    #pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float numbers[STATES];
                        #pragma unroll
                        for (int s = 0; s < STATES; s++) numbers[s] = current.states[s][half].lane[i];
                        const int at = 2 * half + i % 2;
                        update(fmaf(gradients[0][i / 2][at] + gradients[1][i / 2][at], scales[half], shifts[half]), numbers);
                        #pragma unroll
                        for (int s = 0; s < STATES; s++) current.states[s][half].lane[i] = numbers[s];
                    }
                    current.store(half, to, index(chunk, half));
                }
            }
            if (MULTIPLIES) {
                uint32_t bytes[COLUMNS];
                read_bytes(bytes, NEXT, chunk);
                multiply(outputs, current.states[0], bytes);
            }
        }
    }

    // Adds the partial sums of all groups, in a fixed order. Calls epilogue(row of the batch, unit, outputs of four units from `unit`
    // on). weights: this block's rows.
    template <typename Epilogue> __device__ __forceinline__ void finish(
        const Outputs &outputs, const uint8_t *table, const float *weights, const Epilogue &epilogue) const {
        float *const sums = (float *)batches;
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = outputs.weight_sums[half];
            sum += __shfl_xor_sync(FULL_MASK, sum, 1);
            sum += __shfl_xor_sync(FULL_MASK, sum, 2);
            if (c == 0) weight_sums[group * UNITS + tile * 16 + half * 8 + g] = sum;
        }
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
