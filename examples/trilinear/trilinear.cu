// Trilinear interpolation, and its gradient by the features. A thread reads and writes WIDE neighbouring features at a time,
// and a warp whole cache lines.
#include "common/common.cuh"

__device__ __forceinline__ T corner_weight(const T *point, int c) {
    const T x = (point[0] + 1) / 2, y = (point[1] + 1) / 2, z = (point[2] + 1) / 2;
    return (c & 4 ? x : 1 - x) * (c & 2 ? y : 1 - y) * (c & 1 ? z : 1 - z);
}

// A thread adds the eight corners of one point.
KERNEL trilinear(const T *feats, const T *points, T *out, int64_t count, int64_t features) {
    wait_for_inputs();
    for (int64_t i = grid_index() * WIDE; i < count * features; i += grid_size() * WIDE) {
        const int64_t n = i / features, f = i % features;
        Vector<T, WIDE> sum = {};
        #pragma unroll
        for (int c = 0; c < 8; c++) {
            const T weight = corner_weight(points + 3 * n, c);
            const Vector<T, WIDE> x = load<T, WIDE>(feats + (8 * n + c) * features + f);
            #pragma unroll
            for (int h = 0; h < WIDE; h++) sum.lane[h] = fma(weight, x.lane[h], sum.lane[h]);
        }
        store(out, i, sum);
    }
}

// A block writes the eight corners of one point, in the order of memory.
KERNEL trilinear_grad(const T *ct, const T *points, T *out, int64_t count, int64_t features) {
    wait_for_inputs();
    const int64_t n = blockIdx.x;
    for (unsigned i = threadIdx.x * WIDE; i < 8 * features; i += blockDim.x * WIDE) {
        const unsigned c = i / (unsigned)features, f = i % (unsigned)features;
        const T weight = corner_weight(points + 3 * n, c);
        const Vector<T, WIDE> u = load<T, WIDE>(ct + n * features + f);
        Vector<T, WIDE> x;
        #pragma unroll
        for (int h = 0; h < WIDE; h++) x.lane[h] = weight * u.lane[h];
        store(out, 8 * n * features + i, x);
    }
}
