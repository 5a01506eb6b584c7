// standardize: mean 0 and variance 1 over the reduced ones of four lengths in turns, k0 r0 k1 r1.
#include "group.cuh"

// A block for each statistic. Three passes over its elements: mean, mean square of what is left, result.
KERNEL standardize(const T *x, T *y, T *means, T *variances, int64_t k0, int64_t r0, int64_t k1, int64_t r1, double eps)
{
    wait_for_inputs();
    const int64_t start = (blockIdx.x / k1 * r0 * k1 + blockIdx.x % k1) * r1, count = r0 * r1;
    const Runs runs = {r0, r1, k1 * r1};
    T sum = 0, squares = 0;
    for (int64_t r = threadIdx.x; r < count; r += blockDim.x)
        sum += x[start + runs.place(r)];
    const T mean = over_block<Sum>(sum) / (T)count;
    for (int64_t r = threadIdx.x; r < count; r += blockDim.x) {
        const T centred = x[start + runs.place(r)] - mean;
        squares += centred * centred;
    }
    const T variance = over_block<Sum>(squares) / (T)count;
    const T inverse = 1 / sqrt(variance + (T)eps);
    for (int64_t r = threadIdx.x; r < count; r += blockDim.x) {
        const int64_t i = start + runs.place(r);
        y[i] = (x[i] - mean) * inverse;
    }
    if (threadIdx.x == 0) {
        means[blockIdx.x] = mean;
        variances[blockIdx.x] = variance;
    }
}
