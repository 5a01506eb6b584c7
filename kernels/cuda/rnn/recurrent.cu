// A recurrent network, all steps in one launch. The hidden states of a step are in shared memory, twice: a step reads those of the
// step before, and writes its own to all blocks of the cluster.
#include "rnn/recurrent.cuh"

constexpr int PITCH = padded<HIDDEN>;

KERNEL CLUSTER_DIMS __launch_bounds__(THREADS, 1) recurrent(
    const T *x, const T *weight, const T *bias, IF(GRU, const T *bias_x,) const T *h0, IF(LSTM, const T *c0,) T *y, T *h_last,
    IF(LSTM, T *c_last, T *c,) IF(GATED, T *saved,) int64_t rows, int64_t length, int64_t reverse) {
    wait_for_inputs();
    T *const hidden = *SHARED_BUFFERS(T[ROWS * PITCH], own_shared());
    const Item item(rows);
    const auto factor = [&](int unit, int gate, int k) { return weight + (int64_t)(gate * HIDDEN + unit) * HIDDEN + k; };
    Products<HIDDEN, GATES, true> products;
    products.prepare(item, factor);
    for (int i = threadIdx.x; i < 2 * ROWS * PITCH; i += THREADS) {
        const int64_t n = (int64_t)(blockIdx.x / CLUSTER) * ROWS + i / PITCH;
        const bool given = i < ROWS * PITCH && n < rows && i % PITCH < HIDDEN;
        hidden[i] = given ? h0[n * HIDDEN + i % PITCH] : (T)0;
    }
    // The index of step k among all rows and steps.
    const auto at = [&](int64_t k) { return item.n * length + (reverse ? length - 1 - k : k); };
    const auto read = [&](int64_t k, int unit, T (&in)[GATES]) {
        #pragma unroll
        for (int g = 0; g < GATES; g++) in[g] = x[at(k) * (GATES * HIDDEN) + g * HIDDEN + unit];
    };
    const auto write = [&](int64_t k, int unit, const Step &made) {
        const int64_t step = at(k);
#if LSTM
        c[step * HIDDEN + unit] = made.cell;
        if (k == length - 1) c_last[item.n * HIDDEN + unit] = made.cell;
#endif
#if GATED
        #pragma unroll
        for (int g = 0; g < 4; g++) saved[step * (4 * HIDDEN) + g * HIDDEN + unit] = made.kept[g];
#endif
        y[step * HIDDEN + unit] = made.h;
        if (k == length - 1) h_last[item.n * HIDDEN + unit] = made.h;
    };
    Step made;
#if RESIDENT
    T next[GATES];
    if (item.live(0)) {
        read(0, item.unit(0), next);
        IF(LSTM, made.cell = c0[item.n * HIDDEN + item.unit(0)];)
    }
#endif
    const Exchange exchange(rows, HIDDEN);
    if (ASYNC) exchange.init();
    cluster_barrier();
    if (ASYNC) exchange.begin();
    for (int64_t k = 0; k < length; k++) {
        const T *before = hidden + k % 2 * (ROWS * PITCH);
        T *after = hidden + (k + 1) % 2 * (ROWS * PITCH);
        #pragma unroll 1
        for (int pass = 0; pass < PASSES; pass++) {
            const int unit = item.unit(pass);
            const bool live = item.live(pass);
            T in[GATES] = {}, b[GATES] = {}, bx[GATES] = {}, s[ITEMS * GATES];
            if (live) {
                #pragma unroll
                for (int g = 0; g < GATES; g++) b[g] = bias[g * HIDDEN + unit];
#if GRU
                #pragma unroll
                for (int g = 0; g < GATES; g++) bx[g] = bias_x[g * HIDDEN + unit];
#endif
#if RESIDENT
                #pragma unroll
                for (int g = 0; g < GATES; g++) in[g] = next[g];
                if (k + 1 < length) read(k + 1, unit, next);
#else
                read(k, unit, in);
#if LSTM
                made.cell = k ? c[at(k - 1) * HIDDEN + unit] : c0[item.n * HIDDEN + unit]; // this thread has written it
#endif
#endif
            }
            products(item, pass, before, factor, s);
            if (!live) continue;
            #pragma unroll
            for (int g = 0; g < GATES; g++) {
                s[g] += b[g];
                if (GRU) in[g] += bx[g];
            }
            made = step_of(in, s, GRU ? before[item.row * PITCH + unit] : (T)0, made.cell);
            T *const to = after + item.row * PITCH + unit;
            if (!ASYNC) {
                #pragma unroll
                for (int rank = 0; rank < CLUSTER; rank++) *map_shared_rank(to, rank) = made.h;
            } else if (k + 1 < length) {
                exchange.send(to, made.h, (k + 1) % 2);
            }
            if (!RESIDENT) write(k, unit, made);
        }
        if (!ASYNC) cluster_arrive();
        if (RESIDENT && item.live(0)) write(k, item.unit(0), made);
        if (!ASYNC)
            cluster_wait();
        else if (k + 1 < length)
            exchange.wait((k + 1) % 2, k / 2);
    }
}
