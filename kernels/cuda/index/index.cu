// Gathers and scatters. One thread computes an element of the result. It adds in the order of the indices, without atomics, so
// each run gives the same bits. An index out of range sets *bad and is skipped.
#include "common/common.cuh"

#ifndef WIDTH
#define WIDTH 1
#endif

static __device__ __forceinline__ bool valid(U index, int64_t length, int *bad) {
    const bool found = (int64_t)index >= 0 && (int64_t)index < length;
    if (!found) *bad = 1;
    return found;
}

template <typename I>
static __device__ __forceinline__ void take_vectors(const T *x, const U *indices, T *y, int64_t outer, int64_t length,
                                             int64_t inner, int64_t count, int *bad) {
    const Divisor<I> by_inner(inner / WIDTH), by_count(count);
    for (int64_t g = grid_index(); g < outer * count * inner / WIDTH; g += grid_size()) {
        I i = (I)g, j = by_inner(i);
        const I o = by_count(j);
        const U index = indices[j];
        Vector<T, WIDTH> v = {};
        if (valid(index, length, bad))
            v = load<T, WIDTH>(x + ((int64_t)o * length + index) * inner + (int64_t)i * WIDTH);
        store(y, g * WIDTH, v);
    }
}

// y[o, j, i] = x[o, indices[j], i] for x (outer, length, inner); inner is a multiple of WIDTH.
KERNEL take(const T *x, const U *indices, T *y, int64_t outer, int64_t length, int64_t inner, int64_t count, int *bad) {
    wait_for_inputs();
    if (outer * count * inner < (int64_t)1 << 31)
        take_vectors<uint32_t>(x, indices, y, outer, length, inner, count, bad);
    else
        take_vectors<int64_t>(x, indices, y, outer, length, inner, count, bad);
}

// y[o, l, i] = sum of ct[o, j, i] over the j with indices[j] == l
KERNEL scatter_add(const T *ct, const U *indices, T *y, int64_t outer, int64_t length, int64_t inner, int64_t count,
                   int *bad) {
    wait_for_inputs();
    for (int64_t k = grid_index(); k < outer * length * inner; k += grid_size()) {
        const int64_t i = k % inner, l = k / inner % length, o = k / inner / length;
        TotalOf<T>::type sum = 0;
        for (int64_t j = 0; j < count; j++) {
            const U index = indices[j];
            if (valid(index, length, bad) && (int64_t)index == l) sum += ct[(o * count + j) * inner + i];
        }
        y[k] = (T)sum;
    }
}

// y[o, j, i] = x[o, indices[o, j, i], i]
KERNEL take_along_axis(const T *x, const U *indices, T *y, int64_t outer, int64_t length, int64_t inner, int64_t count,
                       int *bad) {
    wait_for_inputs();
    for (int64_t k = grid_index(); k < outer * count * inner; k += grid_size()) {
        const int64_t i = k % inner, o = k / inner / count;
        const U index = indices[k];
        y[k] = valid(index, length, bad) ? x[(o * length + index) * inner + i] : (T)0;
    }
}

// y is x (outer, before, length, inner), but y[o, p, positions[o], i] = rows[o, p, i]. If y is x, only the rows are written.
// inner is a multiple of WIDTH.
KERNEL put_rows(const T *x, const T *rows, const U *positions, T *y, int64_t outer, int64_t before, int64_t length,
                int64_t inner, int *bad) {
    wait_for_inputs();
    const int64_t vectors = inner / WIDTH, parts = outer * before;
    if (x != y)
        for (int64_t g = grid_index(); g < parts * length * vectors; g += grid_size()) {
            const int64_t part = g / (length * vectors), l = g / vectors % length;
            if (l != (int64_t)positions[part / before]) store(y, g * WIDTH, load<T, WIDTH>(x + g * WIDTH));
        }
    for (int64_t g = grid_index(); g < parts * vectors; g += grid_size()) {
        const int64_t part = g / vectors, i = g % vectors;
        const U position = positions[part / before];
        if (valid(position, length, bad))
            store(y, (part * length + position) * inner + i * WIDTH, load<T, WIDTH>(rows + g * WIDTH));
    }
}

// y[o, l, i] = sum of ct[o, j, i] over the j with indices[o, j, i] == l. The first launch stores zeros. In the second a thread
// adds the elements of one (o, i), in the order of j.
KERNEL clear_along_axis(const T *, const U *, T *y, int64_t outer, int64_t length, int64_t inner, int64_t, int *) {
    wait_for_inputs();
    for (int64_t g = grid_index(); g < outer * length * inner / WIDTH; g += grid_size())
        store(y, g * WIDTH, Vector<T, WIDTH>{});
}

KERNEL scatter_along_axis(const T *ct, const U *indices, T *y, int64_t outer, int64_t length, int64_t inner,
                          int64_t count, int *bad) {
    wait_for_inputs();
    for (int64_t k = grid_index(); k < outer * inner; k += grid_size()) {
        const int64_t i = k % inner, o = k / inner;
        for (int64_t j = 0; j < count; j++) {
            const int64_t at = (o * count + j) * inner + i;
            const U index = indices[at];
            if (valid(index, length, bad)) y[(o * length + index) * inner + i] += ct[at];
        }
    }
}

template <typename I>
static __device__ __forceinline__ void scatter_one_vectors(const T *ct, const U *indices, T *y, int64_t outer,
                                                           int64_t length, int64_t inner, int *bad) {
    const Divisor<I> by_inner(inner), by_length(length);
    for (int64_t g = grid_index(); g < outer * length * inner / WIDTH; g += grid_size()) {
        I i = (I)(g * WIDTH), l = by_inner(i);
        const int64_t at = (int64_t)by_length(l) * inner + i;
        Vector<T, WIDTH> v;
        #pragma unroll
        for (int k = 0; k < WIDTH; k++) { // of one row, or of neighbouring columns
            const int64_t position = inner == 1 ? at : at + k;
            const U index = indices[position];
            const bool here = (int64_t)index == (int64_t)l + (inner == 1 ? k : 0);
            v.lane[k] = valid(index, length, bad) && here ? ct[position] : (T)0;
        }
        store(y, g * WIDTH, v);
    }
}

// The same for one index per (o, i), in one launch. WIDTH divides the last axis of y.
KERNEL scatter_one(const T *ct, const U *indices, T *y, int64_t outer, int64_t length, int64_t inner, int64_t, int *bad) {
    wait_for_inputs();
    if (outer * length * inner < (int64_t)1 << 31)
        scatter_one_vectors<uint32_t>(ct, indices, y, outer, length, inner, bad);
    else
        scatter_one_vectors<int64_t>(ct, indices, y, outer, length, inner, bad);
}

KERNEL one_hot(const U *indices, T *y, int64_t count, int64_t classes, int *bad) {
    wait_for_inputs();
    for (int64_t k = grid_index(); k < count * classes; k += grid_size()) {
        const U index = indices[k / classes];
        y[k] = valid(index, classes, bad) && (int64_t)index == k % classes ? (T)1 : (T)0;
    }
}
