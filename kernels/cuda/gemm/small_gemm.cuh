// C = op(A) op(B) for small matrices, which are bound by latency. Each lane loads its operands from global memory directly to
// registers. All loads of a warp are in flight at once, and the first barrier is after the products.
//
// Sliced-K: the warps of a block form SLICES groups. Each takes every SLICES-th K step; a warp computes WM x WN of the BM x BN
// tile. Shared memory collects the slices' accumulators; after the only barrier they are added in order.
#pragma once
#include "gemm/gemm.cuh"

constexpr int K_STEP = 16; // k that a warp takes at a time; a lane holds four neighbours of them

// This lane's elements of an operand for one K step. Rows are those of op(A), or the columns of op(B). The operand is stored as
// [row][k] (K_MAJOR) or [k][row]; WIDE_ of its elements may be loaded at once.
template <class WarpOp, int ROWS, int CHUNK, bool K_MAJOR, int WIDE_> struct LaneOperand {
    static constexpr int MAX_WIDE = K_MAJOR ? 4 : CHUNK, WIDE = WIDE_ < MAX_WIDE ? WIDE_ : MAX_WIDE;

    // first: the first row of the lane's chunks, which are 8 CHUNK apart; at: the step's first k. whole: the number of rows is
    // a multiple of the tile's.
    static __device__ __forceinline__ void load(
        T (&to)[4][ROWS], const T *x, int length, bool whole, int first, int k, int at) {
        const int k0 = at + WarpOp::lane_c() * 4;
        const bool all_k = k % K_STEP == 0; // constant lengths leave no tests
        if (all_k && at >= k) return; // for the whole warp, which does not use the elements
        const auto inside = [&](int i, int row) { return (all_k || k0 + i < k) && (whole || row < length); };
        const T *from = K_MAJOR ? x + (int64_t)first * k + k0 : x + (int64_t)k0 * length + first;
        if (!K_MAJOR) {
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                #pragma unroll
                for (int j = 0; j < ROWS; j += WIDE) {
                    const int row = j / CHUNK * (8 * CHUNK) + j % CHUNK;
                    Vector<T, WIDE> v = {};
                    if (inside(i, first + row)) v = ::load<T, WIDE>(from + (int64_t)i * length + row);
                    #pragma unroll
                    for (int h = 0; h < WIDE; h++) to[i][j + h] = v.lane[h];
                }
            }
        } else {
            #pragma unroll
            for (int j = 0; j < ROWS; j++) {
                const int row = j / CHUNK * (8 * CHUNK) + j % CHUNK;
                #pragma unroll
                for (int i = 0; i < 4; i += WIDE) {
                    Vector<T, WIDE> v = {};
                    if (inside(i, first + row)) v = ::load<T, WIDE>(from + (int64_t)row * k + i);
                    #pragma unroll
                    for (int h = 0; h < WIDE; h++) to[i + h][j] = v.lane[h];
                }
            }
        }
    }
};

// A copy in shared memory, for one warp, of a K step of an operand that is stored as [k][row]: ROWS rows. Direct loads of four k
// by one request would conflict in L1.
template <int ROWS> struct WarpPanel {
    static constexpr int PITCH = ROWS + VECTOR, SIZE = K_STEP * PITCH, ACROSS = ROWS / VECTOR, DOWN = WARP / ACROSS;

    // From row `first` and k `at` on.
    static __device__ __forceinline__ void copy(
        T *panel, const T *x, int length, bool whole, int first, int k, int at) {
        const int down = threadIdx.x % WARP / ACROSS, row = threadIdx.x % ACROSS * VECTOR;
        const bool all_k = k % K_STEP == 0;
        if (at >= k) return; // for the whole warp, which does not use the panel
        const T *from = x + (int64_t)(at + down) * length + first + row;
        panel += down * PITCH + row;
        #pragma unroll
        for (int i = 0; i < K_STEP; i += DOWN) {
            const bool take = (all_k || at + down + i < k) && (whole || first + row < length);
            cp_async<16, true>(panel + i * PITCH, from + (int64_t)i * length, take);
        }
    }

    // The lane's chunks of rows, the first of which begins at `row`, for k = c, c + 4, c + 8, c + 12.
    template <int CHUNK, int COUNT> static __device__ __forceinline__ void read(
        T (&to)[4][COUNT], const T *panel, int row, int c) {
        #pragma unroll
        for (int i = 0; i < 4; i++) ::read<COUNT, CHUNK, 8 * CHUNK>(to[i], panel + (c + 4 * i) * PITCH + row);
    }
};

