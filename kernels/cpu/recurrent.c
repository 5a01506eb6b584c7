/* Recurrent networks and their gradients: rnn_tanh, rnn_relu, lstm and gru (formulas: adtrain/ops/recurrent.py).

   Rows of the batch do not depend on each other. So each thread packs weight_hh once, and takes blocks of BLOCK_ROWS of
   its rows through all steps without a barrier. A step is a product of the block's states with the packed weight, by the
   tiles of tile.h, and the formulas of the cell for one row after the other. Sums have a fixed order, which does not
   depend on the number of threads.

   Arrays over all steps are [row][step][...]; gates are in PyTorch's order. Some outputs may lie in the memory of an
   argument (`in_place` in lowering/cpu/products.py), so pointers to these are not `restrict`. */

#include "elementary.h"
#include "tile.h"

_Static_assert(TILE_COLUMNS * sizeof(T) <= PANEL_BYTES, "PANEL_BYTES of adtrain/lowering/cpu/products.py");

enum {
    DEPTH = 2048 / sizeof(T), /* of a slice of the product */
    MAX_AHEAD = 6,
};

typedef struct {
    int64_t rows, length, hidden, reverse;
} Lengths;

/* The offset of row n at the step number `k` in the order of computation, in arrays of `width` numbers a step. */
static inline int64_t at(const Lengths *s, int64_t n, int64_t k, int64_t width) {
    return (n * s->length + (s->reverse ? s->length - 1 - k : k)) * width;
}

static inline int64_t padded(int64_t columns) { return ceil_div(columns, TILE_COLUMNS) * TILE_COLUMNS; }

/* The slices of B (depth x columns), or of its transpose, one after the other. */
static void pack(const T *b, bool transposed, int64_t columns, int64_t depth, T *to) {
    const int64_t ld = transposed ? depth : columns;
    for (int64_t p = 0; p < depth; p += DEPTH) {
        const T *slice = b + (transposed ? p : p * ld);
        pack_b(slice, ld, transposed, columns, min_i64(DEPTH, depth - p), to + p * padded(columns));
    }
}

/* What the formulas of step `k` need of the rows from `first` on: of each array the `width` numbers of step k - lag. The
   tiles of the product before them prefetch it into L2. An array may be NULL. */
typedef struct {
    const Lengths *lengths;
    int64_t first, k;
    struct {
        const T *array;
        int64_t width, lag;
    } arrays[MAX_AHEAD];
} Ahead;

/* Prefetches part `part` of `parts` of what rows `row` to `row + rows` need. Always inlined: gcc deletes calls of a
   function that only prefetches. */
SPECIALISED void prefetch(const Ahead *ahead, int64_t row, int64_t rows, int64_t part, int64_t parts) {
    for (int64_t x = 0; x < MAX_AHEAD; x++) {
        const int64_t width = ahead->arrays[x].width, k = ahead->k - ahead->arrays[x].lag;
        const int64_t begin = part_begin(width, parts, part), end = part_begin(width, parts, part + 1);
        if (!ahead->arrays[x].array || k < 0) continue;
        for (int64_t i = row; i < row + rows; i++) {
            const T *start = ahead->arrays[x].array + at(ahead->lengths, ahead->first + i, k, width);
            for (int64_t j = begin; j < end; j += CACHE_LINE / sizeof(T)) __builtin_prefetch(start + j, 0, 2);
        }
    }
}

/* C (rows x columns, contiguous) = or += A B, with rows of A `row_step` apart and B packed. */
static void product(int64_t rows, int64_t columns, int64_t depth, const T *a, int64_t row_step, const T *b, T *c,
                    bool add, const Ahead *ahead) {
    const int64_t strips = ceil_div(rows, TILE_ROWS), panels = ceil_div(columns, TILE_COLUMNS);
    for (int64_t p = 0; p < depth; p += DEPTH) {
        const int64_t slice = min_i64(DEPTH, depth - p);
        for (int64_t j = 0; j < columns; j += TILE_COLUMNS)
            for (int64_t t = 0; t < strips; t++) {
                const int64_t i = part_begin(rows, strips, t), height = part_begin(rows, strips, t + 1) - i;
                if (p == 0) prefetch(ahead, i, height, j / TILE_COLUMNS, panels);
                any_tile(height, min_i64(TILE_COLUMNS, columns - j), slice, a + i * row_step + p, row_step, 1,
                         b + p * padded(columns) + j * slice, c + i * columns + j, columns, add || p > 0);
            }
    }
}

