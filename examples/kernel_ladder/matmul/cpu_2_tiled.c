// Idea: the innermost loop goes along rows of b and c, and a tile of b stays in the cache for all rows of a.
// Gain: each cache line is used as a whole, and the compiler makes vectors of the innermost loop; about ten times.
enum { DEPTH = 64, WIDTH = 256 }; // a tile of b takes 64 KiB

void step(const float *a, const float *b, float *c, int m, int n, int k) {
    for (int i = 0; i < m * n; i++) c[i] = 0;
    for (int l0 = 0; l0 < k; l0 += DEPTH)
        for (int j0 = 0; j0 < n; j0 += WIDTH)
            for (int i = 0; i < m; i++)
                for (int l = l0; l < l0 + DEPTH; l++) {
                    float factor = a[i * k + l], *restrict to = c + i * n + j0;
                    const float *restrict from = b + l * n + j0;
                    for (int j = 0; j < WIDTH; j++) to[j] += factor * from[j];
                }
}
