/* Functions of layers.c with the compiler's vector extensions (gcc, clang), for --simd. A vector is 8 floats: one
   register of AVX, two of SSE or NEON. Outputs are computed in blocks, so that their sums stay in registers. */

typedef float vector __attribute__((vector_size(32), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))

/* Unrolls a loop of constant length, so that its sums stay in registers. */
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif

/* y = x weight + bias for `positions` rows and `vectors` vectors of outputs; both numbers are constants where this is
   inlined. A row of y has `pitch` numbers. */
INLINE void linear_block(const int positions, const int vectors, const float *x, int inputs, int outputs,
                         const float *weight, const float *bias, float *y, int pitch) {
    vector sum[4][4];
    UNROLL for (int p = 0; p < positions; p++)
        UNROLL for (int v = 0; v < vectors; v++) sum[p][v] = (vector){0};
    for (int i = 0; i < inputs; i++, weight += 8 * vectors)
        UNROLL for (int p = 0; p < positions; p++)
            UNROLL for (int v = 0; v < vectors; v++) sum[p][v] += *(const vector *)(weight + 8 * v) * x[p * inputs + i];
    UNROLL for (int p = 0; p < positions; p++)
        for (int o = 0; o < outputs; o++) y[p * pitch + o] = sum[p][o / 8][o % 8] + (bias ? bias[o] : 0);
}

/* y = x weight + bias for each row of x: (rows, inputs) to (rows, outputs). The weight is in blocks of 32 outputs, the
   last of as many vectors as it needs, each (inputs, outputs of the block). */
static void linear(const float *x, int rows, int inputs, int outputs, const float *weight, const float *bias,
                   float *restrict y) {
    for (int block = 0; block < outputs; block += 32) {
        const int width = outputs - block < 32 ? outputs - block : 32, vectors = (width + 7) / 8;
        const float *b = bias ? bias + block : NULL;
        int row = 0;
        for (; row + 3 <= rows; row += 3) {
            const float *from = x + row * inputs;
            float *to = y + row * outputs + block;
            if (vectors == 4) linear_block(3, 4, from, inputs, width, weight, b, to, outputs);
            if (vectors == 3) linear_block(3, 3, from, inputs, width, weight, b, to, outputs);
            if (vectors == 2) linear_block(3, 2, from, inputs, width, weight, b, to, outputs);
            if (vectors == 1) linear_block(3, 1, from, inputs, width, weight, b, to, outputs);
        }
        for (; row < rows; row++) {
            const float *from = x + row * inputs;
            float *to = y + row * outputs + block;
            if (vectors == 4) linear_block(1, 4, from, inputs, width, weight, b, to, outputs);
            if (vectors == 3) linear_block(1, 3, from, inputs, width, weight, b, to, outputs);
            if (vectors == 2) linear_block(1, 2, from, inputs, width, weight, b, to, outputs);
            if (vectors == 1) linear_block(1, 1, from, inputs, width, weight, b, to, outputs);
        }
        weight += inputs * 8 * vectors;
    }
}

/* A vector of filters at `positions` columns of a row; positions and stride are constants where this is inlined. */
INLINE void conv2d_block(const int positions, const int stride, const struct conv *s, const float *x,
                         const float *weight, const float *bias, int filters, float *y) {
    vector sum[8];
    UNROLL for (int p = 0; p < positions; p++) sum[p] = (vector){0};
    for (int c = 0; c < s->channels; c++)
        for (int i = 0; i < s->kernel_height; i++) {
            const float *row = x + (c * s->height + i * s->dilation_y) * s->width;
            for (int j = 0; j < s->kernel_width; j++, row += s->dilation_x, weight += 8)
                UNROLL for (int p = 0; p < positions; p++) sum[p] += *(const vector *)weight * row[p * stride];
        }
    for (int f = 0; f < filters; f++)
        UNROLL for (int p = 0; p < positions; p++)
            y[f * s->out_height * s->out_width + p] = sum[p][f] + (bias ? bias[f] : 0);
}

/* conv2d_block for 1 to 8 positions. */
INLINE void conv2d_columns(int positions, const int stride, const struct conv *s, const float *x, const float *weight,
                           const float *bias, int filters, float *y) {
    if (positions == 8) conv2d_block(8, stride, s, x, weight, bias, filters, y);
    if (positions == 7) conv2d_block(7, stride, s, x, weight, bias, filters, y);
    if (positions == 6) conv2d_block(6, stride, s, x, weight, bias, filters, y);
    if (positions == 5) conv2d_block(5, stride, s, x, weight, bias, filters, y);
    if (positions == 4) conv2d_block(4, stride, s, x, weight, bias, filters, y);
    if (positions == 3) conv2d_block(3, stride, s, x, weight, bias, filters, y);
    if (positions == 2) conv2d_block(2, stride, s, x, weight, bias, filters, y);
    if (positions == 1) conv2d_block(1, stride, s, x, weight, bias, filters, y);
}

/* A convolution without groups. The weight is in vectors of filters, each (channels, kernel_height, kernel_width, 8).
   A row is divided into blocks of up to 8 columns; the last may overlap the one before. */
static void conv2d_vectors(const struct conv *s, const float *x, const float *weight, const float *bias,
                           float *restrict y) {
    const int blocks = (s->out_width + 7) / 8, positions = (s->out_width + blocks - 1) / blocks;
    for (int filter = 0; filter < s->filters; filter += 8) {
        const int filters = s->filters - filter < 8 ? s->filters - filter : 8;
        const float *b = bias ? bias + filter : NULL;
        for (int row = 0; row < s->out_height; row++)
            for (int block = 0; block < blocks; block++) {
                const int last = s->out_width - positions;
                const int col = block * positions < last ? block * positions : last;
                const float *from = x + row * s->stride_y * s->width + col * s->stride_x;
                float *to = y + (filter * s->out_height + row) * s->out_width + col;
                if (s->stride_x == 1) conv2d_columns(positions, 1, s, from, weight, b, filters, to);
                else conv2d_columns(positions, s->stride_x, s, from, weight, b, filters, to);
            }
        weight += 8 * s->channels * s->kernel_height * s->kernel_width;
    }
}
