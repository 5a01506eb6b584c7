// The first layer of a network whose inputs are bytes. Its weights and their optimizer state stay in the shared memory of a
// cluster for several training steps (Hopper and later). Each block has UNITS rows of the weight matrix.
//
// A step takes one pass over the inputs. A warp computes the gradient of 16 inputs for 16 units, updates their weights in
// registers, and multiplies the new weights by the next batch. Products are mma.sync in float16. A scaled byte is exact in float16.
// A scaled float32 is the sum of two float16 terms with an error of at most 2^-22 (fp16x2). So the product of both takes two mma.
// The input of the layer is scale * byte + shift.
//
// Lane (g, c), g = lane / 4, c = lane % 4, has inputs 4c ... 4c + 3 of units g and g + 8: see gemm/byte_batch.cuh. So the result
// of the gradient product is an operand of the next product, and lanes exchange nothing (Dao, FlashAttention-2, 2023).
#pragma once
#include "common/epilogue.cuh"
#include "gemm/byte_batch.cuh"
#include "sm90/cluster.cuh"

// WEIGHT_SCALE * weight is split into float16 terms. Weights up to 511 fit. The error is at most 2^-32, or 2^-22 of the weight.
constexpr float WEIGHT_SCALE = 128;

// Copies `length` elements of each of `rows` rows. All threads of the block call it. pitch: elements from a row to the next.
template <typename E>
__device__ __forceinline__ void copy_rows(E *to, int to_pitch, const E *from, int from_pitch, int rows, int length) {
    for (int i = threadIdx.x; i < rows * length; i += THREADS)
        to[i / length * to_pitch + i % length] = from[i / length * from_pitch + i % length];
}

// Sends BYTES of this block to all other blocks of the cluster. to: in each block's shared memory, a place for the bytes of each
// block. barrier: has one arrival.
template <int BYTES> __device__ __forceinline__ void send_to_cluster(char *to, Mbarrier &barrier) {
    constexpr int COUNT = BYTES / 8;
    uint64_t *const own = (uint64_t *)(to + cluster_rank() * BYTES);
    if (threadIdx.x == 0) barrier.arrive_expect_tx((CLUSTER - 1) * BYTES);
    for (int i = threadIdx.x; i < COUNT * (CLUSTER - 1); i += THREADS)
        store_async(own + i % COUNT, (cluster_rank() + 1 + i / COUNT) % CLUSTER, own[i % COUNT], barrier);
}

