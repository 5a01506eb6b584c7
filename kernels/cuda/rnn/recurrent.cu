// Recurrent networks in clusters, and their gradients.
//
// A cluster of CLUSTER blocks takes ROWS rows of the batch through all steps. Each block computes OWN hidden
// units, and writes what other blocks need to the shared memory of all. If RESIDENT, a block reads its part of weight_hh once
// and keeps it in registers, otherwise it reads the part in every step, from L2, and goes through its units in PASSES.
//
// A product has K inner numbers. SLICES neighbouring lanes divide them, for UNITS hidden units, and add their sums by shuffles. In
// the end each item, a row and unit, belongs to EXTRA lanes, and the first of them computes the formulas.
#include "rnn/cells.cuh"
#include "sm90/cluster.cuh"

constexpr int WIDE = 16 / (int)sizeof(T), ITEMS = ROWS * UNITS, EXTRA = SLICES / ITEMS, GROUPS = THREADS / SLICES;
constexpr int OWN = (HIDDEN + CLUSTER - 1) / CLUSTER, PASSES = (OWN + GROUPS * UNITS - 1) / (GROUPS * UNITS);
static_assert(SLICES <= WARP && SLICES % ITEMS == 0 && THREADS % WARP == 0, "items divide lanes, lanes divide warps");
static_assert(!RESIDENT || PASSES == 1, "registers hold one part of the weight");

// Numbers of a row in shared memory: K, with zeros up to a multiple of what SLICES lanes load at once.
template <int K> constexpr int padded = (K + SLICES * WIDE - 1) / (SLICES * WIDE) * (SLICES * WIDE);

// The item of this thread.
struct Item {
    int group, slice, row, unit_of_group;
    int64_t n; // row of the batch
    bool first; // the lane that computes the formulas, of a row that exists

    __device__ explicit Item(int64_t rows) {
        group = threadIdx.x / SLICES, slice = threadIdx.x % SLICES;
        row = slice / EXTRA / UNITS, unit_of_group = slice / EXTRA % UNITS;
        n = (int64_t)(blockIdx.x / CLUSTER) * ROWS + row;
        first = slice % EXTRA == 0 && n < rows;
    }

    // The first hidden unit of this thread's group, which may be past the last one of the block.
    __device__ int group_unit(int pass) const { return cluster_rank() * OWN + (pass * GROUPS + group) * UNITS; }
    __device__ int unit(int pass) const { return group_unit(pass) + unit_of_group; }
    __device__ static bool exists(int unit) { return unit < HIDDEN && unit < (cluster_rank() + 1) * OWN; }
    __device__ bool live(int pass) const { return first && exists(unit(pass)); }
};

// How blocks of a cluster exchange a step's numbers where ASYNC: by asynchronous stores that a barrier of each of two buffers
// counts. That takes less time than a barrier of the cluster, which waits for all earlier writes. Warps of a block are at most a
// step apart: a phase also counts their arrivals after the wait for the last one. So no buffer is overwritten while it is read.
#define ASYNC (RESIDENT && CLUSTER > 1)
struct Exchange {
    Mbarrier *const stored;
    int bytes; // of a step

    // numbers: of a row.
    __device__ Exchange(int64_t rows, int numbers) : stored((Mbarrier *)SHARED_BARRIERS(char, own_shared())) {
        bytes = min((int64_t)ROWS, rows - (int64_t)(blockIdx.x / CLUSTER) * ROWS) * numbers * sizeof(T);
    }
    // By all threads, before a barrier of the cluster; then begin().
    __device__ void init() const {
        if (threadIdx.x > 0) return;
        for (int i = 0; i < 2; i++) stored[i].init(THREADS / WARP);
        fence_mbarrier_init();
    }
    __device__ __forceinline__ void begin() const { expect(0), expect(1); }

    __device__ __forceinline__ void send(T *to, T value, int buffer) const {
        #pragma unroll
        for (int rank = 0; rank < CLUSTER; rank++) store_async(to, rank, value, stored[buffer]);
    }
    // Waits for the numbers of all blocks. round: how often the buffer was used before.
    __device__ __forceinline__ void wait(int buffer, int round) const {
        wait_for_cluster(stored[buffer], round % 2);
        expect(buffer);
    }

  private:
    __device__ __forceinline__ void expect(int buffer) const {
        __syncwarp();
        if (threadIdx.x == 0)
            stored[buffer].arrive_expect_tx(bytes);
        else if (threadIdx.x % WARP == 0)
            stored[buffer].arrive();
    }
};

