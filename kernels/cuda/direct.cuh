// The engine of products of small matrices, where waiting is what takes the time: operands go from memory straight to
// the registers of the lanes that multiply them, all reads of a warp at once, with no barrier on the way.
//
// The warps of a block form SLICES teams, each of which owns every SLICES-th unit of 16 k; a warp of a team owns WM x
// WN of the BM x BN tile. The teams' sums meet in shared memory, after the only barrier, and are added in their order.
#pragma once
#include "staged.cuh"

constexpr int UNIT_K = 16; // k of a unit, of which a lane holds four neighbours

// This lane's share of a unit of an operand, whose lines are the rows of op(A) or the columns of op(B). KEPT: the
// operand lies in memory as [k][line], else as [line][k]; WIDE_ of its elements may be read at once.
template <class Unit, int LINES, int CHUNK, bool KEPT, int WIDE_> struct Fragments {
    static constexpr int WIDE = WIDE_ < (KEPT ? CHUNK : 4) ? WIDE_ : (KEPT ? CHUNK : 4);

    // first: the first line of the lane's chunks, which are 8 CHUNK apart; at: the unit's first k.
    static __device__ __forceinline__ void load(
        T (&to)[4][LINES], const T *x, int length, int first, int k, int at) {
        const int k0 = at + Unit::lane_c() * 4;
        if (KEPT) {
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                #pragma unroll
                for (int j = 0; j < LINES; j += WIDE) {
                    const int line = first + j / CHUNK * (8 * CHUNK) + j % CHUNK;
                    Vector<T, WIDE> v = {};
                    if (k0 + i < k && line < length) v = ::load<T, WIDE>(x + (int64_t)(k0 + i) * length + line);
                    #pragma unroll
                    for (int h = 0; h < WIDE; h++) to[i][j + h] = v.lane[h];
                }
            }
        } else {
            #pragma unroll
            for (int j = 0; j < LINES; j++) {
                const int line = first + j / CHUNK * (8 * CHUNK) + j % CHUNK;
                #pragma unroll
                for (int i = 0; i < 4; i += WIDE) {
                    Vector<T, WIDE> v = {};
                    if (k0 + i < k && line < length) v = ::load<T, WIDE>(x + (int64_t)line * k + k0 + i);
                    #pragma unroll
                    for (int h = 0; h < WIDE; h++) to[i + h][j] = v.lane[h];
                }
            }
        }
    }
};

// The tunables; AHEAD: how many units a warp reads at once.
template <int BM_, int BN_, int SLICES_, int AHEAD_, class Unit_> struct Direct {
    typedef Unit_ Unit;
    static constexpr int BM = BM_, BN = BN_, SLICES = SLICES_, AHEAD = AHEAD_;
    static constexpr int WARPS_N = BN / Unit::WN, TEAM = BM / Unit::WM * WARPS_N, THREADS = TEAM * SLICES * WARP;
    static constexpr int ROW = BN + VECTOR; // of the sums in shared memory: [slice][BM][ROW]
};

// As gemm_block in gemm.cuh; k is not cut: splits is 1.
template <class Tile, bool TURNED_A, bool TURNED_B, int WIDTH_A, int WIDTH_B, int WIDTH_C, class Out>
__device__ __forceinline__ void direct_block(
    const T *a, const T *b, const Out &out, int m, int n, int k, int splits, int block, int split) {
    typedef typename Tile::Unit Unit;
    constexpr int BM = Tile::BM, BN = Tile::BN, AHEAD = Tile::AHEAD;
    constexpr int TM = Unit::TM, TN = Unit::TN, COLUMNS = Unit::COLUMNS;
    const TileAt at(block, (m + BM - 1) / BM, (n + BN - 1) / BN);
    const int64_t item = at.item;
    const int m0 = at.down * BM, n0 = at.across * BN;
    const Factors<TURNED_A, TURNED_B> factors = {a + item * m * k, b + item * k * n, m, n, k};

    const int warp = threadIdx.x / WARP, slice = warp / Tile::TEAM;
    const int down = warp % Tile::TEAM / Tile::WARPS_N * Unit::WM, right = warp % Tile::WARPS_N * Unit::WN;
    T rows[AHEAD][4][TM], columns[AHEAD][4][COLUMNS], sums[TM][TN] = {};
    const auto read = [&](int i, int k0) {
        Fragments<Unit, TM, Unit::CHUNK_M, TURNED_A, WIDTH_A>::load(
            rows[i], factors.a, m, m0 + down + Unit::row(0), k, k0);
        Fragments<Unit, COLUMNS, Unit::CHUNK_N, !TURNED_B, WIDTH_B>::load(
            columns[i], factors.b, n, n0 + right + Unit::column_b(0), k, k0);
    };
    constexpr int STRIDE = Tile::SLICES * UNIT_K;
    #pragma unroll
    for (int i = 0; i < AHEAD; i++) read(i, slice * UNIT_K + i * STRIDE);

    Share<BM, BN, WIDTH_C, Tile::THREADS, Out> share(at, m, n);
    constexpr bool EARLY = share.COUNT == 1; // else there are no registers for it while the warps multiply
    if (EARLY) share.read(out);

    for (int first = slice * UNIT_K; first < k; first += AHEAD * STRIDE) {
        #pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int k0 = first + i * STRIDE;
            if (k0 >= k) break;
            #pragma unroll
            for (int j = 0; j < 4; j += Unit::DEPTH) {
                typename Unit::Numbers numbers;
                #pragma unroll
                for (int d = 0; d < Unit::DEPTH; d++) {
                    #pragma unroll
                    for (int h = 0; h < TM; h++) numbers.left[d][h] = rows[i][j + d][h];
                    #pragma unroll
                    for (int h = 0; h < COLUMNS; h++) numbers.right[d][h] = columns[i][j + d][h];
                }
                Unit::multiply_step(sums, typename Unit::Operands(numbers));
            }
            if (k0 + AHEAD * STRIDE < k) read(i, k0 + AHEAD * STRIDE);
        }
    }

    if (!EARLY) share.read(out);
    T *shared = (T *)shared_bytes;
    #pragma unroll
    for (int i = 0; i < TM; i++) {
        #pragma unroll
        for (int j = 0; j < TN; j += Unit::CHUNK_N) {
            Vector<T, Unit::CHUNK_N> v;
            #pragma unroll
            for (int h = 0; h < Unit::CHUNK_N; h++) v.lane[h] = sums[i][j + h];
            store(shared + (slice * BM + down + Unit::row(i)) * Tile::ROW + right + Unit::column(j), 0, v);
        }
    }
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < share.COUNT; i++) {
        if (!share.inside(i)) continue;
        T value[WIDTH_C] = {};
        #pragma unroll
        for (int s = 0; s < Tile::SLICES; s++) {
            const Vector<T, WIDTH_C> v =
                load<T, WIDTH_C>(shared + (s * BM + share.down(i)) * Tile::ROW + share.right(i));
            #pragma unroll
            for (int h = 0; h < WIDTH_C; h++) value[h] += v.lane[h];
        }
        if (!Unit::EXACT) {
            #pragma unroll
            for (int h = 0; h < WIDTH_C; h++) {
                if (!finite(value[h])) value[h] = factors.plain(share.row(i), share.column(i) + h, 0, k);
            }
        }
        out.write(share.beside[i], share.index(i), value);
    }
}
