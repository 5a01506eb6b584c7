// Idea: cp.async copies tiles from global to shared memory without registers, and three tiles are on their way at once.
// Gain: the latency of global memory is hidden behind three tiles of work; nothing where arithmetic is the limit.
// launch: grid (n/128, m/128), block (256, 1), 73728 bytes of shared memory
#include "../async.cuh"

constexpr int DEPTH = 16, STAGES = 4, A_PITCH = DEPTH + 4; // 4 floats more avoid bank conflicts
constexpr int A_SIZE = 128 * A_PITCH, B_SIZE = DEPTH * 128;

__device__ float4 load4(const float *from) { return *reinterpret_cast<const float4 *>(from); }

extern "C" __global__ void __launch_bounds__(256)
    step(const float *a, const float *b, float *c, int m, int n, int k) {
    extern __shared__ __align__(16) float shared[]; // STAGES tiles of a, then STAGES tiles of b
    int thread = threadIdx.x, x = thread % 16, y = thread / 16;
    a += blockIdx.y * 128 * k;
    b += blockIdx.x * 128;
    c += blockIdx.y * 128 * n + blockIdx.x * 128;
    auto begin_copy = [&](int tile) {
        float *a_tile = shared + tile % STAGES * A_SIZE, *b_tile = shared + STAGES * A_SIZE + tile % STAGES * B_SIZE;
        for (int i = thread; tile * DEPTH < k && i < 128 * DEPTH / 4; i += 256) {
            int row = i / (DEPTH / 4), column = i % (DEPTH / 4) * 4;
            copy_16_bytes(a_tile + row * A_PITCH + column, a + row * k + tile * DEPTH + column);
            copy_16_bytes(b_tile + i * 4, b + (tile * DEPTH + i / 32) * n + i % 32 * 4);
        }
        end_group();
    };
    for (int tile = 0; tile < STAGES - 1; tile++) begin_copy(tile);
    float sum[8][8] = {};
    for (int tile = 0; tile * DEPTH < k; tile++) {
        wait_for_groups<STAGES - 2>();
        __syncthreads(); // this tile has arrived, and all have read the one before, whose place is free
        begin_copy(tile + STAGES - 1);
        float *a_tile = shared + tile % STAGES * A_SIZE, *b_tile = shared + STAGES * A_SIZE + tile % STAGES * B_SIZE;
        for (int l = 0; l < DEPTH; l += 4) {
            __align__(16) float left[8][4], right[8];
            for (int i = 0; i < 8; i++)
                *reinterpret_cast<float4 *>(left[i]) = load4(a_tile + (y + 16 * i) * A_PITCH + l);
            for (int part = 0; part < 4; part++) {
                for (int half = 0; half < 2; half++)
                    *reinterpret_cast<float4 *>(right + 4 * half) =
                        load4(b_tile + (l + part) * 128 + 64 * half + 4 * x);
                for (int i = 0; i < 8; i++)
                    for (int j = 0; j < 8; j++) sum[i][j] += left[i][part] * right[j];
            }
        }
    }
    for (int i = 0; i < 8; i++)
        for (int half = 0; half < 2; half++)
            *reinterpret_cast<float4 *>(c + (y + 16 * i) * n + 64 * half + 4 * x) =
                *reinterpret_cast<float4 *>(&sum[i][4 * half]);
}
