// C = op(A) op(B) on Hopper's matrix units, of operands as they lie in memory: two warpgroups bring them and cut each
// float32 in three pieces on the way (sm90/bf16x3.cuh), two multiply, each half of a tile's rows. k may be cut into parts,
// whose sums lie in scratch for gemm/split_k_sum.cu.
//
// The largest products of pieces are exact. The matrix units, which cut bits off where they add, sum them over DEPTH
// of k; float32 additions go on. The others, 2^-8 of them, have sums of their own.
#ifndef TILE_N
#define TILE_N 128
#define TRANSPOSE_A 0
#define TRANSPOSE_B 0
#define WIDE_A 1 // elements that may be read at once
#define WIDE_B 1
#define WIDE_C 1 // and written, by a thread that has sums
#define WIDE_TILE 1 // and, ONCE, by any thread
#define SPLIT 0
#define ONCE 0 // a block has one part of a tile
#endif
#include "gemm/gemm.cuh"
#include "sm90/bf16x3.cuh"
#include "sm90/accumulator.cuh"
#include "gemm/staged_epilogue.cuh"

constexpr int TILE_M = 128, ROWS = 64, TEAMS = TILE_M / ROWS; // ROWS: of a warpgroup, a team
constexpr int BRINGING = 2 * WARPGROUP, THREADS = BRINGING + TEAMS * WARPGROUP;
constexpr int DEPTH = 32, STEP = 16, STAGES = 3; // k of a stage and of an instruction
constexpr int SUMS = TILE_N / 2;                 // that a thread has
constexpr int APART = 2;                         // stages that a team is ahead of the next one

// LINES rows of op(A) or columns of op(B). In memory they lie as [line][k] if ALONG, else as [k][line], where WIDE
// elements may be read at once; in shared memory in words of eight that are neighbours in memory, a plane: all words of
// the same eight k, or lines. From plane to plane it is so far that what eight threads write lies in different banks.
template <int LINES, bool ALONG, int WIDE> struct Side {
    static constexpr int ACROSS = (ALONG ? DEPTH : LINES) / GROUP_OF, DOWN = ALONG ? LINES : DEPTH; // words
    static constexpr int PLANE = (DOWN + (ALONG ? 2 : 1)) * WORD, PIECE = ACROSS * PLANE, SIZE = PIECE_COUNT * PIECE;
    static constexpr int WORDS = ACROSS * DOWN, EACH = (WORDS + BRINGING - 1) / BRINGING; // of a stage, of a thread
    static constexpr int SLOTS = EACH * BRINGING * GROUP_OF; // elements on their way
    static_assert(LINES % GROUP_OF == 0, "whole words");

    const T *x;
    int length, k, first; // lines and k of the matrix, and the first line taken

    // Starts the copies of a stage from k0 on to slots. Of a warp's words neighbouring lanes copy neighbours in memory.
    __device__ __forceinline__ void start(T *slots, int k0) const {
        constexpr int COPIES = GROUP_OF / WIDE, AT_ONCE = WIDE == VECTOR && WORDS % BRINGING == 0 ? EACH * COPIES : 1;
        #pragma unroll AT_ONCE // else the places would not fit into registers
        for (int i = 0; i < EACH * COPIES; i++) {
            const int copy = i % COPIES * WARP + threadIdx.x % WARP, j = copy % COPIES * WIDE;
            const int at = i / COPIES * BRINGING + threadIdx.x / WARP * WARP + copy / COPIES;
            if (WORDS % BRINGING != 0 && at >= WORDS) break;
            const int across = at % ACROSS * GROUP_OF, down = at / ACROSS;
            const int line = first + (ALONG ? down : across), depth = k0 + (ALONG ? across : down);
            const int left = line < length && depth < k ? ALONG ? k - depth : length - line : 0;
            const int from = ALONG ? line * k + depth : depth * length + line;
            copy_async<WIDE * sizeof(T)>(slots + slot(at, j), x + from + j, left > j);
        }
    }

    // Puts words that the warp has copied to their places in a stage, cut.
    static __device__ __forceinline__ void put(const T *slots, char *stage) {
        #pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int at = i * BRINGING + threadIdx.x;
            if (WORDS % BRINGING != 0 && at >= WORDS) break;
            float found[GROUP_OF];
            #pragma unroll
            for (int j = 0; j < GROUP_OF; j += VECTOR) {
                const Vector<T, VECTOR> v = load<T, VECTOR>(slots + slot(at, j));
                #pragma unroll
                for (int h = 0; h < VECTOR; h++) found[j + h] = v.lane[h];
            }
            Word words[PIECE_COUNT];
            cut(words, found);
            #pragma unroll
            for (int p = 0; p < PIECE_COUNT; p++)
                *(Word *)(stage + p * PIECE + at % ACROSS * PLANE + at / ACROSS * WORD) = words[p];
        }
    }

    // The first piece of lines from `line` of the stage on, as wgmma is told; and how much further on other pieces and k lie.
    static __device__ __forceinline__ uint64_t described(const char *stage, int line) {
        return ALONG ? ::described(stage + line * WORD, PLANE, UNIT_BYTES, NOT_EXCHANGED)
                     : ::described(stage + line / GROUP_OF * PLANE, UNIT_BYTES, PLANE, NOT_EXCHANGED);
    }
    static __device__ __forceinline__ int further(int piece, int k) {
        return (piece * PIECE + (ALONG ? k / GROUP_OF * PLANE : k * WORD)) / WORD;
    }

  private:
    // Where element j of a word is on its way: halves change places so that eight threads read from different banks.
    static __device__ __forceinline__ int slot(int at, int j) {
        return at * GROUP_OF + (j / VECTOR ^ at / 4 % 2) * VECTOR + j % VECTOR;
    }
};
typedef Side<TILE_M, !TRANSPOSE_A, WIDE_A> Left;
typedef Side<TILE_N, TRANSPOSE_B, WIDE_B> Right;
constexpr int STAGE = Left::SIZE + Right::SIZE, SLOTS = Left::SLOTS + Right::SLOTS;

