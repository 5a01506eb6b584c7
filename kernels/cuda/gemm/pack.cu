// Packs the operands of gemm/packed_gemm.cu, see gemm/packed.cuh. A block takes PACK_ROWS packed rows and a chunk of K. For
// FP16X2 the launches are partial_row_stats, row_stats, pack_matrices; for other kinds pack_matrices alone.
//
// Macros (PackedGemm in packed.py): MMA_KIND, TILE_N, TRANSPOSE_*. WIDE_A, WIDE_B: elements per load.
#include "common/epilogue.cuh"
#include "common/collectives.cuh"
#include "gemm/packed.cuh"

constexpr int THREADS = 256;
constexpr int MIN_BLOCKS = WIDE_A * WIDE_B == 16 ? 4 : 3; // per multiprocessor
constexpr float MIN_EXACT = 0x1p-12f;  // smaller scaled elements have an error of up to 2^-36 in FP16X2
constexpr int MIN_PRODUCTS = 24;       // effective products in the first STATISTICS_TILES, see row_stats_of()
constexpr int SPARSE = 32;             // rows with fewer than one non-zero in so many elements never need the fallback
constexpr int MIN_ROUNDINGS = 8, SINGLE_ELEMENTS = 6; // see row_stats_of()
constexpr int SKIP_RATIO = 2;          // rows skip the cancellation test if their row block's participation is so many times theirs
typedef float Panel[PACKED_K][PACK_ROWS + 1]; // PACK_ROWS rows of a packed tile, padded against bank conflicts

// The packed rows of half a row block, number `half`, and their packed tiles in chunk `chunk`.
struct Source {
    const T *x; // the matrix
    bool of_a;
    int length, first; // rows of the matrix, and the first of these
    int64_t row_block;
    int begin, end;    // packed tiles

    __device__ Source(const T *a, const T *b, const PackedLayout &layout, int half, int chunk) {
        row_block = half / 2;
        of_a = row_block < layout.blocks_a;
        const int64_t own = of_a ? row_block : row_block - layout.blocks_a;
        const int64_t per_matrix = of_a ? layout.rows_a : layout.rows_b;
        x = of_a ? a + own / per_matrix * layout.m * layout.k : b + own / per_matrix * layout.k * layout.n;
        length = of_a ? layout.m : layout.n;
        first = own % per_matrix * PACKED_ROWS + half % 2 * PACK_ROWS;
        begin = layout.k_tiles * chunk / layout.chunks;
        end = layout.k_tiles * (chunk + 1) / layout.chunks;
    }

    // Starts to load a packed tile's elements into registers.
    __device__ __forceinline__ void start(int k_tile, int k) {
        if (of_a)
            read<!TRANSPOSE_A, WIDE_A>(k_tile * PACKED_K, k);
        else
            read<TRANSPOSE_B, WIDE_B>(k_tile * PACKED_K, k);
    }

    // Moves them to shared memory, for all threads of the block.
    __device__ __forceinline__ void finish(Panel &panel) const {
        __syncthreads();
        if (of_a)
            put<!TRANSPOSE_A, WIDE_A>(panel);
        else
            put<TRANSPOSE_B, WIDE_B>(panel);
        __syncthreads();
    }

  private:
    T found[PACK_ROWS * PACKED_K / THREADS];

    // Row and k of this thread's i-th vector. The matrix is stored as [row][k] if K_MAJOR, else as [k][row].
    template <bool K_MAJOR, int WIDE> struct VectorCoord {
        static constexpr int ACROSS = (K_MAJOR ? PACKED_K : PACK_ROWS) / WIDE, COUNT = PACK_ROWS * PACKED_K / WIDE / THREADS;
        int row, depth;
        __device__ __forceinline__ explicit VectorCoord(int i) {
            const int down = (i * THREADS + threadIdx.x) / ACROSS, right = threadIdx.x % ACROSS * WIDE;
            row = K_MAJOR ? down : right;
            depth = K_MAJOR ? right : down;
        }
    };

    template <bool K_MAJOR, int WIDE> __device__ __forceinline__ void read(int k0, int k) {
        #pragma unroll
        for (int i = 0; i < VectorCoord<K_MAJOR, WIDE>::COUNT; i++) {
            const VectorCoord<K_MAJOR, WIDE> at(i);
            const int64_t row = first + at.row, depth = k0 + at.depth;
            Vector<T, WIDE> v = {};
            if (row < length && depth < k) v = load<T, WIDE>(x + (K_MAJOR ? row * k + depth : depth * length + row));
            #pragma unroll
            for (int h = 0; h < WIDE; h++) found[i * WIDE + h] = v.lane[h];
        }
    }

