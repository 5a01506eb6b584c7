// Convolutions of images that are channels last, by TMA. Read conv/bfloat16_conv.cuh first. Images and filters are arrays of
// bfloat16, or sums of several (TERMS). With IN_TF32 they are float32, and the filters of INPUT_GRAD are C x KH x KW x O, K-major.
//
// TMA loads a box of 64 or 32 channels of a tap for consecutive pixels (im2col mode); with IN_TF32 of 32 or 16. It writes 0 for
// elements outside the images, so numbers of channels are rounded up. A tile of K is one or two such boxes; for WEIGHT_GRAD it is 64
// pixels.
#include "conv/bfloat16_conv.cuh"

constexpr int CHANNELS = DIRECTION == WEIGHT_GRAD ? BOX_B : BOX_A; // of a box of an im2col operand
constexpr int K_BOXES = DIRECTION == WEIGHT_GRAD ? 1 : TILE_K / CHANNELS; // boxes of a tile of K

struct alignas(128) Maps {
    TensorMap a[PHASES][TERMS], b[TERMS];
};

// Box `i` of the channels of all taps: its tap and first channel. Boxes after the last tap begin after the last channel, so TMA
// writes zeros.
struct ChannelBox {
    int tap, channel;
    __device__ __forceinline__ ChannelBox(int i, int tap_boxes, int taps)
        : tap(min(i / tap_boxes, taps - 1)), channel((i - tap * tap_boxes) * CHANNELS) {}
};

// Calls load(map, to) for each term of an operand. BYTES: of a term in a stage. to: where the box of the first term goes.
template <int BYTES, class Load> __device__ __forceinline__ void for_each_term(
    const TensorMap (&terms)[TERMS], char *to, const Load &load) {
    #pragma unroll
    for (int i = 0; i < TERMS; i++) load(terms[i], to + i * BYTES);
}

struct Images : Lengths {
    typedef Boxes Stage;
    const Maps &maps;

    // The columns of the result, with channels rounded up.
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

        __device__ __forceinline__ int memory_row(int row) const { return images.memory_row(row, phase); }
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
};

#define IMAGE_SIZES int64_t n, int64_t h, int64_t w, int64_t c, int64_t oh, int64_t ow, int64_t o
#define IMAGES Images{{(int)n, (int)h, (int)w, (int)c, (int)oh, (int)ow, (int)o}, maps}

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
