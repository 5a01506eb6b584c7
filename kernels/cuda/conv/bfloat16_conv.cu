// Convolutions of images that are bfloat16 in memory, or sums of several such images (TERMS), channels last (NHWC), as products
// (implicit GEMM); with IN_TF32 images are float32. Read gemm/bfloat16_product.cuh first. y = x * w; x: N x H x W x C, y and its gradient g: N x OH x OW x O, w: O x KH x KW x C.
//
//   DIRECTION      rows of the result   columns    K                  operands
//   FORWARD        pixels of y          O          taps x C           x im2col; w
//   INPUT_GRAD     pixels of x          C          taps x O           g im2col; w, not K-major, with IN_TF32 C x KH x KW x O
//   WEIGHT_GRAD    O                    taps x C   pixels of g        g and x im2col, not K-major
//
// TMA loads a box of 64 or 32 channels of a tap for consecutive pixels (im2col mode). It writes 0 for elements outside the images,
// so numbers of channels are rounded up. A tile of K is one or two such boxes; for WEIGHT_GRAD it is 64 pixels.
//
// An input gradient of stride SH x SW is SH x SW convolutions, one for each phase: the pixels whose row and column have the same
// remainders by the stride. A phase is an item of the batch. It has some of the taps, its sub-filter, so that no zeros are
// multiplied.
//
// Macros (Bfloat16Conv in bfloat16.py): DIRECTION; kernel KH x KW, stride SH x SW, padding PH x PW, dilation DH x DW;
// PHASES_H x PHASES_W: the stride, or the image where it is smaller; 1 x 1 if DIRECTION is not INPUT_GRAD.
#include "gemm/bfloat16_product.cuh"

enum { FORWARD, INPUT_GRAD, WEIGHT_GRAD };
constexpr int PHASES = PHASES_H * PHASES_W, TAPS = KH * KW;
constexpr int CHANNELS = DIRECTION == WEIGHT_GRAD ? BOX_B : BOX_A; // of a box of an im2col operand
constexpr int K_BOXES = DIRECTION == WEIGHT_GRAD ? 1 : TILE_K / CHANNELS; // boxes of a tile of K

struct alignas(128) Maps {
    TensorMap a[PHASES][TERMS], b[TERMS];
};

// Along one axis, the `count` taps of a phase: first, first + STEP, ... The position of g for the i-th of them is that for the last
// one, plus (count - 1 - i) * SHIFT.
struct Taps {
    int first, count;
};
__device__ constexpr int gcd(int a, int b) { return b == 0 ? a : gcd(b, a % b); }
template <int K, int S, int P, int D> struct SubFilter {
    static constexpr int STEP = S / gcd(S, D), SHIFT = D * STEP / S;
    __device__ __forceinline__ static Taps of(int phase) {
        int first = 0;
        while (first < STEP && (phase + P - first * D) % S) first++;
        return {first, first < STEP && first < K ? (K - first + STEP - 1) / STEP : 0};
    }
    // The position of g for the last tap and the first pixel of the phase.
    __device__ __forceinline__ static int last(int phase, const Taps &taps) {
        return (phase + P - (taps.first + (taps.count - 1) * STEP) * D) / S;
    }
};
typedef SubFilter<KH, SH, PH, DH> Down;
typedef SubFilter<KW, SW, PW, DW> Right;

// Box `i` of the channels of all taps: its tap and first channel. Boxes after the last tap begin after the last channel, so TMA
// writes zeros.
struct ChannelBox {
    int tap, channel;
    __device__ __forceinline__ ChannelBox(int i, int tap_boxes, int taps)
        : tap(min(i / tap_boxes, taps - 1)), channel((i - tap * tap_boxes) * CHANNELS) {}
};

// load(map, to) for each term of an operand, of BYTES bytes in a stage. to: where the box of the first one goes.
template <int BYTES, class Load> __device__ __forceinline__ void for_each_term(
    const TensorMap (&terms)[TERMS], char *to, const Load &load) {
    #pragma unroll
    for (int i = 0; i < TERMS; i++) load(terms[i], to + i * BYTES);
}

struct Images {
    const Maps &maps;
    int n, h, w, c, oh, ow, o;

