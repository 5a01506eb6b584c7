// Trilinear interpolation, and its gradient by the features. A thread computes WIDE neighbouring features of one point, so
// that a warp reads and writes whole cache lines; the eight corners are read or written once each.
#include "common/common.cuh"

__device__ __forceinline__ void corner_weights(const T *point, T *weights) {
    const T x = (point[0] + 1) / 2, y = (point[1] + 1) / 2, z = (point[2] + 1) / 2;
    #pragma unroll
    for (int c = 0; c < 8; c++) weights[c] = (c & 4 ? x : 1 - x) * (c & 2 ? y : 1 - y) * (c & 1 ? z : 1 - z);
}

KERNEL trilinear(const T *feats, const T *points, T *out, int64_t count, int64_t features) {
    wait_for_inputs();
    for (int64_t i = grid_index() * WIDE; i < count * features; i += grid_size() * WIDE) {
        const int64_t n = i / features, f = i % features;
        T weights[8];
        corner_weights(points + 3 * n, weights);
        Vector<T, WIDE> sum = {};
        #pragma unroll
        for (int c = 0; c < 8; c++) {
            const Vector<T, WIDE> x = load<T, WIDE>(feats + (8 * n + c) * features + f);
            #pragma unroll
            for (int h = 0; h < WIDE; h++) sum.lane[h] = fma(weights[c], x.lane[h], sum.lane[h]);
        }
        store(out, i, sum);
    }
}

KERNEL trilinear_grad(const T *ct, const T *points, T *out, int64_t count, int64_t features) {
    wait_for_inputs();
    for (int64_t i = grid_index() * WIDE; i < count * features; i += grid_size() * WIDE) {
        const int64_t n = i / features, f = i % features;
        T weights[8];
        corner_weights(points + 3 * n, weights);
        const Vector<T, WIDE> u = load<T, WIDE>(ct + i);
        #pragma unroll
        for (int c = 0; c < 8; c++) {
            Vector<T, WIDE> x;
            #pragma unroll
            for (int h = 0; h < WIDE; h++) x.lane[h] = weights[c] * u.lane[h];
            store(out, (8 * n + c) * features + f, x);
        }
    }
}
