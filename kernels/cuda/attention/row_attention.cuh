// Attention of short sequences inside a kernel that takes whole sequences through a chain of equations, row by row.
//
// x has the rows of q, k and v side by side: ROWS rows of 3 HEADS WIDTH elements, LENGTH rows for each sequence. LANES
// neighbouring threads share a row of a head; each holds some columns of it, and all of them the scores of the row.
#pragma once
#include "common/collectives.cuh"

template <typename A, int THREADS, int ROWS, int LENGTH, int HEADS, int WIDTH, bool CAUSAL> struct RowAttention {
    static constexpr int LANES = 8, MINE = (WIDTH + LANES - 1) / LANES, ACROSS = HEADS * WIDTH, PITCH = 3 * ACROSS;
    static constexpr int COUNT = ROWS * HEADS; // rows of all heads

    int head, row, first, lane; // first: the first row of the sequence

    // Calls body() with the place of this thread for each row of each head. t: the thread's number.
    template <typename Body> __device__ __forceinline__ void for_each_row(int t, Body body) {
        lane = t % LANES;
        for (int start = 0; start < COUNT; start += THREADS / LANES) {
            if (start + t / WARP * WARP / LANES >= COUNT) continue; // no lane of this warp has a row
            const int at = start + t / LANES < COUNT ? start + t / LANES : COUNT - 1;
            head = at / ROWS, row = at % ROWS, first = row / LENGTH * LENGTH;
            body(start + t / LANES < COUNT);
        }
    }

    // This thread's columns of a row of WIDTH elements.
    __device__ __forceinline__ void load(A (&to)[MINE], const A *from) const {
        #pragma unroll
        for (int i = 0; i < MINE; i++) to[i] = lane * MINE + i < WIDTH ? from[lane * MINE + i] : (A)0;
    }
    __device__ __forceinline__ void put(A *to, const A (&from)[MINE]) const {
        #pragma unroll
        for (int i = 0; i < MINE; i++)
            if (lane * MINE + i < WIDTH) to[lane * MINE + i] = from[i];
    }
    // The row of q (0), k (1) or v (2).
    __device__ __forceinline__ int64_t place(int part, int at) const { return at * PITCH + part * ACROSS + head * WIDTH; }

    // products[j] = the product of `mine` by row j of the sequence, in all lanes.
    __device__ __forceinline__ void multiply(A (&products)[LENGTH], const A (&mine)[MINE], const A *x, int part) const {
        #pragma unroll
        for (int j = 0; j < LENGTH; j++) {
            A other[MINE], sum = 0;
            load(other, x + place(part, first + j));
            #pragma unroll
            for (int i = 0; i < MINE; i++) sum = fma(mine[i], other[i], sum);
            products[j] = over_lanes<Sum, LANES>(sum);
        }
    }

    // The value of a lane of this row.
    static __device__ __forceinline__ A of_lane(A value, int which) {
        return __shfl_sync(FULL_MASK, value, threadIdx.x % WARP / LANES * LANES + which);
    }

    __device__ __forceinline__ bool visible(int j) const { return !CAUSAL || first + j <= row; }

    // out: ROWS rows of all heads; logsumexp: (sequence, head, row).
    __device__ __forceinline__ void forward(int t, const A *x, A *out, A *logsumexp, A scale) {
        for_each_row(t, [&](bool live) {
            A q[MINE], scores[LENGTH], top = -(A)INFINITY, total = 0;
            load(q, x + place(0, row));
            multiply(scores, q, x, 1);
            #pragma unroll
            for (int j = 0; j < LENGTH; j++) {
                scores[j] = visible(j) ? scores[j] * scale : -(A)INFINITY;
                top = Max::of(top, scores[j]);
            }
            // Each lane computes some exponentials.
            A own[(LENGTH + LANES - 1) / LANES];
            #pragma unroll
            for (int j = 0; j < LENGTH; j++)
                if (j % LANES == lane) own[j / LANES] = exp(scores[j] - top);
            #pragma unroll
            for (int j = 0; j < LENGTH; j++) {
                scores[j] = of_lane(own[j / LANES], j % LANES);
                total += scores[j];
            }
            A sums[MINE] = {};
            #pragma unroll
            for (int j = 0; j < LENGTH; j++) {
                A value[MINE];
                load(value, x + place(2, first + j));
                #pragma unroll
                for (int i = 0; i < MINE; i++) sums[i] = fma(scores[j], value[i], sums[i]);
            }
            #pragma unroll
            for (int i = 0; i < MINE; i++) sums[i] /= total;
            if (live) put(out + row * ACROSS + head * WIDTH, sums);
            if (live && lane == 0) logsumexp[(first * HEADS + head * LENGTH) + row - first] = log(total) + top;
        });
    }

    // The cotangent of q, and for backward_keys() the probabilities and the cotangents of the scores: COUNT rows of LENGTH each.
    __device__ __forceinline__ void backward_queries(
        int t, const A *x, const A *out, const A *logsumexp, const A *ct, A *grad, A *probabilities, A scale) {
        A *const ct_scores = probabilities + COUNT * LENGTH;
        for_each_row(t, [&](bool live) {
            A q[MINE], mine[MINE], value[MINE], scores[LENGTH], products[LENGTH], delta = 0;
            load(q, x + place(0, row));
            load(mine, ct + row * ACROSS + head * WIDTH);
            load(value, out + row * ACROSS + head * WIDTH);
            #pragma unroll
            for (int i = 0; i < MINE; i++) delta = fma(mine[i], value[i], delta);
            delta = over_lanes<Sum, LANES>(delta);
            multiply(scores, q, x, 1);
            multiply(products, mine, x, 2);
            const A sums = logsumexp[(first * HEADS + head * LENGTH) + row - first];
            A *const own = probabilities + (head * ROWS + row) * LENGTH, *const own_ct = ct_scores + (own - probabilities);
            #pragma unroll
            for (int j = 0; j < LENGTH; j++) {
                if (j % LANES != lane) continue;
                const A probability = visible(j) ? exp(scores[j] * scale - sums) : (A)0;
                const A of_score = probability * (products[j] - delta) * scale;
                products[j] = of_score;
                if (live) own[j] = probability, own_ct[j] = of_score;
            }
            A sum[MINE] = {};
            #pragma unroll
            for (int j = 0; j < LENGTH; j++) {
                const A weight = of_lane(products[j], j % LANES);
                load(value, x + place(1, first + j));
                #pragma unroll
                for (int i = 0; i < MINE; i++) sum[i] = fma(weight, value[i], sum[i]);
            }
            if (live) put(grad + place(0, row), sum);
        });
    }

    // The cotangents of k and v.
    __device__ __forceinline__ void backward_keys(int t, const A *x, const A *ct, A *grad, const A *probabilities) {
        const A *const ct_scores = probabilities + COUNT * LENGTH;
        for_each_row(t, [&](bool live) {
            A keys[MINE] = {}, values[MINE] = {}, other[MINE];
            #pragma unroll
            for (int i = 0; i < LENGTH; i++) {
                const int at = (head * ROWS + first + i) * LENGTH + row - first;
                const A weight = probabilities[at], of_score = ct_scores[at];
                load(other, ct + (first + i) * ACROSS + head * WIDTH);
                #pragma unroll
                for (int h = 0; h < MINE; h++) values[h] = fma(weight, other[h], values[h]);
                load(other, x + place(0, first + i));
                #pragma unroll
                for (int h = 0; h < MINE; h++) keys[h] = fma(of_score, other[h], keys[h]);
            }
            if (live) put(grad + place(1, row), keys), put(grad + place(2, row), values);
        });
    }
};
