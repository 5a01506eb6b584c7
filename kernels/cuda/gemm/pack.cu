// Lays the operands of gemm/packed_gemm.cu out in slabs, see gemm/packed.cuh: a block takes 64 lines of a chunk of k.
#ifndef UNIT
#define UNIT 5
#define TILE_N 128
#define TRANSPOSE_A 0
#define TRANSPOSE_B 0
#define WIDE_A 1 // elements that may be read at once
#define WIDE_B 1
#endif
#include "common/epilogue.cuh"
#include "common/collectives.cuh"
#include "gemm/packed.cuh"

constexpr int THREADS = 256, ROW = HALF + 1;
constexpr int FEW = 24;               // products, see known()
constexpr int THIN = 32, ROUNDED = 8, SINGLE = 6; // see known()
constexpr int SELDOM = 2;             // of the share of all to that of a line, see share_of_all()
constexpr int BLOCKS = WIDE_A * WIDE_B == 16 ? 4 : 3; // that a multiprocessor must have registers for
constexpr float LEAST = 0x1p-12f;     // below it a scaled element loses bits, up to 2^-36
typedef float Panel[DEPTH][ROW]; // HALF lines of a slab

// The lines that a block takes, the half-th 64 of all.
struct Source {
    const T *x;    // the first element of the matrix
    bool of_a;
    int length, first; // lines of the matrix, and the first of these
    int64_t block;     // of lines
    int begin, end;    // slabs

    __device__ Source(const T *a, const T *b, const Slabs &slabs, int half, int chunk) {
        block = half / 2;
        of_a = block < slabs.left;
        const int64_t own = of_a ? block : block - slabs.left, each = of_a ? slabs.rows : slabs.columns;
        x = of_a ? a + own / each * slabs.m * slabs.k : b + own / each * slabs.k * slabs.n;
        length = of_a ? slabs.m : slabs.n;
        first = own % each * LINES + half % 2 * HALF;
        begin = slabs.depth * chunk / slabs.chunks;
        end = slabs.depth * (chunk + 1) / slabs.chunks;
    }

    // Starts to read a slab's elements; what follows need not wait for them.
    __device__ __forceinline__ void start(int slab, int k) {
        if (of_a)
            read<!TRANSPOSE_A, WIDE_A>(slab * DEPTH, k);
        else
            read<TRANSPOSE_B, WIDE_B>(slab * DEPTH, k);
    }

    // Puts them into shared memory, where all threads of the block find them.
    __device__ __forceinline__ void finish(Panel &panel) const {
        __syncthreads();
        if (of_a)
            put<!TRANSPOSE_A, WIDE_A>(panel);
        else
            put<TRANSPOSE_B, WIDE_B>(panel);
        __syncthreads();
    }

  private:
    T found[HALF * DEPTH / THREADS];

    // Where the i-th vector of this thread lies. ALONG: the matrix lies as [line][k], else as [k][line].
    template <bool ALONG, int WIDE> struct Place {
        static constexpr int ACROSS = (ALONG ? DEPTH : HALF) / WIDE, COUNT = HALF * DEPTH / WIDE / THREADS;
        int line, depth;
        __device__ __forceinline__ explicit Place(int i) {
            const int down = (i * THREADS + threadIdx.x) / ACROSS, right = threadIdx.x % ACROSS * WIDE;
            line = ALONG ? down : right;
            depth = ALONG ? right : down;
        }
    };

    template <bool ALONG, int WIDE> __device__ __forceinline__ void read(int k0, int k) {
        #pragma unroll
        for (int i = 0; i < Place<ALONG, WIDE>::COUNT; i++) {
            const Place<ALONG, WIDE> at(i);
            const int64_t line = first + at.line, depth = k0 + at.depth;
            Vector<T, WIDE> v = {};
            if (line < length && depth < k) v = load<T, WIDE>(x + (ALONG ? line * k + depth : depth * length + line));
            #pragma unroll
            for (int h = 0; h < WIDE; h++) found[i * WIDE + h] = v.lane[h];
        }
    }