    template <bool K_MAJOR, int WIDE> __device__ __forceinline__ void put(Panel &panel) const {
        #pragma unroll
        for (int i = 0; i < VectorCoord<K_MAJOR, WIDE>::COUNT; i++) {
            const VectorCoord<K_MAJOR, WIDE> at(i);
            #pragma unroll
            for (int h = 0; h < WIDE; h++)
                panel[at.depth + (K_MAJOR ? h : 0)][at.row + (K_MAJOR ? 0 : h)] = found[i * WIDE + h];
        }
    }
};

// FP16X2, first launch: statistics of each row and chunk.
KERNEL __launch_bounds__(THREADS, MIN_BLOCKS) partial_row_stats(const T *a, const T *b, const Epilogue epilogue,
    int64_t batch, int64_t m, int64_t n, int64_t k, char *scratch) {
    wait_for_inputs();
    const PackedLayout layout(batch, m, n, k, scratch);
    const int half = blockIdx.x, chunk = blockIdx.y;
    Source source(a, b, layout, half, chunk);
    source.start(source.begin, k);
    __shared__ Panel panel;
    __shared__ PartialRowStats found[THREADS];
    constexpr int SLICES = THREADS / PACK_ROWS; // threads that share a row
    const int row = threadIdx.x % PACK_ROWS, slice = threadIdx.x / PACK_ROWS;
    if (blockIdx.x + blockIdx.y + threadIdx.x == 0) layout.votes->count = 0;
    PartialRowStats own = {0, INFINITY, 0, 0};
    for (int k_tile = source.begin; k_tile < source.end; k_tile++) {
        source.finish(panel);
        if (k_tile + 1 < source.end) source.start(k_tile + 1, k);
        #pragma unroll
        for (int i = slice * PACKED_K / SLICES; i < (slice + 1) * PACKED_K / SLICES; i++) {
            const float x = fabsf(panel[i][row]);
            own.squares += (double)x * x;
            own.sum += x;
            if (x > 0) own.least = fminf(own.least, x);
            own.count += x != 0;
        }
    }
    found[threadIdx.x] = own;
    __syncthreads();
    if (slice > 0) return;
    for (int i = 1; i < SLICES; i++) {
        own.squares += found[i * PACK_ROWS + row].squares;
        own.least = fminf(own.least, found[i * PACK_ROWS + row].least);
        own.sum += found[i * PACK_ROWS + row].sum;
        own.count += found[i * PACK_ROWS + row].count;
    }
    layout.partial[(chunk * layout.row_blocks * 2 + half) * PACK_ROWS + row] = own;
}

__device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float(exponent + 127 << 23); }

// The exponent of the root mean square that rows of k elements are scaled to.
__device__ __forceinline__ int target_exponent(int64_t k) {
    int target = 14;
    for (int64_t i = 1; i < k; i *= 4) target--;
    return target;
}

// The statistics of a row from those of its chunks; squares: its sum of squares, 0 for rows of zeros and rows for the fallback.
//
// Scale: the largest element is at most sqrt(k) times the root mean square, which is scaled to 2^target, or up to twice that.
//
// cancellation_level: 5.5 times the root mean square of products with a row at 2^target, which is 1 to 2 times too low for
// the other row.
//
// participation: (sum |x|)^2 / sum x^2 is the effective number of non-zeros. Two rows with p k and q k of them have about p q k
// non-zero products. The error of a product in FP16X2 is 2^-23.8 (root mean square: 2^-24 from each operand, and low x low), of
// a sum of n products sqrt(n) times that. Sequential FMA rounds n sums, by 2^-25.3 each, which is more from 16 products on.
// MIN_PRODUCTS are required in the first STATISTICS_TILES, where running sums are tested. This is the participation of the row
// alone; see row_stats for that of its row block.
//
// fallback: if a large element is near the end of the sum, or dominates it, sequential FMA rounds little after it, while tensor
// cores truncate all products that they add at once. Two numbers show this. The first is the number of roundings (the non-zeros
// of later chunks), weighted by the share of the squares that the sum contains so far. The second is the effective number of
// elements; it must be larger if all elements may be in one or two chunks of 128.
__device__ __forceinline__ RowStats row_stats_of(const PackedLayout &layout, int64_t at, double &squares) {
    PartialRowStats all = {0, INFINITY, 0, 0};
    double rounded = 0;
    PartialRowStats chunks[MAX_CHUNKS]; // all loads in flight at once
    #pragma unroll
    for (int i = 0; i < MAX_CHUNKS; i++) {
        chunks[i] = {0, INFINITY, 0, 0};
        if (i < layout.chunks) chunks[i] = layout.partial[i * layout.row_blocks * PACKED_ROWS + at];
    }
    #pragma unroll
    for (const PartialRowStats &chunk : chunks) {
        rounded += chunk.count * all.squares;
        all.squares += chunk.squares;
        all.least = fminf(all.least, chunk.least);
        all.sum += chunk.sum;
        all.count += chunk.count;
    }
    squares = 0;
    const int target = target_exponent(layout.k);
    const double mean = sqrt(all.squares / layout.k);
    if (mean == 0) return {1, 0, 0, INFINITY, false, false, false};
    const int exponent = mean < INFINITY ? target - ilogb(mean) : 1 << 30; // NaN takes the last branch, too
    if (abs(exponent) > 63) return {1, INFINITY, 0, INFINITY, true, false, false};
    squares = all.squares;
    const float scale = power_of_two(exponent);
    const float level = 5.5f * (float)mean * scale * power_of_two(target);
    const double tested = min(layout.k, (int64_t)STATISTICS_TILES * PACKED_K) / (double)layout.k;
    const double participation = all.sum * (double)all.sum / all.squares * sqrt(tested / MIN_PRODUCTS / layout.k);
    const bool at_end = layout.chunks > 1 && rounded < MIN_ROUNDINGS * all.squares;
    const int min_elements = layout.chunks > 2 ? 2 : SINGLE_ELEMENTS * layout.chunks;
    const bool single = all.sum * (double)all.sum < min_elements * all.squares;
    const bool fallback = (single || at_end) && (int64_t)all.count * SPARSE > layout.k;
    return {power_of_two(-exponent), 0, level, (float)participation, fallback, false, all.least * scale < MIN_EXACT};
}

