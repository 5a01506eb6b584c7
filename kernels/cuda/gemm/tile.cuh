// The tiled matrix product: a block computes a BM x BN tile of C = A B from panels of A and B.
//
//   global -> shared memory     a pipeline of STAGES stages; cp.async fills them STAGES - 1 ahead. A stage holds BK k: for each
//                               BM elements of A and BN of B.
//   shared memory -> registers  a warp computes WM x WN of the tile, a thread TM x TN of that, by its WarpOp: FMA
//                               (Fma) or tensor cores (gemm/mma.cuh). Accumulators stay in registers.
// Sliced-K: SLICES groups of warps share a tile. Each takes its own part of every stage, and their accumulators are added in
// a fixed order at the end. This uses more warps where the matrix has few tiles.
//
// Panels are stored as [k][m] and [k][n], or K-major as [m][k] and [n][k]. load(T *panel) of a loader starts the copies of the
// next BK k, with zeros outside the matrix.
#pragma once
#include "common/common.cuh"

constexpr int VECTOR = 16 / sizeof(T); // elements of a 16-byte load

extern __shared__ __align__(16) unsigned char shared_bytes[];

// The loaders of THREADS threads for panels [k][column] of BK x WIDTH elements, or [column][k] if K_MAJOR. Rows of a panel are
// ROW elements apart.
template <int THREADS, int BK, int WIDTH, int PAD, bool K_MAJOR> struct Panels {
    static constexpr int ROW = K_MAJOR ? BK + 4 : WIDTH + PAD, SIZE = (K_MAJOR ? WIDTH : BK) * ROW;

    // From a matrix [k][column] to a panel [k][column], WIDE columns at a time.
    template <int WIDE> struct LoadRows {
        static constexpr int COLUMNS = WIDTH / WIDE, COPIES = BK * COLUMNS / THREADS;
        static_assert(BK * COLUMNS % THREADS == 0, "all threads make the same number of copies");
        const T *source;
        int64_t step; // elements from one row to the next
        int columns, rows, row, column;

        // source: the panel's first element; columns and rows: those of the matrix from there on.
        __device__ LoadRows(const T *source, int64_t step, int columns, int rows)
            : step(step), columns(columns), rows(rows), row(threadIdx.x / COLUMNS),
              column(threadIdx.x % COLUMNS * WIDE) {
            this->source = source + row * step + column;
        }

        __device__ __forceinline__ void load(T *panel) {
            #pragma unroll
            for (int i = 0; i < COPIES; i++) {
                const int down = i * THREADS / COLUMNS, right = i * THREADS % COLUMNS * WIDE;
                const bool take = row + down < rows && column + right < columns;
                cp_async<WIDE * sizeof(T)>(
                    panel + (row + down) * ROW + column + right, source + down * step + right, take);
            }
            source += BK * step;
            rows -= BK;
        }
    };

    // From a matrix [column][k] to a panel [column][k], WIDE k at a time.
    template <int WIDE> struct LoadKMajor {
        static constexpr int ACROSS = BK / WIDE, DOWN = THREADS / ACROSS, COPIES = WIDTH / DOWN;
        static_assert(THREADS % ACROSS == 0 && WIDTH % DOWN == 0, "all threads make the same number of copies");
        const T *source;
        int64_t step; // elements from one column to the next
        int columns, rows, row, column;

        __device__ LoadKMajor(const T *source, int64_t step, int columns, int rows)
            : step(step), columns(columns), rows(rows), row(threadIdx.x % ACROSS * WIDE),
              column(threadIdx.x / ACROSS) {
            this->source = source + column * step + row;
        }

        __device__ __forceinline__ void load(T *panel) {
            #pragma unroll
            for (int i = 0; i < COPIES; i++) {
                cp_async<WIDE * sizeof(T)>(panel + (column + i * DOWN) * ROW + row, source + i * DOWN * step,
                    row < rows && column + i * DOWN < columns);
            }
            source += BK;
            rows -= BK;
        }
    };

    // The element of copy i in LoadTransposed. A warp copies eight neighbouring k (a 32-byte sector of float) of four columns.
    static constexpr int SECTORS = THREADS / 8, COPIES = BK * WIDTH / THREADS;
    static constexpr int OWN = WIDTH > SECTORS ? WIDTH / SECTORS : 1; // different columns of a thread
    static __device__ __forceinline__ int row(int i) {
        static_assert(BK % 8 == 0 && BK * WIDTH % THREADS == 0, "all threads make the same number of copies");
        return threadIdx.x % 8 + (threadIdx.x / 8 / WIDTH + i * SECTORS / WIDTH) * 8;
    }
    static __device__ __forceinline__ int column(int i) { return threadIdx.x / 8 % WIDTH + i * SECTORS % WIDTH; }

    // From a matrix [column][k] to a panel [k][column], one element at a time.
    struct LoadTransposed {
        const T *source;
        int64_t step; // elements from one column to the next
        int columns, rows;

        __device__ LoadTransposed(const T *source, int64_t step, int columns, int rows)
            : source(source + column(0) * step + row(0)), step(step), columns(columns), rows(rows) {}

        __device__ __forceinline__ void load(T *panel) {
            #pragma unroll
            for (int i = 0; i < COPIES; i++) {
                const T *from = source + (column(i) - column(0)) * step + (row(i) - row(0));
                cp_async<sizeof(T)>(panel + row(i) * ROW + column(i), from, row(i) < rows && column(i) < columns);
            }
            source += BK;
            rows -= BK;
        }
    };
};

