// Idea: tensor cores multiply; a warp computes 64 x 32 elements of c by products (16, 8) (8, 8) of TF32 numbers.
// Gain: one instruction makes 1,024 multiply-adds; three to five times, but factors have only 10 bits of mantissa.
// launch: grid (n/128, m/128), block (256, 1), 107520 bytes of shared memory
#include "../async.cuh"
#include "../mma.cuh"

constexpr int DEPTH = 32, STAGES = 3, A_PITCH = DEPTH + 4, B_PITCH = 128 + 8; // without bank conflicts
constexpr int A_SIZE = 128 * A_PITCH, B_SIZE = DEPTH * B_PITCH;

extern "C" __global__ void __launch_bounds__(256, 2)
    step(const float *a, const float *b, float *c, int m, int n, int k) {
    extern __shared__ __align__(16) float shared[]; // STAGES tiles of a, then STAGES tiles of b
    int thread = threadIdx.x, g = thread % 32 / 4, t = thread % 4;
    int row = thread / 32 / 4 * 64, column = thread / 32 % 4 * 32; // of this warp in the block's 128 x 128
    a += blockIdx.y * 128 * k;
    b += blockIdx.x * 128;
    c += (blockIdx.y * 128 + row) * n + blockIdx.x * 128 + column;
    auto begin_copy = [&](int tile) {
        float *a_tile = shared + tile % STAGES * A_SIZE, *b_tile = shared + STAGES * A_SIZE + tile % STAGES * B_SIZE;
        for (int i = thread; tile * DEPTH < k && i < 128 * DEPTH / 4; i += 256) {
            int y = i / (DEPTH / 4), x = i % (DEPTH / 4) * 4;
            copy_16_bytes(a_tile + y * A_PITCH + x, a + y * k + tile * DEPTH + x);
            copy_16_bytes(b_tile + i / 32 * B_PITCH + i % 32 * 4, b + (tile * DEPTH + i / 32) * n + i % 32 * 4);
        }
        end_group();
    };
    for (int tile = 0; tile < STAGES - 1; tile++) begin_copy(tile);
    float sum[4][4][4] = {};
    for (int tile = 0; tile * DEPTH < k; tile++) {
        wait_for_groups<STAGES - 2>();
        __syncthreads(); // this tile has arrived, and all have read the one before, whose place is free
        begin_copy(tile + STAGES - 1);
        float *a_tile = shared + tile % STAGES * A_SIZE + (row + g) * A_PITCH + t;
        float *b_tile = shared + STAGES * A_SIZE + tile % STAGES * B_SIZE + t * B_PITCH + column + g;
        for (int l = 0; l < DEPTH; l += 8) {
            unsigned right[4][2];
            for (int j = 0; j < 4; j++)
                for (int i = 0; i < 2; i++) right[j][i] = tf32(b_tile[(l + 4 * i) * B_PITCH + 8 * j]);
            for (int i = 0; i < 4; i++) {
                unsigned left[4];
                for (int e = 0; e < 4; e++) left[e] = tf32(a_tile[(16 * i + e % 2 * 8) * A_PITCH + l + e / 2 * 4]);
                for (int j = 0; j < 4; j++) mma_tf32(sum[i][j], left, right[j]);
            }
        }
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++)
            for (int e = 0; e < 4; e++) c[(16 * i + e / 2 * 8 + g) * n + 8 * j + 2 * t + e % 2] = sum[i][j][e];
}