// The participation of a row block, by its PACKED_ROWS threads: the mean over its rows, weighted by their squares. A tile's error
// and its sum of squares are products of its rows' values. So with 16 effective products in this mean the error of a tile is at
// most that of sequential FMA, even if some of its rows have fewer.
__device__ __forceinline__ float row_block_participation(float participation, double squares) {
    __shared__ double found[2][2 * PACKED_ROWS / WARP]; // of each warp: squares, and participation times squares
    const int warp = threadIdx.x / WARP, first = threadIdx.x / PACKED_ROWS * (PACKED_ROWS / WARP);
    const double total = over_lanes<Sum, WARP>(squares);
    const double weighted = over_lanes<Sum, WARP>(squares > 0 ? participation * squares : 0);
    if (threadIdx.x % WARP == 0) found[0][warp] = total, found[1][warp] = weighted;
    __syncthreads();
    double all[2] = {};
    for (int i = first; i < first + PACKED_ROWS / WARP; i++) all[0] += found[0][i], all[1] += found[1][i];
    return all[0] > 0 ? all[1] / all[0] : INFINITY;
}

// FP16X2, second launch: the statistics of all rows. Each block has a row block of A and one of B, and votes for bf16x3 where
// their tile has too few products for FP16X2.
KERNEL __launch_bounds__(THREADS) row_stats(const T *a, const T *b, const Epilogue epilogue, int64_t batch,
    int64_t m, int64_t n, int64_t k, char *scratch) {
    wait_for_inputs();
    const PackedLayout layout(batch, m, n, k, scratch);
    const int item = blockIdx.x / layout.voting_tiles, i = blockIdx.x % layout.voting_tiles;
    const int64_t row_block = threadIdx.x < PACKED_ROWS
        ? (int64_t)item * layout.rows_a + i % layout.rows_a
        : layout.blocks_a + (int64_t)item * layout.rows_b + i % layout.rows_b;
    const int64_t at = row_block * PACKED_ROWS + threadIdx.x % PACKED_ROWS;
    __shared__ float participations[2];
    double squares;
    RowStats row = row_stats_of(layout, at, squares);
    const float participation = row_block_participation(row.participation, squares);
    row.skip_cancellation = row.participation < participation / SKIP_RATIO;
    row.participation = participation;
    if (i < (threadIdx.x < PACKED_ROWS ? layout.rows_a : layout.rows_b)) layout.stats[at] = row;
    if (threadIdx.x % PACKED_ROWS == 0) participations[threadIdx.x / PACKED_ROWS] = row.participation;
    __syncthreads();
    if (threadIdx.x == 0 && !(participations[0] * participations[1] >= 1)) atomicAdd(&layout.votes->count, 1);
}

// 16 bytes of a packed row: neighbouring k of one term.
typedef Vector<uint32_t, 4> Chunk;
constexpr int CHUNK_ELEMENTS = MMA_KIND == TF32 ? 4 : 8;

