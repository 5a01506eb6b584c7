/* Convolution and its gradients as matrix products over many images, for small images with many channels. There the
   weights are larger than an image. So a kernel that computes image by image would wait for them.

   `columns` is the matrix of all factors of the weights: a row for each weight (channel, kernel row, kernel column) of
   an output channel, a column for each output pixel of some images.

     forward           y = w columns
     input gradient    each element of w^T g is added to the element of dx that it belongs to
     weight gradient   dw = g columns^T

   A thread makes the columns of its own part: some images or, for the weight gradient, some channels. An element is
   a sum in the same order, whatever the number of threads. */

#include "conv.h"
#include "gemm_blocks.h"

/* Lengths of a convolution over several images. A padded image has `rows` rows of `pitch` numbers a channel. */
typedef struct {
    Conv v;
    int64_t taps, image, out_pixels, out_image, rows, pitch;
} Images;

static Images images_of(const Conv *v) {
    const int64_t rows = (v->out_height - 1) * v->stride_y + (v->kernel_height - 1) * v->dilation_y + 1;
    const int64_t pitch = (v->out_width - 1) * v->stride_x + (v->kernel_width - 1) * v->dilation_x + 1;
    const int64_t pixels = v->out_height * v->out_width;
    return (Images){
        *v,
        v->kernel_height * v->kernel_width,
        v->channels * v->height * v->width,
        pixels,
        v->out_channels * pixels,
        max_i64(v->height + v->padding_y, rows),
        max_i64(v->width + v->padding_x, pitch),
    };
}

/* Where weight (channel, tap) multiplies a padded image for output pixel (row, column). */
static int64_t factor_at(const Images *s, int64_t channel, int64_t tap, int64_t row, int64_t column) {
    const Conv *v = &s->v;
    const int64_t y = row * v->stride_y + tap / v->kernel_width * v->dilation_y;
    return (channel * s->rows + y) * s->pitch + column * v->stride_x + tap % v->kernel_width * v->dilation_x;
}

/* Rows of `columns` for `channels` channels of `count` images; x points to the first channel of the first one. */
static void make_columns(const Images *s, const T *x, int64_t channels, int64_t count, T *planes, T *columns) {
    const Conv *v = &s->v;
    const int64_t ld = count * s->out_pixels;
    for (int64_t n = 0; n < count; n++) {
        split_image(x + n * s->image, channels, v->height, v->width, v->padding_y, v->padding_x, 1, 1, planes, s->rows,
                    s->pitch);
        T *to = columns + n * s->out_pixels;
        for (int64_t c = 0; c < channels; c++)
            for (int64_t tap = 0; tap < s->taps; tap++, to += ld) {
                const T *from = planes + factor_at(s, c, tap, 0, 0);
                if (v->stride_x == 1) {
                    copy_rows(from, v->stride_y * s->pitch, v->out_width, v->out_height, to, v->out_width);
                    continue;
                }
                for (int64_t r = 0; r < v->out_height; r++)
                    for (int64_t q = 0; q < v->out_width; q++)
                        to[r * v->out_width + q] = from[r * v->stride_y * s->pitch + q * v->stride_x];
            }
    }
}

/* [channel][image, pixel] of `count` outputs, from or to [image][channel][pixel]. */
static void gather_outputs(const Images *s, const T *y, int64_t count, T *matrix) {
    for (int64_t o = 0; o < s->v.out_channels; o++)
        for (int64_t n = 0; n < count; n++, matrix += s->out_pixels)
            memcpy(matrix, y + n * s->out_image + o * s->out_pixels, s->out_pixels * sizeof(T));
}
static void scatter_outputs(const Images *s, const T *matrix, int64_t count, T *y) {
    for (int64_t o = 0; o < s->v.out_channels; o++)
        for (int64_t n = 0; n < count; n++, matrix += s->out_pixels)
            memcpy(y + n * s->out_image + o * s->out_pixels, matrix, s->out_pixels * sizeof(T));
}

/* A team of this thread alone, whose scratch memory is the rest of `scratch`. */
static Team alone(char *scratch) { return (Team){0, 1, scratch}; }

/* y = x * w, up to `group` images at once. */
void FN(conv2d_gemm)(const Team *team, const T *x, const T *w, T *y, CONV_NUMBERS, int64_t images, int64_t group) {
    const Conv v = CONV;
    const Images s = images_of(&v);
    const int64_t depth = v.channels * s.taps;
    char *scratch = team->scratch;
    T *planes = take_bytes(&scratch, v.channels * s.rows * s.pitch * sizeof(T));
    T *columns = take_bytes(&scratch, depth * group * s.out_pixels * sizeof(T));
    T *product = take_bytes(&scratch, v.out_channels * group * s.out_pixels * sizeof(T));
    const Team self = alone(scratch);
    int64_t first, end;
    my_share(team, images, &first, &end);
    for (int64_t n = first; n < end; n += group) {
        const int64_t count = min_i64(group, end - n);
        make_columns(&s, x + n * s.image, v.channels, count, planes, columns);
        multiply(&self, w, columns, product, 1, v.out_channels, count * s.out_pixels, depth, false, false, NULL);
        scatter_outputs(&s, product, count, y + n * s.out_image);
    }
}