/* Calls block(context, first row, rows) for each block of this thread's rows. */
static void blocks(const Team *team, int64_t rows, void (*block)(void *, int64_t, int64_t), void *context) {
    int64_t begin, end;
    my_share(team, rows, &begin, &end);
    const int64_t count = ceil_div(end - begin, BLOCK_ROWS);
    for (int64_t i = 0; i < count; i++) {
        const int64_t first = part_begin(end - begin, count, i);
        block(context, begin + first, part_begin(end - begin, count, i + 1) - first);
    }
}

/* One step of one row: pointers to the numbers of that row and step. `s` is W_hh h, without its bias `b`; `bx` is the bias
   of x, of a GRU; h and c are the states before the step. */
typedef struct {
    const T *x, *s, *b, *bx, *h, *c;
    T *y, *c_new, *saved;
} Step;

/* The pullback of a step. `dh` and `dc` hold the cotangents of the new states. The function changes them to those of the
   states before, without the part that goes through s. */
typedef struct {
    const T *h, *c, *y, *c_new, *saved;
    T *dh, *dc, *dx, *ds;
} StepGrad;

typedef struct {
    Lengths lengths;
    int64_t gates, saved_width;
    const T *x, *weight, *bias, *bias_x, *h0, *c0;
    T *y, *h_last, *c_last, *c, *saved;
    void (*step)(const Step *, int64_t);
    T *packed, *sums; /* scratch: the packed weight, W_hh h of a block */
} Forward;

typedef struct {
    Lengths lengths;
    int64_t gates, saved_width;
    const T *ct_h, *weight, *ct_c, *h0, *c0, *y, *c, *saved;
    const T *ct_y; /* the cotangent of all hidden states, or NULL */
    T *dx, *ds, *before; /* before: the hidden states before each step */
    T *dx_total, *ds_total; /* sums over the steps */
    T *dh, *dc; /* cotangents of the states between two steps; in the end those of h0 and c0 */
    void (*step)(const StepGrad *, int64_t);
    T *packed;
} Backward;

static void forward_block(void *context, int64_t first, int64_t rows) {
    const Forward *f = context;
    const Lengths *s = &f->lengths;
    const int64_t hidden = s->hidden, width = f->gates * hidden;
    for (int64_t k = 0; k < s->length; k++) {
        const T *before = k ? f->y + at(s, first, k - 1, hidden) : f->h0 + first * hidden;
        const Ahead ahead = {
            s, first, k, {{f->x, width}, {f->y, hidden}, {f->c, hidden}, {f->saved, f->saved_width * hidden}},
        };
        product(rows, width, hidden, before, k ? s->length * hidden : hidden, f->packed, f->sums, false, &ahead);
        for (int64_t i = 0; i < rows; i++) {
            const int64_t n = first + i, state = at(s, n, k, hidden);
            const T *c = !f->c ? NULL : k ? f->c + at(s, n, k - 1, hidden) : f->c0 + n * hidden;
            const T *h = k ? f->y + at(s, n, k - 1, hidden) : f->h0 + n * hidden;
            T *saved = f->saved ? f->saved + at(s, n, k, f->saved_width * hidden) : NULL;
            const Step step = {f->x + at(s, n, k, width), f->sums + i * width, f->bias, f->bias_x, h, c, f->y + state,
                               f->c ? f->c + state : NULL, saved};
            f->step(&step, hidden);
        }
    }
    for (int64_t n = first; n < first + rows; n++) {
        const int64_t last = at(s, n, s->length - 1, hidden);
        memcpy(f->h_last + n * hidden, f->y + last, hidden * sizeof(T));
        if (f->c) memcpy(f->c_last + n * hidden, f->c + last, hidden * sizeof(T));
    }
}

