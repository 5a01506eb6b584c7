// The gradient of a recurrent network, all steps in one launch, from the last one to the first. The cotangents of the sums of a
// step are in shared memory: each block writes those of its units to all blocks of the cluster. Their products with weight_hh
// are the cotangents of the hidden states before. With BUFFERS = 2 a step writes while others still read those of the step
// before; with 1 there is a barrier between.
#include "rnn/recurrent.cuh"

// Where the cotangents of the states after the next step to compute are.
#if RESIDENT
#define CARRIED carried
#define CARRIED_CELL carried_cell
#else
#define CARRIED dh[item.n * HIDDEN + unit]
#define CARRIED_CELL dc[item.n * HIDDEN + unit]
#endif

// The cotangents of s, and their sums over the steps. Only those of a GRU differ from those of x.
#if GRU
#define DS ds
#define DS_TOTAL ds_total
#else
#define DS dx
#define DS_TOTAL dx_total
#endif

constexpr int SUMS = GATES * HIDDEN, PITCH = padded<SUMS>;

KERNEL CLUSTER_DIMS __launch_bounds__(THREADS, 1) recurrent_grad(
    const T *ct_h, const T *weight, IF(LSTM, const T *ct_c,) const T *h0, IF(LSTM, const T *c0,) const T *y,
    IF(LSTM, const T *c,) IF(GATED, const T *saved,) IF(ALL, const T *ct_y,) T *dx, IF(GRU, T *ds,) T *before, T *dx_total,
    IF(GRU, T *ds_total,) T *dh, IF(LSTM, T *dc,) int64_t rows, int64_t length, int64_t reverse) {
    wait_for_inputs();
    T *const sums = *SHARED_BUFFERS(T[ROWS * PITCH], own_shared());
    const Item item(rows);
    const auto factor = [&](int unit, int, int k) { return weight + (int64_t)k * HIDDEN + unit; };
    Products<SUMS, 1, false> products;
    products.prepare(item, factor);
    for (int i = threadIdx.x; i < BUFFERS * ROWS * PITCH; i += THREADS) sums[i] = 0;
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
        IF(ALL, given.ct = ct_y[step * HIDDEN + unit];)
#if GATED
        #pragma unroll
        for (int g = 0; g < 4; g++) given.kept[g] = saved[step * (4 * HIDDEN) + g * HIDDEN + unit];
#endif
        IF(LSTM, given.last = k ? c[at(k - 1) * HIDDEN + unit] : c0[item.n * HIDDEN + unit];)
        given.state = states[step * HIDDEN + unit];
        given.hidden = k ? y[at(k - 1) * HIDDEN + unit] : h0[item.n * HIDDEN + unit];
        return given;
    };
    // Stores the cotangents of a unit's x, and of its s if they differ (GRU). T *to_x, *to_s: where those of the first gate
    // are.
    const auto put = [&](T *to_x, T *to_s, const StepGrad &made) {
        #pragma unroll
        for (int g = 0; g < GATES; g++) {
            if (GRU) to_s[g * HIDDEN] = made.by_sum[g];
            to_x[g * HIDDEN] = GRU && g == 2 ? made.by_candidate : made.by_sum[g];
        }
    };
    const auto write = [&](int64_t k, int unit, const StepGrad &made, T hidden) {
        before[at(k) * HIDDEN + unit] = hidden;
        put(dx + at(k) * SUMS + unit, DS + at(k) * SUMS + unit, made);
    };
    // Adds to the sums over the steps so far.
    const auto add = [&](StepGrad &total, const StepGrad &made) {
        #pragma unroll
        for (int g = 0; g < GATES; g++) total.by_sum[g] += made.by_sum[g];
        total.by_candidate += made.by_candidate;
    };
    StepGrad made;
    T hidden;
#if RESIDENT
    T carried = 0, carried_cell = 0;
    StepGrad total = {};
    Given next;
    if (item.live(0)) next = read(length - 1, item.unit(0));
#endif
    #pragma unroll 1
    for (int pass = 0; pass < PASSES; pass++) {
        const int unit = item.unit(pass);
        if (!item.live(pass)) continue;
        CARRIED = ct_h[item.n * HIDDEN + unit];
        IF(LSTM, CARRIED_CELL = ct_c[item.n * HIDDEN + unit];)
    }
    const Exchange exchange(rows, SUMS);
    if (ASYNC) exchange.init();
    cluster_barrier();
    if (ASYNC) exchange.begin();
    for (int64_t k = length - 1; k >= 0; k--) {
        T *const now = sums + k % BUFFERS * (ROWS * PITCH);
        #pragma unroll 1
        for (int pass = 0; pass < PASSES; pass++) {
            if (!item.live(pass)) continue;
            const int unit = item.unit(pass);
#if RESIDENT
            const Given given = next;
#else
            const Given given = read(k, unit);
#endif
            const T ct = ALL ? given.ct + CARRIED : CARRIED;
#if LSTM
            made = step_grad_of(given, ct, CARRIED_CELL);
            CARRIED_CELL = made.cell;
#else
            made = step_grad_of(given, ct, 0);
#endif
            CARRIED = made.h;
            hidden = given.hidden;
            #pragma unroll
            for (int g = 0; g < GATES; g++) {
                T *const to = now + item.row * PITCH + g * HIDDEN + unit;
                if (ASYNC) exchange.send(to, made.by_sum[g], k % BUFFERS);
                #pragma unroll
                for (int rank = 0; rank < CLUSTER && !ASYNC; rank++) *map_shared_rank(to, rank) = made.by_sum[g];
            }
#if !RESIDENT
            write(k, unit, made, hidden);
            T *const to_x = dx_total + item.n * SUMS + unit, *const to_s = DS_TOTAL + item.n * SUMS + unit;
            StepGrad total = {};
            #pragma unroll
            for (int g = 0; g < GATES && k < length - 1; g++) total.by_sum[g] = (GRU ? to_s : to_x)[g * HIDDEN];
            if (GRU && k < length - 1) total.by_candidate = to_x[2 * HIDDEN];
            add(total, made);
            put(to_x, to_s, total);
#endif
        }
        if (!ASYNC) cluster_arrive();
#if RESIDENT
        if (item.live(0)) {
            write(k, item.unit(0), made, hidden);
            add(total, made);
            if (k > 0) next = read(k - 1, item.unit(0));
        }
#endif
        if (ASYNC)
            exchange.wait(k % BUFFERS, (length - 1 - k) / 2);
        else
            cluster_wait();
        #pragma unroll 1
        for (int pass = 0; pass < PASSES; pass++) {
            T s[ITEMS];
            products(item, pass, now, factor, s);
            const int unit = item.unit(pass);
            if (item.live(pass)) CARRIED += s[0];
        }
        if (BUFFERS == 1) cluster_barrier();
    }
#if RESIDENT
    if (item.live(0)) {
        dh[item.n * HIDDEN + item.unit(0)] = carried;
        put(dx_total + item.n * SUMS + item.unit(0), DS_TOTAL + item.n * SUMS + item.unit(0), total);
        IF(LSTM, dc[item.n * HIDDEN + item.unit(0)] = carried_cell;)
    }
#endif
}