// The product of a block, in SHARED bytes of shared memory. WarpOp is the product of a warp, with WM and WN: see Fma.
template <int BM_, int BN_, int BK_, int SLICES_, int STAGES_, class WarpOp_, int SHARED> struct Tile {
    typedef WarpOp_ WarpOp;
    static constexpr int BM = BM_, BN = BN_, BK = BK_, SLICES = SLICES_, STAGES = STAGES_;
    static constexpr int TM = WarpOp::TM, TN = WarpOp::TN, WARPS_N = BN / WarpOp::WN;
    static constexpr int SLICE_THREADS = BM / WarpOp::WM * WARPS_N * WARP, THREADS = SLICE_THREADS * SLICES;
    typedef Panels<THREADS, BK, BM, WarpOp::PAD_A, WarpOp::K_MAJOR_A> PanelsA;
    typedef Panels<THREADS, BK, BN, WarpOp::PAD_B, WarpOp::K_MAJOR_B> PanelsB;
    static constexpr int PANEL = PanelsA::SIZE, STAGE = PANEL + PanelsB::SIZE;
    static constexpr int PIPELINE = STAGES * STAGE, REDUCTION = SLICES / 2 * BM * BN; // elements
    static_assert(SHARED == (PIPELINE > REDUCTION ? PIPELINE : REDUCTION) * sizeof(T), "Tile.shared in tiles.py");

    T sums[TM][TN];
    int slice, m, n; // this thread's slice, and its warp's first row and column in the tile

    __device__ Tile() {
        const int warp = threadIdx.x % SLICE_THREADS / WARP;
        slice = threadIdx.x / SLICE_THREADS;
        m = warp / WARPS_N * WarpOp::WM;
        n = warp % WARPS_N * WarpOp::WN;
    }
    // Row and column of sums[i][j] in the tile.
    __device__ __forceinline__ int row(int i) const { return m + WarpOp::row(i); }
    __device__ __forceinline__ int column(int j) const { return n + WarpOp::column(j); }

    // The product of `stages` stages from both loaders. Afterwards the threads of slice 0 hold the sums.
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
            cp_async_commit_group();
        }
        if constexpr (WarpOp::PREFETCH)
            multiply_prefetched(a, b, stages, shared);
        else
            multiply_staged(a, b, stages, shared);
        if (SLICES > 1) add_slices(shared);
    }

  private:
    // This warp's part of a stage's panels, from row k of its slice on.
    __device__ __forceinline__ const T *panel_a(const T *stage, int k) const {
        k += slice * (BK / SLICES);
        return stage + (WarpOp::K_MAJOR_A ? m * PanelsA::ROW + k : k * PanelsA::ROW + m);
    }
    __device__ __forceinline__ const T *panel_b(const T *stage, int k) const {
        k += slice * (BK / SLICES);
        return stage + PANEL + (WarpOp::K_MAJOR_B ? n * PanelsB::ROW + k : k * PanelsB::ROW + n);
    }

    template <class LoaderA, class LoaderB> __device__ __forceinline__ void multiply_staged(
        LoaderA &a, LoaderB &b, int stages, T *shared) {
        int current = 0, next = STAGES - 1;
        for (int i = 0; i < stages; i++) {
            cp_async_wait_group<STAGES - 2>();
            __syncthreads(); // all copies of this stage are complete, and all warps have read the previous stage
            if (i + STAGES - 1 < stages) {
                a.load(shared + next * STAGE);
                b.load(shared + next * STAGE + PANEL);
            }
            cp_async_commit_group();
            const T *stage = shared + current * STAGE;
            WarpOp::template multiply<BK / SLICES, PanelsA::ROW, PanelsB::ROW>(
                sums, panel_a(stage, 0), panel_b(stage, 0));
            current = current + 1 == STAGES ? 0 : current + 1;
            next = next + 1 == STAGES ? 0 : next + 1;
        }
    }

    // The same; a warp reads its next fragments from shared memory while it multiplies.
    template <class LoaderA, class LoaderB> __device__ __forceinline__ void multiply_prefetched(
        LoaderA &a, LoaderB &b, int stages, T *shared) {
        constexpr int STEPS = BK / SLICES / WarpOp::STEP;
        static_assert(STEPS * SLICES * WarpOp::STEP == BK, "a slice of a stage is whole mma steps");
        if (stages == 0) return;
        const auto read = [&](typename WarpOp::Fragments &fragments, const T *stage, int step) {
            fragments.template read<PanelsA::ROW, PanelsB::ROW>(
                panel_a(stage, step * WarpOp::STEP), panel_b(stage, step * WarpOp::STEP));
        };
        typename WarpOp::Fragments fragments;
        cp_async_wait_group<STAGES - 2>();
        __syncthreads();
        read(fragments, shared, 0);
        int current = 0, next = STAGES - 1;
        for (int i = 0; i < stages; i++) {
            // The barrier below has been passed, so all warps have read the stage that is overwritten here.
            if (i + STAGES - 1 < stages) {
                a.load(shared + next * STAGE);
                b.load(shared + next * STAGE + PANEL);
            }
            cp_async_commit_group();
            next = next + 1 == STAGES ? 0 : next + 1;
            #pragma unroll
            for (int step = 0; step < STEPS; step++) {
                const typename WarpOp::Operands operands(fragments);
                if (step + 1 == STEPS) {
                    current = current + 1 == STAGES ? 0 : current + 1;
                    cp_async_wait_group<STAGES - 2>();
                    __syncthreads(); // all copies of the next stage are complete
                }
                read(fragments, shared + current * STAGE, (step + 1) % STEPS); // unused after the last stage
                WarpOp::multiply_step(sums, operands);
            }
        }
    }

    // Adds the sums of all slices to those of slice 0, by a tree in fixed order.
    __device__ __forceinline__ void add_slices(T *shared) {
        T *mine = shared + threadIdx.x % SLICE_THREADS;
        #pragma unroll
        for (int half = SLICES / 2; half > 0; half /= 2) {
            __syncthreads();
            #pragma unroll
            for (int i = 0; i < TM * TN; i++) {
                if (slice >= half && slice < 2 * half)
                    mine[((slice - half) * TM * TN + i) * SLICE_THREADS] = sums[i / TN][i % TN];
            }
            __syncthreads();
            #pragma unroll
            for (int i = 0; i < TM * TN; i++) {
                if (slice < half) sums[i / TN][i % TN] += mine[(slice * TM * TN + i) * SLICE_THREADS];
            }
        }
    }
};

