// The engine of all matrix products here: one block computes a BM x BN tile of C = A B from panels of A and B.
//
// Three levels, each of which reuses what the slower memory below it gives:
//   device memory -> shared memory   a stage holds BK rows of k: BM numbers of A and BN of B each. The block loads
//                                    STAGES - 1 stages ahead with cp.async, which needs no registers on the way.
//   shared memory -> registers       a warp owns WM x WN of the tile, a thread TM x TN of that: its Unit multiplies,
//                                    with fused multiply-adds (gemm/fma.cuh) or on the matrix units (gemm/mma.cuh).
//   registers                        the sums stay there until the end.
// Where the matrix is too small for many tiles, SLICES teams of warps share a tile: each takes its own rows of every
// stage, and the teams' sums are added in a fixed order at the end.
//
// Both panels lie in shared memory as [k][m] and [k][n]. How they get there is the loaders' business: a loader has
// load(T *panel), which starts the copies of its next BK rows and writes zeros wherever the matrix has ended.
#pragma once
#include "common/cp_async.cuh"

constexpr int VECTOR = 16 / sizeof(T); // elements of the widest load

extern __shared__ __align__(16) unsigned char shared_bytes[];

// The loaders of a block of THREADS threads for panels [k][column] of BK rows of WIDTH columns, or [column][k] if ALONG;
// their lines are ROW elements apart.
template <int THREADS, int BK, int WIDTH, int PAD, bool ALONG> struct Panels {
    static constexpr int ROW = ALONG ? BK + 4 : WIDTH + PAD, SIZE = (ALONG ? WIDTH : BK) * ROW;

    // Loads panels from a matrix [k][column], whose rows lie as they do in the panel: WIDE columns at a time.
    template <int WIDE> struct Along {
        static constexpr int COLUMNS = WIDTH / WIDE, COPIES = BK * COLUMNS / THREADS;
        static_assert(BK * COLUMNS % THREADS == 0, "every thread makes the same number of copies");
        const T *source;
        int64_t step; // elements from one row to the next
        int columns, rows, row, column;

        // source: the panel's first element; columns and rows: how many of the matrix are left from there.
        __device__ Along(const T *source, int64_t step, int columns, int rows)
            : step(step), columns(columns), rows(rows), row(threadIdx.x / COLUMNS),
              column(threadIdx.x % COLUMNS * WIDE) {
            this->source = source + row * step + column;
        }

        __device__ __forceinline__ void load(T *panel) {
            #pragma unroll
            for (int i = 0; i < COPIES; i++) {
                const int down = i * THREADS / COLUMNS, right = i * THREADS % COLUMNS * WIDE;
                const bool take = row + down < rows && column + right < columns;
                copy_async<WIDE * sizeof(T)>(
                    panel + (row + down) * ROW + column + right, source + down * step + right, take);
            }
            source += BK * step;
            rows -= BK;
        }
    };

    // Loads panels [column][k] from a matrix [column][k], WIDE k at a time.
    template <int WIDE> struct Lines {
        static constexpr int ACROSS = BK / WIDE, DOWN = THREADS / ACROSS, COPIES = WIDTH / DOWN;
        static_assert(THREADS % ACROSS == 0 && WIDTH % DOWN == 0, "every thread makes the same number of copies");
        const T *source;
        int64_t step; // elements from one column to the next
        int columns, rows, row, column;

        __device__ Lines(const T *source, int64_t step, int columns, int rows)
            : step(step), columns(columns), rows(rows), row(threadIdx.x % ACROSS * WIDE),
              column(threadIdx.x / ACROSS) {
            this->source = source + column * step + row;
        }

        __device__ __forceinline__ void load(T *panel) {
            #pragma unroll
            for (int i = 0; i < COPIES; i++) {
                copy_async<WIDE * sizeof(T)>(panel + (column + i * DOWN) * ROW + row, source + i * DOWN * step,
                    row < rows && column + i * DOWN < columns);
            }
            source += BK;
            rows -= BK;
        }
    };

    // Where copy i of this thread goes when the loader transposes: eight neighbouring k (a sector of 32 bytes of
    // float) by four columns.
    static constexpr int UNITS = THREADS / 8, COPIES = BK * WIDTH / THREADS;
    static constexpr int OWN = WIDTH > UNITS ? WIDTH / UNITS : 1; // different columns that one thread loads
    static __device__ __forceinline__ int row(int i) {
        static_assert(BK % 8 == 0 && BK * WIDTH % THREADS == 0, "every thread makes the same number of copies");
        return threadIdx.x % 8 + (threadIdx.x / 8 / WIDTH + i * UNITS / WIDTH) * 8;
    }
    static __device__ __forceinline__ int column(int i) { return threadIdx.x / 8 % WIDTH + i * UNITS % WIDTH; }

    // Loads panels from a matrix [column][k]: transposes on the way, one element at a time.
    struct Across {
        const T *source;
        int64_t step; // elements from one column to the next
        int columns, rows;

        __device__ Across(const T *source, int64_t step, int columns, int rows)
            : source(source + column(0) * step + row(0)), step(step), columns(columns), rows(rows) {}

        __device__ __forceinline__ void load(T *panel) {
            #pragma unroll
            for (int i = 0; i < COPIES; i++) {
                const T *from = source + (column(i) - column(0)) * step + (row(i) - row(0));
                copy_async<sizeof(T)>(panel + row(i) * ROW + column(i), from, row(i) < rows && column(i) < columns);
            }
            source += BK;
            rows -= BK;
        }
    };
};

