// A recurrent network, all steps in one launch. The hidden states of a step are in shared memory, twice: a step reads those of the
// step before, and writes its own to all blocks of the cluster.
#include "rnn/recurrent.cuh"

constexpr int PITCH = padded<HIDDEN>;

KERNEL CLUSTER_DIMS __launch_bounds__(THREADS, 1) recurrent(
    const T *x, const T *weight, const T *bias, const T *h0,
#if LSTM
    const T *c0,
#endif
    T *y,
#if LSTM
    T *c_last, T *c,
#endif
#if GATED
    T *saved,
#endif
    int64_t rows, int64_t length, int64_t reverse
) {
    wait_for_inputs();
    T *const hidden = (T *)own_shared();
    const Item item(rows);
    const auto factor = [&](int unit, int gate, int k) { return weight[(int64_t)(gate * HIDDEN + unit) * HIDDEN + k]; };
    Products<HIDDEN, GATES> products;
    products.prepare(item, factor);
    for (int i = threadIdx.x; i < 2 * ROWS * PITCH; i += THREADS) {
        const int64_t n = (int64_t)(blockIdx.x / CLUSTER) * ROWS + i / PITCH;
        const bool given = i < ROWS * PITCH && n < rows && i % PITCH < HIDDEN;
        hidden[i] = given ? h0[n * HIDDEN + i % PITCH] : (T)0;
    }
    T cell[PASSES], b[PASSES][GATES];
    #pragma unroll
    for (int pass = 0; pass < PASSES; pass++)
        if (item.live(pass)) {
#if LSTM
            cell[pass] = c0[item.n * HIDDEN + item.unit(pass)];
#endif
            for (int g = 0; g < GATES; g++) b[pass][g] = bias[g * HIDDEN + item.unit(pass)];
        }
    cluster_barrier();
    for (int64_t k = 0; k < length; k++) {
        const int64_t step = item.n * length + (reverse ? length - 1 - k : k);
        const T *before = hidden + k % 2 * (ROWS * PITCH);
        T *after = hidden + (k + 1) % 2 * (ROWS * PITCH);
        #pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            const int unit = item.unit(pass);
            const bool live = item.live(pass);
            T in[GATES] = {}, s[ITEMS * GATES];
            if (live)
                #pragma unroll
                for (int g = 0; g < GATES; g++) in[g] = x[step * (GATES * HIDDEN) + g * HIDDEN + unit];
            products(item, pass, before, factor, s);
            if (!live) continue;
            #pragma unroll
            for (int g = 0; g < GATES; g++) s[g] += b[pass][g];
#if LSTM
            const T i = sigmoid(in[0] + s[0]), f = sigmoid(in[1] + s[1]), g = tanh(in[2] + s[2]), o = sigmoid(in[3] + s[3]);
            cell[pass] = f * cell[pass] + i * g;
            const T h = o * tanh(cell[pass]), kept[4] = {i, f, g, o};
            c[step * HIDDEN + unit] = cell[pass];
#elif GRU
            const T r = sigmoid(in[0] + s[0]), z = sigmoid(in[1] + s[1]), candidate = tanh(in[2] + r * s[2]);
            const T h = candidate + z * (before[item.row * PITCH + unit] - candidate), kept[4] = {r, z, candidate, s[2]};
#elif RELU
            const T a = in[0] + s[0], h = a <= 0 ? (T)0 : a;
#else
            const T h = tanh(in[0] + s[0]);
#endif
#if GATED
            #pragma unroll
            for (int g = 0; g < 4; g++) saved[step * (4 * HIDDEN) + g * HIDDEN + unit] = kept[g];
#endif
            y[step * HIDDEN + unit] = h;
            #pragma unroll
            for (int rank = 0; rank < CLUSTER; rank++) in_block(after, rank)[item.row * PITCH + unit] = h;
        }
        cluster_barrier();
    }
#if LSTM
    #pragma unroll
    for (int pass = 0; pass < PASSES; pass++)
        if (item.live(pass)) c_last[item.n * HIDDEN + item.unit(pass)] = cell[pass];
#endif
}
