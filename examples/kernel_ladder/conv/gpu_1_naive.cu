// Idea: one thread computes one output; neighbouring threads take neighbouring pixels, so loads are coalesced.
// Gain: none, this is the start; each multiply-add needs two loads.
// launch: grid (width/32, height/8, images*out/1), block (32, 8), 0 bytes of shared memory
// x (images, in, height + 2, width + 2) is padded; w (out, in, 3, 3); y (images, out, height, width)
extern "C" __global__ void step(const float *x, const float *w, float *y, int images, int in, int out, int height,
                                int width) {
    int column = blockIdx.x * 32 + threadIdx.x, row = blockIdx.y * 8 + threadIdx.y;
    int image = blockIdx.z / out, o = blockIdx.z % out, pitch = width + 2, plane = (height + 2) * pitch;
    float sum = 0;
    for (int c = 0; c < in; c++)
        for (int dy = 0; dy < 3; dy++)
            for (int dx = 0; dx < 3; dx++)
                sum += x[(image * in + c) * plane + (row + dy) * pitch + column + dx] *
                       w[((o * in + c) * 3 + dy) * 3 + dx];
    y[((image * out + o) * height + row) * width + column] = sum;
}
