// The gradient of a recurrent network, all steps in one launch, from the last one to the first. The cotangents of the sums of a step
// are in shared memory, twice: each block writes those of its units to all blocks of the cluster. Their products with weight_hh are
// the cotangents of the hidden states before.
#include "rnn/recurrent.cuh"

constexpr int SUMS = GATES * HIDDEN, PITCH = padded<SUMS>;

// What the formulas of a step read.
struct Given {
    T ct, kept[4], state, last, hidden; // state: y, or c of an LSTM; last: c before the step; hidden: h before it
};

KERNEL CLUSTER_DIMS __launch_bounds__(THREADS, 1) recurrent_grad(
    const T *ct_y, const T *weight,
#if LSTM
    const T *ct_c,
#endif
    const T *h0,
#if LSTM
    const T *c0,
#endif
    const T *y,
#if LSTM
    const T *c,
#endif
#if GATED
    const T *saved,
#endif
    T *dx,
#if GRU
    T *ds,
#endif
    T *before, T *dh,
#if LSTM
    T *dc,
#endif
    int64_t rows, int64_t length, int64_t reverse
) {
    wait_for_inputs();
    T *const sums = (T *)own_shared();
    const Item item(rows);
    const auto factor = [&](int unit, int, int k) { return weight[(int64_t)k * HIDDEN + unit]; };
    Products<SUMS, 1> products;
    products.prepare(item, factor);
    for (int i = threadIdx.x; i < 2 * ROWS * PITCH; i += THREADS) sums[i] = 0;
#if LSTM
    const T *const states = c;
#else
    const T *const states = y;
#endif
    // The index of step k among all rows and steps.
    const auto at = [&](int64_t k) { return item.n * length + (reverse ? length - 1 - k : k); };
    const auto read = [&](int64_t k, int unit) {
        Given given;
        const int64_t step = at(k);
        given.ct = ct_y[step * HIDDEN + unit];
#if GATED
        #pragma unroll
        for (int g = 0; g < 4; g++) given.kept[g] = saved[step * (4 * HIDDEN) + g * HIDDEN + unit];
#endif
#if LSTM
        given.last = k ? c[at(k - 1) * HIDDEN + unit] : c0[item.n * HIDDEN + unit];
#endif
        given.state = states[step * HIDDEN + unit];
        given.hidden = k ? y[at(k - 1) * HIDDEN + unit] : h0[item.n * HIDDEN + unit];
        return given;
    };
    T carried[PASSES], cell[PASSES]; // cotangents of the hidden and the cell state after the next step to compute
    Given next;
    #pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
        carried[pass] = 0;
#if LSTM
        if (item.live(pass)) cell[pass] = ct_c[item.n * HIDDEN + item.unit(pass)];
#endif
    }
    if (PASSES == 1 && item.live(0)) next = read(length - 1, item.unit(0));
    cluster_barrier();
    for (int64_t k = length - 1; k >= 0; k--) {
        T *const now = sums + k % 2 * (ROWS * PITCH);
        #pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            if (!item.live(pass)) continue;
            const int unit = item.unit(pass);
            const Given given = PASSES == 1 ? next : read(k, unit);
            const T ct = given.ct + carried[pass];
            carried[pass] = 0;
#if LSTM
            const T i = given.kept[0], f = given.kept[1], g = given.kept[2], o = given.kept[3], t = tanh(given.state);
            const T d = cell[pass] + ct * o * (1 - t * t);
            cell[pass] = d * f;
            const T by_sum[] = {d * g * i * (1 - i), d * given.last * f * (1 - f), d * i * (1 - g * g), ct * t * o * (1 - o)};
#elif GRU
            const T r = given.kept[0], z = given.kept[1], n = given.kept[2], d = ct * (1 - z) * (1 - n * n);
            const T by_sum[] = {d * given.kept[3] * r * (1 - r), ct * (given.hidden - n) * z * (1 - z), d * r};
            carried[pass] = ct * z;
#elif RELU
            const T by_sum[] = {given.state > 0 ? ct : (T)0};
#else
            const T by_sum[] = {ct * (1 - given.state * given.state)};
#endif
            before[at(k) * HIDDEN + unit] = given.hidden;
            #pragma unroll
            for (int g = 0; g < GATES; g++) {
                const int64_t to = at(k) * SUMS + g * HIDDEN + unit;
#if GRU
                ds[to] = by_sum[g];
                dx[to] = g == 2 ? d : by_sum[g];
#else
                dx[to] = by_sum[g];
#endif
                #pragma unroll
                for (int rank = 0; rank < CLUSTER; rank++)
                    in_block(now, rank)[item.row * PITCH + g * HIDDEN + unit] = by_sum[g];
            }
        }
        cluster_barrier();
        if (PASSES == 1 && k > 0 && item.live(0)) next = read(k - 1, item.unit(0));
        #pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            T s[ITEMS];
            products(item, pass, now, factor, s);
            carried[pass] += s[0];
        }
    }
    #pragma unroll
    for (int pass = 0; pass < PASSES; pass++)
        if (item.live(pass)) {
            dh[item.n * HIDDEN + item.unit(pass)] = carried[pass];
#if LSTM
            dc[item.n * HIDDEN + item.unit(pass)] = cell[pass];
#endif
        }
}
