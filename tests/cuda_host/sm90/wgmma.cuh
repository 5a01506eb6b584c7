// What kernels/cuda/sm90/wgmma.cuh has, on the CPU: see host.h.
#pragma once
#include "gemm/mma.cuh"

constexpr int WARPGROUP = 4 * WARP;

struct Barrier {
    int arrivals, missing, bytes, phase;

    void init(int count) { arrivals = missing = count, bytes = phase = 0; }
    void arrive() { missing--, turn(); }
    void expect(int count) { bytes += count, arrive(); }
    void copied(int count) { bytes -= count, turn(); }
    void wait(int parity) { while (phase % 2 == parity) leave(); }

  private:
    void turn() { if (missing == 0 && bytes == 0) missing = arrivals, phase++; }
};
static void show_barriers() {}
static void show_to_matrix_units() {}

template <int BYTES> void copy_bulk(char *to, const char *from, Barrier &arrived) {
    memcpy(to, from, BYTES);
    arrived.copied(BYTES);
}
struct alignas(128) TensorMap {
    const float *x;
    int columns, rows, matrices, rows_of_box;

    void describe(const float *x, int columns, int rows, int matrices, int rows_of_box) {
        *this = {x, columns, rows, matrices, rows_of_box};
    }
    void copy(char *to, int column, int row, int matrix, Barrier &arrived) const {
        for (int i = 0; i < rows_of_box * 32; i++) {
            const int down = row + i / 32, right = column + i % 32;
            const bool there = down < rows && right < columns && matrix < matrices;
            const float value = there ? x[((int64_t)matrix * rows + down) * columns + right] : 0;
            const uint32_t rounded = Format<TF32>::rounded(value);
            memcpy(to + ((i * 4) ^ i / 32 % 8 * 16), &rounded, 4);
        }
        arrived.copied(rows_of_box * 128);
    }
};

static uint32_t rounded_halves(float low, float high) {
    const _Float16 both[2] = {(_Float16)low, (_Float16)high};
    uint32_t word;
    memcpy(&word, both, 4);
    return word;
}
static void as_floats(uint32_t word, float &low, float &high) {
    _Float16 both[2];
    memcpy(both, &word, 4);
    low = both[0], high = both[1];
}
template <int COUNT> void give_registers() {}
template <int COUNT> void take_registers() {}
static void meet(int threads, int place = 1) { of_places[place].wait(threads); }

struct Started {
    static void begin() { __syncwarp(); }
    static void end() {}
    template <int GROUPS> static void finished() { __syncwarp(); }
};
template <int SUMS> void arrived(float (&)[SUMS]) {}

static int sum_row(int i) { return threadIdx.x % WARPGROUP / WARP * 16 + i / 2 % 2 * 8 + threadIdx.x % WARP / 4; }
static int sum_column(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }

static int exchanged(int line, int word) { return line * 128 + (word ^ line % 8) * 16; }
constexpr int NEXT_K = 2;
constexpr uint64_t WITHIN_128_BYTES = 1;
static uint64_t described(const void *lines) {
    return ((const unsigned char *)lines - shared_bytes) >> 4 | (uint64_t)64 << 32 | WITHIN_128_BYTES << 62;
}

enum Exchange { NOT_EXCHANGED = 0, WITHIN_64_BYTES = 2 };
static uint64_t described(const void *from, int next, int then, Exchange exchange) {
    const uint64_t at = (const unsigned char *)from - shared_bytes;
    return at >> 4 | (uint64_t)(next >> 4) << 16 | (uint64_t)(then >> 4) << 32 | (uint64_t)exchange << 62;
}

// An operand as a descriptor says, PTX ISA, "Strides": of lines and k.
struct Operand {
    int start, next, then;
    uint64_t exchange;

    explicit Operand(uint64_t word)
        : start((word & 0x3fff) << 4), next((word >> 16 & 0x3fff) << 4), then((word >> 32 & 0x3fff) << 4),
          exchange(word >> 62) {}