// All tiles of all matrices, of each all parts of k.
struct Work {
    const T *a, *b;
    int m, n, k, splits, tiles;

    __device__ Work(const T *a, const T *b, int64_t batch, int64_t m, int64_t n, int64_t k, int64_t splits)
        : a(a), b(b), m(m), n(n), k(k), splits(splits), tiles(batch * rows() * columns()) {}
    __device__ __forceinline__ int rows() const { return (m + TILE_M - 1) / TILE_M; }
    __device__ __forceinline__ int columns() const { return (n + TILE_N - 1) / TILE_N; }
    __device__ __forceinline__ int count() const { return tiles * splits; }
};

// A part of a tile: its stages are begin to end.
struct Part {
    TileAt at;
    int split, begin, end;

    __device__ Part(const Work &work, int i)
        : at(i % work.tiles, work.rows(), work.columns()), split(i / work.tiles) {
        const int64_t stages = (work.k + DEPTH - 1) / DEPTH;
        begin = stages * split / work.splits;
        end = stages * (split + 1) / work.splits;
    }
    __device__ __forceinline__ const T *a(const Work &work) const { return work.a + at.item * work.m * work.k; }
    __device__ __forceinline__ const T *b(const Work &work) const { return work.b + at.item * work.k * work.n; }
};

// Goes through the stages of all parts that a block takes.
struct Bringing {
    const Work &work;
    int i, stage, end;
    Left left;
    Right right;

