// Convolutions of images that are bfloat16 in memory and have few channels, by cp.async. Read conv/bfloat16_conv.cuh first. For
// WEIGHT_GRAD operands may be sums of two arrays (TERMS).
//
// TMA takes as long for a short row as for a long one, and needs numbers of channels that are rounded up. Here K (for WEIGHT_GRAD:
// the columns of the result) has the channels of all taps without gaps. The producer warps gather the images in chunks of eight
// channels, 16 bytes. Neighbouring rows read the same pixels for other taps, so the copies go through L1. The other operand is a
// matrix. TMA copies it, unless its rows are short (few filters of a WEIGHT_GRAD), or a tile has rows of several taps (INPUT_GRAD).
// Then it is gathered too.
//
// More macros: MAPPED: TMA copies the other operand; UNMAPPED: it is gathered. IMAGE_H x IMAGE_W x IMAGE_C, OUTPUT_H x OUTPUT_W x
// OUTPUT_C: the lengths of x and y. As constants they make divisions fast.
#include "common/common.cuh"
#include "conv/bfloat16_conv.cuh"

constexpr int CHUNK = 8, CHUNK_BYTES = 16;                // channels and bytes of a chunk
constexpr int ROW_CHUNKS = 8;                             // chunks of a row of a box of images
constexpr int STEP_ROWS = WARPGROUP / ROW_CHUNKS;         // rows that the producer warps copy in a step
constexpr bool OF_GRADIENT = DIRECTION == INPUT_GRAD;     // whether the images that are gathered are g, not x
constexpr int HEIGHT = OF_GRADIENT ? OUTPUT_H : IMAGE_H, WIDTH = OF_GRADIENT ? OUTPUT_W : IMAGE_W;
constexpr int CHANNELS = OF_GRADIENT ? OUTPUT_C : IMAGE_C;
constexpr int OUTSIDE = 1 << 28;                          // a row that no image has
typedef uint16_t Bits;

static_assert(TERMS == 1 || DIRECTION == WEIGHT_GRAD, "gradients of filters have several terms");
struct alignas(128) Maps {
    TensorMap of[TERMS];
};
// The arrays whose sum is an operand. As a kernel parameter it has the layout of as many pointers.
struct Terms {
    const Bits *of[TERMS];
};

// The pixel of the first tap, at (y, x) of an image. Its channels begin at `at`.
struct Pixel {
    int y, x, at;
};
// A chunk of the channels of all taps. Its pixel is `down` rows and `right` columns after the one of the first tap.
struct Chunk {
    int down, right, at;
};
template <class E, int COUNT> struct Each {
    E of[COUNT];
};

// Copies a chunk for a pixel, or zeros where there is no such pixel.
__device__ __forceinline__ void copy(char *to, const Bits *images, const Pixel &pixel, const Chunk &chunk) {
    const bool inside = (unsigned)(pixel.y + chunk.down) < HEIGHT && (unsigned)(pixel.x + chunk.right) < WIDTH;
    cp_async<CHUNK_BYTES, true>((Bits *)to, images + (pixel.at + chunk.at), inside);
}

// The row and the chunk of this thread in step 0, and the place of its chunk of a step in a box.
__device__ __forceinline__ int own_row() { return threadIdx.x / ROW_CHUNKS; }
__device__ __forceinline__ int own_chunk() { return threadIdx.x % ROW_CHUNKS; }
__device__ __forceinline__ int in_box(int step) { return step * STEP_ROWS * 128 + swizzle_128b(own_row(), own_chunk()); }

// Copies a tile of an operand that is not K-major, TILE_K rows of LENGTH elements, to swizzled boxes. from(row, column): the offset
// of a chunk in memory; -1 outside of the matrix.
template <class Tile, int LENGTH, class From> __device__ __forceinline__ void copy_rows(
    char *stage, const Bits *matrix, const From &from) {
    constexpr int CHUNKS = LENGTH / CHUNK, BOX_CHUNKS = Tile::ROW_BYTES / CHUNK_BYTES;
    #pragma unroll 2 // more steps take too many registers
    for (int first = 0; first < TILE_K * CHUNKS; first += WARPGROUP) {
        const int i = first + threadIdx.x, row = i / CHUNKS, chunk = i % CHUNKS, at = from(row, chunk * CHUNK);
        char *const to = stage + chunk / BOX_CHUNKS * Tile::BOX_BYTES + row * Tile::ROW_BYTES;
        const int swizzled = chunk % BOX_CHUNKS ^ row * BOX_CHUNKS / 8 % BOX_CHUNKS;
        cp_async<CHUNK_BYTES, true>((Bits *)(to + swizzled * CHUNK_BYTES), matrix + max(at, 0), at >= 0);
    }
}