template <int TERMS> __device__ __forceinline__ void split(Chunk (&terms)[TERMS], const float (&x)[CHUNK_ELEMENTS]) {
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (MMA_KIND == TF32) {
            terms[0].lane[i] = Format<TF32>::rounded(x[i]);
        } else if constexpr (MMA_KIND == BFLOAT16) {
            terms[0].lane[i] = Format<BFLOAT16>::packed(x[2 * i], x[2 * i + 1]);
        } else if constexpr (TERMS == 3) {
            uint32_t words[TERMS][2]; // the first word has both elements
            Format<BF16X3>::convert({x[2 * i], x[2 * i + 1], 0, 0}, words);
            #pragma unroll
            for (int p = 0; p < TERMS; p++) terms[p].lane[i] = words[p][0];
        } else {
            float first, second;
            terms[0].lane[i] = pack_pair<FLOAT16>(x[2 * i], x[2 * i + 1]);
            unpack_float16(terms[0].lane[i], first, second);
            terms[TERMS - 1].lane[i] =
                pack_pair<FLOAT16>((x[2 * i] - first) / LOW_SCALE, (x[2 * i + 1] - second) / LOW_SCALE);
        }
    }
}

// The scale of a row.
struct Scale {
    float scale;
    bool lossy;
};

// Adds to a row's error floor 2^22 times the error of its results by the small ones of these elements, if these are multiplied
// by elements of four times the root mean square. The addends are multiples of one power of two: exact in any order.
__device__ __forceinline__ void raise_error_floor(
    const PackedLayout &layout, int64_t row, const float (&x)[CHUNK_ELEMENTS]) {
    int count = 0;
    #pragma unroll
    for (float element : x) count += element != 0 && fabsf(element) < MIN_EXACT;
    if (count > 0)
        atomicAdd(&layout.stats[row].error_floor, count * power_of_two(22 - 36 + 2 + 1 + target_exponent(layout.k)));
}

// Packs the rows of a packed tile that are in shared memory.
template <int TERMS> __device__ __forceinline__ void write(const PackedLayout &layout, const Source &source, int half,
    int k_tile, const Panel &panel, const Scale (&scales)[PACK_ROWS]) {
    char *to = layout.packed_tile(source.row_block, k_tile, TERMS) + half % 2 * (PACKED_BYTES / 2);
    #pragma unroll
    for (int i = 0; i < PACK_ROWS * 8 / THREADS; i++) {
        const int row = (i * THREADS + threadIdx.x) / 8, chunk = threadIdx.x % 8;
        float x[CHUNK_ELEMENTS];
        #pragma unroll
        for (int h = 0; h < CHUNK_ELEMENTS; h++) {
            x[h] = panel[chunk * CHUNK_ELEMENTS + h][row];
            if (MMA_KIND == FP16X2) x[h] *= scales[row].scale;
        }
        if (MMA_KIND == FP16X2 && TERMS == 2 && scales[row].lossy) raise_error_floor(layout, half * PACK_ROWS + row, x);
        Chunk terms[TERMS];
        split(terms, x);
        #pragma unroll
        for (int p = 0; p < TERMS; p++) *(Chunk *)(to + p * PACKED_BYTES + swizzle_128b(row, chunk)) = terms[p];
    }
}

// Packs in reverse order: partial_row_stats read the end last, so it may still be in L2, and packed_gemm reads the beginning
// first. FP16X2 reads the matrices before the wait: partial_row_stats has waited for them, and row_stats for partial_row_stats
// (wait_for_inputs).
KERNEL __launch_bounds__(THREADS, MIN_BLOCKS) pack_matrices(const T *a, const T *b, const Epilogue epilogue,
    int64_t batch, int64_t m, int64_t n, int64_t k, char *scratch) {
    if (MMA_KIND != FP16X2) wait_for_inputs();
    const PackedLayout layout(batch, m, n, k, scratch);
    const int half = gridDim.x - 1 - blockIdx.x + 2 * layout.first(), chunk = gridDim.y - 1 - blockIdx.y;
    Source source(a, b, layout, half, chunk);
    source.start(source.begin, k);
    if (MMA_KIND == FP16X2) wait_for_inputs();
    __shared__ Panel panel;
    __shared__ Scale scales[PACK_ROWS];
    if (MMA_KIND == FP16X2 && threadIdx.x < PACK_ROWS) {
        const RowStats &row = layout.stats[half * PACK_ROWS + threadIdx.x];
        scales[threadIdx.x] = {1 / row.inverse_scale, row.lossy != 0};
    }
    const bool bf16x3 = MMA_KIND == FP16X2 && layout.use_bf16x3();
    for (int k_tile = source.begin; k_tile < source.end; k_tile++) {
        source.finish(panel);
        if (k_tile + 1 < source.end) source.start(k_tile + 1, k);
        if (bf16x3)
            write<MAX_TERMS>(layout, source, half, k_tile, panel, scales);
        else
            write<MMA_KIND == FP16X2 ? 2 : 1>(layout, source, half, k_tile, panel, scales);
    }
}
