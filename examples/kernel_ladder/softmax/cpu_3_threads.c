// Idea: each thread computes some of the rows.
// Gain: at most the number of cores; a large matrix is bound by memory, which a few cores use up.
#include "../vectors.h"

static vec select(ints condition, vec yes, vec no) { return (vec)((condition & (ints)yes) | (~condition & (ints)no)); }

// e^x for x <= 0: 2^n e^r with |r| <= log(2) / 2, and the Taylor polynomial of e^r
static vec exp_of(vec x) {
    x = select(x > -87, x, (vec){0} - 87);
    vec shifted = x * 1.44269504f + 12582912; // adding 1.5 * 2^23 rounds to an integer, in the last bits
    vec n = shifted - 12582912, r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = 1 + r * (1 + r * (1 / 2.f + r * (1 / 6.f + r * (1 / 24.f + r * (1 / 120.f + r * (1 / 720.f))))));
    return (vec)((ints)p + ((ints)shifted << 23)); // adds n to the exponent
}

static void softmax(const float *x, float *y, int columns) {
    vec largest = load(x), sum = {0};
    for (int i = LANES; i < columns; i += LANES) {
        vec next = load(x + i);
        largest = select(next > largest, next, largest);
    }
    float top = largest[0], total = 0;
    for (int i = 1; i < LANES; i++) top = top > largest[i] ? top : largest[i];
    for (int i = 0; i < columns; i += LANES) {
        vec power = exp_of(load(x + i) - top);
        sum += power;
        store(y + i, power);
    }
    for (int i = 0; i < LANES; i++) total += sum[i];
    for (int i = 0; i < columns; i += LANES) store(y + i, load(y + i) * (1 / total));
}

void step(const float *x, float *y, int rows, int columns) {
#pragma omp parallel for
    for (int row = 0; row < rows; row++) softmax(x + row * columns, y + row * columns, columns);
}