    __device__ explicit Bringing(const Work &work) : work(work), i(blockIdx.x) { enter(); }
    __device__ __forceinline__ bool more() const { return i < work.count(); }
    __device__ __forceinline__ void start(T *slots) const {
        left.start(slots, stage * DEPTH);
        right.start(slots + Left::SLOTS, stage * DEPTH);
    }
    __device__ __forceinline__ void next() {
        if (++stage < end) return;
        i += gridDim.x;
        enter();
    }

  private:
    __device__ __forceinline__ void enter() {
        if (!more()) return;
        const Part part(work, i);
        stage = part.begin;
        end = part.end;
        left = {part.a(work), work.m, work.k, part.at.down * TILE_M};
        right = {part.b(work), work.n, work.k, part.at.across * TILE_N};
    }
};

struct Stages {
    Barrier full[STAGES], empty[STAGES], begun;

    __device__ void init() {
        for (int i = 0; i < STAGES; i++) {
            full[i].init(BRINGING / WARP);
            empty[i].init(TEAMS * WARPGROUP / WARP);
        }
        begun.init(WARPGROUP / WARP);
        show_barriers();
    }
};

// The next stage's elements are on their way while this one's are cut.
__device__ __forceinline__ void bring(const Work &work, Stages &stages, char *shared, T *slots) {
    Bringing ahead(work);
    Round<STAGES> turn;
    bool any = ahead.more();
    if (any) ahead.start(slots);
    end_group();
    for (int i = 0; any; i++, turn.next()) {
        ahead.next();
        any = ahead.more();
        if (any) ahead.start(slots + (i + 1) % 2 * SLOTS);
        end_group();
        wait_groups<1>();
        stages.empty[turn.stage].wait(turn.parity ^ 1);
        __syncwarp(); // what its lanes have copied is there
        const T *copied = slots + i % 2 * SLOTS;
        char *stage = shared + turn.stage * STAGE;
        Left::put(copied, stage);
        Right::put(copied + Left::SLOTS, stage + Left::SIZE);
        show_to_matrix_units();
        say(stages.full[turn.stage]); // and has been read
    }
}

struct Sums {
    float main[SUMS], beside[SUMS];

    // first: whether it is the first part of a block, in which a team waits until the one before it is APART stages ahead:
    // so they end their tiles one after another, while the other one multiplies.
    __device__ __forceinline__ void multiply(
        Stages &stages, const char *shared, const Part &part, int team, bool first, Round<STAGES> &turn) {
        if (first && team > 0) stages.begun.wait(0);
        float high[SUMS];
        #pragma unroll
        for (int i = 0; i < SUMS; i++) main[i] = 0;
        int last = 0;
        for (int i = part.begin; i < part.end; i++, turn.next()) {
            stages.full[turn.stage].wait(turn.parity);
            const char *stage = shared + turn.stage * STAGE;
            const uint64_t a = Left::described(stage, team * ROWS), b = Right::described(stage + Left::SIZE, 0);
            const auto products = [&](float (&sums)[SUMS], Pair pieces, bool add) {
                #pragma unroll
                for (int k = 0; k < DEPTH; k += STEP)
                    start_pieces<TRANSPOSE_A, !TRANSPOSE_B>(
                        sums, a + Left::further(pieces.a, k), b + Right::further(pieces.b, k), add || k > 0);
            };
            Started::begin();
            products(high, {0, 0}, false);
            Started::end();
            Started::finished<1>();
            if (i > part.begin) say(stages.empty[last]);
            if (first && team == 0 && i == min(part.begin + APART, part.end) - 1) say(stages.begun);
            #pragma unroll
            for (int j = 0; j < BESIDE; j++) products(beside, ::beside(j), i + j > part.begin);
            Started::end();
            Started::finished<1>();
            arrived(high);
            #pragma unroll
            for (int j = 0; j < SUMS; j++) main[j] += high[j];
            last = turn.stage;
        }
        Started::finished<0>();
        arrived(beside);
        say(stages.empty[last]);
        #pragma unroll
        for (int i = 0; i < SUMS; i++) main[i] += beside[i];
    }
};