typedef struct {
    const Images *s;
    T *planes; /* of the gradients of all images of a group, padded */
} PaddedGradients;

/* An epilogue: adds rows (channel, tap) and columns (image, pixel) of w^T g to the padded gradients. */
static void add_to_planes(void *context, const T *block, int64_t ld, int64_t row, int64_t column, int64_t rows,
                          int64_t columns) {
    const PaddedGradients *p = context;
    const Images *s = p->s;
    const Conv *v = &s->v;
    const int64_t image = v->channels * s->rows * s->pitch;
    for (int64_t i = row; i < row + rows; i++, block += ld) {
        const int64_t pixel = column % s->out_pixels;
        int64_t n = column / s->out_pixels, r = pixel / v->out_width, q = pixel % v->out_width;
        for (int64_t j = 0, count; j < columns; j += count) {
            count = min_i64(v->out_width - q, columns - j);
            T *to = p->planes + n * image + factor_at(s, i / s->taps, i % s->taps, r, q);
            if (v->stride_x == 1)
                for (int64_t k = 0; k < count; k++) to[k] += block[j + k];
            else
                for (int64_t k = 0; k < count; k++) to[k * v->stride_x] += block[j + k];
            q = 0;
            if (++r == v->out_height) r = 0, n++;
        }
    }
}

/* dx, up to `group` images at once. */
void FN(conv2d_input_grad_gemm)(const Team *team, const T *g, const T *w, T *dx, CONV_NUMBERS, int64_t images,
                                int64_t group) {
    const Conv v = CONV;
    const Images s = images_of(&v);
    const int64_t padded = v.channels * s.rows * s.pitch;
    char *scratch = team->scratch;
    T *planes = take_bytes(&scratch, padded * group * sizeof(T));
    T *matrix = take_bytes(&scratch, v.out_channels * group * s.out_pixels * sizeof(T));
    const Team self = alone(scratch);
    PaddedGradients gradients = {&s, planes};
    const FN(Epilogue) epilogue = {add_to_planes, &gradients, {0}, 0};
    int64_t first, end;
    my_share(team, images, &first, &end);
    for (int64_t n = first; n < end; n += group) {
        const int64_t count = min_i64(group, end - n);
        memset(planes, 0, count * padded * sizeof(T));
        gather_outputs(&s, g + n * s.out_image, count, matrix);
        multiply(&self, w, matrix, NULL, 1, v.channels * s.taps, count * s.out_pixels, v.out_channels, true, false,
                 &epilogue);
        for (int64_t i = 0; i < count * v.channels; i++)
            for (int64_t r = 0; r < v.height; r++)
                memcpy(dx + n * s.image + (i * v.height + r) * v.width,
                       planes + (i * s.rows + r + v.padding_y) * s.pitch + v.padding_x, v.width * sizeof(T));
    }
}

typedef struct {
    T *dw;
    int64_t ld;
    bool add;
} WeightGradient;

/* An epilogue: stores, or adds, a block of the weight gradient. */
static void put_weights(void *context, const T *block, int64_t ld, int64_t row, int64_t column, int64_t rows,
                        int64_t columns) {
    const WeightGradient *p = context;
    for (int64_t i = 0; i < rows; i++, block += ld) {
        T *to = p->dw + (row + i) * p->ld + column;
        for (int64_t j = 0; j < columns; j++) to[j] = p->add ? to[j] + block[j] : block[j];
    }
}

/* dw, a sum over groups of images; a thread computes up to `block` of its channels at once. */
void FN(conv2d_weight_grad_gemm)(const Team *team, const T *x, const T *g, T *dw, CONV_NUMBERS, int64_t images,
                                 int64_t group, int64_t block) {
    const Conv v = CONV;
    const Images s = images_of(&v);
    char *scratch = team->scratch;
    T *planes = take_bytes(&scratch, block * s.rows * s.pitch * sizeof(T));
    T *columns = take_bytes(&scratch, block * s.taps * group * s.out_pixels * sizeof(T));
    T *matrix = take_bytes(&scratch, v.out_channels * group * s.out_pixels * sizeof(T));
    const Team self = alone(scratch);
    int64_t first, end;
    my_share(team, v.channels, &first, &end);
    if (images == 0)
        for (int64_t o = 0; o < v.out_channels; o++)
            memset(dw + (o * v.channels + first) * s.taps, 0, (end - first) * s.taps * sizeof(T));
    for (int64_t n = 0; n < images; n += group) {
        const int64_t count = min_i64(group, images - n);
        gather_outputs(&s, g + n * s.out_image, count, matrix);
        for (int64_t c = first; c < end; c += block) {
            const int64_t channels = min_i64(block, end - c);
            make_columns(&s, x + n * s.image + c * v.height * v.width, channels, count, planes, columns);
            WeightGradient gradient = {dw + c * s.taps, v.channels * s.taps, n > 0};
            const FN(Epilogue) epilogue = {put_weights, &gradient, {0}, 0};
            multiply(&self, matrix, columns, NULL, 1, v.out_channels, channels * s.taps, count * s.out_pixels, false,
                     true, &epilogue);
        }
    }
}