    // The result: its rows (for INPUT_GRAD the pixels of a phase), and its columns with channels rounded up.
    __device__ __forceinline__ int rows(int phase) const {
        if (DIRECTION == FORWARD) return n * oh * ow;
        return DIRECTION == INPUT_GRAD ? n * height(phase) * width(phase) : o;
    }
    __device__ __forceinline__ int columns() const {
        if (DIRECTION == FORWARD) return o;
        return DIRECTION == INPUT_GRAD ? c : TAPS * tap_boxes() * CHANNELS;
    }
    __device__ __forceinline__ Work work(int64_t whole) const {
        return Work(PHASES, rows(0), columns(), whole);
    }
    __device__ __forceinline__ int k_tiles(int64_t phase) const {
        if (DIRECTION == WEIGHT_GRAD) return (n * oh * ow + TILE_K - 1) / TILE_K;
        int taps = TAPS;
        if (DIRECTION == INPUT_GRAD) taps = Down::of(phase / PHASES_W).count * Right::of(phase % PHASES_W).count;
        return (taps * tap_boxes() + K_BOXES - 1) / K_BOXES;
    }

    __device__ __forceinline__ auto load_a(const TileSplit &own) const {
        if constexpr (DIRECTION == WEIGHT_GRAD) {
            return [=, &terms = maps.a[0]](int k_tile, char *stage, Mbarrier &full) {
                #pragma unroll
                for (int i = 0; i < TileA::BOXES; i++)
                    for_each_term<TERM_A>(terms, stage + i * TileA::BOX_BYTES, [&](const TensorMap &map, char *to) {
                        map.load(to, own.row + i * BOX_A, k_tile * TILE_K, 0, full);
                    });
            };
        } else if constexpr (DIRECTION == FORWARD) {
            const int image = own.row / (oh * ow), pixel = own.row % (oh * ow);
            const int y = pixel / ow * SH - PH, x = pixel % ow * SW - PW, tap_boxes = this->tap_boxes();
            return [=, &terms = maps.a[0]](int k_tile, char *stage, Mbarrier &full) {
                #pragma unroll
                for (int i = 0; i < K_BOXES; i++) {
                    const ChannelBox box(k_tile * K_BOXES + i, tap_boxes, TAPS);
                    for_each_term<TERM_A>(terms, stage + i * TileA::BOX_BYTES, [&](const TensorMap &map, char *to) {
                        map.load_im2col(to, box.channel, x, y, image, box.tap % KW * DW, box.tap / KW * DH, full);
                    });
                }
            };
        } else {
            const int phase = own.at.item, area = height(phase) * width(phase), tap_boxes = this->tap_boxes();
            const Taps down = Down::of(phase / PHASES_W), right = Right::of(phase % PHASES_W);
            const int image = own.row / area, pixel = own.row % area;
            const int y = pixel / width(phase) + Down::last(phase / PHASES_W, down);
            const int x = pixel % width(phase) + Right::last(phase % PHASES_W, right);
            return [=, &terms = maps.a[phase]](int k_tile, char *stage, Mbarrier &full) {
                #pragma unroll
                for (int i = 0; i < K_BOXES; i++) {
                    const ChannelBox box(k_tile * K_BOXES + i, tap_boxes, down.count * right.count);
                    const int r = box.tap / right.count, s = box.tap % right.count;
                    for_each_term<TERM_A>(terms, stage + i * TileA::BOX_BYTES, [&](const TensorMap &map, char *to) {
                        map.load_im2col(to, box.channel, x, y, image, (right.count - 1 - s) * Right::SHIFT,
                            (down.count - 1 - r) * Down::SHIFT, full);
                    });
                }
            };
        }
    }
    __device__ __forceinline__ auto load_b(const TileSplit &own) const {
        const int tap_boxes = this->tap_boxes();
        if constexpr (DIRECTION == FORWARD) {
            return [=, &terms = maps.b](int k_tile, char *stage, Mbarrier &full) {
                #pragma unroll
                for (int i = 0; i < K_BOXES; i++) {
                    const ChannelBox box(k_tile * K_BOXES + i, tap_boxes, TAPS);
                    for_each_term<TERM_B>(terms, stage + i * TileB::BOX_BYTES, [&](const TensorMap &map, char *to) {
                        map.load(to, box.channel, box.tap, own.column, full);
                    });
                }
            };
        } else if constexpr (DIRECTION == INPUT_GRAD) {
            const Taps down = Down::of(own.at.item / PHASES_W), right = Right::of(own.at.item % PHASES_W);
            return [=, &terms = maps.b](int k_tile, char *stage, Mbarrier &full) {
                #pragma unroll
                for (int i = 0; i < K_BOXES; i++) {
                    const ChannelBox box(k_tile * K_BOXES + i, tap_boxes, down.count * right.count);
                    const int r = down.first + box.tap / right.count * Down::STEP;
                    const int s = right.first + box.tap % right.count * Right::STEP;
                    if constexpr (!MN_MAJOR_B)
                        for_each_term<TERM_B>(terms, stage + i * TileB::BOX_BYTES, [&](const TensorMap &map, char *to) {
                            map.load(to, box.channel, r * KW + s, own.column, full);
                        });
                    #pragma unroll
                    for (int j = 0; MN_MAJOR_B && j < TileB::BOXES; j++)
                        for_each_term<TERM_B>(terms, stage + j * TileB::BOX_BYTES + i * CHANNELS * TileB::ROW_BYTES,
                            [&](const TensorMap &map, char *to) {
                                map.load(to, own.column + j * BOX_B, r * KW + s, box.channel, full);
                            });
                }
            };
        } else {
            return [=, &terms = maps.b](int k_tile, char *stage, Mbarrier &full) {
                const int first = k_tile * TILE_K, image = first / (oh * ow), pixel = first % (oh * ow);
                const int y = pixel / ow * SH - PH, x = pixel % ow * SW - PW;
                #pragma unroll
                for (int i = 0; i < TileB::BOXES; i++) {
                    const ChannelBox box(own.column / CHANNELS + i, tap_boxes, TAPS);
                    for_each_term<TERM_B>(terms, stage + i * TileB::BOX_BYTES, [&](const TensorMap &map, char *to) {
                        map.load_im2col(to, box.channel, x, y, image, box.tap % KW * DW, box.tap / KW * DH, full);
                    });
                }
            };
        }
    }

