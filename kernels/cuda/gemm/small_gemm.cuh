// The engine of products of small matrices, where waiting is what takes the time: operands go from memory straight to
// the registers of the lanes that multiply them, all reads of a warp at once, with no barrier on the way.
//
// The warps of a block form SLICES teams, each of which owns every SLICES-th unit of 16 k; a warp of a team owns WM x
// WN of the BM x BN tile. The teams' sums meet in shared memory, after the only barrier, and are added in their order.
#pragma once
#include "gemm/staged_epilogue.cuh"

constexpr int UNIT_K = 16; // k of a unit, of which a lane holds four neighbours

// This lane's share of a unit of an operand, whose lines are the rows of op(A) or the columns of op(B). KEPT: the
// operand lies in memory as [k][line], else as [line][k]; WIDE_ of its elements may be read at once.
template <class Unit, int LINES, int CHUNK, bool KEPT, int WIDE_> struct Fragments {
    static constexpr int WIDE = WIDE_ < (KEPT ? CHUNK : 4) ? WIDE_ : (KEPT ? CHUNK : 4);

    // first: the first line of the lane's chunks, which are 8 CHUNK apart; at: the unit's first k. whole: no tile has
    // lines beyond the last one.
    static __device__ __forceinline__ void load(
        T (&to)[4][LINES], const T *x, int length, bool whole, int first, int k, int at) {
        const int k0 = at + Unit::lane_c() * 4;
        const bool all_k = k % UNIT_K == 0; // where lengths are constants, nothing is left of these questions
        if (all_k && at >= k) return; // the whole warp, which will not use it
        const auto inside = [&](int i, int line) { return (all_k || k0 + i < k) && (whole || line < length); };
        const T *from = KEPT ? x + (int64_t)k0 * length + first : x + (int64_t)first * k + k0;
        if (KEPT) {
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                #pragma unroll
                for (int j = 0; j < LINES; j += WIDE) {
                    const int line = j / CHUNK * (8 * CHUNK) + j % CHUNK;
                    Vector<T, WIDE> v = {};
                    if (inside(i, first + line)) v = ::load<T, WIDE>(from + (int64_t)i * length + line);
                    #pragma unroll
                    for (int h = 0; h < WIDE; h++) to[i][j + h] = v.lane[h];
                }
            }
        } else {
            #pragma unroll
            for (int j = 0; j < LINES; j++) {
                const int line = j / CHUNK * (8 * CHUNK) + j % CHUNK;
                #pragma unroll
                for (int i = 0; i < 4; i += WIDE) {
                    Vector<T, WIDE> v = {};
                    if (inside(i, first + line)) v = ::load<T, WIDE>(from + (int64_t)line * k + i);
                    #pragma unroll
                    for (int h = 0; h < WIDE; h++) to[i + h][j] = v.lane[h];
                }
            }
        }
    }
};

// A warp's own copy of a unit of an operand that lies as [k][line] in memory, in rows of LINES that are copied whole.
// Read straight from memory, the four k of lanes that read together would come from the same banks of the first cache.
template <int LINES> struct Slab {
    static constexpr int ROW = LINES + VECTOR, SIZE = UNIT_K * ROW, ACROSS = LINES / VECTOR, DOWN = WARP / ACROSS;

    // From line `first` and row `at` of k on.
    static __device__ __forceinline__ void copy(
        T *slab, const T *x, int length, bool whole, int first, int k, int at) {
        const int row = threadIdx.x % WARP / ACROSS, line = threadIdx.x % ACROSS * VECTOR;
        const bool all_k = k % UNIT_K == 0;
        if (at >= k) return; // the whole warp, which will not use it
        const T *from = x + (int64_t)(at + row) * length + first + line;
        slab += row * ROW + line;
        #pragma unroll
        for (int i = 0; i < UNIT_K; i += DOWN) {
            const bool take = (all_k || at + row + i < k) && (whole || first + line < length);
            copy_async<16, true>(slab + i * ROW, from + (int64_t)i * length, take);
        }
    }

    // The lane's chunks of lines, of which the first begins at `line`, of k = c, c + 4, c + 8, c + 12.
    template <int CHUNK, int COUNT> static __device__ __forceinline__ void read(
        T (&to)[4][COUNT], const T *slab, int line, int c) {
        #pragma unroll
        for (int i = 0; i < 4; i++) ::read<COUNT, CHUNK, 8 * CHUNK>(to[i], slab + (c + 4 * i) * ROW + line);
    }
};

