// A linear layer of a network whose inputs are bytes. Its weights and what the optimizer keeps for them stay in the shared memory of
// a cluster while the network takes several steps (Hopper and later). Each block has UNITS rows of the weight matrix.
//
// In one pass over the inputs a warp computes the gradient of 16 inputs for 16 units, updates their weights in registers, and
// multiplies the new weights by the next batch. Products are mma.sync in float16. A byte is exact in float16, and a scaled float32
// is the sum of two float16 terms up to 2^-22 (fp16x2), so a product of both takes two mma. Input i is scale * byte + shift.
//
// A lane holds inputs 4c ... 4c + 3 of units g and g + 8: see gemm/byte_batch.cuh. So the result of the gradient product is an operand
// of the next product, without an exchange between lanes (Dao, FlashAttention-2, 2023).
#pragma once
#include "gemm/byte_batch.cuh"
#include "sm90/cluster.cuh"

constexpr float WEIGHT_SCALE = 128; // of weights as float16: those up to 511 fit, and errors are at most 2^-32 or 2^-22 of a weight
constexpr int GRADIENT_EXPONENT = 14; // of a unit's largest gradient as float16

// Copies elements by all threads of a block.
template <typename E> __device__ __forceinline__ void copy(E *to, const E *from, int count) {
    for (int i = threadIdx.x; i < count; i += THREADS) to[i] = from[i];
}