static void add(T *restrict total, const T *restrict x, int64_t size) {
#pragma omp simd
    for (int64_t j = 0; j < size; j++) total[j] += x[j];
}

static void backward_block(void *context, int64_t first, int64_t rows) {
    const Backward *f = context;
    const Lengths *s = &f->lengths;
    const int64_t hidden = s->hidden, width = f->gates * hidden;
    memcpy(f->dh + first * hidden, f->ct_h + first * hidden, rows * hidden * sizeof(T));
    if (f->dc) memcpy(f->dc + first * hidden, f->ct_c + first * hidden, rows * hidden * sizeof(T));
    memset(f->dx_total + first * width, 0, rows * width * sizeof(T));
    if (f->ds) memset(f->ds_total + first * width, 0, rows * width * sizeof(T));
    for (int64_t k = s->length - 1; k >= 0; k--) {
        for (int64_t i = 0; i < rows; i++) {
            const int64_t n = first + i, state = at(s, n, k, hidden), sums = at(s, n, k, width);
            T *dh = f->dh + n * hidden;
            for (int64_t j = 0; f->ct_y && j < hidden; j++) dh[j] += f->ct_y[state + j];
            const T *h = k ? f->y + at(s, n, k - 1, hidden) : f->h0 + n * hidden;
            const StepGrad step = {
                h,
                !f->c ? NULL : k ? f->c + at(s, n, k - 1, hidden) : f->c0 + n * hidden,
                f->y + state,
                f->c ? f->c + state : NULL,
                f->saved ? f->saved + at(s, n, k, f->saved_width * hidden) : NULL,
                dh,
                f->dc ? f->dc + n * hidden : NULL,
                f->dx + sums,
                f->ds ? f->ds + sums : NULL,
            };
            f->step(&step, hidden);
            memcpy(f->before + state, h, hidden * sizeof(T));
            add(f->dx_total + n * width, step.dx, width);
            if (f->ds) add(f->ds_total + n * width, step.ds, width);
        }
        const Ahead ahead = {
            s, first, k - 1,
            {{f->dx, width}, {f->ds, width}, {f->before, hidden}, {f->saved, f->saved_width * hidden}, {f->y, hidden, 1},
             {f->c, hidden, 1}},
        };
        product(rows, hidden, width, (f->ds ? f->ds : f->dx) + at(s, first, k, width), s->length * width, f->packed,
                f->dh + first * hidden, true, &ahead);
    }
}

static void forward(const Team *team, Forward *f) {
    const int64_t width = f->gates * f->lengths.hidden;
    f->packed = (T *)team->scratch;
    f->sums = f->packed + f->lengths.hidden * padded(width);
    pack(f->weight, true, width, f->lengths.hidden, f->packed);
    blocks(team, f->lengths.rows, forward_block, f);
}

static void backward(const Team *team, Backward *f) {
    f->packed = (T *)team->scratch;
    pack(f->weight, false, f->lengths.hidden, f->gates * f->lengths.hidden, f->packed);
    blocks(team, f->lengths.rows, backward_block, f);
}

static inline T sigmoid(T x) { return 1 / (1 + exp(-x)); }

/* Field `name` of the struct p. No other pointer of the function overlaps one that is RESTRICT. */
#define RESTRICT(name) __typeof__(*p->name) *restrict name = p->name
#define SHARED(name) __typeof__(*p->name) *name = p->name

static void step_tanh(const Step *p, int64_t hidden) {
    SHARED(x); RESTRICT(s); RESTRICT(b); SHARED(y);
#pragma omp simd
    for (int64_t j = 0; j < hidden; j++) y[j] = tanh(x[j] + (s[j] + b[j]));
}

static void step_relu(const Step *p, int64_t hidden) {
    SHARED(x); RESTRICT(s); RESTRICT(b); SHARED(y);
#pragma omp simd
    for (int64_t j = 0; j < hidden; j++) {
        const T a = x[j] + (s[j] + b[j]);
        y[j] = a <= 0 ? 0 : a;
    }
}