    template <bool ALONG, int WIDE> __device__ __forceinline__ void put(Panel &panel) const {
        #pragma unroll
        for (int i = 0; i < Place<ALONG, WIDE>::COUNT; i++) {
            const Place<ALONG, WIDE> at(i);
            #pragma unroll
            for (int h = 0; h < WIDE; h++)
                panel[at.depth + (ALONG ? h : 0)][at.line + (ALONG ? 0 : h)] = found[i * WIDE + h];
        }
    }
};

// HALVES, first: what scales and limits follow from.
KERNEL __launch_bounds__(THREADS, BLOCKS) measure_lines(const T *a, const T *b, const Epilogue epilogue, int64_t batch,
    int64_t m, int64_t n, int64_t k, char *scratch) {
    wait_for_inputs();
    const Slabs slabs(batch, m, n, k, scratch);
    const int half = blockIdx.x, chunk = blockIdx.y;
    Source source(a, b, slabs, half, chunk);
    source.start(source.begin, k);
    __shared__ Panel panel;
    __shared__ Measured found[THREADS];
    constexpr int TEAMS = THREADS / HALF; // threads that share a line
    const int line = threadIdx.x % HALF, team = threadIdx.x / HALF;
    if (blockIdx.x + blockIdx.y + threadIdx.x == 0) slabs.votes->count = 0;
    Measured own = {0, INFINITY, 0, 0};
    for (int slab = source.begin; slab < source.end; slab++) {
        source.finish(panel);
        if (slab + 1 < source.end) source.start(slab + 1, k);
        #pragma unroll
        for (int i = team * DEPTH / TEAMS; i < (team + 1) * DEPTH / TEAMS; i++) {
            const float x = fabsf(panel[i][line]);
            own.squares += (double)x * x;
            own.sum += x;
            if (x > 0) own.least = fminf(own.least, x);
            own.count += x != 0;
        }
    }
    found[threadIdx.x] = own;
    __syncthreads();
    if (team > 0) return;
    for (int i = 1; i < TEAMS; i++) {
        own.squares += found[i * HALF + line].squares;
        own.least = fminf(own.least, found[i * HALF + line].least);
        own.sum += found[i * HALF + line].sum;
        own.count += found[i * HALF + line].count;
    }
    slabs.measured[(chunk * slabs.blocks * 2 + half) * HALF + line] = own;
}

// 2^exponent
__device__ __forceinline__ float power(int exponent) { return __int_as_float(exponent + 127 << 23); }

// Of lines of k elements, see known().
__device__ __forceinline__ int target_of(int64_t k) {
    int target = 14;
    for (int64_t i = 1; i < k; i *= 4) target--;
    return target;
}

// A line whose chunks are measured.
//
// Its largest element is at most sqrt(k) times the root of the mean square, which is scaled to 2^target, or up to twice
// that. Level: 5.5 times the root of the products' mean square if the other line's is 2^target, else down to half.
//
// Share: (sum |x|)^2 / sum x^2 elements of one size would have this sum and these squares; of two lines with p k and q k
// of them about p q k meet. A product is 2^-23.8 off (root of the mean square: 2^-24 of each operand, and low x low),
// the sum of n sqrt(n) times that; a chain rounds n sums, of 2^-25.3 each, which is more from 16 products on. FEW are
// asked for in the TELLING slabs, as running sums tell something of products alone. Here p is that of this line, see
// `know_lines`.
//
// Late: of an element with many others next to all of the sum comes at its end, or from one product. There a chain has few
// more roundings to make, while the matrix units cut bits off all that they add at once. Counted are the roundings behind
// the chunk of each element, as many as there are elements that are not 0, by the share of the squares that the sum has by
// then; and elements of one size as above, more of them where all are in one chunk of 128, or in two.
__device__ __forceinline__ Line known(const Slabs &slabs, int64_t at, double &squares) {
    Measured all = {0, INFINITY, 0, 0};
    double rounded = 0;
    Measured parts[CHUNKS]; // whose reads are under way at once
    #pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        parts[i] = {0, INFINITY, 0, 0};
        if (i < slabs.chunks) parts[i] = slabs.measured[i * slabs.blocks * LINES + at];
    }
    #pragma unroll
    for (const Measured &part : parts) {
        rounded += part.count * all.squares;
        all.squares += part.squares;
        all.least = fminf(all.least, part.least);
        all.sum += part.sum;
        all.count += part.count;
    }
    squares = 0; // of a line that is left, or has none
    const int target = target_of(slabs.k);
    const double mean = sqrt(all.squares / slabs.k);
    if (mean == 0) return {1, 0, 0, INFINITY, false, false, false};
    const int exponent = mean < INFINITY ? target - ilogb(mean) : 1 << 30; // not of NaN
    if (abs(exponent) > 63) return {1, INFINITY, 0, INFINITY, true, false, false};
    squares = all.squares;
    const float up = power(exponent);
    const float level = 5.5f * (float)mean * up * power(target);
    const double telling = min(slabs.k, (int64_t)TELLING * DEPTH) / (double)slabs.k;
    const double share = all.sum * (double)all.sum / all.squares * sqrt(telling / FEW / slabs.k);
    const bool at_end = slabs.chunks > 1 && rounded < ROUNDED * all.squares;
    const int few = slabs.chunks > 2 ? 2 : SINGLE * slabs.chunks;
    const bool single = all.sum * (double)all.sum < few * all.squares;
    const bool late = (single || at_end) && (int64_t)all.count * THIN > slabs.k;
    return {power(-exponent), 0, level, (float)share, late, false, all.least * up < LEAST};
}