// PREFETCH: K steps that a warp loads ahead. SHARED: bytes of shared memory.
template <int BM_, int BN_, int SLICES_, int PREFETCH_, class WarpOp_, int SHARED_> struct SmallTile {
    typedef WarpOp_ WarpOp;
    static constexpr int BM = BM_, BN = BN_, SLICES = SLICES_, PREFETCH = PREFETCH_;
    static constexpr int WARPS_N = BN / WarpOp::WN, SLICE_WARPS = BM / WarpOp::WM * WARPS_N;
    static constexpr int THREADS = SLICE_WARPS * SLICES * WARP;
    static constexpr int ROW = BN + VECTOR; // accumulators in shared memory are [slice][BM][ROW]
    static constexpr int STAGED_STEPS = PREFETCH < 2 ? PREFETCH : 2; // of a warp, see for_each_staged_k_step()
    static constexpr int STAGED = THREADS / WARP * STAGED_STEPS * (WarpPanel<WarpOp::WM>::SIZE + WarpPanel<WarpOp::WN>::SIZE);
    static constexpr int SUMS = SLICES * BM * ROW, SHARED = SHARED_;

    static __device__ __forceinline__ int slice() { return threadIdx.x / WARP / SLICE_WARPS; }

    // A column's position in its row of accumulators. With 32 columns, every other 16 rows have their halves swapped: lanes that
    // write together are 16 rows apart and would conflict.
    static __device__ __forceinline__ int swizzled(int row, int column) { return BN == 32 ? column ^ (row & 16) : column; }
};

// Calls `multiply` with the lane's elements of both operands for each of the warp's K steps. row, column: the warp's first.
template <class Tile, int WIDTH_A, int WIDTH_B, bool TRANS_A, bool TRANS_B, class Multiply>
__device__ __forceinline__ void for_each_k_step(
    const Operands<TRANS_A, TRANS_B> &of, int row, int column, const Multiply &multiply) {
    typedef typename Tile::WarpOp WarpOp;
    constexpr int PREFETCH = Tile::PREFETCH, STRIDE = Tile::SLICES * K_STEP;
    T rows[PREFETCH][4][WarpOp::TM], columns[PREFETCH][4][WarpOp::COLUMNS];
    const auto load = [&](int i, int k0) {
        LaneOperand<WarpOp, WarpOp::TM, WarpOp::CHUNK_M, !TRANS_A, WIDTH_A>::load(
            rows[i], of.a, of.m, of.m % Tile::BM == 0, row + WarpOp::row(0), of.k, k0);
        LaneOperand<WarpOp, WarpOp::COLUMNS, WarpOp::CHUNK_N, TRANS_B, WIDTH_B>::load(
            columns[i], of.b, of.n, of.n % Tile::BN == 0, column + WarpOp::column_b(0), of.k, k0);
    };
    const int begin = Tile::slice() * K_STEP;
    #pragma unroll
    for (int i = 0; i < PREFETCH; i++) load(i, begin + i * STRIDE);
    for (int first = begin; first < of.k; first += PREFETCH * STRIDE) {
        #pragma unroll
        for (int i = 0; i < PREFETCH; i++) {
            const int k0 = first + i * STRIDE;
            if (k0 >= of.k) break;
            multiply(rows[i], columns[i]);
            if (k0 + PREFETCH * STRIDE < of.k) load(i, k0 + PREFETCH * STRIDE);
        }
    }
}

