// Idea: each output is a sum over the input channels and the 3 x 3 filter, in loops as in the formula.
// Gain: none, this is the start; one sum at a time waits for the addition before it.
// x (images, in, height + 2, width + 2) is padded; w (out, in, 3, 3); y (images, out, height, width)
void step(const float *x, const float *w, float *y, int images, int in, int out, int height, int width) {
    int pitch = width + 2, plane = (height + 2) * pitch;
    for (int image = 0; image < images; image++)
        for (int o = 0; o < out; o++)
            for (int row = 0; row < height; row++)
                for (int column = 0; column < width; column++) {
                    float sum = 0;
                    for (int c = 0; c < in; c++)
                        for (int dy = 0; dy < 3; dy++)
                            for (int dx = 0; dx < 3; dx++)
                                sum += x[(image * in + c) * plane + (row + dy) * pitch + column + dx] *
                                       w[((o * in + c) * 3 + dy) * 3 + dx];
                    y[((image * out + o) * height + row) * width + column] = sum;
                }
}
