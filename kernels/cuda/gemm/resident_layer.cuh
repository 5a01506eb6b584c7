// The first layer of a network whose inputs are bytes. Its weights and their optimizer state stay in the shared memory of a
// cluster for several training steps (Hopper and later). Each block has UNITS rows of the weight matrix.
//
// A step takes one pass over the inputs. A warp computes the gradient of 16 inputs for 16 units, updates their weights in
// registers, and multiplies the new weights by the next batch.
#pragma once
#include "gemm/byte_layer.cuh"
#include "gemm/small_gemm.cuh"
#include "sm90/cluster.cuh"

// A product of small matrices by some warps of a block, without barriers, for a part of a kernel.
//
// A tile of one warp, for for_each_k_step() in gemm/small_gemm.cuh.
struct WarpTile {
    typedef Mma<16, 16, BF16X3> WarpOp;
    static constexpr int BM = WarpOp::WM, BN = WarpOp::WN, SLICES = 1, PREFETCH = 2;

    static __device__ __forceinline__ int slice() { return 0; }
};

// y = op(A) op(B). The warps divide the tiles. t: the index of this thread among THREADS, rotated by whole warps. Operands as in
// small_gemm_block(); the lengths are constants.
template <int THREADS, bool TRANS_A, bool TRANS_B, int WIDTH_A, int WIDTH_B>
__device__ __forceinline__ void warp_products(int t, const T *a, const T *b, T *y, int m, int n, int k) {
    typedef WarpTile::WarpOp WarpOp;
    const Operands<TRANS_A, TRANS_B> operands = {a, b, m, n, k};
    const int across = (n + WarpTile::BN - 1) / WarpTile::BN, tiles = (m + WarpTile::BM - 1) / WarpTile::BM * across;
    #pragma unroll 1
    for (int tile = t / WARP; tile < tiles; tile += THREADS / WARP) {
        const int first_row = tile / across * WarpTile::BM, first_column = tile % across * WarpTile::BN;
        T sums[WarpOp::TM][WarpOp::TN] = {}, low[WarpOp::TM][WarpOp::TN] = {};
        for_each_k_step<WarpTile, WIDTH_A, WIDTH_B>(operands, first_row, first_column,
            [&](const T(&rows)[4][WarpOp::TM], const T(&columns)[4][WarpOp::COLUMNS]) {
                multiply_k_step<WarpOp>(sums, low, rows, columns);
            });
        #pragma unroll
        for (int i = 0; i < WarpOp::TM; i++) {
            #pragma unroll
            for (int j = 0; j < WarpOp::TN; j++) {
                const int row = first_row + WarpOp::row(i), column = first_column + WarpOp::column(j);
                if (row >= m || column >= n) continue;
                const T sum = sums[i][j] + low[i][j];
                y[row * n + column] = finite(sum) ? sum : operands.dot(row, column, 0, k);
            }
        }
    }
}

// Copies `length` elements of each of `rows` rows. All threads of the block call it. pitch: elements from a row to the next.
template <typename E>
__device__ __forceinline__ void copy_rows(E *to, int to_pitch, const E *from, int from_pitch, int rows, int length) {
    for (int i = threadIdx.x; i < rows * length; i += THREADS)
        to[i / length * to_pitch + i % length] = from[i / length * from_pitch + i % length];
}

// Sends BYTES of this block to all other blocks of the cluster. to: in each block's shared memory, a place for the bytes of each
// block. barrier: has one arrival.
template <int BYTES> __device__ __forceinline__ void send_to_cluster(char *to, Mbarrier &barrier) {
    typedef Vector<uint32_t, 4> Four;
    static_assert(BYTES % sizeof(Four) == 0, "whole vectors");
    Four *const own = (Four *)(to + cluster_rank() * BYTES);
    if (threadIdx.x == 0) barrier.arrive_expect_tx((CLUSTER - 1) * BYTES);
    #pragma unroll 1
    for (int i = threadIdx.x; i < BYTES / (int)sizeof(Four); i += THREADS) {
        const Four value = own[i];
        #pragma unroll
        for (int other = 1; other < CLUSTER; other++)
            store_async(own + i, (cluster_rank() + other) % CLUSTER, value, barrier);
    }
}