// The tunables; AHEAD: how many units a warp reads at once.
template <int BM_, int BN_, int SLICES_, int AHEAD_, class Unit_> struct Direct {
    typedef Unit_ Unit;
    static constexpr int BM = BM_, BN = BN_, SLICES = SLICES_, AHEAD = AHEAD_;
    static constexpr int WARPS_N = BN / Unit::WN, TEAM = BM / Unit::WM * WARPS_N, THREADS = TEAM * SLICES * WARP;
    static constexpr int ROW = BN + VECTOR; // of the sums in shared memory: [slice][BM][ROW]

    static __device__ __forceinline__ int slice() { return threadIdx.x / WARP / TEAM; }

    // Where in its row of them a column lies: of 32 the halves change places from 16 rows to the next, as lanes that
    // write together are 16 rows apart.
    static __device__ __forceinline__ int place(int row, int column) { return BN == 32 ? column ^ (row & 16) : column; }
};

// A warp's units, one after the other: `multiply` takes what a lane holds of both operands. row, column: the warp's
// first ones.
template <class Tile, int WIDTH_A, int WIDTH_B, bool TURNED_A, bool TURNED_B, class Multiply>
__device__ __forceinline__ void read_units(
    const Factors<TURNED_A, TURNED_B> &of, int row, int column, const Multiply &multiply) {
    typedef typename Tile::Unit Unit;
    constexpr int AHEAD = Tile::AHEAD, STRIDE = Tile::SLICES * UNIT_K;
    T rows[AHEAD][4][Unit::TM], columns[AHEAD][4][Unit::COLUMNS];
    const auto read = [&](int i, int k0) {
        Fragments<Unit, Unit::TM, Unit::CHUNK_M, TURNED_A, WIDTH_A>::load(
            rows[i], of.a, of.m, of.m % Tile::BM == 0, row + Unit::row(0), of.k, k0);
        Fragments<Unit, Unit::COLUMNS, Unit::CHUNK_N, !TURNED_B, WIDTH_B>::load(
            columns[i], of.b, of.n, of.n % Tile::BN == 0, column + Unit::column_b(0), of.k, k0);
    };
    const int begin = Tile::slice() * UNIT_K;
    #pragma unroll
    for (int i = 0; i < AHEAD; i++) read(i, begin + i * STRIDE);
    for (int first = begin; first < of.k; first += AHEAD * STRIDE) {
        #pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int k0 = first + i * STRIDE;
            if (k0 >= of.k) break;
            multiply(rows[i], columns[i]);
            if (k0 + AHEAD * STRIDE < of.k) read(i, k0 + AHEAD * STRIDE);
        }
    }
}

// The same of operands that both lie as [k][line], by copies of a unit or two in shared memory.
template <class Tile, class Factors, class Multiply>
__device__ __forceinline__ void copied_units(const Factors &of, int row, int column, const Multiply &multiply) {
    typedef typename Tile::Unit Unit;
    typedef Slab<Unit::WM> Left;
    typedef Slab<Unit::WN> Right;
    constexpr int AHEAD = Tile::AHEAD < 2 ? Tile::AHEAD : 2, STRIDE = Tile::SLICES * UNIT_K;
    constexpr int SIZE = Left::SIZE + Right::SIZE;
    T *own = (T *)shared_bytes + threadIdx.x / WARP * SIZE;
    const auto slab = [&](int i) { return own + i * (Tile::THREADS / WARP * SIZE); };
    const auto copy = [&](int i, int k0) {
        Left::copy(slab(i), of.a, of.m, of.m % Tile::BM == 0, row, of.k, k0);
        Right::copy(slab(i) + Left::SIZE, of.b, of.n, of.n % Tile::BN == 0, column, of.k, k0);
        end_group();
    };
    const int begin = Tile::slice() * UNIT_K;
    #pragma unroll
    for (int i = 0; i < AHEAD; i++) copy(i, begin + i * STRIDE);
    int i = 0;
    #pragma unroll 1 // unrolled, it takes more registers than there are for three blocks on a multiprocessor
    for (int k0 = begin; k0 < of.k; k0 += STRIDE) {
        wait_groups<AHEAD - 1>();
        __syncwarp();
        T rows[4][Unit::TM], columns[4][Unit::COLUMNS];
        Left::template read<Unit::CHUNK_M>(rows, slab(i), Unit::row(0), Unit::lane_c());
        Right::template read<Unit::CHUNK_N>(columns, slab(i) + Left::SIZE, Unit::column_b(0), Unit::lane_c());
        __syncwarp();
        copy(i, k0 + AHEAD * STRIDE);
        multiply(rows, columns);
        i = i + 1 == AHEAD ? 0 : i + 1;
    }
    // Sums are written over the copies: of each warp over its own, or else all wait.
    if (SIZE != Unit::WM * Tile::ROW || Tile::WARPS_N > 1) __syncthreads();
}

