// The engine of all matrix products here: one block computes a BM x BN tile of C = A B from panels of A and B.
//
// Three levels, each of which reuses what the slower memory below it gives:
//   device memory -> shared memory   a stage holds BK rows of k: BM numbers of A and BN of B each. The block loads
//                                    STAGES - 1 stages ahead with cp.async, which needs no registers on the way.
//   shared memory -> registers       a warp owns WM x WN of the tile, a thread TM x TN of that: of every k it reads
//                                    TM + TN numbers and does TM * TN multiply-adds.
//   registers                        the sums stay there until the end.
// Where the matrix is too small for many tiles, SLICES teams of warps share a tile: each takes its own rows of every
// stage, and the teams' sums are added in a fixed order at the end.
//
// Both panels lie in shared memory as [k][m] and [k][n]. How they get there is the loaders' business: a loader has
// load(T *panel), which starts the copies of its next BK rows and writes zeros wherever the matrix has ended.
#pragma once
#include "common.cuh"

#ifndef BM // the tunables; the tile of the large products by default
#define BM 128
#define BN 128
#define BK 8
#define WM 64
#define WN 64
#define SLICES 1
#define STAGES 4
#define MIN_BLOCKS 2
#endif

constexpr int LANES_M = 4, LANES_N = 8; // the threads of a warp
constexpr int TM = WM / LANES_M, TN = WN / LANES_N;
constexpr int WARPS_M = BM / WM, WARPS_N = BN / WN;
constexpr int TEAM = WARPS_M * WARPS_N * WARP;
constexpr int THREADS = TEAM * SLICES;
constexpr int VECTOR = 16 / sizeof(T); // elements of the widest load
constexpr int CHUNK_M = TM < VECTOR ? TM : VECTOR, CHUNK_N = TN < VECTOR ? TN : VECTOR;
// Rows of the panels are 16 bytes longer than the tile, so that eight k of four m meet all 32 banks once.
constexpr int ROW_A = BM + VECTOR, ROW_B = BN + VECTOR;
constexpr int STAGE = BK * (ROW_A + ROW_B);

extern __shared__ __align__(16) unsigned char shared_bytes[];

// Copies `BYTES` (4, 8 or 16) into shared memory, or fills them with zeros unless `take`; done after a wait.
template <int BYTES> __device__ __forceinline__ void copy_async(T *to, const T *from, bool take) {
#if __CUDA_ARCH__ >= 800
    const unsigned target = (unsigned)__cvta_generic_to_shared(to);
    const int bytes = take ? BYTES : 0; // the rest is filled with zeros
    if (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(from), "r"(bytes));
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target), "l"(from), "n"(BYTES), "r"(bytes));
#else // compute capability 7.5: through registers
    struct __align__(BYTES) Bytes {
        T elements[BYTES / sizeof(T)];
    };
    *(Bytes *)to = take ? *(const Bytes *)from : Bytes{};
#endif
}

// Ends a group of copies. A stage that loads nothing ends an empty group: the count of groups tells which have landed.
__device__ __forceinline__ void end_group() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;");
#endif
}

// Waits until all but the last GROUPS groups of this thread's copies have landed.
template <int GROUPS> __device__ __forceinline__ void wait_groups() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS));
#endif
}

