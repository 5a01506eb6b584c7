// Idea: a thread computes 8 x 8 elements of c in registers, from 8 elements of a and 8 of b for each l.
// Gain: 64 multiply-adds use 16 loads from shared memory, where the step before uses 128; three to five times.
// launch: grid (n/128, m/128), block (256, 1), 0 bytes of shared memory
extern "C" __global__ void __launch_bounds__(256)
    step(const float *a, const float *b, float *c, int m, int n, int k) {
    __shared__ float a_tile[8][128 + 1], b_tile[8][128]; // a transposed; one more column avoids bank conflicts
    int thread = threadIdx.x, x = thread % 16, y = thread / 16;
    a += blockIdx.y * 128 * k;
    b += blockIdx.x * 128;
    c += blockIdx.y * 128 * n + blockIdx.x * 128;
    float sum[8][8] = {};
    for (int start = 0; start < k; start += 8) {
        for (int i = thread; i < 128 * 8; i += 256) {
            a_tile[i % 8][i / 8] = a[i / 8 * k + start + i % 8];
            b_tile[i / 128][i % 128] = b[(start + i / 128) * n + i % 128];
        }
        __syncthreads();
        for (int l = 0; l < 8; l++) {
            float left[8], right[8];
            for (int i = 0; i < 8; i++) left[i] = a_tile[l][y + 16 * i];
            for (int j = 0; j < 8; j++) right[j] = b_tile[l][x + 16 * j];
            for (int i = 0; i < 8; i++)
                for (int j = 0; j < 8; j++) sum[i][j] += left[i] * right[j];
        }
        __syncthreads();
    }
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 8; j++) c[(y + 16 * i) * n + x + 16 * j] = sum[i][j];
}
