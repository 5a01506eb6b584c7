/* Trilinear interpolation, and its gradient by the features. Threads divide the points. */
#include "common.h"
#include "weights.h"

void FN(trilinear)(const Team *team, const T *feats, const T *points, T *out, int64_t count, int64_t features) {
    int64_t begin, end;
    my_share(team, count, &begin, &end);
    for (int64_t n = begin; n < end; n++) {
        T weights[8];
        corner_weights(points + 3 * n, weights);
        for (int64_t f = 0; f < features; f++) {
            T sum = 0;
            for (int c = 0; c < 8; c++) sum += weights[c] * feats[(8 * n + c) * features + f];
            out[n * features + f] = sum;
        }
    }
}

void FN(trilinear_grad)(const Team *team, const T *ct, const T *points, T *out, int64_t count, int64_t features) {
    int64_t begin, end;
    my_share(team, count, &begin, &end);
    for (int64_t n = begin; n < end; n++) {
        T weights[8];
        corner_weights(points + 3 * n, weights);
        for (int c = 0; c < 8; c++)
            for (int64_t f = 0; f < features; f++) out[(8 * n + c) * features + f] = weights[c] * ct[n * features + f];
    }
}
