// What the passes of recurrent networks share.
//
// A cluster of CLUSTER blocks takes ROWS rows of the batch through all steps. Each block computes OWN hidden
// units, and writes what other blocks need to the shared memory of all. If RESIDENT, a block reads its part of weight_hh once
// and keeps it in registers, otherwise it reads the part in every step, from L2, and goes through its units in PASSES.
//
// A product has K inner numbers. SLICES neighbouring lanes divide them, for UNITS hidden units, and add their sums by shuffles. In
// the end each item, a row and unit, belongs to EXTRA lanes, and the first of them computes the formulas.
#pragma once
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
