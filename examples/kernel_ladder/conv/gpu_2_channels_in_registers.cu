// Idea: a thread computes one pixel of 16 output channels, so that each input that it loads is used 16 times.
// Gain: 16 multiply-adds use one load of the input, and weights that are the same for the warp; two to four times.
// launch: grid (width/32, height/8, images*out/16), block (32, 8), 0 bytes of shared memory
extern "C" __global__ void step(const float *x, const float *w, float *y, int images, int in, int out, int height,
                                int width) {
    int column = blockIdx.x * 32 + threadIdx.x, row = blockIdx.y * 8 + threadIdx.y;
    int image = blockIdx.z / (out / 16), o = blockIdx.z % (out / 16) * 16;
    int pitch = width + 2, plane = (height + 2) * pitch;
    float sum[16] = {};
    for (int c = 0; c < in; c++)
        for (int dy = 0; dy < 3; dy++)
            for (int dx = 0; dx < 3; dx++) {
                float input = x[(image * in + c) * plane + (row + dy) * pitch + column + dx];
                for (int i = 0; i < 16; i++) sum[i] += input * w[(((o + i) * in + c) * 3 + dy) * 3 + dx];
            }
    for (int i = 0; i < 16; i++) y[((image * out + o + i) * height + row) * width + column] = sum[i];
}