// The groups of warps divide the inputs. STATES: the number of arrays: the weights and their optimizer state.
template <int INPUTS, int UNITS, int BATCH, int STATES> struct ResidentLayer : ByteLayer<INPUTS, UNITS, BATCH> {
    typedef ByteLayer<INPUTS, UNITS, BATCH> Base;
    typedef ByteBatch<INPUTS, BATCH> Bytes;
    typedef typename Bytes::Words Words;
    typedef typename Base::Four Four;
    typedef typename Base::Outputs Outputs;
    using Base::CHUNKS, Base::COLUMNS, Base::K_STEPS, Base::TILES, Base::GROUPS, Base::FRAGMENTS;
    using Base::weight_sums, Base::gradient_sums, Base::rows, Base::scale, Base::shift, Base::tile, Base::group, Base::lane, Base::g;
    using Base::c, Base::index, Base::fragment;
    static constexpr int PACKED = Bytes::PACKED;

    // Bytes of shared memory. RESIDENT: weights and optimizer state. SUMS_AND_ROWS: sums of weights, sums and maxima of gradients,
    // and the rows of a batch. WORKSPACE: partial sums, or operands at its end; between the passes other code may use it.
    static constexpr int RESIDENT = STATES * INPUTS * UNITS * 4, SUMS_AND_ROWS = Base::SUMS + BATCH * 4;
    // The same lane of each group has partial sums of the same outputs. Each of these threads adds OWN of the outputs. In a round
    // each group stores a vector of WIDE_SUMS partial sums for each other group. They are short if there are many groups.
    static constexpr int OWN = COLUMNS * 4 / GROUPS, WIDE_SUMS = GROUPS > 4 || OWN % 2 ? 1 : OWN % 4 ? 2 : 4;
    typedef Vector<float, WIDE_SUMS> PartialSums;
    static constexpr int PARTIAL_SUMS = (GROUPS - 1) * THREADS * WIDE_SUMS * 4;
    static constexpr int WORKSPACE = FRAGMENTS > PARTIAL_SUMS ? FRAGMENTS : PARTIAL_SUMS;
    static_assert(COLUMNS * 4 % GROUPS == 0, "as many outputs for each thread");

    char *const resident; // weights and optimizer state
    PartialSums *const partial_sums; // of the outputs, in the memory of the fragments
    const int begin, end; // chunks of inputs from begin to end are this warp's

    // workspace: `size` bytes, of which this uses the first WORKSPACE; the other shared memory follows.
    __device__ ResidentLayer(unsigned char *workspace, int size, float scale, float shift)
        : Base((char *)workspace + WORKSPACE - FRAGMENTS, (float *)((char *)workspace + size + RESIDENT), scale, shift),
          resident((char *)workspace + size), partial_sums((PartialSums *)workspace), begin(group * CHUNKS / GROUPS),
          end((group + 1) * CHUNKS / GROUPS) {}

    // Four numbers of this lane, of a state: those of neighbouring inputs, and of unit g (half 0) or g + 8 (half 1) of the tile.
    __device__ __forceinline__ Four *four(int state, int chunk, int half) const {
        return (Four *)resident + (((state * CHUNKS + chunk) * TILES + tile) * 2 + half) * WARP + lane;
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
    // The number of this warp's chunk i. If warps have unequal numbers of chunks, the last warps have one more, because the first
    // ones have more of the sums that the block computes at the same time.
    __device__ __forceinline__ int batch_chunk(int i) const {
        const int place = i % 2 ? THREADS - 1 - threadIdx.x : threadIdx.x;
        return (i * THREADS + place) / WARP * CLUSTER + cluster_rank();
    }
    // Loads this warp's chunks from the table.
    __device__ __forceinline__ void load_batch(const uint8_t *table, Batch &batch) const {
        #pragma unroll
        for (int i = 0; i < WARP_CHUNKS; i++)
            if (batch_chunk(i) < CHUNKS) batch.chunks[i].load_rows(table, rows, batch_chunk(i), lane);
    }
    // Stores this warp's chunks as operands. A barrier of the cluster must follow.
    __device__ __forceinline__ void store_batch(const Batch &batch, char *direct, char *transposed) const {
        #pragma unroll
        for (int i = 0; i < WARP_CHUNKS; i++) {
            if (batch_chunk(i) >= CHUNKS) return;
            batch.chunks[i].store(direct, batch_chunk(i), lane);
            batch.chunks[i].transposed().store(transposed, batch_chunk(i), lane);
        }
    }

    // This thread's outputs: WEIGHT_SCALE * BYTE_SCALE * weight * byte, added over all inputs.
    struct Sums {
        float own[OWN];
    };
    // This thread's output i: its number among a lane's partial sums, its row of the batch and its unit. See `mma` in the PTX ISA.
    __device__ __forceinline__ int own_number(int i) const { return (i / WIDE_SUMS * GROUPS + group) * WIDE_SUMS + i % WIDE_SUMS; }
    __device__ __forceinline__ int own_row(int i) const { return own_number(i) / 4 * 8 + 2 * c + own_number(i) % 2; }
    __device__ __forceinline__ int own_unit(int i) const { return tile * 16 + own_number(i) % 4 / 2 * 8 + g; }

    // Where this lane of group `from` stores its partial sums for group `to`.
    __device__ __forceinline__ PartialSums *sums_for(int to, int from) const {
        return partial_sums + ((to * (GROUPS - 1) + from - (from > to)) * TILES + tile) * WARP + lane;
    }
    // Adds the outputs of all groups, in a fixed order. Ends with a barrier of the block.
    __device__ __forceinline__ void add_groups(const Outputs &outputs, Sums &sums) const {
        this->store_weight_sums(outputs);
        #pragma unroll
        for (int i = 0; i < OWN; i += WIDE_SUMS) {
            PartialSums of_groups[GROUPS], mine = {}, sum = {};
            #pragma unroll
            for (int to = 0; to < GROUPS; to++) {
                #pragma unroll
                for (int k = 0; k < WIDE_SUMS; k++) {
                    const int number = (i / WIDE_SUMS * GROUPS + to) * WIDE_SUMS + k;
                    const float value = of_groups[to].lane[k] = outputs.values[number / 4][number % 4];
                    mine.lane[k] = to == group ? value : mine.lane[k];
                }
            }
            __syncthreads();
            #pragma unroll
            for (int to = 0; to < GROUPS; to++)
                if (to != group) *sums_for(to, group) = of_groups[to];
            __syncthreads();
            #pragma unroll
            for (int from = 0; from < GROUPS; from++) {
                PartialSums other = mine;
                if (from != group) other = *sums_for(group, from);
                #pragma unroll
                for (int k = 0; k < WIDE_SUMS; k++) sum.lane[k] += other.lane[k];
            }
            #pragma unroll
            for (int k = 0; k < WIDE_SUMS; k++) sums.own[i + k] = sum.lane[k];
        }
        __syncthreads();
    }

    // Computes the thread's outputs from sums, with the epilogue. first: the column of the block's first unit. pitch: of a row.
    template <typename Epilogue> __device__ __forceinline__ void finish(
        const uint8_t *table, const Sums &sums, const Epilogue &epilogue, int first, int pitch) const {
        typename Epilogue::template Aux<1> aux[OWN];
        float found[OWN][1], weights[2] = {};
        bool all = true;
        #pragma unroll
        for (int k = 0; k < GROUPS; k++)
            #pragma unroll
            for (int half = 0; half < 2; half++) weights[half] += weight_sums[k * UNITS + tile * 16 + half * 8 + g];
        #pragma unroll
        for (int i = 0; i < OWN; i++) {
            const int row = own_row(i), column = first + own_unit(i);
            aux[i] = epilogue.template load_aux<1>(0, row, column, (int64_t)row * pitch + column);
            found[i][0] = sums.own[i] * (scale / (WEIGHT_SCALE * BYTE_SCALE));
            all &= finite(found[i][0]);
        }
        if (!all) {
            #pragma unroll
            for (int i = 0; i < OWN; i++)
                if (!finite(found[i][0])) found[i][0] = scale * float32_sum(resident, table + rows[own_row(i)], own_unit(i));
        }
        #pragma unroll
        for (int i = 0; i < OWN; i++) {
            found[i][0] += shift * (own_number(i) % 4 < 2 ? weights[0] : weights[1]);
            epilogue.write(aux[i], (int64_t)own_row(i) * pitch + first + own_unit(i), found[i]);
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
            this->multiply(outputs, weights, words.at);
        }
        add_groups(outputs, sums);
    }

    // As in ByteLayer, for all units of the block: a warp has at most one K step of its tile.
    __device__ __forceinline__ void load_gradient(const float *gradient, int pitch, float (&numbers)[4][2]) const {
        static_assert(K_STEPS <= GROUPS, "a group loads at most one K step");
        if (group < K_STEPS) Base::load_gradient(gradient, pitch, tile, group, numbers);
    }
    __device__ __forceinline__ void split_gradient(const float (&numbers)[4][2]) const {
        if (group < K_STEPS) Base::split_gradient(tile, group, numbers);
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
        this->find_scales(shifts, scales);
        Words this_batch, next_batch;
        this_batch.load(transposed, begin, lane);
        if (NEXT) next_batch.load(next_direct, begin, lane);
        Fragment terms[SPLIT_TERMS][K_STEPS];
        #pragma unroll
        for (int term = 0; term < SPLIT_TERMS; term++)
            #pragma unroll
            for (int step = 0; step < K_STEPS; step++) terms[term][step] = *fragment(term, tile, step);
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
                this->multiply(outputs, weights, next_batch.at);
                next_batch.load(next_direct, min(chunk + 1, end - 1), lane);
            }
            gradients = following;
        }
        if (NEXT) add_groups(outputs, sums);
    }
};