// The tunables. WM and WN are those of Unit, which multiplies the panels of a warp: see Fma in gemm/fma.cuh.
template <int BM_, int BN_, int BK_, int SLICES_, int STAGES_, class Unit_> struct Tile {
    typedef Unit_ Unit;
    static constexpr int BM = BM_, BN = BN_, BK = BK_, SLICES = SLICES_, STAGES = STAGES_;
    static constexpr int TM = Unit::TM, TN = Unit::TN, WARPS_N = BN / Unit::WN;
    static constexpr int TEAM = BM / Unit::WM * WARPS_N * WARP, THREADS = TEAM * SLICES;
    typedef Panels<THREADS, BK, BM, Unit::PAD_A, Unit::ALONG_A> PanelsA;
    typedef Panels<THREADS, BK, BN, Unit::PAD_B, Unit::ALONG_B> PanelsB;
    static constexpr int PANEL = PanelsA::SIZE, STAGE = PANEL + PanelsB::SIZE;

    T sums[TM][TN];
    int slice, m, n; // this thread's team of warps, and where its warp's sums lie in the tile

    __device__ Tile() {
        const int warp = threadIdx.x % TEAM / WARP;
        slice = threadIdx.x / TEAM;
        m = warp / WARPS_N * Unit::WM;
        n = warp % WARPS_N * Unit::WN;
    }
    // Rows and columns of the tile that sum [i][j] belongs to.
    __device__ __forceinline__ int row(int i) const { return m + Unit::row(i); }
    __device__ __forceinline__ int column(int j) const { return n + Unit::column(j); }

    // The product of `stages` stages from both loaders. Afterwards the threads of team 0 hold the sums.
    template <class LoaderA, class LoaderB> __device__ __forceinline__ void multiply(
        LoaderA &a, LoaderB &b, int stages) {
        T *shared = (T *)shared_bytes;
        #pragma unroll
        for (int i = 0; i < TM * TN; i++) sums[i / TN][i % TN] = 0;
        #pragma unroll
        for (int i = 0; i < STAGES - 1; i++) {
            if (i < stages) {
                a.load(shared + i * STAGE);
                b.load(shared + i * STAGE + PANEL);
            }
            end_group();
        }
        if constexpr (Unit::AHEAD)
            multiply_ahead(a, b, stages, shared);
        else
            multiply_staged(a, b, stages, shared);
        if (SLICES > 1) add_slices(shared);
    }

  private:
    // Of a stage's panels, from k on: of this team's rows this warp's columns.
    __device__ __forceinline__ const T *panel_a(const T *stage, int k) const {
        k += slice * (BK / SLICES);
        return stage + (Unit::ALONG_A ? m * PanelsA::ROW + k : k * PanelsA::ROW + m);
    }
    __device__ __forceinline__ const T *panel_b(const T *stage, int k) const {
        k += slice * (BK / SLICES);
        return stage + PANEL + (Unit::ALONG_B ? n * PanelsB::ROW + k : k * PanelsB::ROW + n);
    }

    template <class LoaderA, class LoaderB> __device__ __forceinline__ void multiply_staged(
        LoaderA &a, LoaderB &b, int stages, T *shared) {
        int current = 0, next = STAGES - 1;
        for (int i = 0; i < stages; i++) {
            wait_groups<STAGES - 2>();
            __syncthreads(); // everybody's copies of this stage are there, and nobody reads the stage before it any
            if (i + STAGES - 1 < stages) { // more, which is the one to load into
                a.load(shared + next * STAGE);
                b.load(shared + next * STAGE + PANEL);
            }
            end_group();
            const T *stage = shared + current * STAGE;
            Unit::template multiply<BK / SLICES, PanelsA::ROW, PanelsB::ROW>(
                sums, panel_a(stage, 0), panel_b(stage, 0));
            current = current + 1 == STAGES ? 0 : current + 1;
            next = next + 1 == STAGES ? 0 : next + 1;
        }
    }

    // The same, and while a warp multiplies, its next numbers are on their way from shared memory.
    template <class LoaderA, class LoaderB> __device__ __forceinline__ void multiply_ahead(
        LoaderA &a, LoaderB &b, int stages, T *shared) {
        constexpr int STEPS = BK / SLICES / Unit::STEP;
        static_assert(STEPS * SLICES * Unit::STEP == BK, "a stage is made of instructions");
        if (stages == 0) return;
        const auto read = [&](typename Unit::Numbers &numbers, const T *stage, int step) {
            numbers.template read<PanelsA::ROW, PanelsB::ROW>(
                panel_a(stage, step * Unit::STEP), panel_b(stage, step * Unit::STEP));
        };
        typename Unit::Numbers numbers;
        wait_groups<STAGES - 2>();
        __syncthreads();
        read(numbers, shared, 0);
        int current = 0, next = STAGES - 1;
        for (int i = 0; i < stages; i++) {
            // All have read the stage before this one, as they have passed the barrier below.
            if (i + STAGES - 1 < stages) {
                a.load(shared + next * STAGE);
                b.load(shared + next * STAGE + PANEL);
            }
            end_group();
            next = next + 1 == STAGES ? 0 : next + 1;
            #pragma unroll
            for (int step = 0; step < STEPS; step++) {
                const typename Unit::Operands operands(numbers);
                if (step + 1 == STEPS) {
                    current = current + 1 == STAGES ? 0 : current + 1;
                    wait_groups<STAGES - 2>();
                    __syncthreads(); // everybody's copies of the next stage are there
                }
                read(numbers, shared + current * STAGE, (step + 1) % STEPS); // after the last stage: of no use
                Unit::multiply_step(sums, operands);
            }
        }
    }

    // Adds the teams' sums into team 0's, half of the teams to the other half until one is left: always the same order.
    __device__ __forceinline__ void add_slices(T *shared) {
        T *mine = shared + threadIdx.x % TEAM;
        #pragma unroll
        for (int half = SLICES / 2; half > 0; half /= 2) {
            __syncthreads();
            #pragma unroll
            for (int i = 0; i < TM * TN; i++) {
                if (slice >= half && slice < 2 * half)
                    mine[((slice - half) * TM * TN + i) * TEAM] = sums[i / TN][i % TN];
            }
            __syncthreads();
            #pragma unroll
            for (int i = 0; i < TM * TN; i++) {
                if (slice < half) sums[i / TN][i % TN] += mine[(slice * TM * TN + i) * TEAM];
            }
        }
    }
};

// COUNT numbers in pieces of CHUNK neighbours, STEP apart.
template <int COUNT, int CHUNK, int STEP> __device__ __forceinline__ void read(T (&to)[COUNT], const T *from) {
    #pragma unroll
    for (int i = 0; i < COUNT; i += CHUNK) {
        const Vector<T, CHUNK> chunk = *(const Vector<T, CHUNK> *)(from + i / CHUNK * STEP);
        #pragma unroll
        for (int j = 0; j < CHUNK; j++) to[i + j] = chunk.lane[j];
    }
}