// The same for operands that are both stored as [k][row], through a warp's own copies of up to two K steps in shared memory.
template <class Tile, class Operands, class Multiply>
__device__ __forceinline__ void for_each_staged_k_step(const Operands &of, int row, int column, const Multiply &multiply) {
    typedef typename Tile::WarpOp WarpOp;
    typedef WarpPanel<WarpOp::WM> PanelA;
    typedef WarpPanel<WarpOp::WN> PanelB;
    constexpr int PREFETCH = Tile::STAGED_STEPS, STRIDE = Tile::SLICES * K_STEP;
    constexpr int SIZE = PanelA::SIZE + PanelB::SIZE;
    T *own = (T *)shared_bytes + threadIdx.x / WARP * SIZE;
    const auto panel = [&](int i) { return own + i * (Tile::THREADS / WARP * SIZE); };
    const auto copy = [&](int i, int k0) {
        PanelA::copy(panel(i), of.a, of.m, of.m % Tile::BM == 0, row, of.k, k0);
        PanelB::copy(panel(i) + PanelA::SIZE, of.b, of.n, of.n % Tile::BN == 0, column, of.k, k0);
        cp_async_commit_group();
    };
    const int begin = Tile::slice() * K_STEP;
    #pragma unroll
    for (int i = 0; i < PREFETCH; i++) copy(i, begin + i * STRIDE);
    int i = 0;
    #pragma unroll 1 // unrolled, it needs too many registers for three blocks on a multiprocessor
    for (int k0 = begin; k0 < of.k; k0 += STRIDE) {
        cp_async_wait_group<PREFETCH - 1>();
        __syncwarp();
        T rows[4][WarpOp::TM], columns[4][WarpOp::COLUMNS];
        PanelA::template read<WarpOp::CHUNK_M>(rows, panel(i), WarpOp::row(0), WarpOp::lane_c());
        PanelB::template read<WarpOp::CHUNK_N>(columns, panel(i) + PanelA::SIZE, WarpOp::column_b(0), WarpOp::lane_c());
        __syncwarp();
        copy(i, k0 + PREFETCH * STRIDE);
        multiply(rows, columns);
        i = i + 1 == PREFETCH ? 0 : i + 1;
    }
    // Accumulators overwrite the copies. All warps wait, unless each overwrites only its own copies.
    if (SIZE != WarpOp::WM * Tile::ROW || Tile::WARPS_N > 1) __syncthreads();
}

// Whether operands go through shared memory: both are stored as [k][row], in aligned vectors.
template <bool TRANS_A, bool TRANS_B, int WIDTH_A, int WIDTH_B>
constexpr bool is_staged = TRANS_A && !TRANS_B && WIDTH_A == VECTOR && WIDTH_B == VECTOR && sizeof(T) == 4;

// sums += the product of one K step. Products of low-order terms are added to `low`, if that is not `sums`.
template <class WarpOp>
__device__ __forceinline__ void multiply_k_step(T (&sums)[WarpOp::TM][WarpOp::TN], T (&low)[WarpOp::TM][WarpOp::TN],
    const T (&rows)[4][WarpOp::TM], const T (&columns)[4][WarpOp::COLUMNS]) {
    #pragma unroll
    for (int j = 0; j < 4; j += WarpOp::DEPTH) {
        typename WarpOp::Fragments fragments;
        #pragma unroll
        for (int d = 0; d < WarpOp::DEPTH; d++) {
            #pragma unroll
            for (int h = 0; h < WarpOp::TM; h++) fragments.a[d][h] = rows[j + d][h];
            #pragma unroll
            for (int h = 0; h < WarpOp::COLUMNS; h++) fragments.b[d][h] = columns[j + d][h];
        }
        WarpOp::multiply_step(sums, low, typename WarpOp::Operands(fragments));
    }
}

