// Idea: one thread computes one element of c; neighbouring threads of a warp take neighbouring rows.
// Gain: none, this is the start; a load of a and a store to c touch 32 rows, so 32 sectors for 128 useful bytes.
// launch: grid (n/8, m/32), block (32, 8), 0 bytes of shared memory
extern "C" __global__ void step(const float *a, const float *b, float *c, int m, int n, int k) {
    int row = blockIdx.y * 32 + threadIdx.x, column = blockIdx.x * 8 + threadIdx.y;
    float sum = 0;
    for (int l = 0; l < k; l++) sum += a[row * k + l] * b[l * n + column];
    c[row * n + column] = sum;
}
