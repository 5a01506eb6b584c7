// Idea: a block copies tiles of a and b (32, 32) to shared memory, and each thread reads its 64 elements from there.
// Gain: global memory and L2 are read 32 times less; shared memory is the limit, with two loads a multiply-add.
// launch: grid (n/32, m/32), block (32, 32), 0 bytes of shared memory
extern "C" __global__ void step(const float *a, const float *b, float *c, int m, int n, int k) {
    __shared__ float a_tile[32][32], b_tile[32][32];
    int x = threadIdx.x, y = threadIdx.y;
    int row = blockIdx.y * 32 + y, column = blockIdx.x * 32 + x;
    float sum = 0;
    for (int start = 0; start < k; start += 32) {
        a_tile[y][x] = a[row * k + start + x];
        b_tile[y][x] = b[(start + y) * n + column];
        __syncthreads();
        for (int l = 0; l < 32; l++) sum += a_tile[y][l] * b_tile[l][x];
        __syncthreads();
    }
    c[row * n + column] = sum;
}
