// Convolutions of images that are bfloat16 in memory, channels last (NHWC), as products (implicit GEMM). Read
// gemm/bfloat16_product.cuh first. y = x * w; x: N x H x W x C, y and its gradient g: N x OH x OW x O, w: O x KH x KW x C.
//
//   DIRECTION      rows of the result   columns    K                  operands
//   FORWARD        pixels of y          O          taps x C           x im2col; w
//   INPUT_GRAD     pixels of x          C          taps x O           g im2col; w, not K-major
//   WEIGHT_GRAD    O                    taps x C   pixels of g        g and x im2col, not K-major
//
// TMA loads a box of 64 or 32 channels of a tap for consecutive pixels (im2col mode); elements outside the images are 0. So
// channels are rounded up. A tile of K is one or two such boxes; for WEIGHT_GRAD 64 pixels.
//
// An input gradient of stride S is S x S convolutions, one for each remainder of a pixel's position by the stride: an item of the
// batch. Each has its own taps (sub-filters), so that no zeros are multiplied.
//
// Macros (Bfloat16Conv in bfloat16.py): DIRECTION; kernel KH x KW, stride SH x SW, padding PH x PW, dilation DH x DW;
// REMAINDERS_H x REMAINDERS_W: at most the stride, and the image.
#include "gemm/bfloat16_product.cuh"

enum { FORWARD, INPUT_GRAD, WEIGHT_GRAD };
constexpr int REMAINDERS = REMAINDERS_H * REMAINDERS_W, TAPS = KH * KW;
constexpr int CHANNELS = DIRECTION == WEIGHT_GRAD ? BOX_B : BOX_A; // of a box of an im2col operand
constexpr int PARTS = DIRECTION == WEIGHT_GRAD ? 1 : TILE_K / CHANNELS; // boxes of a tile of K

struct alignas(128) Maps {
    TensorMap a[REMAINDERS], b;
};

// Along one axis, the taps of a convolution that reach the pixels of one remainder: first, first + step, ... The position of g
// for tap i of `count` is that of the last tap, plus (count - 1 - i) * shift.
struct Taps {
    int first, count;
    static __device__ constexpr int gcd(int a, int b) { return b == 0 ? a : gcd(b, a % b); }
};
template <int K, int S, int P, int D> struct SubFilter {
    static constexpr int STEP = S / Taps::gcd(S, D), SHIFT = D * STEP / S;
    __device__ __forceinline__ static Taps of(int remainder) {
        int first = 0;
        while (first < STEP && (remainder + P - first * D) % S) first++;
        return {first, first < STEP && first < K ? (K - first + STEP - 1) / STEP : 0};
    }
    // The position of g for the last tap and the first pixel of the remainder.
    __device__ __forceinline__ static int last(int remainder, const Taps &taps) {
        return (remainder + P - (taps.first + (taps.count - 1) * STEP) * D) / S;
    }
};
typedef SubFilter<KH, SH, PH, DH> Down;
typedef SubFilter<KW, SW, PW, DW> Right;

// Box `i` of the channels of taps: its tap and first channel. Behind the last tap there are channels that are 0.
struct Part {
    int tap, channel;
    __device__ __forceinline__ Part(int i, int chunks, int taps)
        : tap(min(i / chunks, taps - 1)), channel((i - tap * chunks) * CHANNELS) {}
};

struct Images {
    const Maps &maps;
    int n, h, w, c, oh, ow, o;

    // The result: its rows (pixels of an item), and its columns with channels rounded up.
    __device__ __forceinline__ int rows(int item) const {
        if (DIRECTION == FORWARD) return n * oh * ow;
        return DIRECTION == INPUT_GRAD ? n * height(item) * width(item) : o;
    }
    __device__ __forceinline__ int columns() const {
        if (DIRECTION == FORWARD) return o;
        return DIRECTION == INPUT_GRAD ? c : TAPS * chunks() * CHANNELS;
    }
    __device__ __forceinline__ Work work(int64_t whole) const {
        return Work(DIRECTION == INPUT_GRAD ? REMAINDERS : 1, rows(0), columns(), whole);
    }
    __device__ __forceinline__ int k_tiles(int64_t item) const {
        if (DIRECTION == WEIGHT_GRAD) return (n * oh * ow + TILE_K - 1) / TILE_K;
        int taps = TAPS;
        if (DIRECTION == INPUT_GRAD) taps = Down::of(item / REMAINDERS_W).count * Right::of(item % REMAINDERS_W).count;
        return (taps * chunks() + PARTS - 1) / PARTS;
    }

