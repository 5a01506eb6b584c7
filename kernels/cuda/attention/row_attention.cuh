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
    static constexpr int SCRATCH = TASKS * 3 * TILE * TILE; // elements

    // An operand of a product: element (row, k) is at from[row * stride + k] (K_MAJOR_) or from[k * stride + row].
    template <bool K_MAJOR_> struct Matrix {
        static constexpr bool K_MAJOR = K_MAJOR_;
        const T *from;
        int stride;
        __device__ __forceinline__ T at(int row, int k) const { return from[K_MAJOR ? row * stride + k : k * stride + row]; }
    };

    // A product of TILE rows and COLUMNS columns. NEIGHBOURS: the most neighbouring columns of a lane.
    template <int COLUMNS, int NEIGHBOURS> struct Product {
        typedef Mma<TILE, COLUMNS, BF16X3, 1, NEIGHBOURS> WarpOp;
        static constexpr int TM = WarpOp::TM, TN = WarpOp::TN;
        static_assert(WarpOp::COLUMNS % WarpOp::CHUNK_N == 0, "a lane has whole chunks of neighbours");
        T sums[TM][TN] = {};

        // This lane's elements of the operands of a product over K: [K step][k][row of A or column of B].
        template <int K> struct RowsOfA {
            T steps[K / K_STEP][4][TM];

            template <class A> __device__ __forceinline__ RowsOfA(const A &a) {
                #pragma unroll
                for (int i = 0; i < K / K_STEP; i++)
                    LaneOperand<WarpOp, TM, 1, A::K_MAJOR, VECTOR>::load(
                        steps[i], a.from, a.stride, true, WarpOp::row(0), A::K_MAJOR ? a.stride : K, i * K_STEP);
            }
        };
        template <int K> struct ColumnsOfB {
            T steps[K / K_STEP][4][WarpOp::COLUMNS];

            template <class B> __device__ __forceinline__ ColumnsOfB(const B &b) {
                #pragma unroll
                for (int i = 0; i < K / K_STEP; i++)
                    LaneOperand<WarpOp, WarpOp::COLUMNS, WarpOp::CHUNK_N, B::K_MAJOR, VECTOR>::load(
                        steps[i], b.from, b.stride, true, WarpOp::column_b(0), B::K_MAJOR ? b.stride : K, i * K_STEP);
            }
        };

        // sums += a b
        template <int K> __device__ __forceinline__ void multiply(const RowsOfA<K> &a, const ColumnsOfB<K> &b) {
            #pragma unroll
            for (int i = 0; i < K / K_STEP; i++) multiply_k_step<WarpOp>(sums, sums, a.steps[i], b.steps[i]);
        }

        __device__ __forceinline__ bool all_finite() const {
            bool all = true;
            #pragma unroll
            for (int i = 0; i < TM * TN; i++) all &= finite(sums[i / TN][i % TN]);
            return all;
        }

        // Computes this lane's sums that are not finite again by FMA, because BF16X3 turns infinities into NaN. `stored` is where
        // store() wrote them. It is a loop over memory: code for each sum in its register would be half of the kernel's code.
        // OWN: K runs over the rows of the tile, and a row needs only those of its own sequence.
        template <int K, bool OWN, class A, class B>
        static __device__ __forceinline__ void recompute_non_finite(T *stored, int stride, const A &a, const B &b) {
            #pragma unroll 1
            for (int i = 0; i < TM * TN; i++) {
                const int row = WarpOp::row(i / TN), column = WarpOp::column(i % TN);
                T sum = stored[row * stride + column];
                if (finite(sum)) continue;
                sum = 0;
                const int begin = OWN ? row / LENGTH * LENGTH : 0, end = OWN ? begin + LENGTH : K;
                #pragma unroll 1
                for (int k = begin; k < end; k++) sum = fma(a.at(row, k), b.at(column, k), sum);
                stored[row * stride + column] = sum;
            }
        }

        __device__ __forceinline__ void store(T *to, int stride) const {
            #pragma unroll
            for (int i = 0; i < TM; i++) {
                #pragma unroll
                for (int j = 0; j < TN; j += WarpOp::CHUNK_N) {
                    Vector<T, WarpOp::CHUNK_N> v;
                    #pragma unroll
                    for (int h = 0; h < WarpOp::CHUNK_N; h++) v.lane[h] = sums[i][j + h];
                    // Without the alignment the compiler may make four stores of one.
                    T *const at = to + WarpOp::row(i) * stride + WarpOp::column(j);
                    ::store((T *)__builtin_assume_aligned(at, sizeof(v)), 0, v);
                }
            }
        }

        // to[column * stride + row] = the sum
        __device__ __forceinline__ void store_transposed(T *to, int stride) const {
            #pragma unroll
            for (int i = 0; i < TM; i++)
                #pragma unroll
                for (int j = 0; j < TN; j++) to[WarpOp::column(j) * stride + WarpOp::row(i)] = sums[i][j];
        }
    };

    typedef Product<TILE, 1> Scores;
    typedef Product<WIDTH, WIDTH == 48 ? 2 : VECTOR> Columns; // of queries, keys, values or the output
    typedef typename Scores::template RowsOfA<WIDTH> ScoresA;
    typedef typename Scores::template ColumnsOfB<WIDTH> ScoresB;
    typedef typename Columns::template ColumnsOfB<TILE> ColumnsB;

    // scores += a b, whose elements are in `rows` and `columns`. scratch: TILE x TILE elements of the warp, to overwrite.
    template <class A, class B> static __device__ __forceinline__ void multiply_scores(
        Scores &scores, const A &a, const ScoresA &rows, const B &b, const ScoresB &columns, T *scratch) {
        scores.template multiply<WIDTH>(rows, columns);
        if (scores.all_finite()) return;
        scores.store(scratch, TILE);
        Scores::template recompute_non_finite<WIDTH, false>(scratch, TILE, a, b);
        #pragma unroll
        for (int i = 0; i < Scores::TM; i++)
            #pragma unroll
            for (int j = 0; j < Scores::TN; j++)
                scores.sums[i][j] = scratch[Scores::WarpOp::row(i) * TILE + Scores::WarpOp::column(j)];
    }

    // to = a b, which has WIDTH columns. columns: the elements of b.
    template <class A, class B> static __device__ __forceinline__ void multiply_columns(
        T *to, int stride, const A &a, const B &b, const ColumnsB &columns) {
        Columns product;
        product.template multiply<TILE>(typename Columns::template RowsOfA<TILE>(a), columns);
        product.store(to, stride);
        if (!product.all_finite()) Columns::template recompute_non_finite<TILE, true>(to, stride, a, b);
    }

    // Calls body(task, head, first row of the tile) for this warp's tiles. t: the thread's number.
    template <int THREADS, typename Body> static __device__ __forceinline__ void for_each_task(int t, Body body) {
        constexpr int WARPS = THREADS / WARP;
        const auto run = [&](int task) {
            if (ROWS == TILE)
                body(task, task, 0);
            else
                body(task, task % HEADS, task / HEADS * TILE);
        };
        const int warp = (unsigned)t / WARP;
        if (TASKS > WARPS)
            for (int task = warp; task < TASKS; task += WARPS) run(task);
        else if (TASKS == WARPS || warp < TASKS) // without a loop, from which the compiler would move the addresses
            run(warp);
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
            const Matrix<true> queries = {q, PITCH}, keys = {q + ACROSS, PITCH};
            const Matrix<false> values = {q + 2 * ACROSS, PITCH};
            const ColumnsB v_columns(values);
            __syncwarp(); // the compiler does not move loads beyond it
            Scores scores;
            multiply_scores(scores, queries, queries, keys, keys, probabilities);
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
            multiply_columns(out + first * ACROSS + head * WIDTH, ACROSS, Matrix<true>{probabilities, TILE}, values, v_columns);
        });
    }

    // grad: the cotangents of q, k and v, side by side as in x.
    template <int THREADS>
    static __device__ __forceinline__ void backward(
        int t, const T *x, const T *out, const T *logsumexp, const T *ct, T *grad, T *scratch, T scale) {
        for_each_task<THREADS>(t, [&](int task, int head, int first) {
            const T *q = x + first * PITCH + head * WIDTH, *own_ct = ct + first * ACROSS + head * WIDTH;
            const T *own_out = out + first * ACROSS + head * WIDTH;
            T *const operands = scratch + task * 3 * TILE * TILE;
            T *const own_grad = grad + first * PITCH + head * WIDTH;
            const Matrix<true> queries = {q, PITCH}, keys = {q + ACROSS, PITCH}, values = {q + 2 * ACROSS, PITCH};
            const Matrix<true> cts = {own_ct, ACROSS}, outs = {own_out, ACROSS};
            const ScoresA ct_rows(cts), out_rows(outs);
            const ScoresB v_rows(values);
            __syncwarp(); // the compiler does not move loads beyond it
            const ScoresA q_rows(queries);
            const ScoresB k_rows(keys);
            T sums[Scores::TM];
            #pragma unroll
            for (int i = 0; i < Scores::TM; i++) sums[i] = logsumexp[place(head, first + Scores::WarpOp::row(i))];
            Scores scores, products;
            multiply_scores(scores, queries, q_rows, keys, k_rows, operands);
            multiply_scores(products, cts, ct_rows, values, v_rows, operands);
            #pragma unroll
            for (int i = 0; i < Scores::TM; i++) {
                const int row = Scores::WarpOp::row(i);
                T delta = 0;
                #pragma unroll
                for (int k = 0; k < WIDTH / K_STEP; k++)
                    #pragma unroll
                    for (int h = 0; h < 4; h++) delta = fma(ct_rows.steps[k][h][i], out_rows.steps[k][h][i], delta);
                delta = over_lanes<Sum, 4>(delta);
                #pragma unroll
                for (int j = 0; j < Scores::TN; j++) {
                    T &score = scores.sums[i][j], &product = products.sums[i][j];
                    score = visible(row, Scores::WarpOp::column(j)) ? exp(score * scale - sums[i]) : (T)0;
                    product = score * (product - delta) * scale;
                }
            }
            // The first operands of the products for the cotangents of q, k and v, one after another.
            products.store(operands, TILE);
            products.store_transposed(operands + TILE * TILE, TILE);
            scores.store_transposed(operands + 2 * TILE * TILE, TILE);
            __syncwarp();
            #pragma unroll 1 // less code, which the warps wait for when they run it first
            for (int i = 0; i < 3; i++) {
                const Matrix<true> a = {operands + i * TILE * TILE, TILE};
                const Matrix<false> b = {i == 0 ? q + ACROSS : i == 1 ? q : own_ct, i < 2 ? PITCH : ACROSS};
                multiply_columns(own_grad + i * ACROSS, PITCH, a, b, ColumnsB(b));
            }
        });
    }
};
