// Attention of short sequences inside a row-product kernel, whose blocks take whole sequences through a chain of equations.
//
// x has the rows of q, k and v side by side: 3 HEADS WIDTH elements for each row, LENGTH rows for each sequence. A warp
// computes TILE rows of a head by tensor cores: their scores are one tile, in which keys of other sequences are masked.
#pragma once
#include "common/collectives.cuh"
#include "gemm/small_gemm.cuh"

template <int ROWS, int LENGTH, int HEADS, int WIDTH, bool CAUSAL> struct RowAttention {
    static constexpr int TILE = 16, ACROSS = HEADS * WIDTH, PITCH = 3 * ACROSS, TASKS = ROWS / TILE * HEADS;
    static_assert(TILE % LENGTH == 0 && ROWS % TILE == 0 && WIDTH % 16 == 0, "a tile has whole sequences");
    static constexpr int SCRATCH = TASKS * 2 * TILE * TILE; // elements

    // An operand of a product: element (row, k) is at from[row * STRIDE + k] (K_MAJOR) or from[k * STRIDE + row].
    template <int STRIDE_, bool K_MAJOR_> struct Matrix {
        static constexpr int STRIDE = STRIDE_;
        static constexpr bool K_MAJOR = K_MAJOR_;
        const T *from;
        __device__ __forceinline__ T at(int row, int k) const { return from[K_MAJOR ? row * STRIDE + k : k * STRIDE + row]; }
    };

    // A product of TILE rows and COLUMNS columns. NEIGHBOURS: the most neighbouring columns of a lane.
    template <int COLUMNS, int NEIGHBOURS> struct Product {
        typedef Mma<TILE, COLUMNS, BF16X3, 1, NEIGHBOURS> WarpOp;
        static constexpr int TM = WarpOp::TM, TN = WarpOp::TN;
        static_assert(WarpOp::COLUMNS % WarpOp::CHUNK_N == 0, "a lane has whole chunks of neighbours");
        T sums[TM][TN] = {};

        // sums += a b over K. OWN: K runs over the rows of the tile, and a row needs only those of its own sequence.
        template <int K, bool OWN, class A, class B> __device__ __forceinline__ void multiply(const A &a, const B &b) {
            #pragma unroll
            for (int k = 0; k < K; k += K_STEP) {
                typename WarpOp::Fragments fragments;
                LaneOperand<WarpOp, TM, 1, A::K_MAJOR, VECTOR>::load(
                    fragments.a, a.from, A::STRIDE, true, WarpOp::row(0), A::STRIDE, k);
                LaneOperand<WarpOp, WarpOp::COLUMNS, WarpOp::CHUNK_N, B::K_MAJOR, VECTOR>::load(
                    fragments.b, b.from, B::STRIDE, true, WarpOp::column_b(0), B::STRIDE, k);
                WarpOp::multiply_step(sums, typename WarpOp::Operands(fragments));
            }
            bool all = true; // BF16X3 turns infinities into NaN
            for_each([&](int, int, T &sum) { all &= finite(sum); });
            if (all) return;
            for_each([&](int row, int column, T &sum) {
                if (finite(sum)) return;
                sum = 0;
                const int begin = OWN ? row / LENGTH * LENGTH : 0, end = OWN ? begin + LENGTH : K;
                #pragma unroll 1
                for (int k = begin; k < end; k++) sum = fma(a.at(row, k), b.at(column, k), sum);
            });
        }

        // Calls body(row, column, element) for this lane's elements.
        template <typename Body> __device__ __forceinline__ void for_each(Body body) {
            #pragma unroll
            for (int i = 0; i < TM; i++)
                #pragma unroll
                for (int j = 0; j < TN; j++) body(WarpOp::row(i), WarpOp::column(j), sums[i][j]);
        }

        __device__ __forceinline__ void store(T *to, int stride) {
            #pragma unroll
            for (int i = 0; i < TM; i++) {
                #pragma unroll
                for (int j = 0; j < TN; j += WarpOp::CHUNK_N) {
                    Vector<T, WarpOp::CHUNK_N> v;
                    #pragma unroll
                    for (int h = 0; h < WarpOp::CHUNK_N; h++) v.lane[h] = sums[i][j + h];
                    ::store(to, WarpOp::row(i) * stride + WarpOp::column(j), v);
                }
            }
        }
    };

    typedef Product<TILE, 1> Scores;
    typedef Product<WIDTH, WIDTH == 48 ? 2 : VECTOR> Columns; // of queries, keys, values or the output

    // Calls body(head, first row of the tile) for this warp's tiles. t: the thread's number.
    template <int THREADS, typename Body> static __device__ __forceinline__ void for_each_task(int t, Body body) {
        for (int task = t / WARP; task < TASKS; task += THREADS / WARP) body(task, task % HEADS, task / HEADS * TILE);
    }

    static __device__ __forceinline__ bool visible(int row, int column) {
        return row / LENGTH == column / LENGTH && (!CAUSAL || column <= row);
    }
    // The logsumexp of a row is at (sequence, head, row of the sequence).
    static __device__ __forceinline__ int place(int head, int row) {
        return (row / LENGTH * HEADS + head) * LENGTH + row % LENGTH;
    }

    // out: ROWS rows of all heads. scratch: SCRATCH elements.
    template <int THREADS>
    static __device__ __forceinline__ void forward(int t, const T *x, T *out, T *logsumexp, T *scratch, T scale) {
        for_each_task<THREADS>(t, [&](int task, int head, int first) {
            const T *q = x + first * PITCH + head * WIDTH;
            T *const probabilities = scratch + task * TILE * TILE;
            Scores scores;
            scores.template multiply<WIDTH, false>(Matrix<PITCH, true>{q}, Matrix<PITCH, true>{q + ACROSS});
            T tops[Scores::TM], totals[Scores::TM];
            #pragma unroll
            for (int i = 0; i < Scores::TM; i++) {
                const int row = Scores::WarpOp::row(i);
                T top = -(T)INFINITY, total = 0;
                #pragma unroll
                for (int j = 0; j < Scores::TN; j++) {
                    T &score = scores.sums[i][j];
                    score = visible(row, Scores::WarpOp::column(j)) ? score * scale : -(T)INFINITY;
                    top = Max::of(top, score);
                }
                tops[i] = top = over_lanes<Max, 4>(top);
                #pragma unroll
                for (int j = 0; j < Scores::TN; j++) {
                    T &score = scores.sums[i][j];
                    score = exp(score - top);
                    total += score;
                }
                totals[i] = over_lanes<Sum, 4>(total);
                const T inverse = 1 / totals[i];
                #pragma unroll
                for (int j = 0; j < Scores::TN; j++) scores.sums[i][j] *= inverse;
                if (Scores::WarpOp::lane_c() == 0) logsumexp[place(head, first + row)] = log(totals[i]) + tops[i];
            }
            scores.store(probabilities, TILE);
            __syncwarp();
            Columns sums;
            sums.template multiply<TILE, true>(Matrix<TILE, true>{probabilities}, Matrix<PITCH, false>{q + 2 * ACROSS});
            sums.store(out + first * ACROSS + head * WIDTH, ACROSS);
        });
    }

    // grad: the cotangents of q, k and v, side by side as in x.
    template <int THREADS>
    static __device__ __forceinline__ void backward(
        int t, const T *x, const T *out, const T *logsumexp, const T *ct, T *grad, T *scratch, T scale) {
        for_each_task<THREADS>(t, [&](int task, int head, int first) {
            const T *q = x + first * PITCH + head * WIDTH, *own_ct = ct + first * ACROSS + head * WIDTH;
            const T *own_out = out + first * ACROSS + head * WIDTH;
            T *const probabilities = scratch + task * 2 * TILE * TILE, *const ct_scores = probabilities + TILE * TILE;
            T *const own_grad = grad + first * PITCH + head * WIDTH;
            Scores scores, products;
            scores.template multiply<WIDTH, false>(Matrix<PITCH, true>{q}, Matrix<PITCH, true>{q + ACROSS});
            products.template multiply<WIDTH, false>(Matrix<ACROSS, true>{own_ct}, Matrix<PITCH, true>{q + 2 * ACROSS});
            #pragma unroll
            for (int i = 0; i < Scores::TM; i++) {
                const int row = Scores::WarpOp::row(i);
                T delta = 0;
                #pragma unroll
                for (int k = 0; k < WIDTH; k += 16) {
                    const int at = row * ACROSS + k + Scores::WarpOp::lane_c() * 4;
                    const Vector<T, 4> a = load<T, 4>(own_ct + at), b = load<T, 4>(own_out + at);
                    #pragma unroll
                    for (int h = 0; h < 4; h++) delta = fma(a.lane[h], b.lane[h], delta);
                }
                delta = over_lanes<Sum, 4>(delta);
                const T sums = logsumexp[place(head, first + row)];
                #pragma unroll
                for (int j = 0; j < Scores::TN; j++) {
                    T &score = scores.sums[i][j], &product = products.sums[i][j];
                    score = visible(row, Scores::WarpOp::column(j)) ? exp(score * scale - sums) : (T)0;
                    product = score * (product - delta) * scale;
                }
            }
            scores.store(probabilities, TILE);
            products.store(ct_scores, TILE);
            __syncwarp();
            Columns queries, keys, values;
            queries.template multiply<TILE, true>(Matrix<TILE, true>{ct_scores}, Matrix<PITCH, false>{q + ACROSS});
            queries.store(own_grad, PITCH);
            keys.template multiply<TILE, true>(Matrix<TILE, false>{ct_scores}, Matrix<PITCH, false>{q});
            keys.store(own_grad + ACROSS, PITCH);
            values.template multiply<TILE, true>(Matrix<TILE, false>{probabilities}, Matrix<ACROSS, false>{own_ct});
            values.store(own_grad + 2 * ACROSS, PITCH);
        });
    }
};