    __device__ __forceinline__ auto load_a(const Item &item) const {
        if constexpr (DIRECTION == WEIGHT_GRAD) {
            return [=, &map = maps.a[0]](int k_tile, char *stage, Mbarrier &full) {
                #pragma unroll
                for (int i = 0; i < TileA::BOXES; i++)
                    map.load(stage + i * TileA::BOX_BYTES, item.row + i * BOX_A, k_tile * TILE_K, 0, full);
            };
        } else if constexpr (DIRECTION == FORWARD) {
            const int image = item.row / (oh * ow), pixel = item.row % (oh * ow);
            const int y = pixel / ow * SH - PH, x = pixel % ow * SW - PW, chunks = this->chunks();
            return [=, &map = maps.a[0]](int k_tile, char *stage, Mbarrier &full) {
                #pragma unroll
                for (int i = 0; i < PARTS; i++) {
                    const Part part(k_tile * PARTS + i, chunks, TAPS);
                    map.load_im2col(stage + i * TileA::BOX_BYTES, part.channel, x, y, image, part.tap % KW * DW,
                        part.tap / KW * DH, full);
                }
            };
        } else {
            const int number = item.at.item, area = height(number) * width(number), chunks = this->chunks();
            const Taps down = Down::of(number / REMAINDERS_W), right = Right::of(number % REMAINDERS_W);
            const int image = item.row / area, pixel = item.row % area;
            const int y = pixel / width(number) + Down::last(number / REMAINDERS_W, down);
            const int x = pixel % width(number) + Right::last(number % REMAINDERS_W, right);
            return [=, &map = maps.a[number]](int k_tile, char *stage, Mbarrier &full) {
                #pragma unroll
                for (int i = 0; i < PARTS; i++) {
                    const Part part(k_tile * PARTS + i, chunks, down.count * right.count);
                    const int r = part.tap / right.count, s = part.tap % right.count;
                    map.load_im2col(stage + i * TileA::BOX_BYTES, part.channel, x, y, image,
                        (right.count - 1 - s) * Right::SHIFT, (down.count - 1 - r) * Down::SHIFT, full);
                }
            };
        }
    }
    __device__ __forceinline__ auto load_b(const Item &item) const {
        const int chunks = this->chunks();
        if constexpr (DIRECTION == FORWARD) {
            return [=, &map = maps.b](int k_tile, char *stage, Mbarrier &full) {
                #pragma unroll
                for (int i = 0; i < PARTS; i++) {
                    const Part part(k_tile * PARTS + i, chunks, TAPS);
                    map.load(stage + i * TileB::BOX_BYTES, part.channel, part.tap, item.column, full);
                }
            };
        } else if constexpr (DIRECTION == INPUT_GRAD) {
            const Taps down = Down::of(item.at.item / REMAINDERS_W), right = Right::of(item.at.item % REMAINDERS_W);
            return [=, &map = maps.b](int k_tile, char *stage, Mbarrier &full) {
                #pragma unroll
                for (int i = 0; i < PARTS; i++) {
                    const Part part(k_tile * PARTS + i, chunks, down.count * right.count);
                    const int r = down.first + part.tap / right.count * Down::STEP;
                    const int s = right.first + part.tap % right.count * Right::STEP;
                    #pragma unroll
                    for (int j = 0; j < TileB::BOXES; j++)
                        map.load(stage + j * TileB::BOX_BYTES + i * CHANNELS * TileB::ROW_BYTES, item.column + j * BOX_B,
                            r * KW + s, part.channel, full);
                }
            };
        } else {
            return [=, &map = maps.b](int k_tile, char *stage, Mbarrier &full) {
                const int first = k_tile * TILE_K, image = first / (oh * ow), pixel = first % (oh * ow);
                const int y = pixel / ow * SH - PH, x = pixel % ow * SW - PW;
                #pragma unroll
                for (int i = 0; i < TileB::BOXES; i++) {
                    const Part part(item.column / CHANNELS + i, chunks, TAPS);
                    map.load_im2col(stage + i * TileB::BOX_BYTES, part.channel, x, y, image, part.tap % KW * DW,
                        part.tap / KW * DH, full);
                }
            };
        }
    }

    // The places of results: pixels of one remainder are not neighbours, and channels have no gaps.
    struct Tile : AccumulatorTile {
        const Images &images;
        int number; // of the remainder

        __device__ __forceinline__ int memory_row(int row) const {
            if (DIRECTION != INPUT_GRAD || SH * SW == 1) return row;
            const int width = images.width(number), area = images.height(number) * width, pixel = row % area;
            const int y = pixel / width * SH + number / REMAINDERS_W, x = pixel % width * SW + number % REMAINDERS_W;
            return (row / area * images.h + y) * images.w + x;
        }
        __device__ __forceinline__ int memory_column(int column) const {
            if (DIRECTION != WEIGHT_GRAD) return column;
            const int block = column / CHANNELS, tap = block / images.chunks();
            return tap * images.c + min(block % images.chunks() * CHANNELS + column % CHANNELS, images.c - WIDE_RESULT);
        }
        __device__ __forceinline__ bool inside(int row, int column) const {
            if (row >= m || column >= n) return false;
            return DIRECTION != WEIGHT_GRAD ||
                   column / CHANNELS % images.chunks() * CHANNELS + column % CHANNELS < images.c;
        }
        __device__ __forceinline__ int64_t index(int row, int column) const {
            const int64_t across = DIRECTION == WEIGHT_GRAD ? TAPS * images.c : n;
            return opaque(memory_row(row) * across + memory_column(column));
        }
    };
    __device__ __forceinline__ Tile tile(const Item &item, int row, int column) const {
        Tile tile = {{item.at, rows(item.at.item), columns(), row, column}, *this, (int)item.at.item};
        tile.at.item = 0;
        return tile;
    }

  private:
    // Boxes of channels of a tap along K, or along the columns of a weight gradient.
    __device__ __forceinline__ int chunks() const {
        return ((DIRECTION == INPUT_GRAD ? o : c) + CHANNELS - 1) / CHANNELS;
    }
    // Pixels of x with a remainder.
    __device__ __forceinline__ int height(int number) const { return (h - number / REMAINDERS_W + SH - 1) / SH; }
    __device__ __forceinline__ int width(int number) const { return (w - number % REMAINDERS_W + SW - 1) / SW; }
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