// STATES: arrays of the weights' shape, the weights first. SLOTS: partial sums of all outputs that warps exchange at a time.
//
// Each warp computes a tile of 16 units. The warps of a tile form groups, which divide the inputs.
template <int INPUTS, int UNITS, int BATCH, int STATES, int SLOTS> struct ResidentLayer {
    typedef ByteBatch<INPUTS, BATCH> Bytes;
    typedef typename Bytes::Words Words;
    typedef Vector<float, 4> Four;
    static constexpr int PACKED = Bytes::PACKED, CHUNKS = Bytes::CHUNKS, COLUMNS = Bytes::COLUMNS, STEPS = BATCH / 16;
    static constexpr int TILES = UNITS / 16, GROUPS = THREADS / WARP / TILES;
    static_assert(INPUTS % CHUNK == 0 && UNITS % 16 == 0 && BATCH % 16 == 0 && GROUPS * TILES * WARP == THREADS, "whole tiles");

    // Bytes of shared memory: what is held between steps; sums of weights and gradients, and the rows of a batch; what other code
    // may use between the passes.
    static constexpr int HELD = STATES * INPUTS * UNITS * 4, SMALL = (GROUPS + 2 * STEPS) * UNITS * 4 + BATCH * 4;
    static constexpr int FRAGMENTS = SPLIT_TERMS * TILES * STEPS * WARP * 16, EXCHANGE = FRAGMENTS + SLOTS * UNITS * BATCH * 4;

    char *const held; // weights and optimizer state
    float *const weight_sums, *const gradient_sums, *const gradient_maxima; // of a group or K step: [unit]
    uint32_t *const rows; // where the examples of the next batch begin in the table
    char *const fragments; // the outputs' gradient as an operand
    float *const sums; // SLOTS partial sums of the outputs
    const float scale, shift;
    const int tile, group, lane, g, c, begin, end; // the chunks of this warp

    // exchange: `size` bytes, at least EXCHANGE, before the others.
    __device__ ResidentLayer(unsigned char *exchange, int size, float scale, float shift)
        : held((char *)exchange + size), weight_sums((float *)(held + HELD)), gradient_sums(weight_sums + GROUPS * UNITS),
          gradient_maxima(gradient_sums + STEPS * UNITS), rows((uint32_t *)(gradient_maxima + STEPS * UNITS)),
          fragments((char *)exchange), sums((float *)(fragments + FRAGMENTS)), scale(scale), shift(shift),
          tile(threadIdx.x / WARP % TILES), group(threadIdx.x / WARP / TILES), lane(threadIdx.x % WARP), g(lane / 4), c(lane % 4),
          begin(group * CHUNKS / GROUPS), end((group + 1) * CHUNKS / GROUPS) {}

    // Four neighbouring inputs of this lane, of row g or g + 8 of the tile.
    __device__ __forceinline__ Four *four(int state, int chunk, int half) const {
        return (Four *)held + (((state * CHUNKS + chunk) * TILES + tile) * 2 + half) * WARP + lane;
    }
    // The index of these four in the block's rows of the weight matrix.
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

    // The example of this thread's row of a batch, for the first BATCH threads. order: the examples of all batches.
    template <typename I> __device__ __forceinline__ int64_t example(const I *order, int64_t batch, int batches, int *bad) const {
        const bool there = batch >= 0 && batch < batches;
        if (!there) *bad = 1;
        return threadIdx.x < BATCH && there ? (int64_t)order[batch * BATCH + threadIdx.x] : 0;
    }
    // Keeps where this thread's example begins. A barrier of the block follows.
    __device__ __forceinline__ void keep(int64_t example, int count, int *bad) const {
        const bool there = example >= 0 && example < count;
        if (!there) *bad = 1;
        if (threadIdx.x < BATCH) rows[threadIdx.x] = there ? (uint32_t)example * INPUTS : 0;
    }

    // Packs the kept batch. The warps of the cluster divide the chunks. A barrier of the cluster follows.
    __device__ __forceinline__ void pack(const uint8_t *table, char *direct, char *transposed) const {
        constexpr int WARPS = THREADS / WARP;
        #pragma unroll 1
        for (int chunk = threadIdx.x / WARP * CLUSTER + cluster_rank(); chunk < CHUNKS; chunk += WARPS * CLUSTER)
            Bytes::pack(table, rows, chunk, lane, direct, transposed);
    }

    // Sums of the tile's outputs over the chunks of this warp, and of the weights of rows g and g + 8.
    struct Outputs {
        float values[COLUMNS][4] = {}, weights[2] = {};
    };

    // outputs += WEIGHT_SCALE * weights * bytes. weights: this lane's of the chunk.
    __device__ __forceinline__ void multiply(Outputs &outputs, const Four (&weights)[2], const Words &words) const {
        uint32_t terms[4][SPLIT_TERMS];
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            const Four &w = weights[half];
            outputs.weights[half] += w.lane[0] + w.lane[1] + (w.lane[2] + w.lane[3]);
            split_pair(w.lane[0] * WEIGHT_SCALE, w.lane[1] * WEIGHT_SCALE, terms[half]);
            split_pair(w.lane[2] * WEIGHT_SCALE, w.lane[3] * WEIGHT_SCALE, terms[half + 2]);
        }
        constexpr int AT_ONCE = COLUMNS % 4 == 0 ? 4 : 2; // independent products between two of one sum
        #pragma unroll
        for (int first = 0; first < COLUMNS; first += AT_ONCE)
            #pragma unroll
            for (int term = SPLIT_TERMS - 1; term >= 0; term--) {
                const uint32_t a[4] = {terms[0][term], terms[1][term], terms[2][term], terms[3][term]};
                #pragma unroll
                for (int j = first; j < first + AT_ONCE; j++)
                    multiply_add<FLOAT16>(outputs.values[j], a, words.at[2 * j], words.at[2 * j + 1]);
            }
    }

    // Adds the outputs of all groups, in a fixed order. In the end sums[row * UNITS + unit], row of the batch, are their sums of
    // WEIGHT_SCALE * weight * byte. Begins and ends with a barrier of the block.
    __device__ __forceinline__ void add_groups(Outputs &outputs) const {
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = outputs.weights[half];
            sum += __shfl_xor_sync(FULL_MASK, sum, 1);
            sum += __shfl_xor_sync(FULL_MASK, sum, 2);
            if (c == 0) weight_sums[group * UNITS + tile * 16 + half * 8 + g] = sum;
        }
        #pragma unroll 1
        for (int left = GROUPS; left > 1;) {
            const int moved = min(SLOTS, left / 2), receiver = group - left + moved;
            __syncthreads();
            if (receiver >= 0 && group < left)
                #pragma unroll
                for (int j = 0; j < COLUMNS; j++) {
                    Four four;
                    #pragma unroll
                    for (int i = 0; i < 4; i++) four.lane[i] = outputs.values[j][i];
                    *slot(receiver, j) = four;
                }
            __syncthreads();
            if (group < moved)
                #pragma unroll
                for (int j = 0; j < COLUMNS; j++) {
                    const Four four = *slot(group, j);
                    #pragma unroll
                    for (int i = 0; i < 4; i++) outputs.values[j][i] += four.lane[i];
                }
            left -= moved;
        }
        __syncthreads();
        if (group == 0)
            #pragma unroll
            for (int j = 0; j < COLUMNS; j++)
                #pragma unroll
                for (int i = 0; i < 4; i++)
                    sums[(8 * j + 2 * c + i % 2) * UNITS + tile * 16 + i / 2 * 8 + g] = outputs.values[j][i];
        __syncthreads();
    }
    __device__ __forceinline__ Four *slot(int number, int j) const {
        return (Four *)sums + ((number * TILES + tile) * COLUMNS + j) * WARP + lane;
    }

    // Calls end for all outputs of this block: end(row of the batch, unit, outputs of four neighbouring units).
    template <typename End> __device__ __forceinline__ void finish(const uint8_t *table, const End &end) const {
        for (int i = threadIdx.x; i < BATCH * UNITS / 4; i += THREADS) {
            const int row = i / (UNITS / 4), unit = i % (UNITS / 4) * 4;
            float found[4];
            #pragma unroll
            for (int k = 0; k < 4; k++) {
                float weights = 0;
                #pragma unroll
                for (int w = 0; w < GROUPS; w++) weights += weight_sums[w * UNITS + unit + k];
                const float sum = sums[row * UNITS + unit + k] * (scale / WEIGHT_SCALE);
                found[k] = (finite(sum) ? sum : scale * exact_sum(table + rows[row], unit + k)) + shift * weights;
            }
            end(row, unit, found);
        }
    }
    // The sum of weight * byte over the inputs of a row, where a weight is too large for float16.
    __device__ __noinline__ float exact_sum(const uint8_t *bytes, int unit) const {
        float sum = 0;
        for (int i = 0; i < INPUTS; i++) {
            const int place = ((i / CHUNK * TILES + unit / 16) * 2 + unit / 8 % 2) * WARP + unit % 8 * 4 + i % CHUNK / 4;
            sum = fmaf(((const Four *)held)[place].lane[i % 4], bytes[i], sum);
        }
        return sum;
    }

    // The first product of a launch: the outputs of a packed batch.
    __device__ __forceinline__ void forward(const char *direct) const {
        Outputs outputs;
        #pragma unroll 1
        for (int chunk = begin; chunk < end; chunk++) {
            Words words;
            words.load(direct, chunk, lane);
            const Four weights[2] = {*four(0, chunk, 0), *four(0, chunk, 1)};
            multiply(outputs, weights, words);
        }
        add_groups(outputs);
    }

    // Makes the operand of the gradient product. gradient: that of the outputs, row-major with `pitch` numbers in a row of the batch,
    // from this block's first unit on. A barrier of the block follows.
    __device__ __forceinline__ void load_gradient(const float *gradient, int pitch) const {
        static_assert(STEPS <= GROUPS, "a group takes at most one K step");
        const int step = group;
        float numbers[4][2];
        if (step < STEPS) {
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
        __syncthreads();
        if (step >= STEPS) return;
        const float factors[2] = {power_of_2(GRADIENT_EXPONENT - exponent(0)), power_of_2(GRADIENT_EXPONENT - exponent(1))};
        Fragment terms[SPLIT_TERMS];
        #pragma unroll
        for (int k = 0; k < 4; k++) {
            uint32_t of[SPLIT_TERMS];
            split_pair(numbers[k][0] * factors[k % 2], numbers[k][1] * factors[k % 2], of);
            #pragma unroll
            for (int term = 0; term < SPLIT_TERMS; term++) terms[term].lane[k] = of[term];
        }
        #pragma unroll
        for (int term = 0; term < SPLIT_TERMS; term++) *fragment(term, step) = terms[term];
    }
    __device__ __forceinline__ Fragment *fragment(int term, int step) const {
        return (Fragment *)fragments + ((term * TILES + tile) * STEPS + step) * WARP + lane;
    }
    // The exponent of the largest gradient of row g or g + 8, at least so large that its scale is a finite float32.
    __device__ __forceinline__ int exponent(int half) const {
        float largest = 0;
        #pragma unroll
        for (int step = 0; step < STEPS; step++)
            largest = fmaxf(largest, gradient_maxima[step * UNITS + tile * 16 + half * 8 + g]);
        return max((int)(__float_as_uint(largest) >> 23) - 127, GRADIENT_EXPONENT - 126);
    }
    static __device__ __forceinline__ float power_of_2(int exponent) { return __uint_as_float((127 + exponent) << 23); }

    // Gradients, updates, and if NEXT the outputs of the next batch. update(gradient, numbers of each state) changes a weight.
    template <bool NEXT, class Update>
    __device__ __forceinline__ void backward(const char *transposed, const char *next_direct, const Update &update) const {
        Outputs outputs;
        float shifts[2], scales[2];
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = 0;
            #pragma unroll
            for (int step = 0; step < STEPS; step++) sum += gradient_sums[step * UNITS + tile * 16 + half * 8 + g];
            shifts[half] = shift * sum, scales[half] = scale * power_of_2(exponent(half) - GRADIENT_EXPONENT);
        }
        Words columns, words;
        columns.load(transposed, begin, lane);
        if (NEXT) words.load(next_direct, begin, lane);
        #pragma unroll 1
        for (int chunk = begin; chunk < end; chunk++) {
            const int ahead = min(chunk + 1, end - 1);
            float gradients[2][2][4] = {}; // by the larger and the smaller term; of the first and the last two of four inputs
            #pragma unroll
            for (int step = 0; step < STEPS; step++)
                #pragma unroll
                for (int term = 0; term < SPLIT_TERMS; term++) {
                    const Fragment a = *fragment(term, step);
                    #pragma unroll
                    for (int pair = 0; pair < 2; pair++)
                        multiply_add<FLOAT16>(gradients[term][pair], a.lane, columns.at[4 * step + pair], columns.at[4 * step + 2 + pair]);
                }
            columns.load(transposed, ahead, lane);
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
                    update(fmaf(gradients[0][i / 2][at] + gradients[1][i / 2][at], scales[half], shifts[half]), numbers);
                    #pragma unroll
                    for (int s = 0; s < STATES; s++) states[s].lane[i] = numbers[s];
                }
                #pragma unroll
                for (int s = 0; s < STATES; s++) *four(s, chunk, half) = states[s];
                weights[half] = states[0];
            }
            if (NEXT) {
                multiply(outputs, weights, words);
                words.load(next_direct, ahead, lane);
            }
        }
        if (NEXT) add_groups(outputs);
    }
};