// The taps of an item of the batch: all, or the sub-filter of a phase.
struct Window {
    int phase_y, phase_x;
    Taps vertical, horizontal;

    __device__ __forceinline__ explicit Window(int item)
        : phase_y(PHASES == 1 ? 0 : item / PHASES_W), phase_x(PHASES == 1 ? 0 : item % PHASES_W), vertical{0, KH},
          horizontal{0, KW} {
        if (OF_GRADIENT) vertical = Down::of(phase_y), horizontal = Right::of(phase_x);
    }
    __device__ __forceinline__ int count() const { return vertical.count * horizontal.count; }
    // Chunk `i` of the channels of all taps.
    __device__ __forceinline__ Chunk chunk(int i) const {
        const int tap = i / (CHANNELS / CHUNK), channel = i % (CHANNELS / CHUNK) * CHUNK;
        if (tap >= count()) return {OUTSIDE, 0, 0};
        const int r = tap / horizontal.count, s = tap % horizontal.count;
        const int down = OF_GRADIENT ? (vertical.count - 1 - r) * Down::SHIFT : r * DH;
        const int right = OF_GRADIENT ? (horizontal.count - 1 - s) * Right::SHIFT : s * DW;
        return {down, right, (down * WIDTH + right) * CHANNELS + channel};
    }
    // The number of tap `i` among all taps of the filter.
    __device__ __forceinline__ int filter_tap(int i) const {
        const int r = vertical.first + i / horizontal.count * Down::STEP;
        return r * KW + horizontal.first + i % horizontal.count * Right::STEP;
    }
};

struct Images : Lengths {
    typedef Boxes Stage;
    const TensorMap *maps;
    Terms images, matrix; // matrix: the other operand

    __device__ __forceinline__ int columns() const {
        if (DIRECTION == FORWARD) return o;
        return DIRECTION == INPUT_GRAD ? c : TAPS * c;
    }
    __device__ __forceinline__ Work work(int64_t whole) const { return Work(PHASES, rows(0), columns(), whole); }
    __device__ __forceinline__ int k_tiles(int64_t item) const {
        const int k = DIRECTION == WEIGHT_GRAD ? n * oh * ow : Window(item).count() * CHANNELS;
        return (k + TILE_K - 1) / TILE_K;
    }

    __device__ __forceinline__ void load_once(char *) const {}
    __device__ __forceinline__ auto load_a(const TileSplit &own) const {
        if constexpr (DIRECTION == WEIGHT_GRAD && GATHER_A) {
            return [=, matrix = matrix, pixels = n * oh * ow](int k_tile, char *stage, Mbarrier &) {
                #pragma unroll
                for (int term = 0; term < TERMS; term++)
                    copy_rows<TileA, TILE_M>(stage + term * TERM_A, matrix.of[term], [=](int row, int column) {
                        const int pixel = k_tile * TILE_K + row, filter = own.row + column;
                        return pixel < pixels && filter < OUTPUT_C ? pixel * OUTPUT_C + filter : -1;
                    });
            };
        } else if constexpr (DIRECTION == WEIGHT_GRAD) {
            return [=, maps = maps](int k_tile, char *stage, Mbarrier &full) {
                #pragma unroll
                for (int i = 0; i < TERMS * TileA::BOXES; i++) {
                    const int term = i / TileA::BOXES, box = i % TileA::BOXES;
                    maps[term].load(stage + term * TERM_A + box * TileA::BOX_BYTES, own.row + box * BOX_A, k_tile * TILE_K, 0, full);
                }
            };
        } else {
            constexpr int STEPS = TILE_M / STEP_ROWS;
            const Window window(own.at.item);
            Each<Pixel, STEPS> pixels;
            #pragma unroll
            for (int i = 0; i < STEPS; i++) pixels.of[i] = pixel(own.row + i * STEP_ROWS + own_row(), window);
            return [=, images = images](int k_tile, char *stage, Mbarrier &) {
                const Chunk chunk = window.chunk(k_tile * ROW_CHUNKS + own_chunk());
                #pragma unroll
                for (int i = 0; i < STEPS; i++) copy(stage + in_box(i), images.of[0], pixels.of[i], chunk);
            };
        }
    }
    __device__ __forceinline__ auto load_b(const TileSplit &own) const {
        const Window window(own.at.item);
        if constexpr (DIRECTION == FORWARD) {
            return [=, maps = maps](int k_tile, char *stage, Mbarrier &full) {
                maps[0].load(stage, k_tile * TILE_K, own.column, 0, full);
            };
        } else if constexpr (DIRECTION == INPUT_GRAD) {
            return [=, matrix = matrix](int k_tile, char *stage, Mbarrier &) {
                copy_rows<TileB, TILE_N>(stage, matrix.of[0], [=](int row, int column) {
                    const int k = k_tile * TILE_K + row, tap = k / CHANNELS, channel = own.column + column;
                    if (tap >= window.count() || channel >= IMAGE_C) return -1;
                    return (k % CHANNELS * TAPS + window.filter_tap(tap)) * IMAGE_C + channel;
                });
            };
        } else {
            Each<Chunk, TileB::BOXES> chunks;
            #pragma unroll
            for (int j = 0; j < TileB::BOXES; j++)
                chunks.of[j] = window.chunk(own.column / CHUNK + j * ROW_CHUNKS + own_chunk());
            return [=, self = *this](int k_tile, char *stage, Mbarrier &) {
                #pragma unroll
                for (int i = 0; i < TILE_K / STEP_ROWS; i++) {
                    const Pixel from = self.pixel(k_tile * TILE_K + i * STEP_ROWS + own_row(), window);
                    #pragma unroll
                    for (int j = 0; j < TERMS * TileB::BOXES; j++) {
                        const int term = j / TileB::BOXES, box = j % TileB::BOXES;
                        copy(stage + term * TERM_B + box * TileB::BOX_BYTES + in_box(i), self.images.of[term], from, chunks.of[box]);
                    }
                }
            };
        }
    }