// A team of LINES threads, each with a line: the share of all its lines. Errors and sums of squares of a tile are those of
// its lines, multiplied: with shares that count by squares, a tile's error in halves is that of a chain, or smaller, from
// 16 products on, though sums of some of its lines are made by fewer. Of lines with less than a SELDOM-th of that share
// running sums are not watched: few products say little, and little of what a chain loses is lost there.
__device__ __forceinline__ float share_of_all(float share, double squares) {
    __shared__ double found[2][2 * LINES / WARP]; // the squares, and shares of squares, of each warp
    const int warp = threadIdx.x / WARP, first = threadIdx.x / LINES * (LINES / WARP);
    const double of_all = over_lanes<Sum, WARP>(squares);
    const double counted = over_lanes<Sum, WARP>(squares > 0 ? share * squares : 0);
    if (threadIdx.x % WARP == 0) found[0][warp] = of_all, found[1][warp] = counted;
    __syncthreads();
    double all[2] = {};
    for (int i = first; i < first + LINES / WARP; i++) all[0] += found[0][i], all[1] += found[1][i];
    return all[0] > 0 ? all[1] / all[0] : INFINITY;
}

// HALVES, then: what is known of all lines, a block for each tile that is asked. A tile asks for pieces where it is made by
// few products.
KERNEL __launch_bounds__(THREADS) know_lines(const T *a, const T *b, const Epilogue epilogue, int64_t batch,
    int64_t m, int64_t n, int64_t k, char *scratch) {
    wait_for_inputs();
    const Slabs slabs(batch, m, n, k, scratch);
    const int item = blockIdx.x / slabs.asked, i = blockIdx.x % slabs.asked;
    const int64_t block = threadIdx.x < LINES ? (int64_t)item * slabs.rows + i % slabs.rows
                                              : slabs.left + (int64_t)item * slabs.columns + i % slabs.columns;
    const int64_t at = block * LINES + threadIdx.x % LINES;
    __shared__ float shares[2];
    double squares;
    Line line = known(slabs, at, squares);
    const float share = share_of_all(line.share, squares);
    line.seldom = line.share < share / SELDOM;
    line.share = share;
    if (i < (threadIdx.x < LINES ? slabs.rows : slabs.columns)) slabs.lines[at] = line;
    if (threadIdx.x % LINES == 0) shares[threadIdx.x / LINES] = line.share;
    __syncthreads();
    if (threadIdx.x == 0 && !(shares[0] * shares[1] >= 1)) atomicAdd(&slabs.votes->count, 1);
}

// Neighbouring k of a line in the format of the matrix units: a word of each of COUNT numbers.
typedef Vector<uint32_t, 4> Word;
constexpr int IN_WORD = UNIT == TF32 ? 4 : 8;