// Loads panels from a matrix [k][column], whose rows lie as they do in the panel: WIDTH columns, WIDE at a time.
template <int WIDTH, int WIDE> struct AlongLoader {
    static constexpr int COLUMNS = WIDTH / WIDE, COPIES = BK * COLUMNS / THREADS, ROW = WIDTH + VECTOR;
    static_assert(BK * COLUMNS % THREADS == 0, "every thread makes the same number of copies");
    const T *source;
    int64_t step; // elements from one row to the next
    int columns, rows, row, column;

    // source: the panel's first element; columns and rows: how many of the matrix are left from there.
    __device__ AlongLoader(const T *source, int64_t step, int columns, int rows)
        : step(step), columns(columns), rows(rows), row(threadIdx.x / COLUMNS), column(threadIdx.x % COLUMNS * WIDE) {
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

// Where thread copy i of a transposing loader goes: eight neighbouring k (a sector of 32 bytes of float) by four m.
template <int WIDTH> struct Across {
    static constexpr int UNITS = THREADS / 8, COPIES = BK * WIDTH / THREADS, ROW = WIDTH + VECTOR;
    static constexpr int OWN = WIDTH > UNITS ? WIDTH / UNITS : 1; // different columns that one thread loads
    static_assert(BK % 8 == 0 && BK * WIDTH % THREADS == 0, "every thread makes the same number of copies");
    static __device__ __forceinline__ int row(int i) {
        return threadIdx.x % 8 + (threadIdx.x / 8 / WIDTH + i * UNITS / WIDTH) * 8;
    }
    static __device__ __forceinline__ int column(int i) { return threadIdx.x / 8 % WIDTH + i * UNITS % WIDTH; }
};

// Loads panels from a matrix [column][k]: transposes on the way, one element at a time.
template <int WIDTH> struct AcrossLoader {
    typedef Across<WIDTH> At;
    const T *source;
    int64_t step; // elements from one column to the next
    int columns, rows;

    __device__ AcrossLoader(const T *source, int64_t step, int columns, int rows)
        : source(source + At::column(0) * step + At::row(0)), step(step), columns(columns), rows(rows) {}

    __device__ __forceinline__ void load(T *panel) {
        #pragma unroll
        for (int i = 0; i < At::COPIES; i++) {
            const int row = At::row(i), column = At::column(i);
            const T *from = source + (column - At::column(0)) * step + (row - At::row(0));
            copy_async<sizeof(T)>(panel + row * At::ROW + column, from, row < rows && column < columns);
        }
        source += BK;
        rows -= BK;
    }
};

template <int COUNT> struct __align__(COUNT * sizeof(T)) Chunk {
    T elements[COUNT];
};

// This thread's place: its team of warps, and where its sums lie in the tile. Lanes are dealt so that lane ^ 1 reads
// the same numbers of B and lane ^ 2 the same of A: shared memory then serves 16-byte reads of a warp in two goes.
struct Place {
    int slice, m, n; // m, n: of sum [0][0]
    __device__ Place() {
        const int lane = threadIdx.x % WARP, warp = threadIdx.x % TEAM / WARP;
        slice = threadIdx.x / TEAM;
        m = warp / WARPS_N * WM + ((lane & 1) + lane / (2 * LANES_N) * 2) * CHUNK_M;
        n = warp % WARPS_N * WN + lane / 2 % LANES_N * CHUNK_N;
    }
    // Rows and columns of the tile that sum [i][j] belongs to.
    __device__ int row(int i) const { return m + i / CHUNK_M * (LANES_M * CHUNK_M) + i % CHUNK_M; }
    __device__ int column(int j) const { return n + j / CHUNK_N * (LANES_N * CHUNK_N) + j % CHUNK_N; }
};

template <int COUNT, int CHUNK, int STEP> __device__ __forceinline__ void read(T (&to)[COUNT], const T *from) {
    #pragma unroll
    for (int i = 0; i < COUNT; i += CHUNK) {
        const Chunk<CHUNK> chunk = *(const Chunk<CHUNK> *)(from + i / CHUNK * STEP);
        #pragma unroll
        for (int j = 0; j < CHUNK; j++) to[i + j] = chunk.elements[j];
    }
}

// Adds the product of one stage, as far as it is this team's, to the sums.
__device__ __forceinline__ void multiply_stage(T (&sums)[TM][TN], const T *panels, const Place &place) {
    const T *a = panels + place.slice * (BK / SLICES) * ROW_A + place.m;
    const T *b = panels + BK * ROW_A + place.slice * (BK / SLICES) * ROW_B + place.n;
    #pragma unroll
    for (int k = 0; k < BK / SLICES; k++) {
        T left[TM], right[TN];
        read<TM, CHUNK_M, LANES_M * CHUNK_M>(left, a + k * ROW_A);
        read<TN, CHUNK_N, LANES_N * CHUNK_N>(right, b + k * ROW_B);
        #pragma unroll
        for (int i = 0; i < TM; i++) {
            #pragma unroll
            for (int j = 0; j < TN; j++) sums[i][j] += left[i] * right[j];
        }
    }
}

// Adds the teams' sums into team 0's, half of the teams to the other half until one is left: always the same order.
__device__ __forceinline__ void add_slices(T (&sums)[TM][TN], T *shared, const Place &place) {
    T *mine = shared + threadIdx.x % TEAM;
    #pragma unroll
    for (int half = SLICES / 2; half > 0; half /= 2) {
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < TM * TN; i++) {
            if (place.slice >= half && place.slice < 2 * half)
                mine[((place.slice - half) * TM * TN + i) * TEAM] = sums[i / TN][i % TN];
        }
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < TM * TN; i++) {
            if (place.slice < half) sums[i / TN][i % TN] += mine[(place.slice * TM * TN + i) * TEAM];
        }
    }
}

// The product of `stages` stages from both loaders. Afterwards the threads of team 0 hold the sums.
template <class LoaderA, class LoaderB>
__device__ __forceinline__ void multiply(
    T (&sums)[TM][TN], LoaderA &a, LoaderB &b, int stages, const Place &place) {
    T *shared = (T *)shared_bytes;
    #pragma unroll
    for (int i = 0; i < TM * TN; i++) sums[i / TN][i % TN] = 0;
    #pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        if (i < stages) {
            a.load(shared + i * STAGE);
            b.load(shared + i * STAGE + BK * ROW_A);
        }
        end_group();
    }
    int current = 0, next = STAGES - 1;
    for (int i = 0; i < stages; i++) {
        wait_groups<STAGES - 2>();
        __syncthreads(); // everybody's copies of this stage are there, and nobody reads the stage before it any more,
        if (i + STAGES - 1 < stages) { // which is the one to load into
            a.load(shared + next * STAGE);
            b.load(shared + next * STAGE + BK * ROW_A);
        }
        end_group();
        multiply_stage(sums, shared + current * STAGE, place);
        current = current + 1 == STAGES ? 0 : current + 1;
        next = next + 1 == STAGES ? 0 : next + 1;
    }
    if (SLICES > 1) add_slices(sums, shared, place);
}