    // The places of results in memory, where pixels of a phase are not neighbours, and channels are not rounded up.
    struct Tile : AccumulatorTile {
        const Images &images;
        int phase;

        __device__ __forceinline__ int memory_row(int row) const {
            if (DIRECTION != INPUT_GRAD || SH * SW == 1) return row;
            const int width = images.width(phase), area = images.height(phase) * width, pixel = row % area;
            const int y = pixel / width * SH + phase / PHASES_W, x = pixel % width * SW + phase % PHASES_W;
            return (row / area * images.h + y) * images.w + x;
        }
        __device__ __forceinline__ int memory_column(int column) const {
            if (DIRECTION != WEIGHT_GRAD) return column;
            const int block = column / CHANNELS, tap = block / images.tap_boxes();
            return tap * images.c + min(block % images.tap_boxes() * CHANNELS + column % CHANNELS, images.c - WIDE_RESULT);
        }
        __device__ __forceinline__ bool inside(int row, int column) const {
            if (row >= m || column >= n) return false;
            return DIRECTION != WEIGHT_GRAD ||
                   column / CHANNELS % images.tap_boxes() * CHANNELS + column % CHANNELS < images.c;
        }
        __device__ __forceinline__ int64_t index(int row, int column) const {
            const int64_t across = DIRECTION == WEIGHT_GRAD ? TAPS * images.c : n;
            return opaque(memory_row(row) * across + memory_column(column));
        }
    };
    __device__ __forceinline__ Tile tile(const TileSplit &own, int row, int column) const {
        Tile tile = {{own.at, rows(own.at.item), columns(), row, column}, *this, (int)own.at.item};
        tile.at.item = 0;
        return tile;
    }

  private:
    // Boxes of channels of a tap along K, or along the columns of a weight gradient.
    __device__ __forceinline__ int tap_boxes() const {
        return ((DIRECTION == INPUT_GRAD ? o : c) + CHANNELS - 1) / CHANNELS;
    }
    // Rows and columns of x in a phase.
    __device__ __forceinline__ int height(int phase) const { return (h - phase / PHASES_W + SH - 1) / SH; }
    __device__ __forceinline__ int width(int phase) const { return (w - phase % PHASES_W + SW - 1) / SW; }
};

#define IMAGE_SIZES int64_t n, int64_t h, int64_t w, int64_t c, int64_t oh, int64_t ow, int64_t o
#define IMAGES Images{maps, (int)n, (int)h, (int)w, (int)c, (int)oh, (int)ow, (int)o}

KERNEL __launch_bounds__(THREADS, 1) bfloat16_conv(
    const __grid_constant__ Maps maps, const Epilogue epilogue, IMAGE_SIZES, int64_t whole, char *scratch) {
    const Images images = IMAGES;
    multiply(images.work(whole), images, epilogue, scratch);
}

KERNEL __launch_bounds__(SUM_THREADS) sum_bfloat16_conv_splits(
    const __grid_constant__ Maps maps, const Epilogue epilogue, IMAGE_SIZES, int64_t whole, char *scratch) {
    wait_for_inputs();
    const Images images = IMAGES;
    const int i = blockIdx.x * SUM_THREADS + threadIdx.x;
    add_splits(i, images.work(whole), images, epilogue, (const T *)scratch);
}