static void step_lstm(const Step *p, int64_t hidden) {
    SHARED(x); RESTRICT(s); RESTRICT(b); RESTRICT(c); RESTRICT(y); RESTRICT(c_new); SHARED(saved);
#pragma omp simd
    for (int64_t j = 0; j < hidden; j++) {
        const int64_t jf = j + hidden, jg = jf + hidden, jo = jg + hidden;
        const T i = sigmoid(x[j] + (s[j] + b[j])), f = sigmoid(x[jf] + (s[jf] + b[jf]));
        const T g = tanh(x[jg] + (s[jg] + b[jg])), o = sigmoid(x[jo] + (s[jo] + b[jo]));
        const T cell = f * c[j] + i * g;
        saved[j] = i, saved[jf] = f, saved[jg] = g, saved[jo] = o;
        c_new[j] = cell;
        y[j] = o * tanh(cell);
    }
}

static void step_gru(const Step *p, int64_t hidden) {
    RESTRICT(x); RESTRICT(s); RESTRICT(b); RESTRICT(bx); RESTRICT(h); RESTRICT(y); RESTRICT(saved);
#pragma omp simd
    for (int64_t j = 0; j < hidden; j++) {
        const int64_t jz = j + hidden, jn = jz + hidden;
        const T r = sigmoid((x[j] + bx[j]) + (s[j] + b[j])), z = sigmoid((x[jz] + bx[jz]) + (s[jz] + b[jz]));
        const T sn = s[jn] + b[jn], n = tanh((x[jn] + bx[jn]) + r * sn);
        saved[j] = r, saved[jz] = z, saved[jn] = n, saved[jn + hidden] = sn;
        y[j] = n + z * (h[j] - n);
    }
}

static void step_tanh_grad(const StepGrad *p, int64_t hidden) {
    RESTRICT(y); RESTRICT(dh); RESTRICT(dx);
#pragma omp simd
    for (int64_t j = 0; j < hidden; j++) {
        dx[j] = dh[j] * (1 - y[j] * y[j]);
        dh[j] = 0;
    }
}

static void step_relu_grad(const StepGrad *p, int64_t hidden) {
    RESTRICT(y); RESTRICT(dh); RESTRICT(dx);
#pragma omp simd
    for (int64_t j = 0; j < hidden; j++) {
        dx[j] = y[j] > 0 ? dh[j] : 0;
        dh[j] = 0;
    }
}

static void step_lstm_grad(const StepGrad *p, int64_t hidden) {
    RESTRICT(c); RESTRICT(c_new); SHARED(saved); RESTRICT(dh); RESTRICT(dc); SHARED(dx);
#pragma omp simd
    for (int64_t j = 0; j < hidden; j++) {
        const int64_t jf = j + hidden, jg = jf + hidden, jo = jg + hidden;
        const T i = saved[j], f = saved[jf], g = saved[jg], o = saved[jo], t = tanh(c_new[j]);
        const T dcell = dc[j] + dh[j] * o * (1 - t * t);
        dx[j] = dcell * g * i * (1 - i);
        dx[jf] = dcell * c[j] * f * (1 - f);
        dx[jg] = dcell * i * (1 - g * g);
        dx[jo] = dh[j] * t * o * (1 - o);
        dc[j] = dcell * f;
        dh[j] = 0;
    }
}

static void step_gru_grad(const StepGrad *p, int64_t hidden) {
    RESTRICT(h); RESTRICT(saved); RESTRICT(dh); RESTRICT(dx); RESTRICT(ds);
#pragma omp simd
    for (int64_t j = 0; j < hidden; j++) {
        const int64_t jz = j + hidden, jn = jz + hidden;
        const T r = saved[j], z = saved[jz], n = saved[jn], sn = saved[jn + hidden];
        const T dn = dh[j] * (1 - z) * (1 - n * n);
        dx[j] = ds[j] = dn * sn * r * (1 - r);
        dx[jz] = ds[jz] = dh[j] * (h[j] - n) * z * (1 - z);
        dx[jn] = dn;
        ds[jn] = dn * r;
        dh[j] *= z;
    }
}