// Reads COUNT elements: vectors of CHUNK neighbours, STEP apart.
template <int COUNT, int CHUNK, int STEP> __device__ __forceinline__ void read(T (&to)[COUNT], const T *from) {
    #pragma unroll
    for (int i = 0; i < COUNT; i += CHUNK) {
        const Vector<T, CHUNK> chunk = *(const Vector<T, CHUNK> *)(from + i / CHUNK * STEP);
        #pragma unroll
        for (int j = 0; j < CHUNK; j++) to[i + j] = chunk.lane[j];
    }
}

// The warp-level product in true float32 and float64: explicit FMA, so that results do not depend on how the compiler contracts
// the code around it.
//
// The product of a warp, for a WM x WN tile. A WarpOp defines the rows and columns of accumulators of a thread (TM, TN), their
// coordinates in the warp's tile, and multiply() for panels in shared memory.
template <int WM_, int WN_> struct Fma {
    static constexpr int WM = WM_, WN = WN_;
    static constexpr bool KEEPS_NON_FINITE = true; // infinity and NaN give what IEEE arithmetic gives
    static constexpr bool PREFETCH = false;        // the compiler prefetches the next fragments from shared memory
    static constexpr bool K_MAJOR_A = false, K_MAJOR_B = false;
    static constexpr int PAD_A = VECTOR, PAD_B = VECTOR; // elements after a row of a panel, against bank conflicts
    static constexpr int LANES_M = 4, LANES_N = 8; // of a warp
    static constexpr int TM = WM / LANES_M, TN = WN / LANES_N;
    static constexpr int CHUNK_M = TM < VECTOR ? TM : VECTOR, CHUNK_N = TN < VECTOR ? TN : VECTOR;

    // Lane ^ 1 reads the same elements of B and lane ^ 2 the same of A, so a warp's 16-byte reads take two wavefronts.
    static __device__ __forceinline__ int lane_m() { return (threadIdx.x & 1) + threadIdx.x % WARP / 16 * 2; }
    static __device__ __forceinline__ int lane_n() { return threadIdx.x % WARP / 2 % LANES_N; }
    static __device__ __forceinline__ int row(int i) {
        return lane_m() * CHUNK_M + i / CHUNK_M * (LANES_M * CHUNK_M) + i % CHUNK_M;
    }
    static __device__ __forceinline__ int column(int j) {
        return lane_n() * CHUNK_N + j / CHUNK_N * (LANES_N * CHUNK_N) + j % CHUNK_N;
    }

    // Adds the product of ROWS k. For each k a thread reads TM + TN elements and does TM * TN FMA.
    template <int ROWS, int ROW_A, int ROW_B> static __device__ __forceinline__ void multiply(
        T (&sums)[TM][TN], const T *a, const T *b) {
        a += row(0);
        b += column(0);
        #pragma unroll
        for (int k = 0; k < ROWS; k++) {
            T left[TM], right[TN];
            read<TM, CHUNK_M, LANES_M * CHUNK_M>(left, a + k * ROW_A);
            read<TN, CHUNK_N, LANES_N * CHUNK_N>(right, b + k * ROW_B);
            #pragma unroll
            for (int i = 0; i < TM; i++) {
                #pragma unroll
                for (int j = 0; j < TN; j++) sums[i][j] = fma(left[i], right[j], sums[i][j]);
            }
        }
    }
};