// As gemm_block in gemm/gemm.cuh; k is not cut: splits is 1.
template <class Tile, bool TURNED_A, bool TURNED_B, int WIDTH_A, int WIDTH_B, int WIDTH_C, class Out>
__device__ __forceinline__ void direct_block(
    const T *a, const T *b, const Out &out, int m, int n, int k, int splits, int block, int split) {
    typedef typename Tile::Unit Unit;
    constexpr int BM = Tile::BM, BN = Tile::BN;
    constexpr int TM = Unit::TM, TN = Unit::TN, COLUMNS = Unit::COLUMNS;
    const TileAt at(block, (m + BM - 1) / BM, (n + BN - 1) / BN);
    const int64_t item = at.item;
    const int m0 = at.down * BM, n0 = at.across * BN;
    const Factors<TURNED_A, TURNED_B> factors = {a + item * m * k, b + item * k * n, m, n, k};

    const int warp = threadIdx.x / WARP, slice = Tile::slice();
    const int down = warp % Tile::TEAM / Tile::WARPS_N * Unit::WM, right = warp % Tile::WARPS_N * Unit::WN;
    T *shared = (T *)shared_bytes;
    T sums[TM][TN] = {};
    Share<BM, BN, WIDTH_C, Tile::THREADS, Out> share(at, m, n);
    // Both need registers while the warps multiply: what lies beside the product, and sums of the small products.
    constexpr bool EARLY = TM * TN < 32, APART = EARLY && !Unit::EXACT;
    T rest[TM][TN] = {};
    if (EARLY) share.read(out);

    const auto multiply = [&](const T(&rows)[4][TM], const T(&columns)[4][COLUMNS]) {
        #pragma unroll
        for (int j = 0; j < 4; j += Unit::DEPTH) {
            typename Unit::Numbers numbers;
            #pragma unroll
            for (int d = 0; d < Unit::DEPTH; d++) {
                #pragma unroll
                for (int h = 0; h < TM; h++) numbers.left[d][h] = rows[j + d][h];
                #pragma unroll
                for (int h = 0; h < COLUMNS; h++) numbers.right[d][h] = columns[j + d][h];
            }
            Unit::multiply_step(sums, APART ? rest : sums, typename Unit::Operands(numbers));
        }
    };
    if constexpr (TURNED_A && !TURNED_B && WIDTH_A == VECTOR && WIDTH_B == VECTOR && sizeof(T) == 4)
        copied_units<Tile>(factors, m0 + down, n0 + right, multiply);
    else
        read_units<Tile, WIDTH_A, WIDTH_B>(factors, m0 + down, n0 + right, multiply);

    #pragma unroll
    for (int i = 0; i < TM; i++) {
        #pragma unroll
        for (int j = 0; j < TN; j += Unit::CHUNK_N) {
            Vector<T, Unit::CHUNK_N> v;
            #pragma unroll
            for (int h = 0; h < Unit::CHUNK_N; h++)
                v.lane[h] = APART ? sums[i][j + h] + rest[i][j + h] : sums[i][j + h];
            const int within = i % Unit::CHUNK_M, row = down + Unit::row(i - within);
            T *const line = shared + (slice * BM + row) * Tile::ROW + Tile::place(row, right + Unit::column(j));
            store(line, within * Tile::ROW, v);
        }
    }
    if (!EARLY) share.read(out);
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < share.COUNT; i++) {
        if (!share.inside(i)) continue;
        const int down = share.down(i);
        T value[WIDTH_C] = {};
        #pragma unroll
        for (int s = 0; s < Tile::SLICES; s++) {
            const Vector<T, WIDTH_C> v =
                load<T, WIDTH_C>(shared + (s * BM + down) * Tile::ROW + Tile::place(down, share.right(i)));
            #pragma unroll
            for (int h = 0; h < WIDTH_C; h++) value[h] += v.lane[h];
        }
        bool all = true;
        #pragma unroll
        for (int h = 0; h < WIDTH_C; h++) all &= finite(value[h]);
        if (!Unit::EXACT && !all) {
            #pragma unroll
            for (int h = 0; h < WIDTH_C; h++) {
                if (!finite(value[h])) value[h] = factors.plain(share.row(i), share.column(i) + h, 0, k);
            }
        }
        out.write(share.beside[i], share.index(i), value);
    }
}