// As gemm_block in gemm/gemm.cuh; splits is 1.
template <class Tile, bool TRANS_A, bool TRANS_B, int WIDTH_A, int WIDTH_B, int WIDTH_C, class Out>
__device__ __forceinline__ void small_gemm_block(
    const T *a, const T *b, const Out &out, int m, int n, int k, int splits, int block, int split) {
    typedef typename Tile::WarpOp WarpOp;
    constexpr int BM = Tile::BM, BN = Tile::BN;
    constexpr int TM = WarpOp::TM, TN = WarpOp::TN, COLUMNS = WarpOp::COLUMNS;
    constexpr bool STAGED = is_staged<TRANS_A, TRANS_B, WIDTH_A, WIDTH_B>;
    static_assert(Tile::SHARED == (STAGED && Tile::STAGED > Tile::SUMS ? Tile::STAGED : Tile::SUMS) * sizeof(T),
        "SmallTile.shared in tiles.py");
    const TileCoord at(block, (m + BM - 1) / BM, (n + BN - 1) / BN);
    const int64_t item = at.item;
    const int m0 = at.row * BM, n0 = at.column * BN;
    const Operands<TRANS_A, TRANS_B> operands = {a + item * m * k, b + item * k * n, m, n, k};

    const int warp = threadIdx.x / WARP, slice = Tile::slice();
    const int warp_m = warp % Tile::SLICE_WARPS / Tile::WARPS_N * WarpOp::WM, warp_n = warp % Tile::WARPS_N * WarpOp::WN;
    T *shared = (T *)shared_bytes;
    T sums[TM][TN] = {};
    ThreadElements<BM, BN, WIDTH_C, Tile::THREADS, Out> own(at, m, n);
    // Fewer than 32 accumulators leave registers for auxiliary inputs that are loaded early, and for low-order accumulators.
    constexpr bool EARLY = TM * TN < 32, SEPARATE = EARLY && !WarpOp::KEEPS_NON_FINITE;
    T low[TM][TN] = {};
    if (EARLY) own.load_aux(out);

    const auto multiply = [&](const T(&rows)[4][TM], const T(&columns)[4][COLUMNS]) {
        multiply_k_step<WarpOp>(sums, SEPARATE ? low : sums, rows, columns);
    };
    if constexpr (STAGED)
        for_each_staged_k_step<Tile>(operands, m0 + warp_m, n0 + warp_n, multiply);
    else
        for_each_k_step<Tile, WIDTH_A, WIDTH_B>(operands, m0 + warp_m, n0 + warp_n, multiply);

    #pragma unroll
    for (int i = 0; i < TM; i++) {
        #pragma unroll
        for (int j = 0; j < TN; j += WarpOp::CHUNK_N) {
            Vector<T, WarpOp::CHUNK_N> v;
            #pragma unroll
            for (int h = 0; h < WarpOp::CHUNK_N; h++)
                v.lane[h] = SEPARATE ? sums[i][j + h] + low[i][j + h] : sums[i][j + h];
            const int within = i % WarpOp::CHUNK_M, row = warp_m + WarpOp::row(i - within);
            T *const to = shared + (slice * BM + row) * Tile::ROW + Tile::swizzled(row, warp_n + WarpOp::column(j));
            store(to, within * Tile::ROW, v);
        }
    }
    if (!EARLY) own.load_aux(out);
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < own.COUNT; i++) {
        if (!own.inside(i)) continue;
        const int row = own.tile_row(i);
        T value[WIDTH_C] = {};
        #pragma unroll
        for (int s = 0; s < Tile::SLICES; s++) {
            const Vector<T, WIDTH_C> v =
                load<T, WIDTH_C>(shared + (s * BM + row) * Tile::ROW + Tile::swizzled(row, own.tile_column(i)));
            #pragma unroll
            for (int h = 0; h < WIDTH_C; h++) value[h] += v.lane[h];
        }
        bool all = true;
        #pragma unroll
        for (int h = 0; h < WIDTH_C; h++) all &= finite(value[h]);
        if (!WarpOp::KEEPS_NON_FINITE && !all) {
            #pragma unroll
            for (int h = 0; h < WIDTH_C; h++) {
                if (!finite(value[h])) value[h] = operands.dot(own.row(i), own.column(i) + h, 0, k);
            }
        }
        out.write(own.aux[i], own.index(i), value);
    }
}