// Adds the sums of 2 MASK neighbouring lanes. sum[i * OUTPUTS + o] is output o of COUNT items. In the end each lane has those of
// its own item at sum[0 ... OUTPUTS - 1].
template <int OUTPUTS, int COUNT, int MASK> __device__ __forceinline__ void add_slices(T *sum, int slice) {
    if constexpr (MASK > 0) {
        const bool upper = slice & MASK;
        constexpr int LEFT = COUNT > 1 ? COUNT / 2 : 1;
        #pragma unroll
        for (int i = 0; i < LEFT * OUTPUTS; i++) {
            const T low = sum[i], high = sum[COUNT > 1 ? i + LEFT * OUTPUTS : i];
            sum[i] = (upper ? high : low) + shuffle_xor(upper ? low : high, MASK);
        }
        add_slices<OUTPUTS, LEFT, MASK / 2>(sum, slice);
    }
}

// Products of ROWS rows of shared memory with a block's part of the weight.
template <int K, int OUTPUTS, bool CONTIGUOUS> struct Products {
    static constexpr int PITCH = padded<K>, VECTORS = PITCH / (SLICES * WIDE), LINES = UNITS * OUTPUTS;

    T held[RESIDENT ? VECTORS : 1][LINES][WIDE];

    // weight(unit, o, k) is the address of the factor of inner number k, for output o of a unit. CONTIGUOUS: those of
    // neighbouring k are neighbours.
    template <typename Weight>
    __device__ __forceinline__ static void load_part(T (&part)[LINES][WIDE], const Item &item, int pass, int i, Weight weight) {
        #pragma unroll
        for (int line = 0; line < LINES; line++) {
            const int unit = item.group_unit(pass) + line / OUTPUTS, first = (i * SLICES + item.slice) * WIDE;
            if constexpr (CONTIGUOUS && K % WIDE == 0) {
                const Vector<T, WIDE> none = {}, v = first < K && Item::exists(unit)
                    ? load<T, WIDE>(weight(unit, line % OUTPUTS, first)) : none;
                #pragma unroll
                for (int j = 0; j < WIDE; j++) part[line][j] = v.lane[j];
            } else {
                #pragma unroll
                for (int j = 0; j < WIDE; j++) {
                    const int k = first + j;
                    part[line][j] = k < K && Item::exists(unit) ? *weight(unit, line % OUTPUTS, k) : (T)0;
                }
            }
        }
    }

    template <typename Weight> __device__ __forceinline__ void prepare(const Item &item, Weight weight) {
        if constexpr (RESIDENT)
            #pragma unroll
            for (int i = 0; i < VECTORS; i++) load_part(held[i], item, 0, i, weight);
    }

    // The sums of this thread's item at sum[0 ... OUTPUTS - 1].
    template <typename Weight>
    __device__ __forceinline__ void operator()(
        const Item &item, int pass, const T *rows, Weight weight, T (&sum)[ITEMS * OUTPUTS]
    ) const {
        #pragma unroll
        for (int i = 0; i < ITEMS * OUTPUTS; i++) sum[i] = 0;
        if constexpr (RESIDENT) {
            #pragma unroll
            for (int i = 0; i < VECTORS; i++) add_part(item, rows, i, held[i], sum);
        } else {
            #pragma unroll 1
            for (int i = 0; i < VECTORS; i++) {
                T part[LINES][WIDE];
                load_part(part, item, pass, i, weight);
                add_part(item, rows, i, part, sum);
            }
        }
        add_slices<OUTPUTS, ITEMS, SLICES / 2>(sum, item.slice);
    }

    __device__ __forceinline__ static void add_part(
        const Item &item, const T *rows, int i, const T (&part)[LINES][WIDE], T (&sum)[ITEMS * OUTPUTS]
    ) {
        #pragma unroll
        for (int row = 0; row < ROWS; row++) {
            const Vector<T, WIDE> a = load<T, WIDE>(rows + row * PITCH + (i * SLICES + item.slice) * WIDE);
            #pragma unroll
            for (int line = 0; line < LINES; line++)
                #pragma unroll
                for (int j = 0; j < WIDE; j++)
                    sum[row * LINES + line] = fma(a.lane[j], part[line][j], sum[row * LINES + line]);
        }
    }
};

#ifndef BUFFERS // a macro of the gradient alone
// A recurrent network, all steps in one launch. The hidden states of a step are in shared memory, twice: a step reads those of the
// step before, and writes its own to all blocks of the cluster.

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
#else
// The gradient of a recurrent network, all steps in one launch, from the last one to the first. The cotangents of the sums of a
// step are in shared memory: each block writes those of its units to all blocks of the cluster. Their products with weight_hh
// are the cotangents of the hidden states before. With BUFFERS = 2 a step writes while others still read those of the step
// before; with 1 there is a barrier between.

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
#endif