template <int COUNT> __device__ __forceinline__ void cut(Word (&words)[COUNT], const float (&x)[IN_WORD]) {
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (UNIT == TF32) {
            words[0].lane[i] = Format<TF32>::rounded(x[i]);
        } else if constexpr (UNIT == BFLOAT16) {
            words[0].lane[i] = Format<BFLOAT16>::packed(x[2 * i], x[2 * i + 1]);
        } else if constexpr (COUNT == 3) {
            uint32_t pieces[COUNT][2]; // of the first two
            Format<PIECES>::convert({x[2 * i], x[2 * i + 1], 0, 0}, pieces);
            #pragma unroll
            for (int p = 0; p < COUNT; p++) words[p].lane[i] = pieces[p][0];
        } else {
            float of_low, of_high;
            words[0].lane[i] = rounded_halves(x[2 * i], x[2 * i + 1]);
            as_floats(words[0].lane[i], of_low, of_high);
            words[COUNT - 1].lane[i] = rounded_halves((x[2 * i] - of_low) / LOW, (x[2 * i + 1] - of_high) / LOW);
        }
    }
}

// Of the lines of a block.
struct Scale {
    float up;
    bool lossy;
};

// Adds to the floor of a line 2^22 times what its sums lose by elements of these, if what they meet is four times the root of
// the mean square. A sum of powers of two, whose order changes nothing.
__device__ __forceinline__ void raise_floor(const Slabs &slabs, int64_t line, const float (&x)[IN_WORD]) {
    int count = 0;
    #pragma unroll
    for (float each : x) count += each != 0 && fabsf(each) < LEAST;
    if (count > 0) atomicAdd(&slabs.lines[line].floor, count * power(22 - 36 + 2 + 1 + target_of(slabs.k)));
}

// Writes what of a slab is in shared memory, scaled.
template <int COUNT> __device__ __forceinline__ void write(
    const Slabs &slabs, const Source &source, int half, int slab, const Panel &panel, const Scale (&scales)[HALF]) {
    char *to = slabs.slab(source.block, slab, COUNT) + half % 2 * (SLAB / 2);
    #pragma unroll
    for (int i = 0; i < HALF * 8 / THREADS; i++) {
        const int line = (i * THREADS + threadIdx.x) / 8, word = threadIdx.x % 8;
        float x[IN_WORD];
        #pragma unroll
        for (int h = 0; h < IN_WORD; h++) {
            x[h] = panel[word * IN_WORD + h][line];
            if (UNIT == HALVES) x[h] *= scales[line].up;
        }
        if (UNIT == HALVES && COUNT == 2 && scales[line].lossy) raise_floor(slabs, half * HALF + line, x);
        Word words[COUNT];
        cut(words, x);
        #pragma unroll
        for (int p = 0; p < COUNT; p++) *(Word *)(to + p * SLAB + exchanged(line, word)) = words[p];
    }
}

// Begins with what was measured last, much of which is in the second cache still; ends with what is multiplied first. HALVES:
// the matrices are read before the launch before, which has waited for them, has ended (wait_for_inputs).
KERNEL __launch_bounds__(THREADS, BLOCKS) fill_slabs(const T *a, const T *b, const Epilogue epilogue, int64_t batch,
    int64_t m, int64_t n, int64_t k, char *scratch) {
    if (UNIT != HALVES) wait_for_inputs();
    const Slabs slabs(batch, m, n, k, scratch);
    const int half = gridDim.x - 1 - blockIdx.x + 2 * slabs.first(), chunk = gridDim.y - 1 - blockIdx.y;
    Source source(a, b, slabs, half, chunk);
    source.start(source.begin, k);
    if (UNIT == HALVES) wait_for_inputs();
    __shared__ Panel panel;
    __shared__ Scale scales[HALF];
    if (UNIT == HALVES && threadIdx.x < HALF) {
        const Line &line = slabs.lines[half * HALF + threadIdx.x];
        scales[threadIdx.x] = {1 / line.down, line.lossy != 0};
    }
    const bool in_pieces = UNIT == HALVES && slabs.in_pieces();
    for (int slab = source.begin; slab < source.end; slab++) {
        source.finish(panel);
        if (slab + 1 < source.end) source.start(slab + 1, k);
        if (in_pieces)
            write<MOST>(slabs, source, half, slab, panel, scales);
        else
            write<UNIT == HALVES ? 2 : 1>(slabs, source, half, slab, panel, scales);
    }
}