    // The places of results in memory. The pixels of a phase are not neighbours.
    struct Tile : AccumulatorTile {
        const Images &images;
        int phase;

        __device__ __forceinline__ int memory_row(int row) const { return images.memory_row(row, phase); }
        __device__ __forceinline__ int64_t index(int row, int column) const {
            return opaque((int64_t)memory_row(row) * n + column);
        }
    };
    __device__ __forceinline__ Tile tile(const TileSplit &own, int row, int column) const {
        Tile tile = {{own.at, rows(own.at.item), columns(), row, column}, *this, (int)own.at.item};
        tile.at.item = 0;
        return tile;
    }

  private:
    // The first tap's pixel for a row of the im2col matrix.
    __device__ __forceinline__ Pixel pixel(int row, const Window &window) const {
        const int phase = window.phase_y * PHASES_W + window.phase_x;
        const int across = OF_GRADIENT ? width(phase) : OUTPUT_W, area = (OF_GRADIENT ? height(phase) : OUTPUT_H) * across;
        const int image = row / area, line = row % area / across, column = row % area % across;
        const int y = OF_GRADIENT ? line + Down::last(window.phase_y, window.vertical) : line * SH - PH;
        const int x = OF_GRADIENT ? column + Right::last(window.phase_x, window.horizontal) : column * SW - PW;
        return {image < n ? y : OUTSIDE, x, ((image * HEIGHT + y) * WIDTH + x) * CHANNELS};
    }
};

#define NUMBERS int64_t n, int64_t whole
#define IMAGES \
    Images { {(int)n, IMAGE_H, IMAGE_W, IMAGE_C, OUTPUT_H, OUTPUT_W, OUTPUT_C}, OTHER }
#if MAPPED
#define OTHER maps.of, images, {}
#else
#define OTHER nullptr, images, matrix
#endif

KERNEL __launch_bounds__(THREADS, 1) bfloat16_gather(IF(MAPPED, const __grid_constant__ Maps maps,) const Terms images,
    IF(UNMAPPED, const Terms matrix,) const Epilogue epilogue, NUMBERS, char *scratch) {
    const Images product = IMAGES;
    multiply(product.work(whole), product, epilogue, scratch);
}

KERNEL __launch_bounds__(SUM_THREADS) sum_bfloat16_gather_splits(IF(MAPPED, const __grid_constant__ Maps maps,)
    const Terms images, IF(UNMAPPED, const Terms matrix,) const Epilogue epilogue, NUMBERS, char *scratch) {
    wait_for_inputs();
    const Images product = IMAGES;
    const int i = blockIdx.x * SUM_THREADS + threadIdx.x;
    add_splits(i, product.work(whole), product, epilogue, (const T *)scratch);
}