// Of one chain of multiply-adds.
__device__ __noinline__ T plain(const Factors<TRANSPOSE_A, TRANSPOSE_B> &factors, int row, int column, int k0, int k1) {
    return factors.plain(row, column, k0, k1);
}

// Pieces make NaN of infinities: what is not finite is computed again.
__device__ __forceinline__ void repair(float (&sums)[SUMS], const Work &work, const Part &part, const Place &place) {
    float zero = 0;
    #pragma unroll
    for (int i = 0; i < SUMS; i++) zero = fma(sums[i], 0.0f, zero);
    if (zero == 0) return;
    const Factors<TRANSPOSE_A, TRANSPOSE_B> factors = {part.a(work), part.b(work), work.m, work.n, work.k};
    const int k0 = part.begin * DEPTH, k1 = min(part.end * DEPTH, work.k);
    #pragma unroll
    for (int i = 0; i < SUMS; i++)
        if (!finite(sums[i]) && place.inside(i)) sums[i] = plain(factors, place.row(i), place.column(i), k0, k1);
}

// Where sums go: of parts to scratch, one part after another.
#if SPLIT
struct Target {
    T *parts;
    int64_t size;
    __device__ __forceinline__ Store of(const Part &part) const { return {parts + part.split * size}; }
};
#else
struct Target {
    const Epilogue &epilogue;
    __device__ __forceinline__ const Epilogue &of(const Part &) const { return epilogue; }
};
#endif
typedef Staged<TILE_M, TILE_N> Tiled;

// What a team does: its rows of all parts of the block one after another.
__device__ __forceinline__ void compute(
    const Work &work, Stages &stages, const char *shared, const Tiled &tile, const Target &target) {
    const int team = __shfl_sync(~0u, (threadIdx.x - BRINGING) / WARPGROUP, 0); // known to be a whole warp's
    Round<STAGES> turn;
    for (int i = blockIdx.x; i < work.count(); i += gridDim.x) {
        const Part part(work, i);
        const Place place = {part.at, work.m, work.n, part.at.down * TILE_M + team * ROWS, part.at.across * TILE_N};
        Sums sums;
        sums.multiply(stages, shared, part, team, i == blockIdx.x, turn);
        repair(sums.main, work, part, place);
        if (!ONCE) {
            place.give(target.of(part), sums.main);
            continue;
        }
        #pragma unroll
        for (int j = 0; j < SUMS; j += 2) {
            const T value[] = {sums.main[j], sums.main[j + 1]};
            tile(0, place.row(j), place.column(j), 0, value);
        }
    }
}

// ONCE all threads hand the tile to the epilogue, with as many registers each.
KERNEL __launch_bounds__(THREADS, 1) gemm_pieces(const T *a, const T *b, const Epilogue epilogue, int64_t batch,
    int64_t m, int64_t n, int64_t k, int64_t splits
#if SPLIT
    , char *scratch
#endif
) {
    wait_for_inputs();
    const Work work(a, b, batch, m, n, k, splits);
#if SPLIT
    const Target target = {(T *)scratch, batch * m * n};
#else
    const Target target = {epilogue};
#endif
    char *shared = (char *)shared_bytes;
    T *slots = (T *)(shared + STAGES * STAGE);
    const Tiled tile = {slots}; // where nothing is on its way any more
    __shared__ Stages stages;
    if (threadIdx.x == 0) stages.init();
    __syncthreads();
    if (threadIdx.x < BRINGING) {
        give_registers<56>();
        bring(work, stages, shared, slots);
        if (ONCE) take_registers<128>();
    } else {
        take_registers<200>();
        compute(work, stages, shared, tile, target);
        if (ONCE) give_registers<128>();
    }
    if (ONCE) tile.finish<WIDE_TILE, THREADS>(target.of(Part(work, blockIdx.x)), m, n, blockIdx.x % work.tiles);
}