// STATES: the number of arrays: the weights and their optimizer state.
//
// A tile is 16 units. A group of warps has a warp for each tile, and the groups divide the inputs.
template <int INPUTS, int UNITS, int BATCH, int STATES> struct ResidentLayer {
    typedef ByteBatch<INPUTS, BATCH> Bytes;
    typedef typename Bytes::Words Words;
    typedef Vector<float, 4> Four;
    static constexpr int PACKED = Bytes::PACKED, CHUNKS = Bytes::CHUNKS, COLUMNS = Bytes::COLUMNS, K_STEPS = BATCH / 16;
    static constexpr int TILES = UNITS / 16, GROUPS = THREADS / WARP / TILES;
    static_assert(INPUTS % CHUNK == 0 && UNITS % 16 == 0 && BATCH % 16 == 0 && GROUPS * TILES * WARP == THREADS, "whole tiles");

    // Bytes of shared memory. RESIDENT: weights and optimizer state. SUMS_AND_ROWS: sums of weights, sums and maxima of gradients,
    // and the rows of a batch. WORKSPACE: partial sums, or operands at its end; between the passes other code may use it.
    static constexpr int RESIDENT = STATES * INPUTS * UNITS * 4, SUMS_AND_ROWS = (GROUPS + 2 * K_STEPS) * UNITS * 4 + BATCH * 4;
    static constexpr int AT_ONCE = 2; // columns of partial sums that the warps exchange at a time
    // Numbers of a row and of a tile of partial sums. Padding avoids bank conflicts.
    static constexpr int ROW_PITCH = 16 + 4, TILE_PITCH = AT_ONCE * 8 * ROW_PITCH + 16;
    static constexpr int PARTIAL_SUMS = GROUPS * TILES * TILE_PITCH * 4, FRAGMENTS = SPLIT_TERMS * TILES * K_STEPS * WARP * 16;
    static constexpr int WORKSPACE = FRAGMENTS > PARTIAL_SUMS ? FRAGMENTS : PARTIAL_SUMS;
    // Vectors of outputs of a row of the batch, and of a thread.
    static constexpr int QUADS = UNITS / 4, OWN = (BATCH * QUADS + THREADS - 1) / THREADS;

    char *const resident; // weights and optimizer state
    float *const weight_sums, *const gradient_sums, *const gradient_maxima; // [group][unit]; [K step][unit]
    uint32_t *const rows; // where the examples of the next batch begin in the table
    char *const fragments; // the gradient of the outputs, as an operand
    float *const partial_sums; // of the outputs, in the same memory
    const float scale, shift;
    const int tile, group, lane, g, c, begin, end; // chunks of inputs from begin to end are this warp's

    // workspace: `size` bytes, of which this uses the first WORKSPACE; the other shared memory follows.
    __device__ ResidentLayer(unsigned char *workspace, int size, float scale, float shift)
        : resident((char *)workspace + size), weight_sums((float *)(resident + RESIDENT)),
          gradient_sums(weight_sums + GROUPS * UNITS), gradient_maxima(gradient_sums + K_STEPS * UNITS),
          rows((uint32_t *)(gradient_maxima + K_STEPS * UNITS)), fragments((char *)workspace + WORKSPACE - FRAGMENTS),
          partial_sums((float *)workspace), scale(scale), shift(shift),
          tile(threadIdx.x / WARP % TILES), group(threadIdx.x / WARP / TILES), lane(threadIdx.x % WARP), g(lane / 4), c(lane % 4),
          begin(group * CHUNKS / GROUPS), end((group + 1) * CHUNKS / GROUPS) {}

    // Four numbers of this lane, of a state: those of neighbouring inputs, and of unit g (half 0) or g + 8 (half 1) of the tile.
    __device__ __forceinline__ Four *four(int state, int chunk, int half) const {
        return (Four *)resident + (((state * CHUNKS + chunk) * TILES + tile) * 2 + half) * WARP + lane;
    }
    // The index of the first of them in this block's rows of the weight matrix.
    __device__ __forceinline__ int index(int chunk, int half) const {
        return (tile * 16 + half * 8 + g) * INPUTS + chunk * CHUNK + c * 4;
    }
    __device__ __forceinline__ void load(int state, const float *from) const {
        #pragma unroll 4
        for (int i = begin * 2; i < end * 2; i++) *four(state, i / 2, i % 2) = ::load<float, 4>(from + index(i / 2, i % 2));
    }
    __device__ __forceinline__ void store(int state, float *to) const {
        #pragma unroll 4
        for (int i = begin * 2; i < end * 2; i++) ::store(to, index(i / 2, i % 2), *four(state, i / 2, i % 2));
    }

    // The index of the example in row threadIdx.x of a batch. Threads without a row get 0. indices: of the examples of all batches.
    template <typename I> __device__ __forceinline__ int64_t example(const I *indices, int64_t batch, int batches, int *bad) const {
        const bool valid = batch >= 0 && batch < batches;
        if (!valid) *bad = 1;
        return threadIdx.x < BATCH && valid ? (int64_t)indices[batch * BATCH + threadIdx.x] : 0;
    }
    // Stores where the example of row threadIdx.x begins in the table of `count` examples. A barrier of the block must follow.
    __device__ __forceinline__ void set_row(const uint8_t *table, int64_t example, int count, int *bad) const {
        const bool valid = example >= 0 && example < count;
        if (!valid) *bad = 1;
        if (threadIdx.x >= BATCH) return;
        rows[threadIdx.x] = valid ? (uint32_t)example * INPUTS : 0;
    }
    // Prefetches the example of row threadIdx.x to L2. The blocks of the cluster divide the rows.
    __device__ __forceinline__ void prefetch(const uint8_t *table, int64_t example, int count) const {
        if (threadIdx.x < BATCH && threadIdx.x % CLUSTER == cluster_rank() && example >= 0 && example < count)
            prefetch_l2(table + (uint32_t)example * INPUTS, INPUTS);
    }

    // This warp's chunks of the next batch. The warps of the cluster divide the chunks.
    static constexpr int CLUSTER_WARPS = THREADS / WARP * CLUSTER, WARP_CHUNKS = (CHUNKS + CLUSTER_WARPS - 1) / CLUSTER_WARPS;
    struct Batch {
        Words chunks[WARP_CHUNKS];
    };
    __device__ __forceinline__ int batch_chunk(int i) const { return (i * THREADS + threadIdx.x) / WARP * CLUSTER + cluster_rank(); }
    // Loads them from the table.
    __device__ __forceinline__ void load_batch(const uint8_t *table, Batch &batch) const {
        #pragma unroll
        for (int i = 0; i < WARP_CHUNKS; i++)
            if (batch_chunk(i) < CHUNKS) batch.chunks[i].load_rows(table, rows, batch_chunk(i), lane);
    }
    // Stores them as operands. A barrier of the cluster must follow.
    __device__ __forceinline__ void store_batch(const Batch &batch, char *direct, char *transposed) const {
        #pragma unroll
        for (int i = 0; i < WARP_CHUNKS; i++) {
            if (batch_chunk(i) >= CHUNKS) return;
            batch.chunks[i].store(direct, batch_chunk(i), lane);
            batch.chunks[i].transposed().store(transposed, batch_chunk(i), lane);
        }
    }

    // Partial sums over the chunks of this warp: the outputs of the tile, and the weights of units g and g + 8.
    struct Outputs {
        float values[COLUMNS][4] = {}, weight_sums[2] = {};
    };

    // outputs += WEIGHT_SCALE * weights * BYTE_SCALE * bytes, for a chunk. weights and words: those of this lane.
    __device__ __forceinline__ void multiply(Outputs &outputs, const Four (&weights)[2], const Words &words) const {
        uint32_t terms[4][SPLIT_TERMS];
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            const Four &w = weights[half];
            outputs.weight_sums[half] += w.lane[0] + w.lane[1] + (w.lane[2] + w.lane[3]);
            split_terms<FLOAT16>(w.lane[0] * WEIGHT_SCALE, w.lane[1] * WEIGHT_SCALE, terms[half]);
            split_terms<FLOAT16>(w.lane[2] * WEIGHT_SCALE, w.lane[3] * WEIGHT_SCALE, terms[half + 2]);
        }
        constexpr int INDEPENDENT = COLUMNS % 4 == 0 ? 4 : 2; // independent products, between two products that add to the same sum
        #pragma unroll
        for (int first = 0; first < COLUMNS; first += INDEPENDENT)
            #pragma unroll
            for (int term = SPLIT_TERMS - 1; term >= 0; term--) {
                const uint32_t a[4] = {terms[0][term], terms[1][term], terms[2][term], terms[3][term]};
                #pragma unroll
                for (int j = first; j < first + INDEPENDENT; j++)
                    multiply_add<FLOAT16>(outputs.values[j], a, bytes_as_pair(words.at[j], 0), bytes_as_pair(words.at[j], 2));
            }
    }

    // This thread's outputs, of four neighbouring units each: WEIGHT_SCALE * BYTE_SCALE * weight * byte, added over all
    // inputs.
    struct Sums {
        Four own[OWN];
    };
    // The first unit and the row of the batch of the thread's outputs i.
    static __device__ __forceinline__ int own_unit(int i) { return (threadIdx.x + i * THREADS) % QUADS * 4; }
    static __device__ __forceinline__ int own_row(int i) { return (threadIdx.x + i * THREADS) / QUADS; }

    // Adds the outputs of all groups, in a fixed order. Ends with a barrier of the block.
    __device__ __forceinline__ void add_groups(const Outputs &outputs, Sums &sums) const {
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = outputs.weight_sums[half];
            sum += __shfl_xor_sync(FULL_MASK, sum, 1);
            sum += __shfl_xor_sync(FULL_MASK, sum, 2);
            if (c == 0) weight_sums[group * UNITS + tile * 16 + half * 8 + g] = sum;
        }
        #pragma unroll
        for (int first = 0; first < COLUMNS; first += AT_ONCE) {
            __syncthreads();
            #pragma unroll
            for (int j = 0; j < AT_ONCE; j++)
                #pragma unroll
                for (int i = 0; i < 4; i++)
                    partial_sums[(group * TILES + tile) * TILE_PITCH + (8 * j + 2 * c + i % 2) * ROW_PITCH + i / 2 * 8 + g] =
                        outputs.values[first + j][i];
            __syncthreads();
            #pragma unroll
            for (int i = 0; i < OWN; i++) {
                const int row = own_row(i) - 8 * first, unit = own_unit(i);
                if (row < 0 || row >= 8 * AT_ONCE) continue;
                Four sum = {};
                #pragma unroll
                for (int k = 0; k < GROUPS; k++) {
                    const int place = (k * TILES + unit / 16) * TILE_PITCH + row * ROW_PITCH + unit % 16;
                    add(sum, *(const Four *)(partial_sums + place));
                }
                sums.own[i] = sum;
            }
        }
        __syncthreads();
    }
    static __device__ __forceinline__ void add(Four &sum, const Four &other) {
        #pragma unroll
        for (int k = 0; k < 4; k++) sum.lane[k] += other.lane[k];
    }

    // Computes the thread's outputs from sums. Calls epilogue(row of the batch, unit, outputs of four units from `unit` on).
    template <typename Epilogue>
    __device__ __forceinline__ void finish(const uint8_t *table, const Sums &sums, const Epilogue &epilogue) const {
        #pragma unroll
        for (int i = 0; i < OWN; i++) {
            const int row = own_row(i), unit = own_unit(i);
            if (row >= BATCH) continue;
            Four weights = {};
            #pragma unroll
            for (int k = 0; k < GROUPS; k++) add(weights, *(const Four *)(weight_sums + k * UNITS + unit));
            float found[4];
            bool all = true;
            #pragma unroll
            for (int k = 0; k < 4; k++) {
                found[k] = sums.own[i].lane[k] * (scale / (WEIGHT_SCALE * BYTE_SCALE));
                all &= finite(found[k]);
            }
            if (!all) {
                #pragma unroll
                for (int k = 0; k < 4; k++)
                    if (!finite(found[k])) found[k] = scale * float32_sum(resident, table + rows[row], unit + k);
            }
            #pragma unroll
            for (int k = 0; k < 4; k++) found[k] += shift * weights.lane[k];
            epilogue(row, unit, found);
        }
    }
    // The sum of weight * byte over the inputs, in float32: for units with a weight that is too large for float16.
    // It is static, so that the members of this struct stay in registers, and the compiler sees that they point to shared memory.
    static __device__ __noinline__ float float32_sum(const char *resident, const uint8_t *bytes, int unit) {
        float sum = 0;
        for (int i = 0; i < INPUTS; i++) {
            const int place = ((i / CHUNK * TILES + unit / 16) * 2 + unit / 8 % 2) * WARP + unit % 8 * 4 + i % CHUNK / 4;
            sum = fmaf(((const Four *)resident)[place].lane[i % 4], bytes[i], sum);
        }
        return sum;
    }

    // Multiplies the weights by a packed batch: the first product of a launch.
    __device__ __forceinline__ void forward(const char *direct, Sums &sums) const {
        Outputs outputs;
        #pragma unroll 1
        for (int chunk = begin; chunk < end; chunk++) {
            Words words;
            words.load(direct, chunk, lane);
            const Four weights[2] = {*four(0, chunk, 0), *four(0, chunk, 1)};
            multiply(outputs, weights, words);
        }
        add_groups(outputs, sums);
    }

    // Loads this lane's numbers of the gradient of the outputs, and reduces those of a warp. gradient: points to this block's first
    // unit; a row of the batch has `pitch` numbers. A barrier of the block must follow.
    __device__ __forceinline__ void load_gradient(const float *gradient, int pitch, float (&numbers)[4][2]) const {
        static_assert(K_STEPS <= GROUPS, "a group loads at most one K step");
        const int step = group;
        if (step < K_STEPS) {
            float sum[2] = {}, largest[2] = {};
            #pragma unroll
            for (int k = 0; k < 4; k++) {
                const float *const from = gradient + (step * 16 + k / 2 * 8 + 2 * c) * pitch + tile * 16 + k % 2 * 8 + g;
                const float low = numbers[k][0] = from[0], high = numbers[k][1] = from[pitch];
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
                const int place = step * UNITS + tile * 16 + half * 8 + g;
                if (c == 0) gradient_sums[place] = sum[half], gradient_maxima[place] = largest[half];
            }
        }
    }
    // Splits them into float16 terms, the operand of the gradient product. A barrier of the block must follow.
    __device__ __forceinline__ void split_gradient(const float (&numbers)[4][2]) const {
        const int step = group;
        if (step >= K_STEPS) return;
        const float factors[2] = {gradient_scale(0).factor, gradient_scale(1).factor};
        Fragment terms[SPLIT_TERMS];
        #pragma unroll
        for (int k = 0; k < 4; k++) {
            uint32_t of[SPLIT_TERMS];
            split_terms<FLOAT16>(numbers[k][0] * factors[k % 2], numbers[k][1] * factors[k % 2], of);
            #pragma unroll
            for (int term = 0; term < SPLIT_TERMS; term++) terms[term].lane[k] = of[term];
        }
        #pragma unroll
        for (int term = 0; term < SPLIT_TERMS; term++) *fragment(term, step) = terms[term];
    }
    __device__ __forceinline__ Fragment *fragment(int term, int step) const {
        return (Fragment *)fragments + ((term * TILES + tile) * K_STEPS + step) * WARP + lane;
    }
    // The scale of the gradients of unit g or g + 8.
    __device__ __forceinline__ Scale gradient_scale(int half) const {
        float largest = 0;
        #pragma unroll
        for (int step = 0; step < K_STEPS; step++)
            largest = fmaxf(largest, gradient_maxima[step * UNITS + tile * 16 + half * 8 + g]);
        return Scale(largest);
    }

    // The gradient of a chunk of inputs, for this warp's tile of units.
    struct Gradients {
        float terms[SPLIT_TERMS][2][4] = {}; // [][first or last two of four inputs]

        __device__ __forceinline__ void multiply(const Fragment (&gradient)[SPLIT_TERMS][K_STEPS], const Words &batch) {
            #pragma unroll
            for (int step = 0; step < K_STEPS; step++)
                #pragma unroll
                for (int pair = 0; pair < 2; pair++) {
                    const uint32_t word = batch.at[2 * step + pair], low = bytes_as_pair(word, 0), high = bytes_as_pair(word, 2);
                    #pragma unroll
                    for (int term = 0; term < SPLIT_TERMS; term++)
                        multiply_add<FLOAT16>(terms[term][pair], gradient[term][step].lane, low, high);
                }
        }
    };

    // Computes the gradient and updates the weights. If NEXT, also multiplies the new weights by the next batch.
    // update(gradient, numbers) changes a weight and its optimizer state.
    template <bool NEXT, class Update>
    __device__ __forceinline__ void backward(
        const char *transposed, const char *next_direct, const Update &update, Sums &sums) const {
        Outputs outputs;
        float shifts[2], scales[2];
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = 0;
            #pragma unroll
            for (int step = 0; step < K_STEPS; step++) sum += gradient_sums[step * UNITS + tile * 16 + half * 8 + g];
            shifts[half] = shift * sum, scales[half] = scale / BYTE_SCALE * gradient_scale(half).inverse;
        }
        Words this_batch, next_batch;
        this_batch.load(transposed, begin, lane);
        if (NEXT) next_batch.load(next_direct, begin, lane);
        Fragment terms[SPLIT_TERMS][K_STEPS];
        #pragma unroll
        for (int term = 0; term < SPLIT_TERMS; term++)
            #pragma unroll
            for (int step = 0; step < K_STEPS; step++) terms[term][step] = *fragment(term, step);
        Gradients gradients;
        gradients.multiply(terms, this_batch);
        this_batch.load(transposed, min(begin + 1, end - 1), lane);
        #pragma unroll 2
        for (int chunk = begin; chunk < end; chunk++) {
            // The products for the next chunk overlap with the updates of this one.
            Gradients following;
            following.multiply(terms, this_batch);
            this_batch.load(transposed, min(chunk + 2, end - 1), lane);
            __syncwarp(); // so that the compiler does not move the loads down, behind the updates
            Four weights[2];
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                Four states[STATES];
                #pragma unroll
                for (int s = 0; s < STATES; s++) states[s] = *four(s, chunk, half);
                #pragma unroll
                for (int i = 0; i < 4; i++) {
                    float numbers[STATES];
                    #pragma unroll
                    for (int s = 0; s < STATES; s++) numbers[s] = states[s].lane[i];
                    const int at = 2 * half + i % 2;
                    update(fmaf(gradients.terms[0][i / 2][at] + gradients.terms[1][i / 2][at], scales[half], shifts[half]), numbers);
                    #pragma unroll
                    for (int s = 0; s < STATES; s++) states[s].lane[i] = numbers[s];
                }
                #pragma unroll
                for (int s = 0; s < STATES; s++) *four(s, chunk, half) = states[s];
                weights[half] = states[0];
            }
            if (NEXT) {
                multiply(outputs, weights, next_batch);
                next_batch.load(next_direct, min(chunk + 1, end - 1), lane);
            }
            gradients = following;
        }
        if (NEXT) add_groups(outputs, sums);
    }
};
