// Idea: each element of the result is the dot product of a row of a and a column of b.
// Gain: none, this is the start; it is bound by the column, of which each element is in another cache line.
void step(const float *a, const float *b, float *c, int m, int n, int k) {
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            float sum = 0;
            for (int l = 0; l < k; l++) sum += a[i * k + l] * b[l * n + j];
            c[i * n + j] = sum;
        }
}