#define LENGTHS int64_t rows, int64_t length, int64_t hidden, int64_t reverse
#define GIVEN {rows, length, hidden, reverse}

#define ELMAN(name, step)                                                                                             \
    void FN(name)(const Team *team, const T *x, const T *weight, const T *bias, const T *h0, T *y, T *h, LENGTHS) {   \
        forward(team, &(Forward){GIVEN, 1, 0, x, weight, bias, NULL, h0, NULL, y, h, NULL, NULL, NULL, step});              \
    }
ELMAN(rnn_tanh, step_tanh)
ELMAN(rnn_relu, step_relu)

void FN(lstm)(const Team *team, const T *x, const T *weight, const T *bias, const T *h0, const T *c0, T *y, T *h,
              T *c_last, T *c, T *saved, LENGTHS) {
    forward(team, &(Forward){GIVEN, 4, 4, x, weight, bias, NULL, h0, c0, y, h, c_last, c, saved, step_lstm});
}

void FN(gru)(const Team *team, const T *x, const T *weight, const T *bias, const T *bias_x, const T *h0, T *y, T *h,
             T *saved, LENGTHS) {
    forward(team, &(Forward){GIVEN, 3, 4, x, weight, bias, bias_x, h0, NULL, y, h, NULL, NULL, saved, step_gru});
}

/* The gradients, as name_grad, and with the cotangent of all hidden states as name_grad_all. */
#define ALL , const T *ct_y
#define NOTHING
#define ELMAN_GRAD(name, of_all, value, step)                                                                         \
    void FN(name)(const Team *team, const T *ct_h, const T *weight, const T *h0, const T *y of_all, T *dx, T *before, \
                  T *total, T *dh, LENGTHS) {                                                                         \
        backward(team, &(Backward){GIVEN, 1, 0, ct_h, weight, NULL, h0, NULL, y, NULL, NULL, value, dx, NULL, before, \
                                   total, NULL, dh, NULL, step});                                                     \
    }
#define LSTM_GRAD(name, of_all, value)                                                                                \
    void FN(name)(const Team *team, const T *ct_h, const T *weight, const T *ct_c, const T *h0, const T *c0,          \
                  const T *y, const T *c, const T *saved of_all, T *dx, T *before, T *total, T *dh, T *dc, LENGTHS) { \
        backward(team, &(Backward){GIVEN, 4, 4, ct_h, weight, ct_c, h0, c0, y, c, saved, value, dx, NULL, before,     \
                                   total, NULL, dh, dc, step_lstm_grad});                                             \
    }
#define GRU_GRAD(name, of_all, value)                                                                                 \
    void FN(name)(const Team *team, const T *ct_h, const T *weight, const T *h0, const T *y, const T *saved of_all,   \
                  T *dx, T *ds, T *before, T *dx_total, T *ds_total, T *dh, LENGTHS) {                                \
        backward(team, &(Backward){GIVEN, 3, 4, ct_h, weight, NULL, h0, NULL, y, NULL, saved, value, dx, ds, before,  \
                                   dx_total, ds_total, dh, NULL, step_gru_grad});                                     \
    }
ELMAN_GRAD(rnn_tanh_grad, NOTHING, NULL, step_tanh_grad)
ELMAN_GRAD(rnn_tanh_grad_all, ALL, ct_y, step_tanh_grad)
ELMAN_GRAD(rnn_relu_grad, NOTHING, NULL, step_relu_grad)
ELMAN_GRAD(rnn_relu_grad_all, ALL, ct_y, step_relu_grad)
LSTM_GRAD(lstm_grad, NOTHING, NULL)
LSTM_GRAD(lstm_grad_all, ALL, ct_y)
GRU_GRAD(gru_grad, NOTHING, NULL)
GRU_GRAD(gru_grad_all, ALL, ct_y)
