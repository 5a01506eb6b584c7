// Idea: neighbouring threads of a warp take neighbouring columns, so their loads of b and stores to c are coalesced.
// Gain: a load of b is 128 contiguous bytes and a load of a is one address for the warp; about ten times.
// launch: grid (n/32, m/8), block (32, 8), 0 bytes of shared memory
extern "C" __global__ void step(const float *a, const float *b, float *c, int m, int n, int k) {
    int row = blockIdx.y * 8 + threadIdx.y, column = blockIdx.x * 32 + threadIdx.x;
    float sum = 0;
    for (int l = 0; l < k; l++) sum += a[row * k + l] * b[l * n + column];
    c[row * n + column] = sum;
}