    template <Kind KIND = BFLOAT16> static float element(int at) {
        if (KIND == TF32) {
            float x;
            memcpy(&x, shared_bytes + at, 4);
            return x;
        }
        uint16_t bits;
        memcpy(&bits, shared_bytes + at, 2);
        float low, high;
        as_floats(bits, low, high);
        return KIND == HALVES ? low : __uint_as_float((uint32_t)bits << 16);
    }
    // The k of a line are neighbours.
    template <Kind KIND> float along(int line, int k) const {
        const int at = start + line * 128 + k * (KIND == TF32 ? 4 : 2);
        if (exchange == WITHIN_128_BYTES) return element<KIND>(at ^ (at >> 7 & 7) << 4);
        if (exchange == WITHIN_64_BYTES) {
            const int in_64 = start + line % 8 * 64 + line / 8 * then + k * 2;
            return element<KIND>(in_64 ^ (in_64 >> 7 & 3) << 4);
        }
        return element<KIND>(start + line / 8 * then + line % 8 * 16 + k / 8 * next + k % 8 * 2);
    }
    // The lines of a k are.
    template <Kind KIND> float turned(int line, int k) const {
        if (exchange != WITHIN_64_BYTES)
            return element<KIND>(start + line / 8 * then + line % 8 * 2 + k / 8 * next + k % 8 * 16);
        const int at = start + line / 32 * next + line % 32 * 2 + k / 8 * then + k % 8 * 64;
        return element<KIND>(at ^ (at >> 7 & 3) << 4);
    }
};

// sums = (add ? sums : 0) + products of `depth` k, whose elements left(row, k) and right(column, k) tell.
template <int SUMS, class Left, class Right> void multiply(
    float (&sums)[SUMS], bool add, int depth, const Left &left, const Right &right) {
    for (int i = 0; i < SUMS && !add; i++) sums[i] = 0;
    for (int k = 0; k < depth; k++) {
        const float rows[2] = {left(sum_row(0), k), left(sum_row(2), k)};
        for (int i = 0; i < SUMS; i += 4) {
            const float columns[2] = {right(sum_column(i), k), right(sum_column(i + 1), k)};
            for (int j = 0; j < 4; j++) sums[i + j] += rows[j / 2] * columns[j % 2];
        }
    }
}
template <Kind KIND, int SUMS> void start(float (&sums)[SUMS], uint64_t a, uint64_t b, bool add) {
    const auto along = [](const Operand &x) { return [=](int line, int k) { return x.along<KIND>(line, k); }; };
    multiply(sums, add, KIND == TF32 ? 8 : 16, along(Operand(a)), along(Operand(b)));
}
static void start_turned(float (&sums)[48], uint64_t a, uint64_t b, bool add) {
    const auto turned = [](const Operand &x) { return [=](int line, int k) { return x.turned<HALVES>(line, k); }; };
    multiply(sums, add, 16, turned(Operand(a)), turned(Operand(b)));
}
template <bool TURNED_A, bool TURNED_B, int SUMS> void start_pieces(float (&sums)[SUMS], uint64_t a, uint64_t b, bool add) {
    const Operand left(a), right(b);
    const auto of = [](const Operand &x, bool turned) {
        return [=](int line, int k) { return turned ? x.turned<BFLOAT16>(line, k) : x.along<BFLOAT16>(line, k); };
    };
    multiply(sums, add, 16, of(left, TURNED_A), of(right, TURNED_B));
}
// Of four k the two of A that `which` says; lanes 0 and 1 of four hold those of the first and the last 16 k of two rows.
template <bool TURNED_A, bool TURNED_B, int SUMS> void start_sparse(
    float (&sums)[SUMS], uint64_t a, uint64_t b, uint32_t which, bool add) {
    const Operand left(a), right(b);
    const auto at = [](const Operand &x, bool turned, int line, int k) {
        return turned ? x.turned<BFLOAT16>(line, k) : x.along<BFLOAT16>(line, k);
    };
    const int lane = threadIdx.x % WARP / 4 * 4;
    const uint32_t first = __shfl_sync(FULL_MASK, which, lane), last = __shfl_sync(FULL_MASK, which, lane + 1);
    multiply(sums, add, 32,
        [&](int row, int k) {
            const uint32_t codes = (k < 16 ? first : last) >> row % 16 / 8 * 16, code = codes >> k % 16 / 4 * 4;
            const int low = code & 3, high = code >> 2 & 3;
            return k % 4 == low    ? at(left, TURNED_A, row, k / 4 * 2)
                   : k % 4 == high ? at(left, TURNED_A, row, k / 4 * 2 + 1)
                                   : 0;
        },
        [&](int column, int k) { return at(right, TURNED_B, column, k); });
}
