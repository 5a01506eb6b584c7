// Idea: the block holds its row in registers, loads and stores 16 bytes at a time, and combines by warp shuffles.
// Gain: x is read once, not three times, and there are two barriers a sum; it comes near the speed of a copy.
// launch: grid (rows/1), block (256, 1), 0 bytes of shared memory
constexpr int EACH = 4; // vectors of a thread: the row has 256 * 4 * EACH elements

template <class Combine> __device__ float over_block(float value, float *of_warps, Combine combine) {
    for (int lane = 16; lane > 0; lane /= 2) value = combine(value, __shfl_xor_sync(~0u, value, lane));
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
    __syncthreads();
    value = of_warps[threadIdx.x % 8];
    for (int lane = 4; lane > 0; lane /= 2) value = combine(value, __shfl_xor_sync(~0u, value, lane));
    return value;
}

extern "C" __global__ void __launch_bounds__(256) step(const float *x, float *y, int rows, int columns) {
    __shared__ float maxima[8], sums[8];
    auto from = reinterpret_cast<const float4 *>(x + blockIdx.x * columns) + threadIdx.x;
    auto to = reinterpret_cast<float4 *>(y + blockIdx.x * columns) + threadIdx.x;
    float4 v[EACH];
    for (int i = 0; i < EACH; i++) v[i] = from[256 * i];
    float largest = v[0].x, sum = 0;
    for (float4 u : v) largest = fmaxf(largest, fmaxf(fmaxf(u.x, u.y), fmaxf(u.z, u.w)));
    largest = over_block(largest, maxima, [](float a, float b) { return fmaxf(a, b); });
    for (float4 &u : v) {
        u = {__expf(u.x - largest), __expf(u.y - largest), __expf(u.z - largest), __expf(u.w - largest)};
        sum += u.x + u.y + u.z + u.w;
    }
    sum = over_block(sum, sums, [](float a, float b) { return a + b; });
    for (int i = 0; i < EACH; i++) to[256 * i] = {v[i].x / sum, v[i].y / sum, v[i].z / sum, v[i].w / sum};
}
